"""How much memory there is to use, in bytes.

On an integrated device (DGX Spark) CUDA's "free" is MemFree, which a full page cache drives to nothing: there, as on
the host, MemAvailable of /proc/meminfo is the figure.
"""

import resource
import sys
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
MIN_RESERVE_BYTES = 1 << 30
FRAC_RESERVE = 0.1
INTEGRATED_RESERVE_BYTES = 20 << 30


def host_available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """MemAvailable; None where the system does not say."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else None


def usable_bytes(device: torch.device) -> int | None:
    """What a run may plan with on this device: what is available less a reserve; None where nobody says."""
    if device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated:
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - int(FRAC_RESERVE * total))
    available = host_available_bytes()
    if available is None:
        return None
    reserve = (
        INTEGRATED_RESERVE_BYTES if device.type == "cuda" else max(MIN_RESERVE_BYTES, int(FRAC_RESERVE * available))
    )
    return max(0, available - reserve)


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: the allocator's on CUDA, the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
