"""A task whose reward is given by functions of the user; its problems and its strict check stay as they are."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from sparkgrpo.trainer.metrics import REWARD_ERROR, SCORED
from sparkgrpo.trainer.reward_check import RewardCheck
from sparkgrpo.trainer.tasks.base import (
    NOT_APPLICABLE,
    Completion,
    EvaluationReport,
    Problem,
    Score,
    StepObserver,
    StepReport,
    Task,
    start_scoring,
)
from sparkgrpo.trainer.tasks.user import RewardFunctions, TrainerState, UserScores


class RewardedTask:
    """The task. See `Task` and `StepObserver` for the contracts of its methods.

    Args:
        task: Makes the problems and has the strict check, if there is one.
        functions: What training pays.
        num_steps: Steps of the run, for `trainer_state`.
    """

    def __init__(
        self,
        task: Task,
        functions: RewardFunctions,
        *,
        num_steps: int,
    ) -> None:
        self.task, self.functions = task, functions
        self.name: str = task.name
        self.columns: frozenset[str] = task.columns
        self.reasons: tuple[str, ...] = (NOT_APPLICABLE, REWARD_ERROR, SCORED, *task.reasons)
        self.num_problems: int | None = task.num_problems
        self.notes: tuple[str, ...] = (*functions.notes, *getattr(task, "notes", ()))
        self._state = TrainerState(global_step=0, max_steps=num_steps)
        self._check = RewardCheck(task)
        self._found: list[tuple[UserScores, int]] = []

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Those of the task."""
        return self.task.problems(seed, start, count)

    def heldout(self, count: int) -> list[Problem]:
        """Those of the task."""
        return self.task.heldout(count)

    def start_scoring(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        """Have the task's strict check begin, if it can work ahead."""
        start_scoring(self.task, problems, completions)

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """The task's strict check."""
        return self.task.verify(problem, completion)

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """What the functions give. `UserError` where one of them raised in step 1 or gave another number of values."""
        self.start_scoring(problems, completions)
        verdicts = self._check.verdicts(problems, completions)  # one that fails takes no reward with it
        found = self.functions.score(problems, completions, verdicts, self._state)
        self._found.append((found, len(completions)))
        return list(found.scores)

    def begin_step(self, step: int, num_problems: int) -> None:
        """The functions see this step as `trainer_state`; what an evaluation left is forgotten."""
        size = self.num_problems
        epoch = None if size is None else (step - 1) * num_problems / size
        self._state = TrainerState(global_step=step - 1, max_steps=self._state.max_steps, epoch=epoch)
        self._found.clear()
        if isinstance(self.task, StepObserver):
            self.task.begin_step(step, num_problems)

    def take_report(self) -> StepReport:
        """Restarts, what functions logged (the mean over batches) and kept, their errors; and what the task reports."""
        inner = self.task.take_report() if isinstance(self.task, StepObserver) else StepReport()
        found, sizes = [scores for scores, _ in self._found], [size for _, size in self._found]
        self._found.clear()
        logged = {name for scores in found for name in scores.metrics}
        columns = {column for scores in found for column in scores.extras}
        return StepReport(
            metrics={
                **inner.metrics,
                "num_reward_restarts": inner.metrics.get("num_reward_restarts", 0)
                + sum(scores.num_restarts for scores in found),
                **{
                    f"metric/{name}": fmean(scores.metrics[name] for scores in found if name in scores.metrics)
                    for name in sorted(logged)
                },
            },
            extras={
                column: [
                    value
                    for scores, size in zip(found, sizes, strict=True)
                    for value in scores.extras.get(column, [None] * size)
                ]
                for column in sorted(columns)
            },
            warnings=[
                *self._check.take_faults(),
                *inner.warnings,
                *(warning for scores in found for warning in scores.warnings),
            ],
            tracebacks=[*inner.tracebacks, *(text for scores in found for text in scores.tracebacks)],
        )

    def evaluation_report(
        self, problems: Sequence[Problem], completions: Sequence[Completion], verdicts: Sequence[Score]
    ) -> Mapping[str, float | None]:
        """What the task has to add."""
        if isinstance(self.task, EvaluationReport):
            return self.task.evaluation_report(problems, completions, verdicts)
        return {}
