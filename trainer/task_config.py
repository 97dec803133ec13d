"""The settings of tasks and rewards: the part of `Config` that says what is asked and what is paid.

Which of them a task takes, and which do not go together, is checked where the task is made (`tasks/registry.py`).
"""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Literal

REWARD_WORDS = ("auto", "strict", "sloppy", "five", "correct", "visible")
CHECKERS = ("number", "exact", "math")
PYTHON = "python:"
"""Stands before the name of a function or task that was given as an object: its name does not lead to it again."""
REFERENCE = re.compile(r"(?:verl:)?[^:,]+:[A-Za-z_]\w*")
"""A function by reference: "file.py:name" or "package.module:name", for verl's contract with verl: before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Settings of tasks and rewards; the base of `Config`, which checks them."""

    reward: str = "auto"
    """What training pays; accuracy is always strict. "auto": the task's own; "strict" and "sloppy" (whenever the
    target's digits occur: an experiment in reward hacking) for Countdown; "five" (the lesson's parts) and "correct" for
    numbers; or functions "file.py:name", "package.module:name", "verl:module:name", several with commas."""

    reward_weights: str = ""
    """Weights of reward functions, such as "1,0.5"; default 1 each."""

    reward_timeout_s: float = 60.0
    """Deadline of a reward function for a batch, seconds; above 0."""

    truncated_reward: Literal["keep", "zero"] = "keep"
    """What a completion that hit max_new_tokens earns: its reward, or 0."""

    format_reward: float = 0.0
    """Countdown: paid for an expression that is well formed and no solution; 0 to 0.1."""

    single_answer: bool = False
    """Countdown: more than one answer block earns nothing; otherwise the last block counts."""

    max_number: int = 20
    """Countdown: numbers are drawn from 1 to this; 2 to 999."""

    max_target: int = 200
    """Countdown: targets lie in 1 to this; max_number to 999999."""

    xmlcount_floor: float | None = None
    """Least that the part xmlcount of "five" pays, at most 0; none is no floor, as in the lesson."""

    data: str = ""
    """Tasks gsm8k and rows: a JSONL file, a folder with train.jsonl and test.jsonl, or a hub name (extra "data")."""

    prompt_column: str = "prompt"
    """Task rows: the column with the prompt, text or chat messages."""

    answer_column: str = ""
    """Task rows: the column with the right answer; none: no strict check, and --reward judges alone."""

    checker: str = "number"
    """Task rows: how an answer is compared: "number", "exact", "math", or a function "file.py:name"."""

    heldout_frac: float | None = None
    """Share of the problems kept out of training, 0 to 0.9; none: 0.05, and 0.4 for Countdown with 2 numbers."""

    sandbox: Literal["strict", "bwrap", "basic"] = "strict"
    """Walls around programs that the model writes (code) and around checkers that may run what it wrote (math, gym,
    verl): "strict": Landlock, seccomp, limits; "bwrap": inside bubblewrap too; "basic": none, with unsafe_sandbox."""

    unsafe_sandbox: bool = False
    """Run them even where no walls stand: what the model writes can then do all that you can."""

    flexible: bool = False
    """Numbers: an evaluation also reports the accuracy of the last number anywhere in the text."""


def task_value_problem(name: str, value: object) -> str | None:
    """What is wrong with the text of a reward, a checker or weights, as "expected ..., got ...", or None."""
    if name == "reward":
        return _reward_problem(str(value))
    if name == "checker" and value not in CHECKERS and not REFERENCE.fullmatch(str(value)):
        return f"expected one of {', '.join(CHECKERS)}, or a function such as file.py:name, got {value!r}"
    if name == "reward_weights" and value:
        try:
            are_finite = all(math.isfinite(float(weight)) for weight in str(value).split(","))
        except ValueError:
            are_finite = False
        if not are_finite:
            return f'expected finite numbers such as "1,0.5", got {value!r}'
    return None


def reward_references(reward: str) -> tuple[str, ...]:
    """The functions that a reward names; none for one of its words."""
    return () if reward in REWARD_WORDS else tuple(part.strip() for part in reward.split(","))


def _reward_problem(reward: str) -> str | None:
    wrong = [part for part in reward_references(reward) if not REFERENCE.fullmatch(part)]
    if not wrong:
        return None
    near = difflib.get_close_matches(wrong[0], REWARD_WORDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected one of {', '.join(REWARD_WORDS)}, or functions such as file.py:name, got {wrong[0]!r}{hint}"
