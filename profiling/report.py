"""The report of a trace as sections of lines and tables; `text_report` prints them, `report_page.py` makes a page.

Every number that the trace cannot give reads "cannot say". Names of kernels and ranges are a stranger's text: they are
shown as text. Host, user, paths, processes and environment never enter a report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkgrpo.profiling.summary import PhaseSummary, TraceSummary
from sparkgrpo.profiling.wording import CANNOT_SAY, count, duration, percent, plain

MAX_KERNELS = 25
MAX_RANGES = 12
MAX_OPERATIONS = 3
MAX_FRAC_UNACCOUNTED = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a report: sentences, then a table."""

    title: str
    lines: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    num_left: int = 1
    """Columns of text; the others are numbers and stand right."""


def sections(summary: TraceSummary) -> list[Section]:
    """All parts, what matters most first."""
    parts = [
        Section(title="What to do", lines=summary.suggestions or (_no_suggestion(summary),)),
        _phases(summary),
        *([_operations(summary)] if summary.operations is not None else []),
        _rates(summary.facts),
        *([_devices(summary), _idle(summary), _graphs(summary), _kernels(summary)] if _has_device(summary) else []),
        *([_ranges(summary)] if summary.ranges and summary.phases is None else []),
        _memory(summary.facts),
        _state(summary.facts),
        _trust(summary),
    ]
    return [part for part in parts if part.lines or part.rows]


def _no_suggestion(summary: TraceSummary) -> str:
    if summary.phases is None or (summary.kernels is None and summary.operations is None):
        return f"{CANNOT_SAY}: too much is missing in this trace for advice (see the last section)."
    return "Nothing stands out."


def text_report(summary: TraceSummary) -> str:
    """The report for a terminal: aligned columns, no colour, no control characters."""
    return "\n\n".join(_as_text(section) for section in sections(summary)) + "\n"


def _as_text(section: Section) -> str:
    lines = [section.title, "-" * len(section.title), *section.lines]
    if section.rows:
        grid = [section.header, *section.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(section.header))]
        for row in grid:
            left = section.num_left
            cells = [cell.ljust(width) for cell, width in zip(row[:left], widths[:left], strict=True)]
            cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _has_device(summary: TraceSummary) -> bool:
    """Whether a GPU is in the trace, or should have been."""
    return summary.devices is not None or summary.kind == "nsys"


def _phases(summary: TraceSummary) -> Section:
    title = "Phases"
    if summary.phases is None:
        return Section(
            title=title,
            lines=(f"{CANNOT_SAY}: the trace has no range named grpo.t_...; sparkgrpo profile records them.",),
        )
    header = ("phase", "times", "wall", "of steps", "device span", "device busy", "busy of steps", "kernels", "replays")
    is_opaque = summary.graphs is not None and summary.graphs.num_opaque > 0
    rows = [
        (
            plain(phase.name),
            count(phase.num),
            duration(phase.wall_ns),
            percent(phase.frac_of_steps),
            duration(phase.device_span_ns),
            duration(phase.activity_busy_ns),
            percent(_share(phase.activity_busy_ns, summary.step_ns)),
            count(phase.num_kernels) + (" + opaque" if phase.num_replays and is_opaque else ""),
            count(phase.num_replays),
        )
        for phase in summary.phases
    ]
    if not _has_device(summary):
        header, rows = header[:4], [row[:4] for row in rows]
    elif summary.unattributed is not None:
        lost = summary.unattributed
        rows.append(
            (
                "unattributed",
                "",
                "",
                "",
                "",
                f"{percent(lost.frac_of_time)} of kernel time",
                "",
                count(lost.num_kernels),
                "",
            )
        )
    return Section(title=title, lines=tuple(_sum_check(summary)), header=header, rows=tuple(rows))


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _sum_check(summary: TraceSummary) -> list[str]:
    missing = summary.frac_unaccounted
    if summary.step_ns is None or missing is None:
        return [f"{summary.num_steps or 0} whole steps: their sum cannot be checked."]
    verdict = "they add up" if abs(missing) <= MAX_FRAC_UNACCOUNTED else "NOT within 1 %: something has no phase"
    return [
        f"{summary.num_steps} whole steps of {duration(summary.step_ns / max(summary.num_steps or 1, 1))}; the phases "
        f"leave {percent(abs(missing))} of them unnamed: {verdict}."
    ]


