"""What the verifier pays, on rows; the puzzles, their prompt and their split; what the options change."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks.base import Completion, Problem
from sparkgrpo.trainer.tasks.countdown import (
    Countdown,
    CountdownOptions,
    make_problem,
)

CASE_FILE = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "cases" / "countdown.jsonl"
PLAIN = CountdownOptions()


def completion(text: str, *, is_truncated: bool = False) -> Completion:
    return Completion(text=text, token_ids=(), is_truncated=is_truncated)


def case_rows() -> list:
    if os.environ.get("CI"):
        return [pytest.param({}, marks=pytest.mark.skip(reason="the shared rows are never read on CI"), id="rows")]
    if not CASE_FILE.exists():
        return [pytest.param({}, marks=pytest.mark.skip(reason="the shared rows lie outside the project"), id="rows")]
    rows = [json.loads(line) for line in CASE_FILE.read_text(encoding="utf-8").splitlines()]
    return [pytest.param(row, id=row["id"]) for row in rows]


@pytest.mark.parametrize("row", case_rows())
def test_shared_row(row: dict) -> None:
    text = row["text"] if "text" in row else "".join(piece * times for piece, times in row["text_parts"])
    problem, answer = make_problem(row["nums"], row["target"]), completion(text)
    task = Countdown(CountdownOptions(**row.get("options", {})))
    score = task.reward([problem], [answer])[0]
    assert (score.reward, score.reason) == (row["reward"], row["reason"])
    strict = task.verify(problem, answer)
    if "options" not in row:
        assert strict == score
    if "sloppy_reward" in row:
        assert (
            Countdown(CountdownOptions(reward="sloppy")).reward([problem], [answer])[0].reward == row["sloppy_reward"]
        )
    assert fastest_s(task, problem, answer) < row.get("max_s", 0.005)


def fastest_s(task: Countdown, problem: Problem, answer: Completion, tries: int = 3) -> float:
    """The quickest of a few tries: a busy machine slows some of them, a slow algorithm slows all."""
    times_s = []
    for _ in range(tries):
        start_s = time.perf_counter()
        task.verify(problem, answer)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>(3 + 7) * 4</answer>", 1.0),
        ("<answer>40</answer>", 0.0),
        ("<answer>3 * 7 + 7 + 12</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>(3 + 7) / 0 + 4</answer>", 0.0),
        ("the answer is (3 + 7) * 4", 0.0),
    ],
)
def test_the_six_assertions_of_the_lesson(text: str, reward: float) -> None:
    task, problem = Countdown(PLAIN), make_problem([3, 7, 4], 40)
    assert task.verify(problem, completion(text)).reward == reward
    assert task.reward([problem], [completion(text)])[0].reward == reward


@pytest.mark.parametrize(
    ("answer", "nums", "target", "reason"),
    [
        # ways of writing a right answer
        ("4*(7+3)", (3, 7, 4), 40, "ok"),
        ("\n (3 + 7)\t*\r\n4 ", (3, 7, 4), 40, "ok"),
        ("(3 + 7) \u00d7 4", (3, 7, 4), 40, "ok"),
        ("12 \u00f7 4 \u2212 2", (2, 4, 12), 1, "ok"),
        ("8\u00a0/\u2009(3\u202f-\u30008/3)", (3, 3, 8, 8), 24, "ok"),
        ("1/49*49", (1, 49, 49), 1, "ok"),
        ("-3 + 7 * 4", (3, 7, 4), 25, "ok"),
        ("3 - (-4) + 7", (3, 7, 4), 14, "ok"),
        ("3 - - 4 * 7", (3, 7, 4), 31, "ok"),
        ("100000 + 0", (0, 100000), 100000, "ok"),
        ("(3 + 7) * 4 = 40", (3, 7, 4), 40, "ok"),
        ("(3 + 7) * 4 \uff1d 40", (3, 7, 4), 40, "ok"),
        # tricks that an evaluator of Python would fall for
        ("1_2+3", (1, 2, 3), 15, "bad_char"),
        ("(3+7)*4+True", (3, 7, 4), 41, "bad_char"),
        ("3+7 # 4", (3, 7, 4), 10, "bad_char"),
        ("2**3", (2, 3), 8, "syntax"),
        ("7//2", (7, 2), 3, "syntax"),
        ("3.5*2", (3, 5, 2), 7, "bad_char"),
        ("1e3", (1, 3), 1000, "bad_char"),
        ("0x10", (0, 10), 16, "bad_char"),
        ("007", (7,), 7, "bad_number"),
        ("1000000+1", (1000000, 1), 1000001, "bad_number"),
        ("9" * 200, (9,), 9, "bad_number"),
        ("9**9**9", (9, 9, 9), 1, "syntax"),
        ("\uff13 + 7", (3, 7), 10, "non_ascii"),
        ("\u0663 + 7", (3, 7), 10, "non_ascii"),
        ("2\u00b2", (2,), 4, "non_ascii"),
        ("1\u200b+2", (1, 2), 3, "non_ascii"),
        # the order of the codes
        ("", (1, 2), 3, "empty"),
        (" \u2003\n", (1, 2), 3, "empty"),
        ("1" + " " * 253 + "+2", (1, 2), 3, "ok"),
        ("1" + " " * 254 + "+2", (1, 2), 3, "too_long"),
        ("\u00b2" * 257, (1, 2), 3, "too_long"),
        ("(" * 257, (1, 2), 3, "too_long"),
        ("\u00b2 = 4", (1, 2), 3, "non_ascii"),
        ("# = 4", (1, 2), 3, "bad_equation"),
        ("1+2 == 3", (1, 2), 3, "bad_equation"),
        ("1+2 = 03", (1, 2), 3, "bad_equation"),
        ("1+2 =", (1, 2), 3, "bad_equation"),
        ("3 = 1+2", (1, 2), 3, "bad_equation"),
        ("= 3", (1, 2), 3, "syntax"),
        ("01 $", (1, 2), 3, "bad_number"),
        ("$ 01", (1, 2), 3, "bad_char"),
        ("1 2 + $", (1, 2), 3, "bad_char"),
        ("(" * 32 + "6" + ")" * 32, (6,), 6, "ok"),
        ("-" * 32 + "6", (6,), 6, "ok"),
        ("(" * 33 + "6" + ")" * 33, (6,), 6, "too_deep"),
        ("-" * 33 + "6", (6,), 6, "too_deep"),
        ("(-" * 17 + "6", (6,), 6, "too_deep"),
        ("1+2)", (1, 2), 3, "syntax"),
        ("(1+2", (1, 2), 3, "syntax"),
        ("1+", (1, 2), 3, "syntax"),
        ("1 2", (1, 2), 3, "syntax"),
        ("1(2)", (1, 2), 2, "syntax"),
        ("+1+2", (1, 2), 3, "syntax"),
        ("()", (1, 2), 3, "syntax"),
        ("3 + 7", (3, 7, 4), 10, "wrong_numbers"),
        ("3 + 7 + 4 + 4", (3, 7, 4), 18, "wrong_numbers"),
        ("37 + 4", (3, 7, 4), 41, "wrong_numbers"),
        ("5 / (3 - 3)", (5, 3), 1, "wrong_numbers"),
        ("5 / (3 - 3)", (5, 3, 3), 1, "div_by_zero"),
        ("0 * (5 / (3 - 3))", (0, 5, 3, 3), 0, "div_by_zero"),
        ("50000*2+1", (50000, 2, 1), 100000, "wrong_value"),
        ("3 + 7 + 4", (3, 7, 4), 40, "wrong_value"),
    ],
)
def test_reason_of_an_answer(answer: str, nums: Sequence[int], target: int, reason: str) -> None:
    score = Countdown(PLAIN).verify(make_problem(nums, target), completion(f"<answer>{answer}</answer>"))
    assert score.reason == reason
    assert score.reward == float(reason == "ok")
    assert score.parts["correct"] == float(reason == "ok")
    assert score.parts["well_formed"] == float(reason in ("ok", "wrong_numbers", "div_by_zero", "wrong_value"))


@pytest.mark.parametrize(
    ("text", "reason", "has_many"),
    [
        ("", "no_answer", False),
        ("(3+7)*4", "no_answer", False),
        ("<answer>(3+7)*4", "no_answer", False),
        ("(3+7)*4</answer>", "no_answer", False),
        ("</answer>(3+7)*4<answer>", "no_answer", False),
        ("<ANSWER>(3+7)*4</ANSWER>", "no_answer", False),
        ("<answer>3+7+4</answer> no: <answer>(3+7)*4</answer>", "ok", True),
        ("<answer>(3+7)*4</answer> or <answer>3+7+4</answer>", "wrong_value", True),
        ("<answer>(3+7)*4</answer> or <answer>3+7", "ok", False),
        ("<answer>(3+ <answer>(3+7)*4</answer>", "ok", False),
        ("<answer><answer>(3+7)*4</answer></answer>", "ok", True),
        ("such as <answer>(1 + 2) / 3</answer>", "wrong_numbers", False),
        ("<answer>(3+7)*4</answer>" + " The numbers fit." * 50, "ok", False),
    ],
)
def test_which_block_is_graded(text: str, reason: str, has_many: bool) -> None:
    score = Countdown(PLAIN).verify(make_problem([3, 7, 4], 40), completion(text))
    assert (score.reason, score.parts["many_answers"]) == (reason, float(has_many))


def paid(text: str, options: CountdownOptions = PLAIN, *, is_truncated: bool = False) -> tuple[float | None, str]:
    task = Countdown(options)
    problem, answer = make_problem([3, 7, 4], 40), completion(text, is_truncated=is_truncated)
    assert task.verify(problem, answer) == Countdown(PLAIN).verify(problem, answer)  # options have no say
    score = task.reward([problem], [answer])[0]
    assert score.reason in task.reasons
    return score.reward, score.reason


def test_format_reward_pays_what_parses() -> None:
    assert paid("<answer>1</answer>") == (0.0, "wrong_numbers")
    assert paid("<answer>1</answer>", CountdownOptions(format_reward=0.1)) == (0.1, "wrong_numbers")
    assert paid("<answer>3/(7-7)</answer>", CountdownOptions(format_reward=0.1)) == (0.1, "wrong_numbers")
    assert paid("<answer>3+</answer>", CountdownOptions(format_reward=0.1)) == (0.0, "syntax")
    assert paid("<answer>(3+7)*4</answer>", CountdownOptions(format_reward=0.1)) == (1.0, "ok")


def test_single_answer_pays_nothing_for_several() -> None:
    several = "<answer>3+7+4</answer><answer>(3+7)*4</answer>"
    assert paid(several) == (1.0, "ok")
    assert paid(several, CountdownOptions(single_answer=True, format_reward=0.1)) == (0.0, "many_answers")
    assert paid("<answer>(3+7)*4</answer>", CountdownOptions(single_answer=True)) == (1.0, "ok")


def test_sloppy_reward_pays_for_the_digits_of_the_target() -> None:
    assert paid("I think 40 it is", CountdownOptions(reward="sloppy")) == (1.0, "ok")
    assert paid("1405", CountdownOptions(reward="sloppy")) == (1.0, "ok")
    assert paid("<answer>(3+7)*4</answer>", CountdownOptions(reward="sloppy")) == (0.0, "no_answer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": (5,)}, "numbers must name one or more of 2, 3, 4"),
        ({"numbers": ()}, "numbers must name one or more of 2, 3, 4"),
        ({"heldout_frac": 1.0}, r"heldout_frac must lie in 0\.\.0\.9"),
        ({"heldout_frac": float("nan")}, r"heldout_frac must lie in 0\.\.0\.9"),
        ({"format_reward": 0.5}, r"format_reward must lie in 0\.\.0\.1"),
        ({"reward": "lenient"}, "reward must be 'strict' or 'sloppy', got 'lenient'"),
        ({"reward": "sloppy", "format_reward": 0.1}, "need reward 'strict'"),
        ({"reward": "sloppy", "single_answer": True}, "need reward 'strict'"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CountdownOptions(**options)
