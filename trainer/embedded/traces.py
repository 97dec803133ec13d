"""Worked answers for the warm-up of the embedded model: a search on paper, imperfect on purpose.

    7-3=4*4=16?40 no         an attempt: a chain with every value, the target again, and whether they agree
    7+3=10*4=40?40 yes
    <answer>(7+3)*4</answer>

The teacher guesses a chain, which is a solution more often than chance, then goes on to the next chain in a fixed
order (or guesses again) until one hits or patience ends. What it writes is true (each `=`, each verdict) and no chain
is tried twice, but it mostly gives up after a miss or two and then answers with that miss; it sometimes goes on after
a hit, and sometimes answers a hit with another expression. These decisions are what reinforcement learning teaches.

Two lessons of failed warm-ups are in the format. The target is written again beside the value: compared with the
number in the prompt, 9 % of the verdicts were wrong after 1,600 steps. The search has an order: when every next chain
was drawn at random, greedy decoding wrote the same attempt again and again (55 % repeats), however often samples hit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from sparkgrpo.trainer.embedded.tokenizer_build import MAX_NUMBER
from sparkgrpo.trainer.tasks.base import KeyedDraws

YES, NO = " yes\n", " no\n"

OP_ORDER = ("--", "+-", "++", "-*", "*-", "*+", "+*", "**")
"""Pairs of successive operators in the order of the search, about that of the values they give. `-+` is missing: it
gives no value that `+-` does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """How the teacher searches. Probabilities are per decision."""

    solution_rate: float = 0.25
    """An attempt is a solution that the teacher just knows."""
    wander_rate: float = 0.15
    """An attempt is a chain at random; else it is the one that follows the last attempt in the order of the search."""
    give_up: tuple[float, ...] = (0.6, 0.6, 0.15, 0.05)
    """The teacher gives up after the first, second, ... miss; the last probability holds for all later misses."""
    max_attempts: int = 10
    """The teacher always gives up after so many misses."""
    ignore_hit: float = 0.05
    """The teacher goes on although the attempt hit."""
    wrong_copy: float = 0.05
    """A hit is answered with another chain."""


HASTY = Teacher()
"""Gives up after a miss or two: what the finished model does."""

PATIENT = Teacher(solution_rate=0.1, give_up=(0.05,), ignore_hit=0.4)
"""Writes long searches, six attempts on average: from them the model learns to search on without repeating itself."""


@dataclass(frozen=True, slots=True)
class Chain:
    """`((a op b) op c) ...` with its intermediate values, all between 0 and MAX_NUMBER."""

    ops: str
    """`+*`."""
    operands: tuple[int, ...]
    text: str
    """`7+3=10*4=40`."""
    answer: str
    """`(7+3)*4`: the same without values, parentheses where precedence needs them."""
    value: int


def chains(numbers: Sequence[int]) -> list[Chain]:
    """The chains over all the numbers, in the order of the search: by operators, then by operands from the largest.

    Each sum is spelled once: operands of `+ +`, `- -`, `* *` fall, and no `+` follows a `-`.
    """
    starts = [
        (Chain("", (order[0],), str(order[0]), str(order[0]), order[0]), order[1:])
        for order in sorted(set(permutations(numbers)), reverse=True)
    ]
    found = [chain for start, rest in starts for chain in _extended(start, rest)]
    return sorted(found, key=lambda chain: [OP_ORDER.index(chain.ops[i : i + 2]) for i in range(len(chain.ops) - 1)])


def _extended(start: Chain, rest: Sequence[int]) -> list[Chain]:
    if not rest:
        return [start]
    out: list[Chain] = []
    number, last, last_op = rest[0], start.operands[-1], start.ops[-1:]
    for op, value in (("-", start.value - number), ("+", start.value + number), ("*", start.value * number)):
        is_other_spelling = number > last if op == last_op or (not last_op and op != "-") else last_op + op == "-+"
        if 0 <= value <= MAX_NUMBER and not is_other_spelling:
            left = f"({start.answer})" if op == "*" and last_op in ("+", "-") else start.answer
            text, answer = f"{start.text}{op}{number}={value}", f"{left}{op}{number}"
            out += _extended(Chain(start.ops + op, (*start.operands, number), text, answer, value), rest[1:])
    return out


def worked_answer(options: Sequence[Chain], target: int, teacher: Teacher, draws: KeyedDraws) -> str:
    """One worked answer for a puzzle whose `chains` are `options`; no attempt is made twice."""
    untried = list(options)
    last_idx = draws.below(len(untried))  # as if the attempt before the first had been this one
    lines, num_missed = "", 0
    while True:
        hits = [index for index, chain in enumerate(untried) if chain.value == target]
        if hits and _happens(teacher.solution_rate, draws):
            last_idx = hits[draws.below(len(hits))]
        elif _happens(teacher.wander_rate, draws):
            last_idx = draws.below(len(untried))
        chain = untried.pop(last_idx)
        last_idx = last_idx % len(untried) if untried else 0  # the next in the order has moved up
        is_hit = chain.value == target
        lines += f"{chain.text}?{target}{YES if is_hit else NO}"
        num_missed += not is_hit
        give_up_rate = teacher.give_up[min(num_missed, len(teacher.give_up)) - 1]
        is_over = not untried or num_missed >= teacher.max_attempts
        if is_over or _happens(1 - teacher.ignore_hit if is_hit else give_up_rate, draws):
            break
    if is_hit and untried and _happens(teacher.wrong_copy, draws):
        chain = untried[draws.below(len(untried))]
    return f"{lines}<answer>{chain.answer}</answer>"


def _happens(probability: float, draws: KeyedDraws) -> bool:
    return draws.below(2**24) < probability * 2**24
