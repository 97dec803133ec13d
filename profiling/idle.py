"""What the host did while the device had nothing to do.

Within a phase, time of the host that no activity of any device covers is split by the calls that ran meanwhile:
waiting for the device, getting or giving back memory, other calls (launches), and no call at all (Python).
"""

import numpy as np

from sparkgrpo.profiling.intervals import difference, intersection, merged, overlap_ns, union_ns
from sparkgrpo.profiling.summary import IdleSummary
from sparkgrpo.profiling.timeline import Timeline

SYNC = ("Synchronize", "StreamWait", "EventQuery")
ALLOCATOR = ("Malloc", "Free", "MemAlloc", "MemFree", "MemMap", "MemUnmap", "MemCreate", "MemRelease", "HostAlloc")
BLOCKING_COPY = ("cudaMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH")
"""Copies whose name does not end in Async wait for the device."""


def idle_of(timeline: Timeline, start_P: np.ndarray, end_P: np.ndarray) -> IdleSummary | None:
    """The idle time of the devices inside these intervals of the host; None where calls or device rows are missing."""
    calls, tables = timeline.calls, timeline.device_rows()
    if calls is None or not tables:
        return None
    busy = merged(*(np.concatenate(column) for column in zip(*((t.start_N, t.end_N) for t in tables), strict=True)))
    idle = difference(*merged(start_P, end_P), *busy)
    kinds = np.array([_kind(name) for name in timeline.names], dtype=np.int8)[calls.name_N]
    rest, parts = idle, []
    for kind in (0, 1, 2):
        own = kinds == kind
        covered = merged(calls.start_N[own], calls.end_N[own])
        parts.append(overlap_ns(*rest, *covered))
        taken = intersection(*rest, *covered)
        rest = difference(*rest, *taken) if len(taken[0]) else rest
    return IdleSummary(sync_ns=parts[0], allocator_ns=parts[1], launch_ns=parts[2], host_ns=union_ns(*rest))


def _kind(name: str) -> int:
    """0: waits for the device, 1: memory, 2: any other call."""
    if any(part in name for part in SYNC) or (name.startswith(BLOCKING_COPY) and "Async" not in name):
        return 0
    return 1 if any(part in name for part in ALLOCATOR) else 2
