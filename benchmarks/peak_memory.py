"""The largest memory that a step takes beside what was there before it.

On CUDA the allocator counts. On Linux the kernel keeps the largest resident size (VmHWM) and forgets it on request.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _resident_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def _peak_on_cpu(step: Callable[[], object]) -> int | None:
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier steps freed would otherwise be taken again unseen
        CLEAR_REFS.write_text("5")  # VmHWM starts again from the present size
        before = _resident_bytes("VmRSS")
    except (OSError, AttributeError):
        return None  # another operating system, or a sandbox that forbids it
    result = step()
    peak = _resident_bytes("VmHWM")
    del result
    return max(0, peak - before)


def peak_extra_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Bytes beyond those in use before the step, its outputs included; None where the system does not tell."""
    gc.collect()
    if device.type != "cuda":
        return _peak_on_cpu(step)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return peak - before
