"""Two traces against each other: phases per step and kernels per call, never totals of slices.

What cannot be compared is refused: another device, model, token count, graph mode or number of whole steps, or a
machine whose probes were 10 % apart. Kernels that communicate wait for each other, so they are listed apart.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sparkgrpo.profiling.probe_verdict import compare_probes
from sparkgrpo.profiling.summary import TraceSummary
from sparkgrpo.profiling.wording import CANNOT_SAY, duration, percent, plain

MIN_FRAC = 0.01
"""Kernels and phases with less of the time are shown and fail nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One line of the comparison."""

    kind: str
    """"phase" (per step), "kernel" (per call) or "communication"."""
    name: str
    before_ns: float | None
    after_ns: float | None
    frac: float
    """Share of the time in the first trace (the second where it is new)."""

    @property
    def ratio(self) -> float | None:
        """After over before."""
        return self.after_ns / self.before_ns if self.before_ns and self.after_ns is not None else None

    def is_worse(self, limit: float) -> bool:
        """Slower by more than the limit, and enough of the time to matter."""
        return self.kind != "communication" and self.frac >= MIN_FRAC and (self.ratio or 0) > 1 + limit


def why_not_comparable(before: TraceSummary, after: TraceSummary) -> list[str]:
    """Each reason in one sentence; empty when the traces may be compared."""
    pairs = {
        "device": (_devices(before), _devices(after)),
        "graph mode": (before.graph_mode, after.graph_mode),
        "number of whole steps": (before.num_steps, after.num_steps),
        **{key: (before.facts.get(key), after.facts.get(key)) for key in ("model", "num_tokens", "task")},
    }
    reasons = [
        f"{name}: {plain(str(a), 60)} against {plain(str(b), 60)}"
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and a != b
    ]
    probes = [summary.facts.get("probe_before") for summary in (before, after)]
    if all(isinstance(probe, Mapping) for probe in probes):
        verdict = compare_probes(probes[0], probes[1])  # pyright: ignore[reportArgumentType]
        reasons += [verdict.text] if not verdict.is_comparable else []
    return reasons


def changes(before: TraceSummary, after: TraceSummary) -> list[Change]:
    """Phases, then kernels, the largest share first."""
    return [*_phase_changes(before, after), *_kernel_changes(before, after)]


def diff_report(before: TraceSummary, after: TraceSummary, limit: float) -> str:
    """The comparison as aligned text."""
    rows = [("what", "name", "before", "after", "ratio", "share", "")]
    for change in changes(before, after):
        ratio = CANNOT_SAY if change.ratio is None else f"{change.ratio:.3f}"
        mark = "slower" if change.is_worse(limit) else ""
        name = plain(change.name, 56)
        rows.append(
            (
                change.kind,
                name,
                duration(change.before_ns),
                duration(change.after_ns),
                ratio,
                percent(change.frac),
                mark,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(["Phases per step, kernels per call.", *lines]) + "\n"


def _devices(summary: TraceSummary) -> str | None:
    return None if summary.devices is None else ", ".join(device.device.name for device in summary.devices)


def _phase_changes(before: TraceSummary, after: TraceSummary) -> Iterator[Change]:
    phases = [{phase.name: phase for phase in summary.phases or ()} for summary in (before, after)]
    for name in dict.fromkeys([*phases[0], *phases[1]]):
        a, b = phases[0].get(name), phases[1].get(name)
        yield Change(
            kind="phase",
            name=name,
            before_ns=None if a is None else a.wall_ns / max(before.num_steps or 1, 1),
            after_ns=None if b is None else b.wall_ns / max(after.num_steps or 1, 1),
            frac=(a or b).frac_of_steps or 0.0,  # pyright: ignore[reportOptionalMemberAccess]
        )


def _kernel_changes(before: TraceSummary, after: TraceSummary) -> Iterator[Change]:
    kernels = [{kernel.name: kernel for kernel in summary.kernels or ()} for summary in (before, after)]
    for name in dict.fromkeys([*kernels[0], *kernels[1]]):
        a, b = kernels[0].get(name), kernels[1].get(name)
        known = a or b
        assert known is not None
        yield Change(
            kind="communication" if known.owner == "NCCL" else "kernel",
            name=name,
            before_ns=None if a is None else a.mean_ns,
            after_ns=None if b is None else b.mean_ns,
            frac=known.frac_of_kernels,
        )
