"""A task's judgements as the loop may use them: a fault is counted and named, and never becomes a silent 0.

| what the task does                   | rows                             | run                              |
|--------------------------------------|----------------------------------|----------------------------------|
| NaN, infinity, not a number          | that row unscored, `reward_error` | goes on                          |
| raises, or gives another number of scores | all unscored, `reward_error` | first batch: stops; later: goes on |
| its strict check raises on a row    | that row unjudged, `reward_error` | first batch: stops; later: goes on |
| no row scored, so many steps running |                                  | stops, saved (`live_run.py`)      |

Unscored rows leave their group's statistics and carry no gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.metrics import REWARD_ERROR
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score, Task, start_scoring

MAX_UNSCORED_STEPS = 3
"""Steps in a row without one scored completion that a run takes."""


class RewardCheck:
    """Asks a task for rewards and verdicts, batch after batch.

    Args:
        truncated_reward: "zero": a completion that ran into the token limit earns 0, if it was scored, in every task.
    """

    def __init__(self, task: Task, *, truncated_reward: Literal["keep", "zero"] = "keep") -> None:
        self.task, self.truncated_reward = task, truncated_reward
        self.has_worked = False
        """Some batch came back whole: a fault from then on is an accident, before it a mistake of the task."""
        self.has_judged = False
        """The same for the strict check."""
        self.faults: list[str] = []
        """What went wrong since the last `take_faults`, a sentence each."""

    def start_scoring(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        """Have a task that can judge ahead begin with these; where it cannot now, it is asked again by what follows.

        Raises:
            Exception: What the task raised on the first batch, its name added.
        """
        try:
            start_scoring(self.task, problems, completions)
        except UserError:
            raise
        except Exception as error:
            if not (self.has_worked or self.has_judged):
                error.add_note(f"while task {self.task.name} began to score its first batch")
                raise
            self.faults.append(f"task {self.task.name}: {len(completions)} completions not scored ahead: {error!r}")

    def scores(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """One score a completion; `problems[i]` is that of `completions[i]`.

        Raises:
            Exception: What the task raised on the first batch, its name added.
            ValueError: Another number of scores on the first batch.
        """
        try:
            scores = list(self.task.reward(problems, completions))
            if len(scores) != len(completions):
                raise ValueError(
                    f"task {self.task.name}: expected a reward for each of {len(completions)} completions, "
                    f"got {len(scores)}"
                )
            is_usable = [_is_usable(score.reward) for score in scores]
        except UserError:
            raise  # the task has decided that this is a mistake of the person
        except Exception as error:
            if not self.has_worked:
                error.add_note(f"while task {self.task.name} scored its first batch")
                raise
            self.faults.append(f"task {self.task.name}: no reward for {len(completions)} completions: {error!r}")
            return [_unscored() for _ in completions]
        self.has_worked = True
        wrong = [i for i, usable in enumerate(is_usable) if not usable]
        if wrong:
            self.faults.append(
                f"task {self.task.name}: {len(wrong)} of {len(scores)} rewards are no finite numbers, such as "
                f"{scores[wrong[0]].reward!r} for {problems[wrong[0]].identity}"
            )
        usable = [score if ok else _unscored() for score, ok in zip(scores, is_usable, strict=True)]
        if self.truncated_reward == "keep":
            return usable
        return [
            replace(score, reward=0.0) if answer.is_truncated and score.reward is not None else score
            for score, answer in zip(usable, completions, strict=True)
        ]

    def verdicts(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """What the strict check says of each completion; one that it fails on is unjudged, the others keep theirs.

        Raises:
            Exception: What the task raised on the first batch, its name added.
        """
        verdicts: list[Score] = []
        failures: list[str] = []
        for problem, completion in zip(problems, completions, strict=True):
            try:
                verdict = self.task.verify(problem, completion)
                if not _is_usable(verdict.reward):
                    raise ValueError(f"expected a finite number or None as reward, got {verdict.reward!r}")
            except UserError:
                raise
            except Exception as error:
                if not self.has_judged:
                    error.add_note(f"while task {self.task.name} verified its first batch")
                    raise
                failures.append(f"such as {problem.identity}: {error!r}")
                verdict = _unscored()
            verdicts.append(verdict)
        if failures:
            self.faults.append(
                f"task {self.task.name}: no verdict for {len(failures)} of {len(verdicts)} completions, {failures[0]}"
            )
        self.has_judged = True
        return verdicts

    def take_faults(self) -> list[str]:
        """The faults since the last call."""
        faults, self.faults = self.faults, []
        return faults


def _is_usable(reward: object) -> bool:
    return reward is None or (isinstance(reward, (int, float)) and math.isfinite(reward))


def _unscored() -> Score:
    return Score(reward=None, parts={}, reason=REWARD_ERROR)
