import pytest

from sparkgrpo.trainer.tasks.base import Completion
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions


def sampled(*token_ids: int) -> Completion:
    return Completion(text="", token_ids=token_ids, is_truncated=True)


def test_prompt_p_is_the_token_p() -> None:
    problems = sorted(Echo(EchoOptions()).problems(0, 0, 5), key=lambda problem: problem.prompt)
    assert [problem.prompt for problem in problems] == [(0,), (1,), (2,), (3,), (4,)]
    assert [problem.identity for problem in problems] == [f"echo:{p}" for p in range(5)]
    assert all(set(problem.columns) == Echo.columns for problem in problems)


def test_every_batch_of_n_has_each_prompt_once_and_parts_make_the_whole() -> None:
    task = Echo(EchoOptions(num_tokens=7))
    assert task.num_problems == 7
    whole = task.problems(3, 0, 21)
    assert whole == task.problems(3, 0, 9) + task.problems(3, 9, 12)
    assert all(len({problem.identity for problem in whole[start : start + 7]}) == 7 for start in (0, 7, 14))
    assert whole[:7] != whole[7:14] and whole != task.problems(4, 0, 21), "each epoch and seed has an order of its own"


def test_heldout_is_at_most_all_prompts() -> None:
    task = Echo(EchoOptions())
    assert [problem.prompt for problem in task.heldout(3)] == [(0,), (1,), (2,)]
    assert len(task.heldout(200)) == 5


@pytest.mark.parametrize(
    ("token_ids", "reward", "reason"),
    [
        ((3,), 1.0, "ok"),
        ((2,), 0.0, "wrong_value"),
        ((), 0.0, "no_answer"),
        ((3, 1), 1.0, "ok"),
        ((1, 3), 0.0, "wrong_value"),
    ],
)
def test_the_first_sampled_token_decides(token_ids: tuple[int, ...], reward: float, reason: str) -> None:
    task = Echo(EchoOptions())
    problem = next(problem for problem in task.problems(0, 0, 5) if problem.prompt == (3,))
    score = task.verify(problem, sampled(*token_ids))
    assert (score.reward, score.reason, score.parts) == (reward, reason, {"correct": reward})
    assert task.reward([problem], [sampled(*token_ids)]) == [score]
    assert score.reason in task.reasons


def test_reward_pairs_problems_with_completions() -> None:
    task = Echo(EchoOptions())
    problems = sorted(task.problems(0, 0, 5), key=lambda problem: problem.prompt)
    assert [s.reward for s in task.reward(problems, [sampled(p) for p in (0, 0, 2, 2, 4)])] == [1, 0, 1, 0, 1]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        task.reward(problems, [sampled(0)])


def test_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 2"):
        EchoOptions(num_tokens=1)
