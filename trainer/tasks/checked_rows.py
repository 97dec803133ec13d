"""Rows whose answers a function of the user compares: called like a reward function, right is at least 1.0."""

from collections.abc import Sequence

from sparkgrpo.trainer.metrics import REWARD_ERROR
from sparkgrpo.trainer.tasks.base import NOT_APPLICABLE, OK, UNVERIFIED, Completion, Problem, Score, StepReport
from sparkgrpo.trainer.tasks.records import Splits
from sparkgrpo.trainer.tasks.rows import Rows, RowsOptions
from sparkgrpo.trainer.tasks.user import RewardFunctions, TrainerState


class CheckedRows(Rows):
    """The task. See `Task` and `StepObserver` for the contracts of its methods; close it at the end of a run.

    Args:
        checker: "file.py:name" or "package.module:name".
        timeout_s: Its deadline for a batch.
    """

    def __init__(self, options: RowsOptions, splits: Splits, *, checker: str, timeout_s: float) -> None:
        super().__init__(options, splits)
        self.reasons: tuple[str, ...] = (NOT_APPLICABLE, REWARD_ERROR, "wrong_value", OK)
        self._functions = RewardFunctions(
            [checker],
            columns=self.columns,
            is_plain=self.has_text_prompts,
            timeout_s=timeout_s,
            warn=lambda text: None,  # a reference has nothing to say before it answers
        )
        self._num_batches = self._num_restarts = 0
        self._warnings: list[str] = []
        self._tracebacks: list[str] = []
        self._judged: dict[tuple[str, str], Score] = {}

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """1.0 or 0.0 by the function; unscored where it failed."""
        key = (problem.identity, completion.text)
        return self._judged[key] if key in self._judged else self._verdicts([problem], [completion])[key]

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """What the function says is what training pays."""
        self.start_scoring(problems, completions)
        pairs = zip(problems, completions, strict=True)
        return [self._judged[problem.identity, completion.text] for problem, completion in pairs]

    def start_scoring(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        """Call the function once for all of these, unless it has judged them. Earlier answers are forgotten."""
        pairs = list(zip(problems, completions, strict=True))
        keys = [(problem.identity, completion.text) for problem, completion in pairs]
        kept = {key: self._judged[key] for key in keys if key in self._judged}
        new = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in kept}
        if new:
            kept |= self._verdicts(*zip(*new.values(), strict=True))
        self._judged = kept

    def begin_step(self, step: int, num_problems: int) -> None:
        """The step has no say here; what an evaluation before it left is told with it."""

    def take_report(self) -> StepReport:
        """Why answers could not be judged, and how often the process of the function was replaced."""
        warnings, self._warnings = self._warnings, []
        tracebacks, self._tracebacks = self._tracebacks, []
        num_restarts, self._num_restarts = self._num_restarts, 0
        return StepReport(metrics={"num_reward_restarts": num_restarts}, warnings=warnings, tracebacks=tracebacks)

    def close(self) -> None:
        """End the process of the function."""
        self._functions.close()

    def _verdicts(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> dict[tuple[str, str], Score]:
        state = TrainerState(global_step=self._num_batches, max_steps=0)  # an error in the first batch ends the run
        found = self._functions.score(problems, completions, [UNVERIFIED] * len(completions), state)
        self._num_batches += 1
        self._num_restarts += found.num_restarts
        self._warnings += found.warnings
        self._tracebacks += found.tracebacks
        judged = zip(problems, completions, found.scores, strict=True)
        return {(problem.identity, completion.text): _verdict(score) for problem, completion, score in judged}


def _verdict(score: Score) -> Score:
    if score.reward is None:
        return score
    is_right = score.reward >= 1.0
    return Score(reward=float(is_right), parts={"correct": float(is_right)}, reason=OK if is_right else "wrong_value")
