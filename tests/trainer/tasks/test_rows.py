"""Rows of any data set: columns, checkers, splits, and messages that name the row."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.base import UNVERIFIED, Completion, opened, start_scoring
from sparkgrpo.trainer.tasks.checked_rows import CheckedRows
from sparkgrpo.trainer.tasks.math_answers import MathOptions
from sparkgrpo.trainer.tasks.math_rows import MathRows
from sparkgrpo.trainer.tasks.records import in_memory, load_splits, normalised, text_digest
from sparkgrpo.trainer.tasks.rewarded import RewardedTask
from sparkgrpo.trainer.tasks.rows import Rows, RowsOptions
from sparkgrpo.trainer.tasks.user import RewardFunctions

Make = Callable[..., Completion]


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), **more} for n in range(count)]


def task(given: list[dict[str, Any]], **options: Any) -> Rows:
    return Rows(RowsOptions(**{"answer_column": "answer", **options}), in_memory(given))


def test_a_text_becomes_one_user_message_and_messages_stay() -> None:
    text = task(rows(40))
    assert text.has_text_prompts and text.columns == {"answer"}
    prompt = text.problems(0, 0, 1)[0].prompt
    assert prompt == ({"role": "user", "content": prompt[0]["content"]},)  # pyright: ignore[reportIndexIssue]
    message = {"role": "system", "content": "a"}
    given = [{"prompt": [message, {"role": "user", "content": f"{n}"}], "answer": 1, "x": 2} for n in range(5)]
    chat = task(given)
    assert not chat.has_text_prompts and chat.columns == {"answer", "x"}
    assert [dict(m)["role"] for m in chat.problems(0, 0, 1)[0].prompt if not isinstance(m, int)] == ["system", "user"]


def test_other_columns_by_name() -> None:
    given = [{"text": f"q{n}", "solution": n, "level": "easy"} for n in range(20)]
    made = task(given, prompt_column="text", answer_column="solution")
    assert made.columns == {"solution", "level"}
    assert made.problems(0, 0, 1)[0].columns["level"] == "easy"


@pytest.mark.parametrize(
    ("answer", "text", "reason"),
    [
        ("18", "<answer>18 apples</answer>", "ok"),
        ("so it is\n#### 1,800", "\\boxed{1800}", "ok"),
        (18, "#### 18.0", "ok"),
        (0.5, "<answer>.5</answer>", "ok"),
        ("18", "<answer>17 or 18</answer>", "many_values"),
        ("18", "18", "no_answer"),
        ("18", "<answer>19</answer>", "wrong_value"),
    ],
)
def test_checker_number(completion: Make, answer: object, text: str, reason: str) -> None:
    made = task([{"prompt": "q", "answer": answer}])
    score = made.verify(made.problems(0, 0, 1)[0], completion(text))
    assert (score.reason, score.reward) == (reason, float(reason == "ok")) and reason in made.reasons
    assert made.reward(made.problems(0, 0, 1), [completion(text)]) == [score]


@pytest.mark.parametrize(
    ("answer", "text", "reason"),
    [
        ("Paris", "<answer>\nParis </answer>", "ok"),
        ("Paris", "<answer>paris</answer>", "wrong_value"),
        ("Paris", "#### Paris\nyes", "ok"),
        ("Paris", "Paris", "no_answer"),
        ("Paris", "<answer> </answer>", "empty"),
        (18, "<answer>18</answer>", "ok"),
        (18, "<answer>18.0</answer>", "wrong_value"),
    ],
)
def test_checker_exact(completion: Make, answer: object, text: str, reason: str) -> None:
    made = task([{"prompt": "q", "answer": answer}], checker="exact")
    assert made.verify(made.problems(0, 0, 1)[0], completion(text)).reason == reason


def test_without_an_answer_column_nothing_is_verified(completion: Make) -> None:
    made = task([{"prompt": "q"}], answer_column="")
    assert made.verify(made.problems(0, 0, 1)[0], completion("x")) == UNVERIFIED


def test_checker_math(completion: Make) -> None:
    pytest.importorskip("math_verify")
    given = [{"prompt": "q", "answer": r"\frac{1}{2}"}]
    made = MathRows(RowsOptions(answer_column="answer", checker="math"), in_memory(given), MathOptions(num_workers=1))
    with opened(made) as opening:
        assert opening.facts["sandbox"]
        problem = made.problems(0, 0, 1)[0]
        answers = [completion(rf"so \boxed{{{box}}}") for box in ("0.5", "2/4", "0.6", "^" * 9)] + [completion("0.5")]
        reasons = ["ok", "ok", "wrong_value", "too_complex", "no_answer"]
        assert [score.reason for score in made.reward([problem] * 5, answers)] == reasons
        assert [made.verify(problem, answer).reward for answer in answers] == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[CheckedRows]:
    path = tmp_path / "checks.py"
    path.write_text(
        "def check(completions, answer):\n"
        "    if 'boom' in completions: raise ValueError('boom')\n"
        "    return [None if text == 'none' else text == a for text, a in zip(completions, answer)]\n"
    )
    made = CheckedRows(
        RowsOptions(answer_column="answer", checker=f"{path}:check"),
        in_memory(rows(5)),
        checker=f"{path}:check",
        timeout_s=5,
    )
    yield made
    made.close()


def test_a_function_checks(checked: CheckedRows, completion: Make) -> None:
    problem = checked.problems(0, 0, 1)[0]
    right = completion(str(problem.columns["answer"]))
    scores = checked.reward([problem] * 3, [right, completion("no"), completion("none")])
    assert [(score.reward, score.reason) for score in scores] == [
        (1.0, "ok"), (0.0, "wrong_value"), (None, "not_applicable"),
    ]  # fmt: skip
    assert checked.verify(problem, right) == scores[0]
    later = checked.reward([problem] * 2, [right, completion("boom")])
    assert [score.reason for score in later] == ["ok", "reward_error"]


def test_a_batch_is_one_call_and_only_the_newest_is_kept(checked: CheckedRows, completion: Make) -> None:
    """In an evaluation and behind a reward function too, where the task's own reward is never asked for."""
    problem = checked.problems(0, 0, 1)[0]
    rewarded = RewardedTask(checked, RewardFunctions(
        [lambda completions, **_: [0.5] * len(completions)],
        columns=checked.columns, is_plain=True, timeout_s=5, warn=print,
    ), num_steps=9)  # fmt: skip
    for batch in range(3):
        answers = [completion(f"{batch} {n}") for n in range(4)]
        start_scoring(rewarded, [problem] * 4, answers)
        assert [rewarded.verify(problem, answer).reason for answer in answers] == ["wrong_value"] * 4
        assert [score.reward for score in rewarded.reward([problem] * 4, answers)] == [0.5] * 4
        assert checked._num_batches == batch + 1 and len(checked._judged) == 4
    assert checked.verify(problem, completion("another")).reason == "wrong_value" and len(checked._judged) == 4