def _operations(summary: TraceSummary) -> Section:
    """The costliest operations of the host in each phase, by self time."""
    header = ("phase", "operation", "calls", "self time", "of the phase")
    rows = []
    groups: Sequence[PhaseSummary] = summary.phases or ()
    for phase in groups:
        shown = (phase.operations or ())[:MAX_OPERATIONS]
        for index, op in enumerate(shown):
            own = (
                plain(op.name, 60),
                count(op.num_calls),
                duration(op.self_ns),
                percent(op.self_ns / max(phase.wall_ns, 1)),
            )
            rows.append((plain(phase.name) if index == 0 else "", *own))
        outside = max(0, phase.wall_ns - (phase.operations_ns or 0))
        name = "" if shown else plain(phase.name)
        rows.append((name, "outside of operations", "", duration(outside), percent(outside / max(phase.wall_ns, 1))))
    if not groups:
        total = max(sum(op.self_ns for op in summary.operations or ()), 1)
        for op in (summary.operations or ())[:MAX_KERNELS]:
            rows.append(
                ("", plain(op.name, 60), count(op.num_calls), duration(op.self_ns), percent(op.self_ns / total))
            )
    return Section(title="Costliest operations of the host by self time", header=header, rows=tuple(rows), num_left=2)


def _rates(facts: Mapping[str, object]) -> Section:
    """What `sparkgrpo profile` reckoned for the recorded steps."""
    listed = facts.get("rates")
    rows = []
    for rate in listed if isinstance(listed, list) else []:
        if isinstance(rate, Mapping):
            rows.append(
                tuple(plain(str(rate.get(key, CANNOT_SAY))) for key in ("what", "rate", "of_probe", "of_spec", "note"))
            )
    return Section(
        title="Rates against the device's limits",
        header=("what", "rate", "of today's probe", "of the data sheet", "note"),
        rows=tuple(rows),
    )


def _devices(summary: TraceSummary) -> Section:
    if summary.devices is None:
        return Section(title="Devices", lines=(f"{CANNOT_SAY}: the trace has no row of a device.",))
    header = ("device", "kernels", "kernel sum", "kernels busy", "of their window", "any activity", "of its window")
    rows = tuple(
        (
            f"{device.number}: {plain(device.device.name, 40)}",
            count(device.num_kernels),
            duration(device.kernel_sum_ns),
            duration(device.kernel_busy_ns),
            percent(device.frac_kernel_busy),
            duration(device.activity_busy_ns),
            percent(device.frac_activity_busy),
        )
        for device in summary.devices
    )
    lines = [
        f"Copies {plain(kind, 40)}: {num:,}, {num_bytes / 1e9:.3f} GB in {duration(ns)}"
        for kind, (num, num_bytes, ns) in (summary.copies or {}).items()
    ]
    return Section(title="Devices", lines=tuple(lines), header=header, rows=rows)


def _idle(summary: TraceSummary) -> Section:
    rows = [
        (
            plain(phase.name),
            duration(phase.idle.total_ns),
            percent(phase.idle.total_ns / max(phase.wall_ns, 1)),
            phase.idle.cause,
            *(
                duration(ns)
                for ns in (phase.idle.host_ns, phase.idle.sync_ns, phase.idle.allocator_ns, phase.idle.launch_ns)
            ),
        )
        for phase in summary.phases or ()
        if phase.idle is not None
    ]
    header = ("phase", "idle", "of wall", "mostly", "no call (host)", "waiting (sync)", "allocator", "other calls")
    return Section(title="Idle device by what the host did", header=header, rows=tuple(rows))


def _graphs(summary: TraceSummary) -> Section:
    graphs = summary.graphs
    if graphs is None:
        return Section(title="CUDA graphs", lines=(f"{CANNOT_SAY}: the trace has no calls.",))
    if not graphs.num_launches:
        return Section(title="CUDA graphs", lines=("No graph was launched.",))
    mean = duration(graphs.launch_ns / graphs.num_launches)
    nodes = CANNOT_SAY if graphs.nodes_per_replay is None else f"{graphs.nodes_per_replay:.0f}"
    lines = [
        f"{graphs.num_launches:,} replays; {nodes} nodes each; launch {mean} of the host each; median gap on the "
        f"device between two {duration(graphs.median_gap_ns)}."
    ]
    if graphs.num_opaque:
        lines.append(
            f"{graphs.num_opaque:,} replays are opaque: record with --cuda-graph-trace=node to see their kernels."
        )
    if graphs.num_without_time:
        lines.append(f"{graphs.num_without_time:,} replays have no time and are in no sum.")
    inflation = summary.facts.get("node_mode_inflation")
    if isinstance(inflation, int | float):
        lines.append(f"Recording nodes made a step {inflation:.2f} times as long.")
    return Section(title="CUDA graphs", lines=tuple(lines))


