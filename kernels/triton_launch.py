"""Launching Triton kernels, the same way everywhere: on a GPU, in the interpreter, and offline for the compile report.

This module needs Triton, which comes with Linux alone: it and the `*_kernels.py` files are imported inside the
functions that launch, so that a laptop without Triton never meets them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs

ROW_WARPS = 8
"""Row kernels run 256 threads: 1,024 reach two thirds of the occupancy on sm_12x."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One variant of a kernel as a GPU would compile it; each kernel file lists its own in `compile_cases`."""

    name: str
    """Unique among all cases; what the report calls it."""
    kernel: Any
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Run-time argument -> Triton type: "*bf16", "i32", "fp32", "tensordesc<bf16[128, 64]>"."""
    constexprs: Mapping[str, Any]
    """Compile-time argument -> value."""
    aligned: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16 (pointers always are); without it no wide loads are made."""
    num_warps: int = ROW_WARPS
    num_stages: int = 2
    is_product: bool = False
    """It multiplies matrices: the report demands tensor-core instructions."""
    uses_tma: bool = False
    """It loads through tensor descriptors: the report demands UTMALDG."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": True})


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET, read when a kernel is decorated)."""
    return bool(knobs.runtime.interpret)


def launch(
    kernel: Any,  # noqa: ANN401  what triton.jit returns has no public type
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constexprs: Mapping[str, Any],
    *,
    num_warps: int = ROW_WARPS,
    num_stages: int = 2,
) -> None:
    """Run `kernel` on `grid` programs; a grid without programs launches nothing.

    FP fusion is set on purpose: its default differs between Triton versions, and with it the last bit of results.
    """
    if min(grid) == 0:
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    with _on_device_of(args):
        kernel[grid](*args, **constexprs, **({} if is_interpreted() else options))


def _on_device_of(args: tuple[Any, ...]) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    device = next((x.device for x in args if isinstance(x, torch.Tensor)), None)
    is_elsewhere = device is not None and device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if is_elsewhere else nullcontext()


def as_operand(x: torch.Tensor) -> torch.Tensor:
    """`x` as a kernel may read it: the interpreter multiplies raw bits of bf16, so there alone it is made fp32."""
    return x.float() if is_interpreted() and x.dtype == torch.bfloat16 else x


def capability_of(device: torch.device) -> int:
    """Compute capability as one number: 90, 120, 121. In the interpreter 121, the machine this project is for."""
    if device.type != "cuda":
        return 121
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_triton(device: torch.device) -> None:
    """Raises RuntimeError, with the remedy, where the installed Triton cannot assemble code for the device."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if device.type == "cuda" and version < (3, 6):
        raise RuntimeError(
            f"Triton {triton.__version__} cannot serve this GPU (sm_{capability_of(device)}): expected 3.6 or newer,"
            " whose assembler knows sm_121; run pip install --upgrade 'triton>=3.6' torch"
        )
