"""GSM8K: the five parts against the lesson's own code, what the options pay, the files, the split, the golds."""

import json
import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.base import Completion
from sparkgrpo.trainer.tasks.gsm8k import (
    Gsm8k,
    Gsm8kOptions,
    NumberGrader,
    NumberRewardOptions,
    gold_of,
    soft_format,
    strict_format,
    xmlcount,
)
from sparkgrpo.trainer.tasks.number_text import NUMBER_REASONS, read_number

Make = Callable[..., Completion]
GRADER = NumberGrader()
CLEAN = "<reasoning>\nwork\n</reasoning>\n<answer>\n8\n</answer>\n"
FIVE = ("xmlcount", "soft_format", "strict_format", "int", "correctness")


def test_shared_row(gsm8k_row: dict, completion: Make, fastest_s: Callable[..., float]) -> None:
    row = gsm8k_row
    text = row["text"] if "text" in row else "".join(piece * times for piece, times in row["text_parts"])
    gold = read_number(row["gold"]).value
    assert gold is not None
    verdict, paid = GRADER.verify(text, gold), GRADER.reward(completion(text), gold)
    assert (verdict.reward, verdict.reason) == (row["reward"], row["reason"])
    assert paid.reason == row["reason"]
    assert paid.reward == pytest.approx(sum(paid.parts[name] for name in FIVE))
    for name, value in row.get("parts", {}).items():
        assert paid.parts[name] == pytest.approx(value, abs=1e-9)
    assert fastest_s(lambda: GRADER.reward(completion(text), gold)) < row.get("max_s", 0.005)


def lesson_xmlcount(text: str) -> float:
    """As the lesson has it."""
    count = 0.0
    if text.count("<reasoning>\n") == 1:
        count += 0.125
    if text.count("\n</reasoning>\n") == 1:
        count += 0.125
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        count -= len(text.split("\n</answer>\n")[-1]) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        count -= (len(text.split("\n</answer>")[-1]) - 1) * 0.001
    return count


SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
STRICT = re.compile(r"<reasoning>\n(?:.*\n)?</reasoning>\n<answer>\n(?:.*\n)?</answer>\n?", re.DOTALL)
TAG = re.compile(r"</?(?:reasoning|answer)>")
PIECES = ("<reasoning>", "</reasoning>", "<answer>", "</answer>", "\n", "\n", "\n", "8", " ", "work", "x")


def test_parts_agree_with_patterns_on_random_texts() -> None:
    """The patterns backtrack, so they serve short texts alone."""
    rng = random.Random(0)
    seen = {"soft": 0, "strict": 0}
    for _ in range(30_000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(14)))
        if rng.random() < 0.3:
            text = CLEAN.replace("work", text[:9])
        assert xmlcount(text) == pytest.approx(lesson_xmlcount(text), abs=1e-12), repr(text)
        is_soft = SOFT.search(text) is not None
        assert soft_format(text) == 0.5 * is_soft, repr(text)
        tags = TAG.findall(text)
        is_strict = STRICT.fullmatch(text) is not None and sorted(tags) == sorted(set(tags)) and len(tags) == 4
        assert strict_format(text) == 0.5 * is_strict, repr(text)
        seen["soft"] += is_soft
        seen["strict"] += is_strict
    assert min(seen.values()) > 100


@pytest.mark.parametrize(
    ("text", "paid"), [(CLEAN, 0.5), (CLEAN + "thanks for asking!!", 0.462), ("", 0.0), (CLEAN.rstrip("\n"), None)]
)
def test_the_lesson_s_values_of_xmlcount(text: str, paid: float | None) -> None:
    """Without the last line break the lesson subtracts the whole text."""
    assert xmlcount(text) == pytest.approx(0.501 - 0.001 * len(text) if paid is None else paid)


def test_form_alone_earns_two_and_measures_nothing(completion: Make) -> None:
    wrong = CLEAN.replace("8", "9")
    score = GRADER.reward(completion(wrong), Fraction(8))
    assert score.reward == pytest.approx(2.0) and score.reason == "wrong_value" and not score.is_right
    assert GRADER.verify(wrong, Fraction(8)).reward == 0.0
    assert GRADER.reward(completion(CLEAN), Fraction(8)).reward == pytest.approx(4.0)


