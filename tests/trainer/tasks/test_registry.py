"""Tasks by name, by reference and as rows; settings that do not go together."""

import json
from pathlib import Path
from typing import cast

import pytest

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.tasks.base import UNVERIFIED, Completion
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions
from sparkgrpo.trainer.tasks.registry import (
    TASKS,
    TaskOptions,
    check_settings,
    evaluation_task,
    make_task,
    run_task,
    task_options,
)
from sparkgrpo.trainer.tasks.rewarded import RewardedTask
from sparkgrpo.trainer.tasks.rows import Rows

OWN = Path(__file__).with_name("own_tasks.py")
REWARDS = Path(__file__).with_name("reward_functions.py")


def test_each_task_gets_its_own_options() -> None:
    options = TaskOptions(countdown=CountdownOptions(numbers=(2, 4)), echo=EchoOptions(num_tokens=9))
    countdown, echo = make_task("countdown", options), make_task("echo", options)
    assert isinstance(countdown, Countdown) and countdown.options.numbers == (2, 4)
    assert isinstance(echo, Echo) and echo.num_problems == 9


@pytest.mark.parametrize("name", TASKS)
def test_every_task_keeps_the_contract(name: str) -> None:
    task = make_task(name, TaskOptions())
    assert task.name == name
    assert "ok" in task.reasons and len(set(task.reasons)) == len(task.reasons)
    for problem in (*task.problems(0, 0, 3), *task.heldout(3)):
        assert problem.identity.startswith(f"{name}:")
        assert set(problem.columns) == task.columns


@pytest.mark.parametrize(("typo", "nearest"), [("countdwn", "countdown"), ("Echo", "echo"), ("gsm8", "gsm8k")])
def test_unknown_name_names_the_nearest(typo: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"unknown task '{typo}': did you mean '{nearest}'"):
        make_task(typo, TaskOptions())


def test_unknown_name_without_a_neighbour_lists_the_tasks() -> None:
    with pytest.raises(
        UserError, match=r"unknown task 'zzz': the tasks are .*countdown, echo, .*, gym:<dataset>, file"
    ):
        make_task("zzz", TaskOptions())
    with pytest.raises(UserError, match=r"rows of a file are --task rows --data my/rows\.jsonl"):
        make_task("my/rows.jsonl", TaskOptions())


