"""Word problems: text, solution and gold belong together, families, split, and nothing of them is GSM8K's."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks.base import Completion, KeyedDraws, Problem, is_heldout, stream_key
from sparkgrpo.trainer.tasks.word_families import HELDOUT_FAMILIES, TRAINING_FAMILIES
from sparkgrpo.trainer.tasks.word_problems import WordProblems, WordProblemsOptions, make_problem

Make = Callable[..., Completion]
TASK = WordProblems(WordProblemsOptions())
FAMILIES = {**TRAINING_FAMILIES, **HELDOUT_FAMILIES}
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def drawn(family: str, count: int) -> list[Problem]:
    key = stream_key("test", family, 0)
    return [make_problem(KeyedDraws(key, index), family) for index in range(count)]


def test_fourteen_families_three_of_them_held_out() -> None:
    assert (len(TRAINING_FAMILIES), len(HELDOUT_FAMILIES), len(FAMILIES)) == (11, 3, 14)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_solution_leads_to_the_gold(family: str) -> None:
    """One to four steps, each right, each on the value before; whole numbers up to 100,000; the text tells them."""
    lengths = Counter()
    for problem in drawn(family, 400):
        question, answer = str(problem.columns["question"]), str(problem.columns["answer"])
        *steps, gold = str(problem.columns["solution"]).split("\n")
        lengths[len(steps)] += 1
        value = None
        for step in steps:
            match = STEP.fullmatch(step)
            assert match is not None, step
            left, symbol, right, result = match.groups()
            assert value in (None, left)
            a, b = int(left), int(right)
            assert int(result) == {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[symbol]
            assert symbol != "/" or a % b == 0
            value = result
        assert gold == f"#### {answer}" and value == answer and 1 <= int(answer) <= 100_000
        assert question.endswith("?") and question.count("?") == 1
        assert set(problem.columns) == TASK.columns and problem.columns["family"] == family
    assert set(lengths) == {1, 2, 3, 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_the_solution_stand_in_the_text(family: str) -> None:
    """What a step needs was told, or is derived from told numbers: else the problem could not be solved."""
    for problem in drawn(family, 200):
        told = {int(number) for number in re.findall(r"\d+", str(problem.columns["question"]))}
        reachable = told | {a + 1 for a in told} | {a * b for a in told for b in told}
        for step in str(problem.columns["solution"]).split("\n")[:-1]:
            match = STEP.fullmatch(step)
            assert match is not None and int(match.group(3)) in reachable, problem


def test_the_gold_is_verified_and_others_are_not(completion: Make) -> None:
    for problem in TASK.problems(0, 0, 100):
        gold = int(str(problem.columns["answer"]))
        assert TASK.verify(problem, completion(f"<answer>{gold:,}</answer>")).reason == "ok"
        assert TASK.verify(problem, completion(str(problem.columns["solution"]))).reason == "ok"
        assert TASK.verify(problem, completion(f"<answer>{gold + 1}</answer>")).reason == "wrong_value"
    paid = TASK.reward(TASK.problems(0, 0, 1), [completion("<answer>x</answer>")])[0]
    assert set(paid.parts) >= {"xmlcount", "soft_format", "strict_format", "int", "correctness"}


def test_the_stream_is_pure_and_skips_what_is_held_out() -> None:
    whole = TASK.problems(5, 0, 400)
    assert whole == TASK.problems(5, 0, 1) + TASK.problems(5, 1, 399)
    assert whole[:20] != TASK.problems(6, 0, 20)
    assert len({problem.identity for problem in whole}) > 395
    assert {problem.columns["family"] for problem in whole} == set(TRAINING_FAMILIES)
    assert not any(is_heldout(problem.identity, 0.05) for problem in whole)


def test_heldout_has_every_family_and_nothing_of_training() -> None:
    heldout = TASK.heldout(300)
    assert heldout[:40] == TASK.heldout(40) and len({problem.identity for problem in heldout}) == 300
    counts = Counter(str(problem.columns["family"]) for problem in heldout)
    assert set(counts) == set(FAMILIES) and min(counts.values()) > 5
    for problem in heldout:
        assert problem.columns["family"] in HELDOUT_FAMILIES or is_heldout(problem.identity, 0.05)
    wide = WordProblems(WordProblemsOptions(heldout_frac=0.5))
    assert not any(is_heldout(problem.identity, 0.5) for problem in wide.problems(0, 0, 200))
    with pytest.raises(ValueError, match=r"heldout_frac 0\.0 holds out no problem"):
        WordProblems(WordProblemsOptions(heldout_frac=0.0)).heldout(20)
    with pytest.raises(ValueError, match="heldout_frac must lie in"):
        WordProblemsOptions(heldout_frac=0.95)


def test_unseen_families_are_reported_apart(completion: Make) -> None:
    problems = TASK.heldout(60)
    answers = [
        completion(f"#### {p.columns['answer']}" if p.columns["family"] in HELDOUT_FAMILIES else "#### 0")
        for p in problems
    ]
    verdicts = [TASK.verify(problem, answer) for problem, answer in zip(problems, answers, strict=True)]
    report = TASK.evaluation_report(problems, answers, verdicts)
    assert report["heldout_family_accuracy"] == 1.0 and 0 <= (report["constant_guess"] or 0) < 0.2
    assert "accuracy_flexible" not in report


def test_some_problems_have_a_distractor() -> None:
    texts = [str(problem.columns["question"]) for problem in TASK.problems(0, 0, 300)]
    share = sum("owls" in text or "violin" in text or "paces" in text or "radio" in text for text in texts) / 300
    assert 0.1 < share < 0.35


def test_the_first_problem_never_changes() -> None:
    """A resumed run and a published curve rest on it."""
    assert TASK.problems(0, 0, 1)[0].identity == "word_problems:journeys:b0b7cfb11481e01a"


def word_runs(text: str, length: int = 10) -> set[str]:
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_no_ten_words_in_a_row_are_gsm8k_s(gsm8k_folder: Path) -> None:
    runs: set[str] = set()
    for name in ("train", "test"):
        for line in (gsm8k_folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            runs |= word_runs(row["question"]) | word_runs(row["answer"])
    assert len(runs) > 500_000
    for family in FAMILIES:
        for problem in drawn(family, 300):
            assert not word_runs(str(problem.columns["question"])) & runs, problem
