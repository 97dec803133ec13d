"""One to three suggestions with their numbers: what costs most and can be changed. None where nothing stands out."""

from collections.abc import Iterator

from sparkgrpo.profiling.summary import PhaseSummary, TraceSummary
from sparkgrpo.profiling.wording import duration, percent, plain

MAX_SUGGESTIONS = 3
MIN_FRAC = 0.1
"""Of the steps' wall time (or of the kernels' time): what is worth less is not worth a sentence."""
SMALL_KERNEL_NS = 5_000
MIN_NS = 1_000_000
"""Of device time; a trace with less is too small for advice."""


def suggestions(summary: TraceSummary) -> tuple[str, ...]:
    """Sentences, the one worth most first. What makes the trace hard to trust comes before all."""
    found = sorted([*_about_trust(summary), *_about_idle(summary), *_about_kernels(summary), *_about_host(summary)])
    return tuple(text for _, text in found[:MAX_SUGGESTIONS])


def _about_trust(summary: TraceSummary) -> Iterator[tuple[float, str]]:
    lost = summary.unattributed
    if lost is not None and lost.frac_of_time > MIN_FRAC:
        why = "before the capture began" if lost.num_without_call >= lost.num_outside else "outside every range"
        yield (
            -2 - lost.frac_of_time,
            f"{percent(lost.frac_of_time)} of the kernel time ({lost.num_kernels:,} kernels) belongs to no phase, most "
            f"of it launched {why}: start and stop the capture at the boundary of a step, behind a synchronisation.",
        )
    graphs = summary.graphs
    if graphs is not None and graphs.num_opaque:
        yield (
            -1.5,
            f"{graphs.num_opaque:,} graph replays hide their kernels: record one step with --cuda-graph-trace=node to "
            "see them (it slows replays down, so take times from this trace).",
        )


def _about_idle(summary: TraceSummary) -> Iterator[tuple[float, str]]:
    cures = {
        "host": "the host does not keep up: fewer and larger launches, a CUDA graph, or less Python between them",
        "sync": "the host waits where it could go on: look for .item(), .cpu(), .tolist() and blocking copies",
        "allocator": "memory is got and given back: reuse buffers, bucket the shapes",
        "launch": "launches take the time: a CUDA graph, or fewer kernels",
    }
    for phase in summary.phases or ():
        idle = phase.idle
        if idle is None or not summary.step_ns or not phase.activity_sum_ns:
            continue
        worth = idle.total_ns / summary.step_ns
        if worth > MIN_FRAC:
            yield (
                -worth,
                f"In {plain(phase.name, 40)} the device idles {duration(idle.total_ns)} of {duration(phase.wall_ns)}, "
                f"{percent(worth)} of the steps; cause: {cures[idle.cause]}.",
            )


def _about_kernels(summary: TraceSummary) -> Iterator[tuple[float, str]]:
    kernels = summary.kernels or ()
    small = [kernel for kernel in kernels if kernel.mean_ns < SMALL_KERNEL_NS]
    kernels_ns = sum(kernel.total_ns for kernel in kernels)
    frac_small = sum(kernel.frac_of_kernels for kernel in small)
    num_small, num = sum(kernel.num_calls for kernel in small), sum(kernel.num_calls for kernel in kernels)
    if num > 1000 and num_small > 0.5 * num and frac_small > MIN_FRAC:
        yield (
            -frac_small,
            f"{num_small:,} of {num:,} launches take less than {duration(SMALL_KERNEL_NS)} each, together "
            f"{percent(frac_small)} of the kernel time: fuse them or replay them from a graph.",
        )
    for kernel in kernels[:3] if kernels_ns >= MIN_NS else ():
        if kernel.waves is not None and kernel.waves < 0.75 and kernel.frac_of_kernels > MIN_FRAC:
            yield (
                -kernel.frac_of_kernels,
                f"{plain(kernel.name, 60)} is {percent(kernel.frac_of_kernels)} of the kernel time and fills "
                f"{percent(kernel.waves)} of the device a launch: smaller tiles, or a split along another axis.",
            )
    copies_ns = sum(ns for _, _, ns in (summary.copies or {}).values())
    busy_ns = sum(device.activity_busy_ns for device in summary.devices or ())
    if busy_ns >= MIN_NS and copies_ns / busy_ns > 2 * MIN_FRAC:
        kind, (num, num_bytes, ns) = max((summary.copies or {}).items(), key=lambda item: item[1][2])
        yield (
            -copies_ns / busy_ns,
            f"Copies take {duration(copies_ns)}, {percent(copies_ns / busy_ns)} of what the devices did; most of it "
            f"{plain(kind, 40)}: {num:,} copies, {num_bytes / 1e9:.2f} GB in {duration(ns)}. Keep it where it is used.",
        )


def _about_host(summary: TraceSummary) -> Iterator[tuple[float, str]]:
    """A CPU's run: the costliest phase, and what it spends its time in."""
    if summary.devices is not None or not summary.phases or not summary.step_ns:
        return
    for phase in sorted(summary.phases, key=lambda phase: -phase.wall_ns)[:2]:
        worth = phase.wall_ns / summary.step_ns
        if worth > MIN_FRAC and phase.operations and phase.operations_ns is not None:
            yield (-worth, _costs_of(phase, worth))


def _costs_of(phase: PhaseSummary, worth: float) -> str:
    assert phase.operations is not None and phase.operations_ns is not None
    parts = [f"{plain(op.name, 60)} {percent(op.self_ns / phase.wall_ns)}" for op in phase.operations[:3]]
    python = max(0.0, 1 - phase.operations_ns / phase.wall_ns)
    return (
        f"{plain(phase.name, 40)} is {percent(worth)} of the steps: {', '.join(parts)}; {percent(python)} outside of "
        "torch's operations (Python, recording)."
    )