def test_settings_reach_their_task() -> None:
    config = Config(
        numbers="2,3", max_number=12, max_target=99, heldout_frac=0.3, reward="sloppy",
        data="x", prompt_column="p", answer_column="a", checker="exact", flexible=True,
    )  # fmt: skip
    options = task_options(config)
    assert options.countdown == CountdownOptions(
        numbers=(2, 3), max_number=12, max_target=99, heldout_frac=0.3, reward="sloppy"
    )
    assert options.gsm8k.data == "x" and options.gsm8k.is_flexible
    assert (options.rows.prompt_column, options.rows.answer_column, options.rows.checker) == ("p", "a", "exact")
    assert task_options(Config(task="gsm8k", reward="correct")).gsm8k.grading.reward == "correct"
    assert task_options(Config()).word_problems.grading.reward == "five"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "gsm8k", "numbers": "2"}, "numbers: belongs to the task countdown, got the task gsm8k: leave"),
        ({"task": "countdown", "data": "x"}, "data: belongs to the task gsm8k or rows, got the task countdown"),
        ({"task": "gsm8k", "answer_column": "x"}, "answer_column: belongs to the task rows"),
        ({"task": "echo", "heldout_frac": 0.1}, "heldout_frac: belongs to the task countdown or"),
        ({"task": "gsm8k", "reward": "sloppy"}, "reward: the task gsm8k pays five or correct, or functions"),
        ({"task": "countdown", "reward": "five"}, "reward: the task countdown pays strict or sloppy, or functions"),
        ({"task": "rows", "reward": "five"}, "reward: the task rows pays strict, or functions"),
        ({"reward": "a:f", "format_reward": 0.1}, "format_reward: is part of the task's own reward, which a:f"),
        ({"reward": "a:f", "single_answer": True}, "single_answer: is part of the task's own reward"),
        ({"reward_weights": "1"}, "reward_weights: weighs reward functions, and none is given"),
        ({"task": "rows", "reward_weights": "1"}, "reward_weights: weighs reward functions, and none is given"),
        ({"task": "cuontdown"}, "did you mean 'countdown'"),
    ],
)  # fmt: skip
def test_what_a_task_does_not_take_is_refused(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(Config(**values), values)


def test_defaults_and_recipes_contradict_nothing() -> None:
    check_settings(Config(task="word_problems", numbers="2"), {})
    check_settings(Config(task="gym:sudoku", heldout_frac=0.1), {"heldout_frac": 0.1})
    check_settings(Config(task="countdown", max_number=30, max_target=300), {"max_number": 30, "max_target": 300})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward": "strickt"}, "reward: expected one of auto, strict, .* got 'strickt'; did you mean 'strict'"),
        ({"reward": "a:f,b"}, "got 'b'"),
        ({"reward": ":f"}, "got ':f'"),
        ({"reward_weights": "1;2"}, 'reward_weights: expected finite numbers such as "1,0.5", got'),
        ({"reward_weights": "1,nan"}, "reward_weights: expected finite numbers"),
        ({"reward_weights": "1e999"}, "reward_weights: expected finite numbers"),
        ({"reward_timeout_s": 0.0}, "reward_timeout_s: expected above 0"),
        ({"checker": "similar"}, "checker: expected one of number, exact, math, or a function"),
        ({"format_reward": 0.2}, "format_reward: expected at least 0 and at most 0.1"),
        ({"heldout_frac": 1.0}, "heldout_frac: expected at least 0 and at most 0.9"),
        ({"truncated_reward": "drop"}, "truncated_reward: expected one of keep, zero"),
    ],
)
def test_wrong_values_are_refused_by_the_configuration(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(**values)


@pytest.mark.parametrize(("numbers", "target"), [((2,), 30), ((3, 4), 1000)])
def test_other_ranges_of_countdown(numbers: tuple[int, ...], target: int) -> None:
    options = CountdownOptions(numbers=numbers, max_number=30, max_target=target)
    problems = make_task("countdown", TaskOptions(countdown=options)).problems(0, 0, 300)
    nums = [n for problem in problems for n in cast(list[int], problem.columns["nums"])]
    targets = [cast(int, problem.columns["target"]) for problem in problems]
    assert 20 < max(nums) <= 30 and min(nums) >= 1 and 0.8 * target < max(targets) <= target and min(targets) >= 1
    for wrong in ({"max_number": 1}, {"max_target": 5, "max_number": 9}, {"max_target": 10**7}):
        with pytest.raises(ValueError, match=r"max_(number|target) must lie in"):
            CountdownOptions(**wrong)


@pytest.mark.parametrize("name", ["Repeat", "instance", "made"])
def test_a_task_of_one_s_own(name: str) -> None:
    task = make_task(f"{OWN}:{name}", TaskOptions())
    assert task.name == "repeat" and len(task.problems(0, 3, 2)) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Reapeat", "has no 'Reapeat'; did you mean 'Repeat'"),
        ("NeedsArguments", "could not be made: TypeError"),
        ("WithoutHeldout", "has no method heldout"),
        ("ColumnsAsList", "columns must be frozenset, got list"),
        ("OtherParameters", r"expected problems\(seed, start, count\), got problems\(count"),
        ("Forgets", "gave another problem the second time; it must be pure"),
        ("OtherColumns", r"its columns are \['target'\], its problems have \['number'\]"),
        ("UnknownReason", "verify gave the reason 'wrong_value', which is not among"),
        ("Raises", "could not be made: OSError: no licence"),
        (
            "ProblemsRaise",
            r"own_tasks.py:ProblemsRaise: expected problems\(0, 0, 1\) .* KeyError: 'question' \(.*py:\d+",
        ),
        ("NoProblems", r"NoProblems: expected problems\(0, 0, 1\) to be a list of one Problem, got \[\]"),
        ("GivesOnce", r"GivesOnce: expected problems\(0, 0, 1\) to be a list of one Problem, got \[\]"),
        ("NotToBeCompared", r"NotToBeCompared: expected problems.* columns compared by ==, but it raised ValueError"),
        (
            "VerifyGivesBool",
            r"VerifyGivesBool: expected verify\(problem, completion\) to give a Score .* got bool False",
        ),
        ("VerifyGivesNothing", r"expected verify\(problem, completion\) to give a Score .* got NoneType None"),
        ("VerifyRaises", r"expected verify\(problem, completion\) of an empty completion .* raised AttributeError"),
    ],
)
def test_what_is_no_task_is_told(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_task(f"{OWN}:{name}", TaskOptions())


def data(tmp_path: Path, count: int = 8) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"q{n}", "answer": n}) for n in range(count)))
    return str(path)


