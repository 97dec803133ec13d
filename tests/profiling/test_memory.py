"""What may be used, from a meminfo of our own and the machine's."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparkgrpo.profiling import memory

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    """A machine whose page cache has eaten MemFree."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  125829120 kB\nMemFree:       1024 kB\nMemAvailable:  52428800 kB\nSwapFree:  0 kB\n")
    return path


def test_available_is_not_free(meminfo: Path) -> None:
    assert memory.host_available_bytes(meminfo) == 50 * GIB


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.host_available_bytes(tmp_path / "missing") is None
    (tmp_path / "old").write_text("MemTotal: 1 kB\n")
    assert memory.host_available_bytes(tmp_path / "old") is None
    monkeypatch.setattr(memory, "host_available_bytes", lambda: None)
    assert memory.usable_bytes(CPU) is None


@pytest.mark.parametrize(("available", "usable"), [(50 * GIB, 45 * GIB), (4 * GIB, 3 * GIB), (GIB // 2, 0)])
def test_reserve_of_a_cpu(monkeypatch: pytest.MonkeyPatch, available: int, usable: int) -> None:
    """A tenth, 1 GiB at least."""
    monkeypatch.setattr(memory, "host_available_bytes", lambda: available)
    assert memory.usable_bytes(CPU) == usable


@pytest.mark.parametrize(("is_integrated", "usable"), [(True, 30 * GIB), (False, 12 * GIB)])
def test_cuda(monkeypatch: pytest.MonkeyPatch, is_integrated: bool, usable: int) -> None:
    """Integrated: the host's MemAvailable less 20 GiB, not the device's "free". Discrete: free less a tenth of all."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(is_integrated=is_integrated))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 50 * GIB)
    assert memory.usable_bytes(CUDA) == usable


def test_peak_grows_with_use() -> None:
    before = memory.peak_bytes(CPU)
    size = before + 64 * (1 << 20)
    kept = torch.ones(size // 4)
    assert memory.peak_bytes(CPU) >= before + 32 * (1 << 20)
    assert before > 32 * (1 << 20) and len(kept)
