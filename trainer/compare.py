"""Runs laid over each other: what was set differently, which is better beyond chance, and what it cost.

Accuracies compare problem by problem: both runs answered the same held-out set, so the exact McNemar test on the
problems that one solved and the other did not says more than two standard errors do. Where the machine, its measured
speed or the held-out set differs, that is said, and no ratio of speeds is given.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.run_reader import Row, RunRecord

MAX_RUNS = 8
AXES = ("step", "tokens", "seconds")
_MAX_PROBE_DIFFERENCE = 0.10
_NO_DIFFERENCE = frozenset(("run_dir", "resume", "plain", "sink"))


@dataclass(kw_only=True, slots=True)
class Side:
    """One run in a comparison."""

    label: str
    record: RunRecord
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    accuracy_se: float | None = None
    seconds: float = 0.0
    """In steps, evaluations included."""
    tokens: float | None = None
    tok_per_s: float | None = None
    """Median over steps."""
    seconds_to: float | None = None
    """Until the first evaluation at the common accuracy."""
    tokens_to: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two runs, problem by problem."""

    first: str
    second: str
    num_first_only: int
    """Problems that only the first solved."""
    num_second_only: int
    p_value: float
    """Of so uneven a split, or a more uneven one, if both were equally good (exact, two-sided)."""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The result."""

    sides: list[Side]
    differences: dict[str, list[object]] = field(default_factory=dict)
    """Settings that are not the same in all runs, with the value of each."""
    warnings: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    common_accuracy: float | None = None
    """The highest accuracy that every run reached."""
    has_equal_speed_terms: bool = True
    """Whether times may be compared."""


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Compare 2 to 8 runs. `UserError` for another number."""
    if not 2 <= len(records) <= MAX_RUNS:
        raise UserError(f"expected 2 to {MAX_RUNS} runs to compare, got {len(records)}")
    sides = [_side(record, label) for record, label in zip(records, _labels(records), strict=True)]
    found = Comparison(sides=sides, differences=_differences(records))
    found.warnings, found.has_equal_speed_terms = _warnings(records)
    found.common_accuracy = _common_accuracy(sides)
    if found.common_accuracy is not None:
        for side in sides:
            side.seconds_to, side.tokens_to = _cost_to(side.record, found.common_accuracy)
    found.pairs = [pair for a, b in itertools.combinations(sides, 2) if (pair := _pair(a, b)) is not None]
    return found


def mcnemar_p(num_first_only: int, num_second_only: int) -> float:
    """Exact two-sided p value of McNemar's test: 2 P(Bin(n, 1/2) <= min), at most 1."""
    n, smaller = num_first_only + num_second_only, min(num_first_only, num_second_only)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(smaller + 1)) / 2**n)


def x_axis(record: RunRecord, axis: str) -> dict[int, float]:
    """Where each step lies on an axis: the step, tokens so far, or seconds so far (0 before the first step)."""
    place, seconds = {0: 0.0}, 0.0
    for row in record.steps:
        step = int(number(row.get("step")) or 0)
        seconds += number(row.get("t_step")) or 0.0
        tokens = number(row.get("num_tokens_total"))
        place[step] = float(step) if axis == "step" else seconds if axis == "seconds" else (tokens or math.nan)
    return place


def _labels(records: Sequence[RunRecord]) -> list[str]:
    names = [record.name for record in records]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({i})" for i, name in enumerate(names, start=1)]


def _side(record: RunRecord, label: str) -> Side:
    accuracies = [value for row in record.evals if (value := number(row.get("accuracy"))) is not None]
    speeds = [value for row in record.steps if (value := number(row.get("tok_per_s"))) is not None]
    return Side(
        label=label,
        record=record,
        accuracy_before=accuracies[0] if accuracies else None,
        accuracy_after=accuracies[-1] if accuracies else None,
        accuracy_se=number(record.evals[-1].get("accuracy_se")) if record.evals else None,
        seconds=sum(number(row.get("t_step")) or 0.0 for row in record.steps),
        tokens=number(record.steps[-1].get("num_tokens_total")) if record.steps else None,
        tok_per_s=median(speeds) if speeds else None,
    )


