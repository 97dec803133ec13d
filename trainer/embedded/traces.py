"""Worked answers for the warm-up of the embedded model: a search on paper, imperfect on purpose.

    3+7=10*4=40 yes          an attempt: a chain with every value, and whether it is the target
    <answer>(3+7)*4</answer>

The teacher tries chains until one hits or patience ends. What it writes is true (each `=`, each verdict), but it gives
up early, and then answers with its last attempt although that missed; it sometimes goes on after a hit, and sometimes
answers with another expression. These are the decisions that reinforcement learning has to teach.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from sparkgrpo.trainer.embedded.tokenizer_build import MAX_NUMBER
from sparkgrpo.trainer.tasks.base import KeyedDraws

YES, NO = " yes\n", " no\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """How the teacher searches. Probabilities are per decision."""

    solution_rate: float = 0.2
    """An attempt is a true solution with this probability, else one of the chains that miss."""
    give_up: tuple[float, ...] = (0.55, 0.5, 0.3, 0.15, 0.1, 0.05)
    """Probability of giving up after the first, second, ... miss; the last one holds for all later misses."""
    max_attempts: int = 9
    """The teacher always gives up after so many misses."""
    ignore_hit: float = 0.05
    """Probability of going on although the attempt hit."""
    wrong_copy: float = 0.05
    """Probability of answering a hit with another chain."""


@dataclass(frozen=True, slots=True)
class Chain:
    """`((a op b) op c) ...` with its intermediate values, all between 0 and MAX_NUMBER."""

    text: str
    """`3+7=10*4=40`."""
    answer: str
    """`(3+7)*4`: the same without values, parentheses where precedence needs them."""
    value: int


def chains(numbers: tuple[int, ...]) -> list[Chain]:
    """Every chain over all the numbers, one spelling each: the first two in descending order, no value outside
    0..MAX_NUMBER, no two chains with the same text. In a fixed order."""
    found: dict[str, Chain] = {}
    for order in sorted(set(permutations(numbers)), reverse=True):
        if order[0] >= order[1]:
            for chain in _extend(Chain(str(order[0]), str(order[0]), order[0]), order[1:], ""):
                found[chain.text] = chain
    return list(found.values())


def _extend(start: Chain, rest: tuple[int, ...], last_op: str) -> list[Chain]:
    if not rest:
        return [start]
    out = []
    number = rest[0]
    for op, value in (("+", start.value + number), ("-", start.value - number), ("*", start.value * number)):
        if 0 <= value <= MAX_NUMBER:
            left = f"({start.answer})" if op == "*" and last_op in ("+", "-") else start.answer
            out += _extend(Chain(f"{start.text}{op}{number}={value}", f"{left}{op}{number}", value), rest[1:], op)
    return out


def worked_answer(options: Sequence[Chain], target: int, teacher: Teacher, draws: KeyedDraws) -> str:
    """One worked answer for a puzzle whose `chains` are `options`; no attempt is made twice."""
    hits = _shuffled([chain for chain in options if chain.value == target], draws)
    misses = _shuffled([chain for chain in options if chain.value != target], draws)
    lines, num_missed = "", 0
    while True:
        is_hit = bool(hits) and (not misses or _happens(teacher.solution_rate, draws))
        chain = (hits if is_hit else misses).pop()
        lines += chain.text + (YES if is_hit else NO)
        num_missed += not is_hit
        give_up = teacher.give_up[min(num_missed, len(teacher.give_up)) - 1]
        stop_rate = 1 - teacher.ignore_hit if is_hit else give_up
        if not misses or num_missed >= teacher.max_attempts or _happens(stop_rate, draws):
            break
    if misses and is_hit and _happens(teacher.wrong_copy, draws):
        chain = misses[-1]
    return f"{lines}<answer>{chain.answer}</answer>"


def _happens(probability: float, draws: KeyedDraws) -> bool:
    return draws.below(2**24) < probability * 2**24


def _shuffled(options: list[Chain], draws: KeyedDraws) -> list[Chain]:
    return [options[index] for index in draws.shuffled(range(len(options)))]
