"""A `Timeline` becomes a `TraceSummary`: joins, unions and sums, none of which adds up what overlaps.

N: rows of the device, P: phase ranges.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sparkgrpo.profiling import kernel_table
from sparkgrpo.profiling.attribution import (
    PREFIX,
    PhaseRanges,
    calls_of,
    phase_ranges,
    phase_ranges_of,
    ranges_of,
)
from sparkgrpo.profiling.idle import idle_of
from sparkgrpo.profiling.intervals import innermost_by_group, merged, self_ns, union_ns
from sparkgrpo.profiling.suggestions import suggestions
from sparkgrpo.profiling.summary import (
    DeviceSummary,
    GraphSummary,
    OperationSummary,
    PhaseSummary,
    RangeSummary,
    TraceSummary,
    Unattributed,
)
from sparkgrpo.profiling.timeline import UNKNOWN, Device, DeviceRows, Timeline

NUM_OPERATIONS = 10
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


def summarise(timeline: Timeline, *, prefix: str = PREFIX, facts: Mapping[str, object] | None = None) -> TraceSummary:
    """Everything that the trace tells.

    Args:
        prefix: Ranges that are phases begin so.
        facts: What the recorder wrote beside the trace.
    """
    summary = _Summariser(timeline, prefix).summary(dict(facts or {}))
    return replace(summary, suggestions=suggestions(summary))


class _Summariser:
    """The joins of one trace, made once and used by every table."""

    def __init__(self, timeline: Timeline, prefix: str) -> None:
        self.timeline = timeline
        self.phases = phase_ranges(timeline, prefix)
        operations = timeline.operations
        self.self_N = np.zeros(0, dtype=np.int64)
        """Self time of each operation."""
        if operations is not None:
            self.self_N = self_ns(operations.thread_N, operations.start_N, operations.end_N)
        self.call_of_rows: list[tuple[DeviceRows, np.ndarray | None, np.ndarray | None]] = []
        """Each table of the device with the call and the phase range of its rows."""
        for rows in timeline.device_rows():
            call_N = calls_of(rows, timeline.calls)
            has_phase = call_N is not None and timeline.calls is not None and self.phases is not None
            range_N = phase_ranges_of(call_N, timeline.calls, self.phases) if has_phase else None  # pyright: ignore
            self.call_of_rows.append((rows, call_N, range_N))
        self.kernel_call_N, self.kernel_range_N = next(
            ((call, place) for rows, call, place in self.call_of_rows if rows is timeline.kernels), (None, None)
        )

    def summary(self, facts: dict[str, object]) -> TraceSummary:
        """All tables."""
        timeline, phases = self.timeline, self.phases
        kernels, calls = timeline.kernels, timeline.calls
        has_call = self.kernel_call_N is not None
        step_ns, phases_ns = self._step_sums()
        return TraceSummary(
            kind=timeline.kind,
            graph_mode=timeline.graph_mode,
            versions=dict(timeline.versions),
            missing=tuple(timeline.missing),
            notes=tuple(timeline.notes),
            num_processes=None if calls is None else len(np.unique(calls.process_N)),
            num_steps=None if phases is None else len(phases.step_start),
            step_ns=step_ns,
            phases_ns=phases_ns,
            num_open_ranges=None if timeline.ranges is None else int(timeline.ranges.is_open_N.sum()),
            num_other_ranges=timeline.num_other_ranges,
            devices=self._devices() or None,
            phases=None if phases is None else self._phases(phases),
            kernels=None if kernels is None else self._kernels(kernels),
            num_kernels=None if kernels is None else len(kernels.start_N),
            num_kernels_with_call=int((self.kernel_call_N >= 0).sum()) if has_call else None,  # pyright: ignore
            launch_calls=self._launch_calls(),
            unattributed=self._unattributed(),
            ranges=self._ranges(),
            copies=self._copies(),
            graphs=self._graphs(),
            operations=self._operations(None),
            facts=facts,
        )

    def _step_sums(self) -> tuple[int | None, int | None]:
        """Wall time of the whole steps, and of the phases inside them."""
        phases = self.phases
        if phases is None or not len(phases.step_start):
            return None, None
        starts, ends = merged(phases.step_start, phases.step_end)
        inside = np.zeros(len(phases.start_P), dtype=bool)
        place = np.searchsorted(starts, phases.start_P, side="right") - 1
        inside[place >= 0] = phases.end_P[place >= 0] <= ends[place[place >= 0]]
        return int((ends - starts).sum()), union_ns(phases.start_P[inside], phases.end_P[inside])

    def _devices(self) -> tuple[DeviceSummary, ...]:
        timeline = self.timeline
        tables = [self._timed(rows) for rows in timeline.device_rows()]
        numbers = sorted({int(number) for table in tables for number in np.unique(table[2])})
        found = []
        for number in numbers:
            start_N, end_N = (np.concatenate([t[i][t[2] == number] for t in tables]) for i in (0, 1))
            kernels = timeline.kernels
            own = None if kernels is None else kernels.device_N == number
            begin, stop = (None, None) if own is None else (kernels.start_N[own], kernels.end_N[own])  # pyright: ignore
            has_kernels = begin is not None and stop is not None and len(begin) > 0
            found.append(
                DeviceSummary(
                    number=number,
                    device=timeline.devices.get(number, Device(name=f"device {number}")),
                    num_kernels=None if begin is None else len(begin),
                    kernel_sum_ns=int((stop - begin).sum()) if has_kernels else None,  # pyright: ignore
                    kernel_busy_ns=union_ns(begin, stop) if has_kernels else None,  # pyright: ignore
                    kernel_window_ns=int(stop.max() - begin.min()) if has_kernels else None,  # pyright: ignore
                    activity_busy_ns=union_ns(start_N, end_N),
                    activity_window_ns=int(end_N.max() - start_N.min()) if len(start_N) else 0,
                )
            )
        return tuple(found)

    @staticmethod
    def _timed(rows: DeviceRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start, end and device of the rows that have a time."""
        has_time = (rows.start_N != 0) | (rows.end_N != 0)
        return rows.start_N[has_time], rows.end_N[has_time], rows.device_N[has_time]

    def _phases(self, phases: PhaseRanges) -> tuple[PhaseSummary, ...]:
        step_ns, _ = self._step_sums()
        tables = [
            (rows, range_N, np.where(range_N >= 0, phases.phase_P[range_N], UNKNOWN))
            for rows, _, range_N in self.call_of_rows
            if range_N is not None and len(phases.phase_P)
        ]
        operations = self._operation_phases(phases)
        found = []
        for number, name in enumerate(phases.names):
            mine = phases.phase_P == number
            start_P, end_P = phases.start_P[mine], phases.end_P[mine]
            wall_ns = union_ns(start_P, end_P)
            listed = None if operations is None else self._operations(operations == number)
            found.append(
                PhaseSummary(
                    name=name,
                    num=int(mine.sum()),
                    wall_ns=wall_ns,
                    frac_of_steps=wall_ns / step_ns if step_ns else None,
                    **self._device_sums(tables, number),
                    idle=idle_of(self.timeline, start_P, end_P) if tables else None,
                    operations=None if listed is None else listed[:NUM_OPERATIONS],
                    operations_ns=None if listed is None else sum(operation.self_ns for operation in listed),
                )
            )
        return tuple(found)

    def _device_sums(
        self, tables: list[tuple[DeviceRows, np.ndarray, np.ndarray]], number: int
    ) -> dict[str, int | None]:
        """What the device did for a phase; None throughout where no table can be attributed."""
        keys = ("num_kernels", "num_replays", "kernel_sum_ns", "activity_sum_ns", "activity_busy_ns", "device_span_ns")
        sums: dict[str, int | None] = dict.fromkeys(keys)
        if not tables:
            return sums
        pieces = []
        for rows, range_N, phase_N in tables:
            own = (phase_N == number) & ((rows.start_N != 0) | (rows.end_N != 0))
            pieces.append((rows.start_N[own], rows.end_N[own], rows.device_N[own], range_N[own]))
            if rows is self.timeline.kernels:
                sums["num_kernels"] = int((phase_N == number).sum())
                sums["kernel_sum_ns"] = int((rows.end_N[own] - rows.start_N[own]).sum())
        start_N, end_N, device_N, range_N = (np.concatenate([piece[i] for piece in pieces]) for i in range(4))
        busy = [union_ns(start_N[device_N == d], end_N[device_N == d]) for d in np.unique(device_N)]
        sums["activity_sum_ns"] = int((end_N - start_N).sum())
        sums["activity_busy_ns"] = sum(busy)
        sums["device_span_ns"] = _spans_ns(start_N, end_N, range_N)
        launches = self._graph_launches()
        if launches is not None and self.phases is not None and self.timeline.calls is not None:
            place = phase_ranges_of(launches, self.timeline.calls, self.phases)
            sums["num_replays"] = int((self.phases.phase_P[place[place >= 0]] == number).sum())
        return sums

    def _operation_phases(self, phases: PhaseRanges) -> np.ndarray | None:
        operations = self.timeline.operations
        if operations is None or not len(phases.phase_P):
            return None
        range_N = innermost_by_group(
            phases.process_P, phases.start_P, phases.end_P, operations.process_N, operations.start_N, operations.end_N
        )
        return np.where(range_N >= 0, phases.phase_P[range_N], UNKNOWN)

    def _operations(self, chosen: np.ndarray | None) -> tuple[OperationSummary, ...] | None:
        """Operations by self time, costliest first; all of them where nothing is chosen."""
        operations = self.timeline.operations
        if operations is None:
            return None
        chosen = np.ones(len(operations.start_N), dtype=bool) if chosen is None else chosen
        sums, nums = (
            np.bincount(operations.name_N[chosen], weights=weights, minlength=len(self.timeline.names))
            for weights in (self.self_N[chosen], None)
        )
        order = np.argsort(-sums, kind="stable")
        return tuple(
            OperationSummary(name=self.timeline.names[i], num_calls=int(nums[i]), self_ns=int(sums[i]))
            for i in order.tolist()
            if nums[i]
        )

    def _kernels(self, kernels: DeviceRows) -> tuple[kernel_table.KernelSummary, ...]:
        phase_N, names = None, ()
        if self.kernel_range_N is not None and self.phases is not None and len(self.phases.phase_P):
            phase_N = np.where(self.kernel_range_N >= 0, self.phases.phase_P[self.kernel_range_N], UNKNOWN)
            names = self.phases.names
        return kernel_table.kernel_summaries(self.timeline, kernels, phase_N, names)

    def _launch_calls(self) -> dict[str, int] | None:
        calls, call_N = self.timeline.calls, self.kernel_call_N
        if calls is None or call_N is None:
            return None
        counts = np.bincount(calls.name_N[call_N[call_N >= 0]], minlength=len(self.timeline.names))
        return {self.timeline.names[i]: int(counts[i]) for i in np.argsort(-counts, kind="stable") if counts[i]}

    def _unattributed(self) -> Unattributed | None:
        """By phase; where a trace has ranges but no phase, by range."""
        kernels, call_N, range_N = self.timeline.kernels, self.kernel_call_N, self.kernel_range_N
        if kernels is None or call_N is None or self.timeline.ranges is None:
            return None
        if range_N is None and self.timeline.calls is not None:
            range_N = ranges_of(call_N, self.timeline.calls, self.timeline.ranges)
        assert range_N is not None
        long_N, is_lost_N = kernels.end_N - kernels.start_N, range_N < 0
        return Unattributed(
            num_kernels=int(is_lost_N.sum()),
            frac_of_kernels=float(is_lost_N.mean()) if len(is_lost_N) else 0.0,
            frac_of_time=float(long_N[is_lost_N].sum() / max(long_N.sum(), 1)),
            num_without_call=int((call_N < 0).sum()),
            num_outside=int((is_lost_N & (call_N >= 0)).sum()),
        )

    def _ranges(self) -> tuple[RangeSummary, ...] | None:
        kernels, calls, ranges, call_N = (
            self.timeline.kernels, self.timeline.calls, self.timeline.ranges, self.kernel_call_N,
        )  # fmt: skip
        if kernels is None or calls is None or ranges is None or call_N is None:
            return None
        range_N = ranges_of(call_N, calls, ranges)
        has = range_N >= 0
        names = ranges.name_N[range_N[has]]
        nums = np.bincount(names, minlength=len(self.timeline.names))
        sums = np.bincount(names, (kernels.end_N - kernels.start_N)[has], minlength=len(self.timeline.names))
        order = np.argsort(-sums, kind="stable").tolist()
        return tuple(
            RangeSummary(name=self.timeline.names[i], num_kernels=int(nums[i]), sum_ns=int(sums[i]))
            for i in order
            if nums[i]
        )

    def _copies(self) -> dict[str, tuple[int, int, int]] | None:
        copies = self.timeline.copies
        if copies is None or copies.size_N is None:
            return None
        found = {}
        for place in np.unique(copies.name_N).tolist():
            own = copies.name_N == place
            long_ns = int((copies.end_N - copies.start_N)[own].sum())
            num_bytes = int(np.maximum(copies.size_N[own], 0).sum())
            found[self.timeline.names[place]] = (int(own.sum()), num_bytes, long_ns)
        return found

    def _graph_launches(self) -> np.ndarray | None:
        """Indices of the calls that launch a graph."""
        calls = self.timeline.calls
        if calls is None:
            return None
        is_launch = np.array([name.startswith(GRAPH_LAUNCHES) for name in self.timeline.names], dtype=bool)
        return np.flatnonzero(is_launch[calls.name_N])

    def _graphs(self) -> GraphSummary | None:
        launches, calls, kernels = self._graph_launches(), self.timeline.calls, self.timeline.kernels
        if launches is None or calls is None:
            return None
        shown = np.zeros(0, dtype=np.int64)  # launches whose kernels are in the file
        num_nodes = 0
        if kernels is not None and self.kernel_call_N is not None:
            is_node = np.isin(self.kernel_call_N, launches)
            shown, num_nodes = np.unique(self.kernel_call_N[is_node]), int(is_node.sum())
        replays = self.timeline.replays
        num_untimed = 0 if replays is None else int(((replays.start_N == 0) & (replays.end_N == 0)).sum())
        return GraphSummary(
            num_launches=len(launches),
            num_opaque=len(launches) - len(shown),
            num_without_time=num_untimed,
            nodes_per_replay=num_nodes / len(shown) if len(shown) else None,
            launch_ns=int((calls.end_N - calls.start_N)[launches].sum()),
            median_gap_ns=self._replay_gap_ns(launches),
        )

    def _replay_gap_ns(self, launches: np.ndarray) -> int | None:
        """Median time between the end of a replay and the start of the next one of the same phase range."""
        pieces = []
        for rows, call_N, range_N in self.call_of_rows:
            if call_N is None or range_N is None or rows is self.timeline.copies or rows is self.timeline.fills:
                continue
            own = np.isin(call_N, launches) & ((rows.start_N != 0) | (rows.end_N != 0)) & (range_N >= 0)
            pieces.append((call_N[own], rows.start_N[own], rows.end_N[own], range_N[own]))
        if not pieces:
            return None
        call_N, start_N, end_N, range_N = (np.concatenate([piece[i] for piece in pieces]) for i in range(4))
        order_N, first = _runs(call_N)
        if len(first) < 2:
            return None
        begin, stop = np.minimum.reduceat(start_N[order_N], first), np.maximum.reduceat(end_N[order_N], first)
        place = range_N[order_N][first]
        in_time = np.argsort(begin, kind="stable")
        begin, stop, place = begin[in_time], stop[in_time], place[in_time]
        gap = (begin[1:] - stop[:-1])[place[1:] == place[:-1]]
        return int(np.median(gap)) if len(gap) else None


def _runs(key_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order that puts equal keys side by side, and where each run of them begins."""
    order_N = np.argsort(key_N, kind="stable")
    first = np.flatnonzero(np.concatenate(([True], np.diff(key_N[order_N]) != 0))) if len(key_N) else key_N[:0]
    return order_N, first


def _spans_ns(start_N: np.ndarray, end_N: np.ndarray, range_N: np.ndarray) -> int:
    """First start to last end of each range's rows, summed."""
    if not len(start_N):
        return 0
    order_N, first = _runs(range_N)
    begin, stop = np.minimum.reduceat(start_N[order_N], first), np.maximum.reduceat(end_N[order_N], first)
    return int((stop - begin).sum())
