"""From a condition at every step to one episode a disease: it must last before it counts, and be gone before it clears.

A condition raises after 5 steps in a row and clears after 10 without; then it stays quiet for 20. What must not wait
(``at_once``) raises at the step where it is seen. Severities: 0 none, 1 info, 2 warn, 3 error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RAISE_AFTER, CLEAR_AFTER, QUIET_FOR = 5, 10, 20
SEVERITIES = ("none", "info", "warn", "error")


@dataclass(kw_only=True, slots=True)
class Episode:
    """When a disease was there; indices are those of the steps' rows."""

    severity: int
    """What it is now; what it was when it cleared."""
    first_idx: int
    """First step of the condition that raised it."""
    raised_idx: int
    """Step at which it was raised, that is known."""
    worst_idx: int
    """First step at which it was raised at its worst severity."""
    last_idx: int
    """Last step of the condition."""
    is_active: bool
    num_episodes: int = 1


def episode_of(severity_T: Sequence[int], at_once_T: Sequence[int]) -> Episode | None:
    """The episodes of a disease as one, or None if it was never raised.

    Args:
        severity_T: Severity of the condition at each step, which has to last.
        at_once_T: Severity of the condition that raises at once.
    """
    if not any(severity_T) and not any(at_once_T):
        return None
    found: Episode | None = None
    streak = [0, 0, 0, 0]
    absent = [CLEAR_AFTER] * 4  # steps since a severity, or a worse one, was seen last
    quiet_until = -1
    for t, (lasting, at_once) in enumerate(zip(severity_T, at_once_T, strict=True)):
        seen = max(lasting, at_once)
        for level in (1, 2, 3):
            streak[level] = streak[level] + 1 if lasting >= level else 0
            absent[level] = 0 if seen >= level else absent[level] + 1
        raised = max(at_once, max((level for level in (1, 2, 3) if streak[level] >= RAISE_AFTER), default=0))
        is_active = found is not None and found.is_active
        if raised and (is_active or t > quiet_until):
            first = t if at_once >= raised else t - streak[raised] + 1
            if found is None or not is_active:
                found = _opened(found, raised, first, t)
            elif raised > found.severity:
                found.severity, found.worst_idx = raised, t
        if found is not None and found.is_active:
            if seen:
                found.last_idx = t
            if absent[1] >= CLEAR_AFTER:
                found.is_active, quiet_until = False, t + QUIET_FOR
            elif absent[found.severity] >= CLEAR_AFTER:
                found.severity = max(level for level in (1, 2) if absent[level] < CLEAR_AFTER)
    return found


def _opened(before: Episode | None, severity: int, first: int, t: int) -> Episode:
    if before is None:
        return Episode(severity=severity, first_idx=first, raised_idx=t, worst_idx=t, last_idx=t, is_active=True)
    before.severity, before.is_active, before.last_idx = severity, True, t
    before.worst_idx = t
    before.num_episodes += 1
    return before
