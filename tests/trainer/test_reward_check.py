"""Rewards that cannot be used: counted, named, never 0."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.reward_check import REWARD_ERROR, RewardCheck
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions

ASKED = [Problem(prompt=(n,), columns={}, identity=f"echo:{n}") for n in range(4)]
ANSWERS = [Completion(text="", token_ids=(n,), is_truncated=False) for n in range(4)]


class Paying(Echo):
    """Answers with what it is told to."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(EchoOptions(num_tokens=4))
        self.answers = list(answers)

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [Score(reward=reward, parts={"p": 1.0}, reason="ok") for reward in answer]


def test_good_rewards_pass_untouched() -> None:
    check = RewardCheck(Paying([1.0, None, True, 0]))
    scores = check.scores(ASKED, ANSWERS)
    assert [score.reward for score in scores] == [1.0, None, True, 0] and check.take_faults() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1", [1.0], 1j])
def test_no_finite_number_is_unscored_and_named(bad: object) -> None:
    check = RewardCheck(Paying([1.0, bad, 0.0, bad]))
    scores = check.scores(ASKED, ANSWERS)
    assert [score.reward for score in scores] == [1.0, None, 0.0, None]
    assert [score.reason for score in scores] == ["ok", REWARD_ERROR, "ok", REWARD_ERROR] and scores[1].parts == {}
    (fault,) = check.take_faults()
    assert f"2 of 4 rewards are no finite numbers, such as {bad!r} for echo:1" in fault
    assert check.take_faults() == []


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError('by zero')"),
        ([1.0, 0.0], "expected a reward for each of 4 completions, got 2"),
        ([], "got 0"),
        ([1.0] * 5, "got 5"),
    ],
)
def test_a_fault_stops_the_first_batch_and_is_counted_later(answer: Any, named: str) -> None:
    """At the start it is a mistake of the task, and its traceback helps; after a good batch it is an accident."""
    with pytest.raises((ZeroDivisionError, ValueError)) as caught:
        RewardCheck(Paying(answer)).scores(ASKED, ANSWERS)
    assert "task echo" in str(caught.value) + "".join(caught.value.__notes__)
    check = RewardCheck(Paying([1.0] * 4, answer, [0.0] * 4))
    check.scores(ASKED, ANSWERS)
    scores = check.scores(ASKED, ANSWERS)
    assert [(score.reward, score.reason) for score in scores] == [(None, REWARD_ERROR)] * 4
    (fault,) = check.take_faults()
    assert "task echo: no reward for 4 completions" in fault and named in fault
    assert [score.reward for score in check.scores(ASKED, ANSWERS)] == [0.0] * 4


def test_what_is_no_score_is_a_fault_too() -> None:
    task = Paying()
    task.reward = lambda problems, completions: [1.0] * 4  # type: ignore[method-assign]
    with pytest.raises(AttributeError):
        RewardCheck(task).scores(ASKED, ANSWERS)


def test_a_mistake_of_the_person_ends_the_run_at_any_time() -> None:
    check = RewardCheck(Paying([1.0] * 4, UserError("no such column")))
    check.scores(ASKED, ANSWERS)
    with pytest.raises(UserError, match="no such column"):
        check.scores(ASKED, ANSWERS)


class Judging(Echo):
    """Its strict check says or raises what it is told to, by the problem's token."""

    def __init__(self, **by_token: Any) -> None:
        super().__init__(EchoOptions(num_tokens=4))
        self.by_token = by_token

    def verify(self, problem: Problem, completion: Completion) -> Score:
        told = self.by_token.get(f"echo{problem.prompt[0]}", 1.0)
        if isinstance(told, Exception):
            raise told
        return Score(reward=told, parts={}, reason="ok")


@pytest.mark.parametrize("told", [ZeroDivisionError("by zero"), math.nan, "1"])
def test_a_strict_check_that_fails_later_leaves_its_row_unjudged(told: object) -> None:
    task = Judging()
    check = RewardCheck(task)
    assert [verdict.reward for verdict in check.verdicts(ASKED, ANSWERS)] == [1.0] * 4
    task.by_token = {"echo1": told, "echo3": told}
    verdicts = check.verdicts(ASKED, ANSWERS)
    assert [verdict.reward for verdict in verdicts] == [1.0, None, 1.0, None]
    assert verdicts[1] == Score(reward=None, parts={}, reason=REWARD_ERROR)
    (fault,) = check.take_faults()
    assert "task echo: no verdict for 2 of 4 completions, such as echo:1" in fault


def test_a_strict_check_that_fails_at_first_ends_the_run() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        RewardCheck(Judging(echo2=ZeroDivisionError())).verdicts(ASKED, ANSWERS)
    assert "while task echo verified its first batch" in caught.value.__notes__


def test_a_mistake_of_the_person_in_a_strict_check_ends_the_run_at_any_time() -> None:
    task = Judging()
    check = RewardCheck(task)
    check.verdicts(ASKED, ANSWERS)
    task.by_token = {"echo0": UserError("no such column")}
    with pytest.raises(UserError, match="no such column"):
        check.verdicts(ASKED, ANSWERS)


def test_truncated_completions_can_earn_nothing() -> None:
    """Whatever the task; one that was not scored stays so, and the reason is the task's."""
    answers = [replace(answer, is_truncated=n > 0) for n, answer in enumerate(ANSWERS)]
    paid = [1.0, 1.0, None, -2.0]
    assert [s.reward for s in RewardCheck(Paying(paid)).scores(ASKED, answers)] == paid
    scores = RewardCheck(Paying(paid), truncated_reward="zero").scores(ASKED, answers)
    assert [(s.reward, s.reason) for s in scores] == [(1.0, "ok"), (0.0, "ok"), (None, "ok"), (0.0, "ok")]


class Ahead(Judging):
    """Judges ahead, as long as it can; it has no processes to open or close."""

    fault: Exception | None = None
    num_begun = 0

    def start_scoring(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        if self.fault is not None:
            raise self.fault
        self.num_begun += len(completions)


def test_any_task_may_judge_ahead_and_may_fail_at_it() -> None:
    task = Ahead()
    check = RewardCheck(task)
    check.start_scoring(ASKED, ANSWERS)
    assert task.num_begun == 4
    task.fault = OSError("no process")
    with pytest.raises(OSError, match="no process"):
        check.start_scoring(ASKED, ANSWERS)
    check.verdicts(ASKED, ANSWERS)
    check.start_scoring(ASKED, ANSWERS)
    assert "4 completions not scored ahead: OSError('no process')" in check.take_faults()[0]
