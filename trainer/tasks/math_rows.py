"""Rows whose answers are mathematical expressions, compared by math-verify in confined processes (extra `math`)."""

from collections.abc import Sequence
from concurrent.futures import Future

from sparkgrpo.trainer.tasks.base import OK, Completion, Problem, Score, TaskOpening
from sparkgrpo.trainer.tasks.math_answers import REASONS, MathChecker, MathOptions
from sparkgrpo.trainer.tasks.records import Splits
from sparkgrpo.trainer.tasks.rows import Rows, RowsOptions
from sparkgrpo.trainer.tasks.scoring import Outcome


class MathRows(Rows):
    """The task. See `Task` and `TaskWithProcesses` for the contract of its methods."""

    def __init__(self, options: RowsOptions, splits: Splits, math: MathOptions) -> None:
        super().__init__(options, splits)
        self.reasons: tuple[str, ...] = REASONS
        self._math = math
        self._checker: MathChecker | None = None
        self._started: dict[tuple[str, str], Future[Outcome] | str] = {}

    def open(self) -> TaskOpening:
        """Try the walls and start the processes. `UserError` without the extra, or where the walls do not stand."""
        if self._checker is None:
            self._checker = MathChecker(self._math)
        report = self._checker.report
        return TaskOpening(task=self, facts={"sandbox": report.facts()}, notes=(str(report),))

    def close(self) -> None:
        """End the processes; the task can be opened again."""
        if self._checker is not None:
            self._checker.close()
        self._checker, self._started = None, {}

    def start_scoring(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        """Have these compared meanwhile; equal answers to a problem once. Others are forgotten."""
        before, self._started = self._started, {}
        for problem, completion in zip(problems, completions, strict=True):
            key = (problem.identity, completion.text)
            if key not in self._started:
                self._started[key] = before[key] if key in before else self._start(problem, completion.text)

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """1.0 if math-verify finds the box equal to the answer, else 0.0."""
        key = (problem.identity, completion.text)
        started = self._started[key] if key in self._started else self._start(problem, completion.text)
        assert self._checker is not None, "what was started was started by it"
        reason = self._checker.finish(self._gold(problem), completion.text, started)
        if key in self._started:
            self._started[key] = reason
        return Score(reward=float(reason == OK), parts={"correct": float(reason == OK)}, reason=reason)

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """The strict check is what training pays."""
        self.start_scoring(problems, completions)
        return [self.verify(problem, completion) for problem, completion in zip(problems, completions, strict=True)]

    def _start(self, problem: Problem, text: str) -> "Future[Outcome] | str":
        if self._checker is None:
            self.open()
        assert self._checker is not None
        return self._checker.start(self._gold(problem), text)

    def _gold(self, problem: Problem) -> str:
        return str(problem.columns[self.options.answer_column])