def test_why_an_answer_could_not_be_judged_is_told_behind_a_reward_too(checked: CheckedRows, completion: Make) -> None:
    problem = checked.problems(0, 0, 1)[0]
    rewarded = RewardedTask(checked, RewardFunctions(
        [lambda completions, **_: [0.5] * len(completions)],
        columns=checked.columns, is_plain=True, timeout_s=5, warn=print,
    ), num_steps=9)  # fmt: skip
    rewarded.reward([problem], [completion("fine")])
    rewarded.begin_step(2, 1)
    scores = rewarded.reward([problem] * 2, [completion("boom"), completion("no")])
    assert [(score.reward, score.reason) for score in scores] == [(0.5, "scored"), (0.5, "wrong_value")]
    (warning,) = rewarded.take_report().warnings
    assert "no value for 1 of 2 completions" in warning and "boom" in warning
    assert not rewarded.take_report().warnings


def test_a_function_that_raises_at_once_stops(checked: CheckedRows, completion: Make) -> None:
    with pytest.raises(UserError, match=r"check raised ValueError: boom \(checks.py line 2\) in step 1"):
        checked.reward(checked.problems(0, 0, 1), [completion("boom")])


def test_split_by_hash_and_its_small_ends() -> None:
    made = task(rows(300))
    held = {problem.identity for problem in made.heldout(10**6)}
    assert 5 < len(held) < 30 and made.num_problems == 300 - len(held)
    assert not held & {problem.identity for problem in made.problems(0, 0, 600)}
    few = task(rows(4))
    assert few.num_problems == 3 and len(few.heldout(200)) == 1, "one row at least is held out"
    one = task(rows(1))
    assert one.num_problems == len(one.heldout(5)) == 1 and "one row alone" in one.notes[-1]


