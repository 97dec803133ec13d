"""Implementations of one op side by side: checked against float64, then timed in turn on the same operands.

An implementation is timed only behind its own green check. One that is missing, fails or is wrong keeps its row and
says why. In each round the implementations rotate, so that a noisy machine hits all alike; minimum and median count.
"""

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from benchmarks.peak_memory import peak_extra_bytes

ROUNDS = 5
IMPLEMENTATION_S = 2.0
"""Timed rounds of one implementation of one case end within this, but for the first three (one of a slow peer)."""
MIN_SAMPLE_S = 2e-3
"""Shorter steps are repeated within a sample until it takes that long."""
MAX_REPEATS = 100

Outputs = Mapping[str, torch.Tensor]
Step = Callable[[], Outputs]
NATS = ("logprob", "entropy")
"""Outputs whose error is absolute; of the others the error is relative, of L2 norms."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an op."""

    name: str
    make: Callable[[Any], Step]
    """From a case to a function that computes it once; both may raise."""
    truth: str | None = "op"
    """Which reference its outputs are checked against; None: it computes nothing that could be checked (a floor)."""
    is_floor: bool = False
    is_ours: bool = False
    note: str = ""


@dataclass(kw_only=True)
class Row:
    """What is known of one implementation, seconds, bytes and errors; what was not measured is None."""

    name: str
    note: str = ""
    is_ours: bool = False
    is_floor: bool = False
    failure: str | None = None
    failure_traceback: str | None = None
    times_s: list[float] = field(default_factory=list)
    min_s: float | None = None
    median_s: float | None = None
    iqr_s: float | None = None
    frac_floor: float | None = None
    speedup: float | None = None
    """How many times as fast as the baseline."""
    gbps: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    peak_extra_bytes: int | None = None
    has_equal_bits: bool | None = None
    """A second run from the same operands gave the same bits."""

    def fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        self.failure_traceback = traceback.format_exc()


@dataclass(kw_only=True)
class Comparison:
    """One case of one op on one device."""

    op: str
    device: torch.device
    conditions: dict[str, object]
    """Shapes and dtype, as they head the table."""
    case: Any
    check_case: Any
    """The case's first rows, small enough for float64."""
    truths: Mapping[str, Outputs]
    """Float64 outputs of the check case."""
    bounds: Mapping[str, float]
    """Largest error of ours, by output."""
    peer_bounds: Mapping[str, float]
    """Peers round more; these tell a wrong computation from a rounded one."""
    implementations: Sequence[Implementation]
    baseline: str = "eager"
    is_in_place: bool = False
    """A second step goes on from the first one's result."""
    num_bytes: int | None = None
    """Compulsory traffic, where that is the limit."""
    copy_gbps: float | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def floor_s(self) -> float | None:
        floors = [row.min_s for row in self.rows if row.is_floor and row.min_s is not None]
        if floors:
            return min(floors)
        return self.num_bytes / self.copy_gbps / 1e9 if self.num_bytes and self.copy_gbps else None

    def as_json(self) -> dict[str, object]:
        facts = {"num_bytes": self.num_bytes, "copy_gbps": self.copy_gbps, "baseline": self.baseline}
        rows = [asdict(row) for row in self.rows]
        return {"conditions": self.conditions, "floor_s": self.floor_s, **facts, "rows": rows}


def output_errors(outputs: Outputs, truth: Outputs) -> dict[str, float]:
    """Errors by output; log-probs get a 99th percentile too. Outputs that the truth lacks are not compared."""
    errors: dict[str, float] = {}
    for name, value in outputs.items():
        if name not in truth:
            continue
        difference = value.double() - truth[name]
        if name in NATS:
            errors[name] = difference.abs().max().item()
            errors[f"{name}_p99"] = difference.abs().quantile(0.99).item()
        else:
            errors[name] = (difference.norm() / truth[name].norm().clamp(min=1e-300)).item()
    return errors