def test_rows_need_data_and_something_that_judges(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the task rows needs rows; expected --data"), run_of(task="rows"):
        pass
    with (
        pytest.raises(UserError, match="nothing that judges them; expected --answer-column, or --reward"),
        run_of(task="rows", data=data(tmp_path)),
    ):
        pass
    with run_of(task="rows", data=data(tmp_path), answer_column="answer") as opening:
        task = opening.task
        assert isinstance(task, Rows) and task.num_problems == 7
    with (
        pytest.raises(UserError, match="no strict check can measure"),
        evaluation_task(Config(task="rows", data=data(tmp_path))),
    ):
        pass


def run_of(**values: object):  # noqa: ANN201
    return run_task(Config(**values), values, warn=print)


def test_functions_take_the_place_of_the_reward(tmp_path: Path) -> None:
    reward = f"{REWARDS}:fast,{REWARDS}:length"
    with run_of(reward=reward, reward_weights="1,0.5", steps=9) as opening:
        task = opening.task
        assert isinstance(task, RewardedTask) and isinstance(task.task, Countdown)
        problem, answer = task.problems(0, 0, 1)[0], Completion(text="1234", token_ids=(1,), is_truncated=False)
        task.begin_step(3, 16)
        (score,) = task.reward([problem], [answer])
        assert (score.reward, score.reason) == (3.0, "no_answer") and score.reason in task.reasons
        assert task.verify(problem, answer).reward == 0.0
        report = task.take_report()
        assert report.metrics == {"num_reward_restarts": 0} and not report.warnings
    with run_of(task="rows", data=data(tmp_path), reward=f"{REWARDS}:sees_text") as opening:
        task = opening.task
        problem = task.problems(0, 0, 1)[0]
        assert task.verify(problem, answer) == UNVERIFIED
        assert task.reward([problem], [answer])[0].reason == "scored"


def test_what_functions_log_is_reported_over_the_batches_of_a_step() -> None:
    with run_of(reward=f"{REWARDS}:logs", steps=9) as opening:
        task = opening.task
        assert isinstance(task, RewardedTask)
        problem = task.problems(0, 0, 1)[0]
        batches = [[Completion(text=text, token_ids=(1,), is_truncated=False)] for text in ("ab", "abcd")]
        task.reward([problem], batches[0])  # an evaluation before the step
        task.begin_step(2, 16)
        assert task.reward([problem], batches[0])[0].reward == 1009.0
        task.reward([problem], batches[1])
        report = task.take_report()
        assert report.metrics == {"num_reward_restarts": 0, "metric/mean_length": 3.0}
        assert report.extras == {"upper": ["AB", "ABCD"]}
        assert task.take_report().metrics == {"num_reward_restarts": 0}


def test_a_lost_python_function_is_told_apart() -> None:
    with (
        pytest.raises(UserError, match="close_to_ten was a Python object, which no name leads to: go on from Python"),
        run_of(reward="python:close_to_ten"),
    ):
        pass
