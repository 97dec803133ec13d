"""How kernels are launched: options on purpose, the tensors' device, one message where Triton cannot serve the GPU."""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton comes with Linux only")

from sparkgrpo.kernels import triton_launch  # noqa: E402  after the skip
from sparkgrpo.kernels.triton_launch import as_operand, check_triton, launch  # noqa: E402


class Recorder:
    """In the place of a kernel: what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((grid, args, options))


def test_fp_fusion_is_set_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton 11270: the default moves with the compiler, and with it the last bit of every result."""
    monkeypatch.setattr(triton_launch, "is_interpreted", lambda: False)
    kernel, x = Recorder(), torch.zeros(3)
    launch(kernel, (2, 1), (x, 5), {"BLOCK": 64}, num_warps=4, num_stages=3)
    options = {"BLOCK": 64, "num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    assert kernel.launches == [((2, 1), (x, 5), options)]


def test_a_grid_without_programs_launches_nothing() -> None:
    kernel = Recorder()
    launch(kernel, (4, 0), (), {})
    assert kernel.launches == []


def test_the_interpreter_alone_gets_wider_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton 11584: its product multiplies raw bits of bf16."""
    x = torch.ones(2, dtype=torch.bfloat16)
    for is_interpreted in (True, False):
        monkeypatch.setattr(triton_launch, "is_interpreted", lambda flag=is_interpreted: flag)
        assert as_operand(x).dtype == (torch.float32 if is_interpreted else torch.bfloat16)
        assert as_operand(x.float()).dtype == torch.float32


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.10.0"])
def test_a_triton_that_cannot_assemble_for_the_gpu(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """triton 8539: an assembler that does not know sm_121; one message with the remedy. 3.10 is newer than 3.6."""
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
    check_triton(torch.device("cpu"))
    if version == "3.5.1":
        with pytest.raises(
            RuntimeError, match=r"Triton 3\.5\.1 cannot serve this GPU \(sm_121\).*pip install --upgrade"
        ):
            check_triton(torch.device("cuda"))
    else:
        check_triton(torch.device("cuda"))