def test_options_of_the_reward(completion: Make) -> None:
    correct = NumberGrader(NumberRewardOptions(reward="correct"))
    assert correct.reward(completion(CLEAN), Fraction(8)).reward == 1.0
    assert correct.reward(completion(CLEAN), Fraction(9)).reward == 0.0
    long_tail = CLEAN + "x" * 5_000
    assert GRADER.reward(completion(long_tail), Fraction(8)).parts["xmlcount"] < -9
    floored = NumberGrader(NumberRewardOptions(xmlcount_floor=-0.5))
    assert floored.reward(completion(long_tail), Fraction(8)).parts["xmlcount"] == -0.5
    assert floored.reward(completion(CLEAN), Fraction(8)).reward == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "four"}, "reward must be 'five' or 'correct'"),
        ({"xmlcount_floor": 0.1}, "xmlcount_floor must be at most 0"),
        ({"xmlcount_floor": float("nan")}, "xmlcount_floor must be at most 0"),
        ({"reward": "correct", "xmlcount_floor": 0.0}, "xmlcount_floor needs reward 'five'"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NumberRewardOptions(**options)


def check_rewards(text: str) -> None:
    score = GRADER.reward(Completion(text=text, token_ids=(), is_truncated=False), Fraction(18))
    assert score.reason in NUMBER_REASONS and score.reward is not None and score.reward <= 4.0
    assert GRADER.verify(text, Fraction(18)).reason == score.reason


def test_random_unicode_is_paid_without_an_error(fuzz: Callable[..., None]) -> None:
    fuzz(check_rewards, 500)


@pytest.mark.slow
def test_much_random_unicode_is_paid_without_an_error(fuzz: Callable[..., None]) -> None:
    fuzz(check_rewards, 10_000)


@pytest.mark.parametrize(
    "piece",
    ["<reasoning>", "</reasoning>", "</reasoning><answer>", "</reasoning> ", "\n</answer>\n", "<answer>", " ", "\n"],
)
def test_hostile_texts_take_linear_time(piece: str, completion: Make, fastest_s: Callable[..., float]) -> None:
    texts = [
        "<reasoning>" + piece * (size // len(piece)) + end for size in (16_000, 256_000) for end in ("", "</answer>")
    ]
    times_s = [fastest_s(lambda t=text: GRADER.reward(completion(t), Fraction(18))) for text in texts]
    assert max(times_s) < 0.005
    assert max(times_s[2:]) < 16 * 5 * max(*times_s[:2], 20e-6)


@pytest.mark.parametrize("wrong", ["17", "", "lol", "18 or 17", "9" * 70])
def test_a_wrong_block_after_a_right_one_never_helps(wrong: str) -> None:
    gold = Fraction(18)
    alone = GRADER.verify(f"<answer>{wrong}</answer>", gold)
    assert alone.reward == 0.0
    assert GRADER.verify(f"<answer>18</answer> no <answer>{wrong}</answer>", gold).reason == alone.reason
    assert GRADER.verify(f"<answer>{wrong}</answer> no <answer>18</answer>", gold).reward == 1.0


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows(count: int, first: int = 0) -> list[object]:
    return [{"question": f"What is {n} and {n}?", "answer": f"Add.\n#### {2 * n}"} for n in range(first, first + count)]


def test_a_file_with_a_test_split_keeps_it(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [*rows(50), {"question": " what IS 3  and 3? ", "answer": "#### 6"}])
    write(tmp_path / "test.jsonl", rows(8))
    task = Gsm8k(Gsm8kOptions(data=str(tmp_path)))
    assert (task.num_problems, task.num_dropped) == (42, 9), "eight rows of the test split, and one written otherwise"
    assert "9 training rows dropped" in task.notes[0]
    held = {problem.identity for problem in task.heldout(200)}
    assert len(held) == 8 and task.heldout(3) == task.heldout(200)[:3]
    assert not held & {problem.identity for problem in task.problems(0, 0, 200)}
    assert Gsm8k(Gsm8kOptions(data=str(tmp_path / "train.jsonl"))).problems(0, 0, 9) == task.problems(0, 0, 9)
    with pytest.raises(UserError, match=r"heldout_frac: .* has a test split"):
        Gsm8k(Gsm8kOptions(data=str(tmp_path), heldout_frac=0.1))


def test_a_file_alone_is_split_by_hash(tmp_path: Path) -> None:
    task = Gsm8k(Gsm8kOptions(data=write(tmp_path / "mine.jsonl", rows(400)), heldout_frac=0.2))
    held = {problem.identity for problem in task.heldout(1000)}
    assert 50 < len(held) < 120 and task.num_problems == 400 - len(held)
    assert not held & {problem.identity for problem in task.problems(3, 0, 900)}
    whole = task.problems(3, 0, 700)
    assert whole == task.problems(3, 0, 5) + task.problems(3, 5, 695)
    epoch = task.num_problems
    assert len({problem.identity for problem in whole[:epoch]}) == epoch, "every row once before any comes again"
    assert whole[:50] != task.problems(4, 0, 50)


def test_a_problem_is_the_question_and_the_canonical_gold(tmp_path: Path, completion: Make) -> None:
    data = write(tmp_path / "a.jsonl", [{"question": "Why?", "answer": "So.\n#### $1,200.00"}, *rows(3)])
    problem = next(p for p in Gsm8k(Gsm8kOptions(data=data)).problems(0, 0, 9) if p.columns["question"] == "Why?")
    assert problem.columns == {"question": "Why?", "answer": "1200"} and gold_of(problem) == 1200
    system, user = problem.prompt
    assert not isinstance(system, int)
    assert all(tag in system["content"] for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"))
    assert user == {"role": "user", "content": "Why?"}


def test_the_byte_order_mark_of_windows_tools_is_no_text(tmp_path: Path) -> None:
    plain = write(tmp_path / "mine.jsonl", rows(3))
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + Path(plain).read_bytes())
    found, expected = (Gsm8k(Gsm8kOptions(data=str(data))) for data in (tmp_path / "marked.jsonl", plain))
    assert found.problems(0, 0, 3) == expected.problems(0, 0, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "answer": "eighteen"}, r"mine.jsonl:2: expected an answer whose last line is ####"),
        ({"question": "a", "answer": "#### 17 or 18"}, r"mine.jsonl:2: expected an answer whose last line is ####"),
        ({"question": "a"}, r"mine.jsonl:2: expected text in the field 'answer', got the fields question"),
        ({"question": 3, "answer": "#### 1"}, r"mine.jsonl:2: expected text in the field 'question', got 3"),
        ("[1]", r"mine.jsonl:2: expected a JSON object"),
        ("{", r"mine.jsonl:2: not JSON"),
    ],
)
def test_a_bad_row_stops_the_load_by_its_number(tmp_path: Path, row: object, message: str) -> None:
    data = write(tmp_path / "mine.jsonl", [*rows(1), row, *rows(2)])
    with pytest.raises(UserError, match=message):
        Gsm8k(Gsm8kOptions(data=data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "expected --data train.jsonl .* or --data openai/gsm8k"),
        ("nowhere.jsonl", "nowhere.jsonl is not there"),
        ("no such place", "no such place is not there"),
    ],
)
def test_no_data(data: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Gsm8k(Gsm8kOptions(data=data))


def test_constant_guess_and_last_number_stand_beside_accuracy(tmp_path: Path, completion: Make) -> None:
    same = [{"question": f"q{n}", "answer": "#### 7"} for n in range(9)]
    write(tmp_path / "train.jsonl", [*same, *rows(5)])
    write(tmp_path / "test.jsonl", [{"question": "t1", "answer": "#### 7"}, {"question": "t2", "answer": "#### 8"}])
    task = Gsm8k(Gsm8kOptions(data=str(tmp_path), is_flexible=True))
    problems = task.heldout(2)
    answers = [completion("I think it is 7") for _ in problems]
    verdicts = [task.verify(problem, answer) for problem, answer in zip(problems, answers, strict=True)]
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0]
    report = task.evaluation_report(problems, answers, verdicts)
    assert task.constant_guess == "7" and report == {"constant_guess": 0.5, "accuracy_flexible": 0.5}


