"""Echo: the lesson's toy. Prompt p of N is the token p, one token is sampled, and it is right when it is p.

There is no tokenizer and no text: ids go in and ids come out. A one-layer random decoder learns it in seconds, which
proves the whole loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sparkgrpo.trainer.tasks.base import OK, Completion, Problem, Score, place_in_order, stream_key


@dataclass(frozen=True, kw_only=True, slots=True)
class EchoOptions:
    """The size of the toy."""

    num_tokens: int = 5
    """How many prompts there are, one per token id 0 .. num_tokens - 1; chance is 1 / num_tokens. At least 2."""

    def __post_init__(self) -> None:
        if self.num_tokens < 2:
            raise ValueError(f"num_tokens must be at least 2 (with 1 there is nothing to learn), got {self.num_tokens}")


class Echo:
    """The task. See `Task` for the contract of its methods."""

    name: str = "echo"
    columns: frozenset[str] = frozenset({"answer"})
    reasons: tuple[str, ...] = ("no_answer", "wrong_value", OK)

    def __init__(self, options: EchoOptions) -> None:
        self.options = options
        self.num_problems: int | None = options.num_tokens

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """The prompts in an order that each epoch draws anew, so that every aligned batch of N has each once."""
        key, num_tokens = stream_key(self.name, "train", seed), self.options.num_tokens
        return [self._problem(place_in_order(key, index, num_tokens)) for index in range(start, start + count)]

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` prompts, at most all N: the toy is the one task that is evaluated on what it learns."""
        return [self._problem(token_id) for token_id in range(min(count, self.options.num_tokens))]

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """1.0 when the first sampled token is the prompt's."""
        answer = cast(int, problem.columns["answer"])
        sampled = completion.token_ids[:1]
        reason = "no_answer" if not sampled else OK if sampled[0] == answer else "wrong_value"
        is_right = float(reason == OK)
        return Score(reward=is_right, parts={"correct": is_right}, reason=reason)

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """The strict check is what training pays."""
        return [self.verify(problem, completion) for problem, completion in zip(problems, completions, strict=True)]

    def _problem(self, token_id: int) -> Problem:
        return Problem(prompt=(token_id,), columns={"answer": token_id}, identity=f"echo:{token_id}")
