"""Reward functions in TRL's contract as a user's file has them: right ones, and every way to go wrong."""

import asyncio
import math
import os
import time
from typing import Any

BAD = "bad"
"""A completion with this text makes a row fail."""


def texts_of(completions: list) -> list[str]:
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def length(completions: list, **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in texts_of(completions)]


def fast(completions: list, **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def named_only(nums: list[list[int]], target: list[int]) -> list[float]:
    assert all(isinstance(n, list) for n in nums)
    return [float(sum(n) == t) for n, t in zip(nums, target, strict=True)]


def every_kind(completions: list) -> list[Any]:
    """A float, an int, a bool, NumPy's scalars, a tensor without dimensions, None."""
    import numpy as np  # here: a process starts in a tenth of the time without
    import torch

    kinds = [1.5, 2, True, np.float32(0.5), np.int64(3), np.bool_(True), torch.tensor(0.25), None]
    return [kinds[i % len(kinds)] for i in range(len(completions))]


def as_array(completions: list) -> Any:
    import numpy as np

    return np.arange(len(completions), dtype=np.float32)


def as_tensor(completions: list) -> Any:
    import torch

    return torch.arange(len(completions))


def as_generator(completions: list) -> Any:
    return (float(i) for i in range(len(completions)))


def wrong_kinds(completions: list) -> list[Any]:
    import torch

    kinds = [
        math.nan,
        math.inf,
        -math.inf,
        "1.0",
        [1.0],
        1j,
        torch.tensor([1.0]),
        10**400,
        {},
        b"1",
        torch.tensor(math.nan),
    ]
    return [*kinds, *[1.0] * (len(completions) - len(kinds))]


def too_few(completions: list) -> list[float]:
    return [1.0]


def too_many(completions: list) -> list[float]:
    return [1.0] * (len(completions) + 1)


def one_number(completions: list) -> float:
    return 1.0


def nothing(completions: list) -> None:
    return None


def a_text(completions: list) -> str:
    return "1" * len(completions)


def always_none(completions: list) -> list[None]:
    return [None] * len(completions)


def none_for_short(completions: list) -> list[float | None]:
    return [1.0 if len(text) > 3 else None for text in texts_of(completions)]


def raises(completions: list) -> list[float]:
    raise ZeroDivisionError("always")


def raises_on_bad(completions: list) -> list[float]:
    for text in texts_of(completions):
        if text == BAD:
            raise KeyError("a bad row")
    return [1.0] * len(completions)


def exits_politely(completions: list) -> list[float]:
    raise SystemExit(3)


def dies_on_bad(completions: list) -> list[float]:
    if BAD in texts_of(completions):
        os._exit(7)
    return [1.0] * len(completions)


def sleeps_on_bad(completions: list) -> list[float]:
    if BAD in texts_of(completions):
        time.sleep(1000)
    return [1.0] * len(completions)


def sleeps_a_little(completions: list) -> list[float]:
    time.sleep(0.4)
    return [1.0] * len(completions)


def spins(completions: list) -> list[float]:
    """In C code, where no signal of Python is looked at."""
    sum(range(10**18))
    return []


def needs_a_column(completions: list, targte: list[int]) -> list[float]:
    return [1.0] * len(completions)


def by_place_only(completions: list, other: int, /) -> list[float]:
    return []


def logs(completions: list, log_metric: Any, log_extra: Any, trainer_state: Any) -> list[float]:
    log_metric("mean_length", sum(map(len, texts_of(completions))) / len(completions))
    log_extra("upper", [text.upper() for text in texts_of(completions)])
    return [float(trainer_state.global_step * 1000 + trainer_state.max_steps)] * len(completions)


def logs_too_few(completions: list, log_extra: Any) -> list[float]:
    log_extra("column", [1])
    return [1.0] * len(completions)


def changes_what_it_gets(prompts: list, completions: list, nums: list, **kwargs: Any) -> list[float]:
    before = [len(n) for n in nums]
    for values in (*nums, *prompts):
        values.clear()
    completions.clear()
    return [float(n) for n in before]


def sees(prompts: list, completions: list, completion_ids: list, **kwargs: Any) -> list[float]:
    """Asserts the shape of everything; the columns come in kwargs."""
    assert kwargs.keys() == {"nums", "target", "trainer_state", "log_metric", "log_extra"}
    assert all(message.keys() == {"role", "content"} for prompt in prompts for message in prompt)
    assert all(c == [{"role": "assistant", "content": c[0]["content"]}] for c in completions)
    assert all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in completion_ids)
    return [float(sum(ids)) for ids in completion_ids]


def sees_text(prompts: list, completions: list, **kwargs: Any) -> list[float]:
    assert all(isinstance(text, str) for text in (*prompts, *completions))
    return [1.0] * len(completions)


IN_LOOP: list[str] = []


async def waits(completions: list, log_metric: Any) -> list[float]:
    """Ends only if the other function of the loop runs meanwhile."""
    IN_LOOP.append("waits")
    for _ in range(200):
        if "is_waited_for" in IN_LOOP:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("the other function was not started")
    IN_LOOP.clear()
    return [2.0] * len(completions)


async def is_waited_for(completions: list) -> list[float]:
    await asyncio.sleep(0.02)
    IN_LOOP.append("is_waited_for")
    await asyncio.sleep(0.02)
    return [3.0] * len(completions)


async def sleeps_in_the_loop(completions: list) -> list[float]:
    await asyncio.sleep(1000 if BAD in texts_of(completions) else 0)
    return [1.0] * len(completions)


async def blocks_the_loop(completions: list) -> list[float]:
    if BAD in texts_of(completions):
        time.sleep(1000)
    return [1.0] * len(completions)


class Stateful:
    """An object that is called."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, completions: list, **kwargs: Any) -> list[float]:
        self.num_calls += 1
        return [float(self.num_calls)] * len(completions)


stateful = Stateful()


def countdown_reward_func(completions: list, target: list, nums: list, **kwargs: Any) -> list[float]:
    """The way the lesson hands its verifier to TRL, with a verifier of our own behind it."""
    from sparkgrpo.trainer.tasks.answer_block import find_answer
    from sparkgrpo.trainer.tasks.countdown import judge

    responses = [completion[0]["content"] for completion in completions]
    return [
        1.0 if judge(find_answer(r), n, t) == "ok" else 0.0 for r, n, t in zip(responses, nums, target, strict=True)
    ]
