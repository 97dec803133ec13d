"""How much memory there is to use, in bytes.

On an integrated device (DGX Spark) CUDA's "free" is MemFree, which a full page cache drives to nothing: there, as on
the host, MemAvailable of /proc/meminfo is the figure, and NVML is never asked. In a container the limit of its control
group counts where it leaves less.
"""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
CGROUP_ROOT, CGROUP_OF_SELF = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MIN_RESERVE_BYTES = 1 << 30
FRAC_RESERVE = 0.1
INTEGRATED_RESERVE_BYTES = 20 << 30
INTEGRATED_FLOOR_BYTES = 16 << 30
"""A driver has reported no memory with 22 GiB available, and hosts have hung below."""
HOST_FLOOR_BYTES = 1 << 29
WARNING_BYTES = 4 << 30
"""Above an integrated device's floor: time to give back what is cached. A quarter of the floor elsewhere."""
UNLIMITED_BYTES = 1 << 60
"""A control group without a limit says a number of this size (version 1) or "max"."""


def host_available_bytes(
    meminfo: Path = MEMINFO, cgroup_root: Path = CGROUP_ROOT, cgroup_of_self: Path = CGROUP_OF_SELF
) -> int | None:
    """MemAvailable, or what the control group leaves where that is less; None where the system does not say."""
    available = meminfo_bytes("MemAvailable", meminfo)
    left = cgroup_left_bytes(cgroup_root, cgroup_of_self)
    known = [value for value in (available, left) if value is not None]
    return min(known, default=None)


def meminfo_bytes(field: str, meminfo: Path = MEMINFO) -> int | None:
    """A field of /proc/meminfo; None where there is none."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None  # another operating system
    found = [line.split() for line in lines if line.startswith(f"{field}:")]
    return int(found[0][1]) * 1024 if found and len(found[0]) > 1 and found[0][1].isdigit() else None


def cgroup_left_bytes(root: Path = CGROUP_ROOT, of_self: Path = CGROUP_OF_SELF) -> int | None:
    """What the tightest control group above this process still gives, its reclaimable file cache counted as free.

    None without a limit. Reads version 2 (memory.max) and version 1 (memory.limit_in_bytes).
    """
    left = [
        max(0, limit - used)
        for folder, names in _cgroup_folders(root, of_self)
        if (limit := _number(folder / names[0])) is not None and limit < UNLIMITED_BYTES
        if (used := _used_bytes(folder, names[1])) is not None
    ]
    return min(left) if left else None


def _cgroup_folders(root: Path, of_self: Path) -> list[tuple[Path, tuple[str, str]]]:
    """Every group from this process's up to the root, with the names of its limit and its use."""
    try:
        lines = of_self.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [(base.joinpath(*parts[:depth]), names) for depth in range(len(parts), -1, -1)]
    return folders


def _used_bytes(folder: Path, name: str) -> int | None:
    used = _number(folder / name)
    if used is None:
        return None
    try:
        fields = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return used
    cache = fields.get("total_inactive_file", fields.get("inactive_file", "0")).strip()
    return used - (int(cache) if cache.isdigit() else 0)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """What a run may take of this machine and where it must stop."""

    available_bytes: int | None
    """Of the device the model lies on; None where nobody says."""
    reserve_bytes: int
    """Kept free by the plan."""
    floor_bytes: int
    """Of the host's MemAvailable: below, the run ends."""
    warning_bytes: int
    """Of the host's MemAvailable: below, caches are given back."""

    @property
    def usable_bytes(self) -> int | None:
        """What a plan may use."""
        return None if self.available_bytes is None else max(0, self.available_bytes - self.reserve_bytes)


def memory_limits(device: torch.device) -> MemoryLimits:
    """The limits of a device right now."""
    if device.type == "cuda" and torch.cuda.get_device_properties(device).is_integrated:
        floor = INTEGRATED_FLOOR_BYTES
        return MemoryLimits(
            available_bytes=host_available_bytes(),
            reserve_bytes=INTEGRATED_RESERVE_BYTES,
            floor_bytes=floor,
            warning_bytes=floor + WARNING_BYTES,
        )
    floor, warning = HOST_FLOOR_BYTES, HOST_FLOOR_BYTES + HOST_FLOOR_BYTES // 4
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserve = int(FRAC_RESERVE * total)
        return MemoryLimits(available_bytes=free, reserve_bytes=reserve, floor_bytes=floor, warning_bytes=warning)
    available = host_available_bytes()
    reserve = max(MIN_RESERVE_BYTES, int(FRAC_RESERVE * (available or 0)))
    return MemoryLimits(available_bytes=available, reserve_bytes=reserve, floor_bytes=floor, warning_bytes=warning)


def usable_bytes(device: torch.device) -> int | None:
    """What a run may plan with on this device: what is available less a reserve; None where nobody says."""
    return memory_limits(device).usable_bytes


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: the allocator's on CUDA, the process's resident set on the CPU.

    `ru_maxrss` alone would not do on Linux: a process inherits it through exec from the one that started it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (own := meminfo_bytes("VmHWM", STATUS)) is not None:
        return own
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes(status: Path = STATUS) -> int | None:
    """Memory of this process that is in RAM now; None where the system does not say."""
    return meminfo_bytes("VmRSS", status)