def _differences(records: Sequence[RunRecord]) -> dict[str, list[object]]:
    keys = dict.fromkeys(key for record in records for key in record.config)
    found = {}
    for key in keys:
        # A setting that one run does not have came with a later version: whether it differs is not known.
        known = [record.config[key] for record in records if key in record.config]
        if key not in _NO_DIFFERENCE and any(value != known[0] for value in known):
            found[str(key)] = [record.config.get(key, "-") for record in records]
    return found


def _warnings(records: Sequence[RunRecord]) -> tuple[list[str], bool]:
    warnings, is_equal = [], True
    machines = [_machine(record) for record in records]
    if any(machine != machines[0] for machine in machines):
        warnings.append("the runs ran on different machines: times do not compare")
        is_equal = False
    probes = [_probe(record) for record in records]
    for name in {key for probe in probes for key in probe}:
        values = [probe[name] for probe in probes if name in probe]
        if len(values) > 1 and max(values) > (1 + _MAX_PROBE_DIFFERENCE) * min(values):
            warnings.append(
                f"the probe {name} differs by {100 * (max(values) / min(values) - 1):.0f} %: "
                "the machine was not equally fast"
            )
            is_equal = False
    sets = {record.run.get("eval_sha256") for record in records}
    if len({str(value) for value in sets}) > 1:
        warnings.append("the held-out problems differ: accuracies do not compare")
        is_equal = False
    unfinished = [record.name for record in records if record.status != "finished"]
    if unfinished:
        warnings.append(f"not finished: {', '.join(unfinished)}")
    return warnings, is_equal


def _machine(record: RunRecord) -> tuple[object, ...]:
    hardware = record.run.get("hardware")
    known = hardware if isinstance(hardware, Mapping) else {}
    threads = record.config.get("num_threads") if record.config.get("device") == "cpu" else None
    return (*(known.get(key) for key in ("device", "name", "cpu", "cpu_cores", "num_sms")), threads)


def _probe(record: RunRecord) -> dict[str, float]:
    probe = record.run.get("probe_before")
    if not isinstance(probe, Mapping):
        return {}
    return {str(key): value for key, raw in probe.items() if (value := number(raw)) is not None and value > 0}


def _common_accuracy(sides: Sequence[Side]) -> float | None:
    best = [
        max((value for row in side.record.evals if (value := number(row.get("accuracy"))) is not None), default=None)
        for side in sides
    ]
    known = [value for value in best if value is not None]
    return min(known) if len(known) == len(best) else None


def _cost_to(record: RunRecord, accuracy: float) -> tuple[float | None, float | None]:
    for row in record.evals:
        if (number(row.get("accuracy")) or 0.0) >= accuracy:
            step = int(number(row.get("step")) or 0)
            seconds, tokens = x_axis(record, "seconds").get(step), x_axis(record, "tokens").get(step)
            return seconds, tokens
    return None, None


def _pair(a: Side, b: Side) -> Pair | None:
    if not a.record.evals or not b.record.evals:
        return None
    if a.record.run.get("eval_sha256") != b.record.run.get("eval_sha256"):
        return None
    one, other = _bits(a.record.evals[-1]), _bits(b.record.evals[-1])
    if one is None or other is None or one[1] != other[1]:
        return None
    first_only, second_only = (one[0] & ~other[0]).bit_count(), (other[0] & ~one[0]).bit_count()
    return Pair(
        first=a.label,
        second=b.label,
        num_first_only=first_only,
        num_second_only=second_only,
        p_value=mcnemar_p(first_only, second_only),
    )


def _bits(row: Row) -> tuple[int, int] | None:
    """A bit a problem, and how many problems; None where they are not known."""
    bits, count = row.get("right_bits"), row.get("num_problems")
    if not isinstance(bits, str) or not isinstance(count, int) or len(bits) > 1_000_000:
        return None
    try:
        return int(bits, 16), count
    except ValueError:
        return None


def held_values(x: Sequence[float], y: Sequence[float], grid: np.ndarray) -> list[float | None]:
    """At each place of the grid the last value known by then; None before the first and after the end."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not known:
        return [None] * len(grid)
    places = np.array([a for a, _ in known])
    index = np.searchsorted(places, grid + 1e-9, side="right") - 1
    return [
        known[i][1] if i >= 0 and place <= places[-1] + 1e-9 else None for i, place in zip(index, grid, strict=True)
    ]
