"""What a rule of diagnosis is: a disease, when it is there, what shows it, and what to do about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparkgrpo.trainer.diagnosis.curves import Array, Curves

WARM_UP_STEPS = 20


@dataclass(kw_only=True, slots=True)
class Finding:
    """What a rule sees: severities over the steps, and how to say it."""

    severity_T: Array
    """int; 0 none, 1 info, 2 warn, 3 error; has to last five steps."""
    at_once_T: Array
    """int; the same, counted at once and in the warm-up too."""
    say: Callable[[int], str]
    """One sentence with the numbers at a step's index."""
    evidence: Callable[[int], dict[str, float]]
    """The numbers at a step's index, by the metric (and term) they come from."""
    cures: Callable[[int], tuple[str, ...]] | None = None
    """Cures that depend on what was seen; else those of the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A disease."""

    id: str
    title: str
    """What it is, in a few words."""
    judge: Callable[[Curves], Finding | str]
    """The finding, or why the rule is off for this run."""
    cures: tuple[str, ...] = ()
    """What to do, in the order of trying."""
    because_of: tuple[str, ...] = ()
    """Diseases that it follows from: beside one of them it is no verdict of its own."""
    sample_kind: str = "any"
    """Which samples show it: any, wrong, right, truncated, best, none."""


def graded(
    curves: Curves, *, info: Array | None = None, warn: Array | None = None, error: Array | None = None
) -> Array:
    """Severity of each step, after the warm-up; conditions are bool [T], comparisons with NaN are false."""
    severity_T = np.zeros(curves.T, dtype=int)
    for level, condition_T in ((1, info), (2, warn), (3, error)):
        if condition_T is not None:
            severity_T[np.asarray(condition_T, dtype=bool)] = level
    severity_T[: WARM_UP_STEPS - 1] = 0
    return severity_T


def at_once(
    curves: Curves, *, info: Array | None = None, warn: Array | None = None, error: Array | None = None
) -> Array:
    """Severity of each step for conditions that do not wait."""
    severity_T = np.zeros(curves.T, dtype=int)
    for level, condition_T in ((1, info), (2, warn), (3, error)):
        if condition_T is not None:
            severity_T[np.asarray(condition_T, dtype=bool)] = level
    return severity_T


def never(curves: Curves) -> Array:
    """No severity at any step."""
    return np.zeros(curves.T, dtype=int)


def numbers_at(curves: Curves, t: int, terms: Sequence[str]) -> dict[str, float]:
    """Evidence: the value at step index ``t`` of terms such as "frac_right", "med10(kl_mean)", "early(len_mean)"."""
    found: dict[str, float] = {}
    for term in terms:
        function, _, key = term.removesuffix(")").rpartition("(")
        curve = {"": curves.raw, "med10": curves.med10, "early": curves.early}[function](key)
        if np.isfinite(curve[t]):
            found[term] = float(curve[t])
    return found


@dataclass(kw_only=True, slots=True)
class Verdict:
    """One disease, found."""

    id: str
    title: str
    severity: str
    """info, warn or error: of itself, or of the worst that follows from it."""
    first_step: int
    last_step: int
    is_active: bool
    raised_step: int
    """Step from which it was known."""
    text: str
    """The numbers in a sentence."""
    evidence: dict[str, float]
    cures: tuple[str, ...]
    sample_ids: tuple[str, ...] = ()
    because_of: str | None = None
    """Id of the verdict that this one follows from; such a one does not count."""
    num_episodes: int = 1


@dataclass(kw_only=True, slots=True)
class Diagnosis:
    """What a run suffers from, and what was looked at."""

    verdicts: list[Verdict] = field(default_factory=list)
    """Worst first; what follows from another stands behind it."""
    checked: list[str] = field(default_factory=list)
    """Rules that could be judged."""
    off: dict[str, str] = field(default_factory=dict)
    """Rules that could not, and why."""
    num_steps: int = 0
    notes: list[str] = field(default_factory=list)
    """Facts that are no disease: expected dead groups, lines that could not be read."""

    def counting(self, severity: str = "warn", *, is_active_only: bool = True) -> list[Verdict]:
        """Verdicts of their own at this severity or above."""
        levels = ("info", "warn", "error")
        least = levels.index(severity)
        return [
            verdict
            for verdict in self.verdicts
            if verdict.because_of is None
            and levels.index(verdict.severity) >= least
            and (verdict.is_active or not is_active_only)
        ]