def _check(comparison: Comparison, implementation: Implementation, row: Row) -> None:
    step = implementation.make(comparison.check_case)
    outputs = step()
    if implementation.truth is None:
        return
    row.errors = output_errors(outputs, comparison.truths[implementation.truth])
    assert row.errors, f"{implementation.name} gives none of the outputs that are checked"
    bounds = comparison.bounds if implementation.is_ours else comparison.peer_bounds
    wrong = [f"{name} off by {row.errors[name]:.1e}" for name in bounds if not row.errors.get(name, 0) <= bounds[name]]
    if wrong:
        raise ArithmeticError(f"{', '.join(wrong)}; not timed")
    again = (implementation.make(comparison.check_case) if comparison.is_in_place else step)()
    row.has_equal_bits = all(torch.equal(value, again[name]) for name, value in outputs.items())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample_s(step: Step, device: torch.device, repeats: int = 1) -> float:
    """Seconds of one step, the mean of `repeats`."""
    synchronize(device)
    start = perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (perf_counter() - start) / repeats


def _summarise(comparison: Comparison) -> None:
    for row in comparison.rows:
        if row.times_s:
            row.min_s, row.median_s = min(row.times_s), median(row.times_s)
            lower, _, upper = quantiles(row.times_s, n=4) if len(row.times_s) > 1 else (row.min_s,) * 3
            row.iqr_s = upper - lower
    floor_s = comparison.floor_s
    baseline_s = next((row.median_s for row in comparison.rows if row.name == comparison.baseline), None)
    for row in comparison.rows:
        if row.min_s is None or row.median_s is None:
            continue
        row.frac_floor = None if floor_s is None else floor_s / row.min_s
        row.speedup = None if baseline_s is None else baseline_s / row.median_s
        row.gbps = None if comparison.num_bytes is None else comparison.num_bytes / row.min_s / 1e9


def run_comparison(comparison: Comparison, *, rounds: int = ROUNDS, implementation_s: float = IMPLEMENTATION_S) -> None:
    """Checks, warms up, measures memory and times every implementation; fills `comparison.rows`.

    A slow implementation takes part in fewer rounds; see IMPLEMENTATION_S.
    """
    timed: list[tuple[Row, Step, int, int]] = []
    for implementation in comparison.implementations:
        row = Row(**{key: getattr(implementation, key) for key in ("name", "note", "is_ours", "is_floor")})
        comparison.rows.append(row)
        try:
            _check(comparison, implementation, row)
            step = implementation.make(comparison.case)
            warm_s = sample_s(step, comparison.device)
            row.peak_extra_bytes = peak_extra_bytes(step, comparison.device)
            if warm_s < implementation_s / 2:  # the first call may have filled caches
                warm_s = sample_s(step, comparison.device)
        except Exception as error:  # the row says what happened; the others go on
            row.fail(error)
        if row.failure is not None:
            _free_memory()
            continue
        repeats = max(1, min(MAX_REPEATS, round(MIN_SAMPLE_S / warm_s)))
        is_needed = row.is_ours or row.is_floor or row.name == comparison.baseline
        fewest = 3 if is_needed or warm_s < implementation_s else 1
        own_rounds = min(rounds, max(fewest, int(implementation_s / (warm_s * repeats))))
        timed.append((row, step, repeats, own_rounds))
    for number in range(rounds):
        for i in range(len(timed)):
            row, step, repeats, own_rounds = timed[(i + number) % len(timed)]
            if number < own_rounds and row.failure is None:
                _time_once(row, step, comparison.device, repeats)
    _summarise(comparison)


def _time_once(row: Row, step: Step, device: torch.device, repeats: int) -> None:
    """One more sample; what fails only here, where others hold memory too, costs its own row alone."""
    try:
        row.times_s.append(sample_s(step, device, repeats))
    except Exception as error:
        row.fail(error)
        row.times_s.clear()
    if row.failure is not None:
        _free_memory()


def _free_memory() -> None:
    """What a failed implementation took; not inside `except`, where the traceback still holds its tensors."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA was not used
