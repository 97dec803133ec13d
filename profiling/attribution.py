"""Which call launched a kernel, in which range, in which phase.

A kernel joins its call on correlation id *and* process: ids of two processes collide. Its range is the innermost one
of the launching thread; its phase is looked for in the whole process, because autograd launches a backward from a
thread that pushed no range (in a public trace the thread alone finds 30 of 2,810 backward kernels).

N: rows of the device, C: calls, P: phase ranges.
"""

from dataclasses import dataclass

import numpy as np

from sparkgrpo.profiling.intervals import innermost_by_group
from sparkgrpo.profiling.timeline import UNKNOWN, Calls, DeviceRows, Ranges, Timeline

PREFIX = "grpo."
STEP = "grpo.step"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRanges:
    """The ranges that are phases: those whose name begins with the prefix, the step's own left out."""

    names: tuple[str, ...]
    """Phases in the order of their first occurrence, prefix cut off; "t_train/backward" belongs to "t_train"."""
    start_P: np.ndarray
    end_P: np.ndarray
    process_P: np.ndarray
    phase_P: np.ndarray
    """Index into `names`."""
    step_start: np.ndarray
    step_end: np.ndarray
    """Whole steps."""
    num_open: int
    """Ranges that the end of the capture cut."""


def phase_ranges(timeline: Timeline, prefix: str = PREFIX) -> PhaseRanges | None:
    """The phases of a trace; None where it has no range with the prefix."""
    ranges = timeline.ranges
    if ranges is None:
        return None
    named = np.array([name.startswith(prefix) for name in timeline.names], dtype=bool)
    mine = np.flatnonzero(named[ranges.name_N]) if len(ranges.name_N) else np.zeros(0, dtype=np.int64)
    mine = mine[np.argsort(ranges.start_N[mine], kind="stable")]
    if not len(mine):
        return None
    names: list[str] = []
    phase_of = {}
    for place in dict.fromkeys(ranges.name_N[mine].tolist()):
        name = timeline.names[place]
        phase = name.removeprefix(prefix).partition("/")[0] if prefix == PREFIX else name
        if name != STEP and phase not in names:
            names.append(phase)
        phase_of[place] = UNKNOWN if name == STEP else names.index(phase)
    phase = np.array([phase_of[place] for place in ranges.name_N[mine].tolist()], dtype=np.int64)
    steps, own = mine[(phase == UNKNOWN) & ~ranges.is_open_N[mine]], mine[phase != UNKNOWN]
    return PhaseRanges(
        names=tuple(names),
        start_P=ranges.start_N[own],
        end_P=ranges.end_N[own],
        process_P=ranges.process_N[own],
        phase_P=phase[phase != UNKNOWN],
        step_start=ranges.start_N[steps],
        step_end=ranges.end_N[steps],
        num_open=int(ranges.is_open_N[mine].sum()),
    )


def calls_of(rows: DeviceRows, calls: Calls | None) -> np.ndarray | None:
    """int64 [N]: the call that launched each row, -1 for those launched before the capture; None: cannot say.

    Without the process of the rows a join is allowed only when a single process made calls.
    """
    if calls is None:
        return None
    processes = np.unique(calls.process_N)
    has_process = bool(len(rows.process_N)) and bool((rows.process_N != UNKNOWN).all())
    if not has_process and len(processes) > 1:
        return None
    row_process_N = (
        rows.process_N
        if has_process and UNKNOWN not in processes
        else np.full(len(rows.start_N), processes[0] if len(processes) else UNKNOWN)
    )
    call_key, row_key = _keys(processes, calls.process_N, calls.correlation_N, row_process_N, rows.correlation_N)
    order_C = np.argsort(call_key, kind="stable")
    sorted_key = call_key[order_C]
    place_N = np.searchsorted(sorted_key, row_key)
    place_N = np.minimum(place_N, max(len(sorted_key) - 1, 0))
    if not len(sorted_key):
        return np.full(len(row_key), UNKNOWN, dtype=np.int64)
    is_found_N = (sorted_key[place_N] == row_key) & (row_key >= 0)
    return np.where(is_found_N, order_C[place_N], UNKNOWN)


def _keys(
    processes: np.ndarray,
    call_process: np.ndarray,
    call_correlation: np.ndarray,
    row_process: np.ndarray,
    row_correlation: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """One number for (process, correlation id), negative for what cannot be joined."""
    keys = []
    for process, correlation in ((call_process, call_correlation), (row_process, row_correlation)):
        place = np.minimum(np.searchsorted(processes, process), max(len(processes) - 1, 0))
        is_known = (processes[place] == process) & (correlation >= 0) if len(processes) else correlation < 0
        keys.append(np.where(is_known, (place << 40) | correlation, UNKNOWN))
    return keys[0], keys[1]


def ranges_of(call_N: np.ndarray, calls: Calls, ranges: Ranges) -> np.ndarray:
    """int64 [N]: the innermost range of the launching thread around each row's call, -1 outside every range."""
    return _found(call_N, calls, ranges.thread_N, calls.thread_N, ranges.start_N, ranges.end_N)


def phase_ranges_of(call_N: np.ndarray, calls: Calls, phases: PhaseRanges) -> np.ndarray:
    """int64 [N]: the phase range of the launching process around each row's call, -1 for what no phase holds."""
    return _found(call_N, calls, phases.process_P, calls.process_N, phases.start_P, phases.end_P)


def _found(
    call_N: np.ndarray,
    calls: Calls,
    group_R: np.ndarray,
    call_group_C: np.ndarray,
    start_R: np.ndarray,
    end_R: np.ndarray,
) -> np.ndarray:
    """The innermost range around each row's call within a group; each call is looked up once."""
    launching = np.unique(call_N[call_N >= 0])
    found_C = np.full(len(calls.start_N) + 1, UNKNOWN, dtype=np.int64)  # the last one for rows without a call
    found_C[launching] = innermost_by_group(
        group_R, start_R, end_R, call_group_C[launching], calls.start_N[launching], calls.end_N[launching]
    )
    return found_C[call_N]
