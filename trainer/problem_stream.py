"""The problems of a run in order, each with its prompt's ids; what is done about a prompt that is too long.

A problem has one place in the stream of its run's seed, and its randomness is called by that place. So a step takes the
next problems, and a problem that is dropped or replaced only moves the cursor on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.model.decoder import DecoderConfig
from sparkgrpo.trainer.model.families import check_length
from sparkgrpo.trainer.tasks.base import Problem, Task

MAX_DROPPED_IN_A_ROW = 1000
"""So many too long prompts one after the other are no exception but the wrong limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Problems for one round of sampling; all columns in one order."""

    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    places: Sequence[int]
    """Index of each in the run's stream."""
    end: int
    """Index of the next problem."""
    num_dropped: int
    """Problems passed over because their prompts are too long."""


class ProblemStream:
    """Draws problems whose prompts fit.

    Args:
        task: Makes them. dialogue: Gives prompts as ids. model: Says how long a sequence may be.
    """

    def __init__(self, config: Config, task: Task, dialogue: Dialogue, model: DecoderConfig) -> None:
        self.config, self.task, self.dialogue, self.model = config, task, dialogue, model

    def draw(self, start: int, count: int) -> Drawn:
        """The next `count` problems from this place on, `long_prompts` obeyed.

        Raises:
            UserError: A prompt that is too long, by index and name; nothing but such prompts; or a task that gives
                another number of problems than it was asked for.
        """
        config = self.config
        problems: list[Problem] = []
        prompts: list[list[int]] = []
        places: list[int] = []
        place, num_dropped, in_a_row = start, 0, 0
        while len(problems) < count:
            for problem in self._asked(place, count - len(problems)):
                ids = self.dialogue.prompt_ids(problem)
                fault = self.fault(len(ids))
                if fault is None:
                    problems.append(problem)
                    prompts.append(ids)
                    places.append(place)
                    in_a_row = 0
                elif config.long_prompts == "refuse":
                    raise UserError(
                        f"{problem.identity}: training prompt {place}: {fault}; --long-prompts drop goes on"
                    )
                else:
                    num_dropped, in_a_row = num_dropped + 1, in_a_row + 1
                place += 1
                if in_a_row == MAX_DROPPED_IN_A_ROW:
                    raise UserError(f"{problem.identity}: {in_a_row} prompts in a row are too long; the last: {fault}")
        return Drawn(problems=problems, prompts=prompts, places=places, end=place, num_dropped=num_dropped)

    def _asked(self, start: int, count: int) -> Sequence[Problem]:
        """The task's problems from here on, exactly as many as asked: none at all would be asked for without an end."""
        given = self.task.problems(self.config.seed, start, count)
        got = len(given) if isinstance(given, Sequence) else type(given).__name__
        if got != count:
            raise UserError(
                f"task: {self.task.name}: expected problems(seed={self.config.seed}, start={start}, count={count}) to "
                f"give {count} problems, got {got}; the stream has no end: after its last row start again from the "
                "first row (index % number of rows), and set num_problems to the number of rows"
            )
        return given

    def fitting(self, problems: Sequence[Problem]) -> list[Problem]:
        """Those held-out problems whose prompts fit, under "drop"; all of them, or a `UserError`, under "refuse"."""
        kept = []
        for index, problem in enumerate(problems):
            fault = self.fault(len(self.dialogue.prompt_ids(problem)))
            if fault is None:
                kept.append(problem)
            elif self.config.long_prompts == "refuse":
                raise UserError(f"{problem.identity}: held-out prompt {index}: {fault}; --long-prompts drop goes on")
        if not kept:
            raise UserError(f"all {len(problems)} held-out prompts are too long; raise --max-prompt-tokens")
        return kept

    def fault(self, num_prompt_tokens: int) -> str | None:
        """What is wrong with a prompt of so many tokens, or None."""
        limit = self.config.max_prompt_tokens
        if limit and num_prompt_tokens > limit:
            return f"expected at most max_prompt_tokens {limit}, got {num_prompt_tokens} tokens"
        try:
            check_length(self.model, num_prompt_tokens + self.config.max_new_tokens)
        except UserError as error:
            return str(error)
        return None