def test_rows_that_are_the_same_question_are_on_one_side() -> None:
    given = [row for n, row in enumerate(rows(60)) for _ in range(3)]
    made = task(given, heldout_frac=0.3)
    held = {problem.identity for problem in made.heldout(200)}
    assert len(made.heldout(200)) == len(held)
    assert not held & {problem.identity for problem in made.problems(0, 0, 400)}


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "dataset: expected at least one row"),
        (["text"], {}, "dataset row 1: expected a dictionary, got str"),
        ([{"question": "a", "answer": 1}], {}, "row 1: no column 'prompt'; there are question, answer: name"),
        ([*rows(2), {"prompt": "a", "answer": "x"}], {}, r"row 3: expected one number in 'answer', got 'x'; .* exact"),
        ([*rows(2), {"prompt": "a"}], {}, "dataset row 3: expected the columns of the first row, but 'answer'"),
        ([*rows(1), {"prompt": "a", "answer": None}], {}, "dataset row 2: no answer in the column 'answer'"),
        (rows(2), {"answer_column": "gold"}, "dataset row 1: no answer in the column 'gold'"),
        ([{"prompt": "", "answer": 1}], {}, "dataset row 1: expected a prompt that is text or a list of chat messages"),
        ([{"prompt": 3, "answer": 1}], {}, "dataset row 1: expected a prompt"),
        ([{"prompt": [{"role": "king", "content": "a"}], "answer": 1}], {}, "dataset row 1: expected chat messages"),
        ([*rows(1), {"prompt": [{"role": "user", "content": "a"}], "answer": 1}], {}, "row 2: expected a prompt like"),
    ],
)  # fmt: skip
def test_mistakes_name_the_row(given: list, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task(given, **options)


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(6)) + "\n\n")
    alone = load_splits(str(tmp_path / "train.jsonl"))
    assert len(alone.train) == 6 and alone.test is None and alone.train[2].place == "train.jsonl:3"
    (tmp_path / "test.jsonl").write_text(json.dumps(rows(1)[0]))
    for data in (tmp_path, tmp_path / "train.jsonl"):
        both = load_splits(str(data))
        assert both.test is not None and (len(both.train), len(both.test)) == (6, 1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty.jsonl holds no row"):
        load_splits(str(tmp_path / "empty.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"binary.jsonl is not UTF-8 text"):
        load_splits(str(tmp_path / "binary.jsonl"))
    everything = Rows(RowsOptions(answer_column="answer"), load_splits(str(tmp_path)))
    assert (everything.num_problems, len(everything.heldout(9))) == (5, 1)
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows(6)))
    with pytest.raises(UserError, match="leaves no row to train on"):
        Rows(RowsOptions(answer_column="answer"), load_splits(str(tmp_path)))


def test_a_hub_name_without_a_network_says_what_failed() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match=r"nobody/nothing-of-this-name could not be loaded from the hub \("):
        load_splits("nobody/nothing-of-this-name")


def test_texts_compare_without_spacing_case_and_form() -> None:
    assert normalised("  A\u00a0b\n\tC ") == "a b c" and normalised("\uff21\ufb01") == "afi"
    assert text_digest("A  b") == text_digest("a b\n") != text_digest("a c") and len(text_digest("\ud800")) == 16