def test_gsm8k_itself(gsm8k_folder: Path, completion: Make) -> None:
    """All 8,792 golds are read, each as written in five ways; nothing of the test split is trained on."""
    task = Gsm8k(Gsm8kOptions(data=str(gsm8k_folder)))
    assert (task.num_problems, task.num_dropped, task.constant_guess) == (7473, 0, "4")
    heldout = task.heldout(1319)
    report = task.evaluation_report(heldout, [completion("")] * 1319, [])
    assert report["constant_guess"] == pytest.approx(0.0265, abs=5e-5)
    problems = [*task.problems(0, 0, 7473), *heldout]
    assert len({problem.identity for problem in problems}) == 8792
    minus = "\u2212"
    for problem in problems:
        gold = gold_of(problem)
        number = int(gold)
        assert gold == number
        for text in (
            f"<reasoning>\nso\n</reasoning>\n<answer>\n{number}\n</answer>\n",
            f"It follows.\n#### {number:,}",
            f"\\boxed{{{number}}}",
            f"<answer>**${number:,}.00**</answer>",
            f"<answer>{str(number).replace('-', minus)} dollars.</answer>",
        ):
            assert task.verify(problem, completion(text)).reward == 1.0, text
        assert task.verify(problem, completion(f"<answer>{number + 1}</answer>")).reward == 0.0
