"""Diagnosis of a run that goes: the same function over what is known so far, and which verdicts are news.

It may never end a run, nor slow one: one that raises is switched off with one sentence, and it is asked again only when
a hundred times what it took last has passed, so that it takes at most a hundredth of the time.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from sparkgrpo.trainer.diagnose import diagnose_rows
from sparkgrpo.trainer.diagnosis.rule import Diagnosis, Verdict

_SHARE = 100


class ThrottledDiagnosis:
    """`diagnose_rows`, at most a hundredth of the time."""

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._end_s = float("-inf")
        self.latest: Diagnosis | None = None

    def ask(
        self,
        steps: Sequence[Mapping[str, object]],
        evals: Sequence[Mapping[str, object]],
        config: Mapping[str, object],
        *,
        is_forced: bool = False,
    ) -> Diagnosis | None:
        """A new diagnosis, or None where it is too early for one."""
        begin_s = time.monotonic()
        if not is_forced and begin_s - self._end_s < _SHARE * self._cost_s:
            return None
        self.latest = diagnose_rows(steps, evals, config)
        self._end_s = time.monotonic()
        self._cost_s = self._end_s - begin_s
        return self.latest


class LiveDiagnosis:
    """Tells what is new about a run.

    Args:
        config: The resolved configuration as JSON values.
        steps: Lines of metrics.jsonl from before a resume. evals: Lines of evals.jsonl likewise.
        warn: Gets one sentence if diagnosis itself fails.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        steps: Sequence[Mapping[str, object]] = (),
        evals: Sequence[Mapping[str, object]] = (),
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._warn = config, warn
        self._steps, self._evals = list(steps), list(evals)
        self._throttled = ThrottledDiagnosis()
        self._told: dict[str, tuple[str, bool]] = {}
        self._is_on = True

    def evaluation(self, row: Mapping[str, object]) -> None:
        """Take in an evaluation."""
        self._evals.append(row)

    def step(self, line: Mapping[str, object], *, is_last: bool = False) -> list[Verdict]:
        """Take in a step; warnings and errors that were raised, became worse or cleared since the last answer."""
        self._steps.append(line)
        if not self._is_on:
            return []
        try:
            found = self._throttled.ask(self._steps, self._evals, self._config, is_forced=is_last)
        except Exception as error:  # a bug of ours in a rule: the run is worth more than its diagnosis
            self._is_on = False
            self._warn(f"diagnosis is switched off ({type(error).__name__}: {error}); the run goes on")
            return []
        return [] if found is None else self._news(found)

    def _news(self, found: Diagnosis) -> list[Verdict]:
        news = []
        for verdict in found.counting("warn", is_active_only=False):
            now = (verdict.severity, verdict.is_active)
            if self._told.get(verdict.id) != now and (verdict.is_active or verdict.id in self._told):
                news.append(verdict)
                self._told[verdict.id] = now
        return news


def verdict_event(verdict: Verdict) -> dict[str, object]:
    """The verdict as fields of an event."""
    return {"state": "active" if verdict.is_active else "cleared", **dataclasses.asdict(verdict)}


def verdict_sentence(verdict: Verdict) -> str:
    """The verdict as one sentence for a person."""
    if not verdict.is_active:
        return f"cleared: {verdict.id}, after step {verdict.last_step}"
    cure = f"; {verdict.cures[0]}" if verdict.cures else ""
    return f"{verdict.severity}: {verdict.id} since step {verdict.first_step}: {verdict.text}{cure}"