def _kernels(summary: TraceSummary) -> Section:
    if summary.kernels is None:
        return Section(title="Kernels", lines=(f"{CANNOT_SAY}: the trace has no table of kernels (this is not zero).",))
    header = ("kernel", "whose", "calls", "total", "share", "mean", "registers", "shared", "waves", "mostly in")
    rows = tuple(
        (
            plain(kernel.name, 56),
            kernel.owner,
            count(kernel.num_calls),
            duration(kernel.total_ns),
            percent(kernel.frac_of_kernels),
            duration(kernel.mean_ns),
            count(kernel.registers),
            CANNOT_SAY if kernel.shared_bytes is None else f"{kernel.shared_bytes / 1024:.0f} KiB",
            CANNOT_SAY if kernel.waves is None else f"{kernel.waves:.2f}",
            CANNOT_SAY if not kernel.phases else plain(kernel.phases[0][0], 24),
        )
        for kernel in summary.kernels[:MAX_KERNELS]
    )
    rest = summary.kernels[MAX_KERNELS:]
    lines = ()
    if rest:
        lines = (
            f"{len(rest)} more kernels take {percent(sum(kernel.frac_of_kernels for kernel in rest))} of the time.",
        )
    return Section(title="Kernels", lines=lines, header=header, rows=rows, num_left=2)


def _ranges(summary: TraceSummary) -> Section:
    rows = tuple(
        (plain(item.name, 60), count(item.num_kernels), duration(item.sum_ns))
        for item in (summary.ranges or ())[:MAX_RANGES]
    )
    return Section(title="Kernels by innermost range", header=("range", "kernels", "sum"), rows=rows)


def _memory(facts: Mapping[str, object]) -> Section:
    memory = facts.get("memory")
    rows = []
    for phase, row in memory.items() if isinstance(memory, Mapping) else ():
        if isinstance(row, Mapping):
            cells = [row.get(key) for key in ("allocated_bytes", "reserved_bytes", "resident_bytes")]
            texts = [f"{cell / 2**20:,.0f} MiB" if isinstance(cell, int | float) else CANNOT_SAY for cell in cells]
            rows.append((plain(str(phase)), *texts))
    header = ("at the end of", "allocated", "reserved", "resident (host)")
    return Section(title="Memory", header=header, rows=tuple(rows))


def _state(facts: Mapping[str, object]) -> Section:
    lines = facts.get("state")
    return Section(
        title="State of the machine",
        lines=tuple(plain(str(line), 200) for line in lines) if isinstance(lines, list) else (),
    )


def _trust(summary: TraceSummary) -> Section:
    """What the numbers rest on."""
    versions = ", ".join(f"{plain(name, 20)} {plain(value, 40)}" for name, value in summary.versions.items())
    lines = [
        f"Recorded by {summary.kind} ({versions or 'versions: ' + CANNOT_SAY}); graphs traced by "
        f"{summary.graph_mode or CANNOT_SAY}; whole "
        f"steps: {count(summary.num_steps)}; processes with calls: {count(summary.num_processes)}.",
    ]
    if summary.num_kernels is not None:
        lines.append(
            f"{count(summary.num_kernels_with_call)} of {summary.num_kernels:,} kernels have their call in the trace."
        )
    if summary.unattributed is not None:
        lost = summary.unattributed
        lines.append(
            f"Unattributed: {lost.num_kernels:,} kernels ({percent(lost.frac_of_kernels)}, "
            f"{percent(lost.frac_of_time)} of the kernel time): {lost.num_without_call:,} without a call in the "
            f"capture, {lost.num_outside:,} launched outside."
        )
    elif summary.kernels is not None:
        lines.append(f"Unattributed kernels: {CANNOT_SAY}, ranges or calls are missing.")
    if summary.num_open_ranges:
        lines.append(f"{summary.num_open_ranges} ranges were open when the capture stopped and count to its end.")
    if summary.num_other_ranges:
        lines.append(f"{summary.num_other_ranges:,} ranges and marks of other kinds are not attributed.")
    if summary.missing:
        lines.append(f"Missing in the file: {', '.join(plain(name, 60) for name in summary.missing)}.")
    lines += [plain(note, 200) for note in summary.notes]
    return Section(title="How far to trust this", lines=tuple(lines))
