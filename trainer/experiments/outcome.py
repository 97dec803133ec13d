"""What an experiment expected, what came out, and whether they agree.

An expectation is a direction that must exceed two standard errors over seeds, or a number where theory has one.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

AGREES, DISAGREES, TOO_SHORT = "agrees", "disagrees", "too short to tell"
EXIT_CODES = {AGREES: 0, DISAGREES: 1, TOO_SHORT: 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where and how large an experiment runs."""

    folder: Path
    """Run folders of all experiments (one control is shared) and their pages."""
    num_seeds: int
    num_threads: int
    """CPU threads of PyTorch; 0: its own choice."""
    say: Callable[[str], None]
    """Tells the person how far it is."""


@dataclass(kw_only=True, slots=True)
class Check:
    """One thing that was expected."""

    expected: str
    found: str
    verdict: str
    """AGREES, DISAGREES or TOO_SHORT."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The result of an experiment."""

    name: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    """Numbers for outcome.json."""
    plots: dict[str, str] = field(default_factory=dict)
    """SVG texts by file name."""
    remarks: list[str] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """DISAGREES if any check does, else TOO_SHORT if any is, else AGREES."""
        verdicts = [check.verdict for check in self.checks]
        return DISAGREES if DISAGREES in verdicts else TOO_SHORT if TOO_SHORT in verdicts else AGREES

    def as_json(self) -> str:
        """The content of outcome.json."""
        checks = [{"expected": c.expected, "found": c.found, "verdict": c.verdict} for c in self.checks]
        content = {
            "name": self.name,
            "verdict": self.verdict,
            "checks": checks,
            "remarks": self.remarks,
            "figures": self.figures,
            "runs": [run.name for run in self.runs],
        }
        return json.dumps(content, indent=1) + "\n"


def expect(expected: str, found: str, holds: bool) -> Check:
    """A check that theory decides."""
    return Check(expected=expected, found=found, verdict=AGREES if holds else DISAGREES)


def expect_larger(
    expected: str, larger: Sequence[float], smaller: Sequence[float], *, least_se: float = 0.0, unit: str = ""
) -> Check:
    """A direction: the mean over seeds must be larger by two standard errors; more seeds are needed in between.

    Args:
        least_se: Standard error of one value by its own making (an accuracy on n problems); the spread over few seeds
            can be small by chance.
    """
    difference = fmean(larger) - fmean(smaller)
    se = math.hypot(standard_error(larger, least_se), standard_error(smaller, least_se))
    if len(larger) < 2 and least_se == 0.0:
        verdict = TOO_SHORT
    else:
        verdict = AGREES if difference > 2 * se else DISAGREES if difference < -2 * se else TOO_SHORT
    found = f"{with_range(larger)} against {with_range(smaller)}{unit}: {difference:+.3g} ± {se:.2g} (standard error)"
    return Check(expected=expected, found=found, verdict=verdict)


def standard_error(values: Sequence[float], least_se: float = 0.0) -> float:
    """Of the mean over seeds; at least what one value's own error comes to."""
    spread = stdev(values) if len(values) > 1 else 0.0
    return max(spread, least_se) / math.sqrt(len(values))


def with_range(values: Sequence[float]) -> str:
    """Mean and range: 0.743 [0.735, 0.755]."""
    return f"{fmean(values):.3g} [{min(values):.3g}, {max(values):.3g}]"
