"""Problems in order, and prompts that are too long."""

from collections.abc import Sequence
from typing import Any

import pytest

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.model.decoder import DecoderConfig
from sparkgrpo.trainer.problem_stream import MAX_DROPPED_IN_A_ROW, ProblemStream
from sparkgrpo.trainer.run import heldout_problems
from sparkgrpo.trainer.tasks.base import Problem
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions

MODEL = DecoderConfig(
    family="qwen2", vocab_size=40, width=32, num_layers=1, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=48,
    rms_eps=1e-6, rope_theta=1e4, max_position=100,
)  # fmt: skip


class Growing(Echo):
    """Prompts of 1, 2, 3, 4, 5, 1, 2, ... tokens."""

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return [
            Problem(prompt=(1,) * (1 + i % 5), columns={}, identity=f"echo:{i}") for i in range(start, start + count)
        ]


def stream(**values: Any) -> ProblemStream:
    config = Config(task="echo", max_new_tokens=10, **values)
    return ProblemStream(config, Growing(EchoOptions(num_tokens=5)), Dialogue(None), MODEL)


def test_all_that_fit_come_in_order() -> None:
    drawn = stream().draw(7, 5)
    assert list(drawn.places) == [7, 8, 9, 10, 11] and (drawn.end, drawn.num_dropped) == (12, 0)
    assert [len(prompt) for prompt in drawn.prompts] == [3, 4, 5, 1, 2]
    assert [problem.identity for problem in drawn.problems] == [f"echo:{i}" for i in range(7, 12)]


def test_refused_with_index_and_name() -> None:
    message = r"echo:7: training prompt 7: expected at most max_prompt_tokens 2, got 3 tokens; --long-prompts drop"
    with pytest.raises(UserError, match=message):
        stream(max_prompt_tokens=2).draw(5, 4)


def test_dropped_counted_and_replaced_by_the_next() -> None:
    drawn = stream(max_prompt_tokens=2, long_prompts="drop").draw(5, 4)
    assert list(drawn.places) == [5, 6, 10, 11] and [len(prompt) for prompt in drawn.prompts] == [1, 2, 1, 2]
    assert (drawn.end, drawn.num_dropped) == (12, 3)
    assert [problem.identity for problem in drawn.problems] == ["echo:5", "echo:6", "echo:10", "echo:11"]


def test_the_models_own_limit_counts_too() -> None:
    """100 positions, of which the answer may take 97."""
    limited = stream(long_prompts="drop")
    limited.config = Config(task="echo", max_new_tokens=97, long_prompts="drop")
    assert list(limited.draw(0, 4).places) == [0, 1, 2, 5]


def test_nothing_but_long_prompts_is_a_mistake_and_no_endless_search() -> None:
    limited = stream(long_prompts="drop")
    limited.config = Config(task="echo", max_new_tokens=100, long_prompts="drop")
    with pytest.raises(UserError, match=f"{MAX_DROPPED_IN_A_ROW} prompts in a row are too long; the last: expected"):
        limited.draw(0, 1)


def test_heldout_problems() -> None:
    problems: Sequence[Problem] = Growing(EchoOptions(num_tokens=5)).problems(0, 0, 7)
    with pytest.raises(UserError, match=r"echo:3: held-out prompt 3: .* --long-prompts drop"):
        stream(max_prompt_tokens=3).fitting(problems)
    kept = stream(max_prompt_tokens=3, long_prompts="drop").fitting(problems)
    assert [problem.identity for problem in kept] == ["echo:0", "echo:1", "echo:2", "echo:5", "echo:6"]
    with pytest.raises(UserError, match="all 2 held-out prompts are too long; raise --max-prompt-tokens"):
        stream(max_prompt_tokens=3, long_prompts="drop").fitting(problems[3:5])


class Finite(Echo):
    """Seven problems, sliced."""

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return super().problems(seed, 0, 7)[start : start + count]


class Generous(Echo):
    """All of its problems, however many are wanted."""

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return super().problems(seed, start, count + 3)


@pytest.mark.parametrize(("kind", "start", "got"), [(Finite, 5, 2), (Finite, 7, 0), (Finite, 70, 0), (Generous, 2, 7)])
def test_another_number_of_problems_is_a_mistake_and_no_endless_search(kind: type[Echo], start: int, got: int) -> None:
    asked = stream()
    asked.task = kind(EchoOptions(num_tokens=5))
    assert kind is Generous or len(asked.draw(3, 4).problems) == 4
    message = (
        rf"task: echo: expected problems\(seed=0, start={start}, count=4\) to give 4 problems, got {got}; .*first row"
    )
    with pytest.raises(UserError, match=message):
        asked.draw(start, 4)


def test_a_task_without_heldout_problems_is_told() -> None:
    class Without(Echo):
        def heldout(self, count: int) -> list[Problem]:
            return []

    with pytest.raises(UserError, match="task: heldout gave no problem; an evaluation needs at least one"):
        heldout_problems(Without(EchoOptions(num_tokens=5)), Config(task="echo"))
