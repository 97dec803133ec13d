"""Advantages against arithmetic by hand."""

import math
import warnings

import pytest
import torch

from sparkgrpo.trainer.advantages import STD_FLOOR, Estimator, advantages

ESTIMATORS: tuple[Estimator, ...] = ("group", "mean", "batch", "rloo", "none")


def values(rewards: list[float | None], group_S: list[int], estimator: Estimator, ddof: int = 0) -> list[float]:
    return advantages(rewards, group_S, estimator, ddof=ddof).advantage_S.tolist()


def test_one_success_in_sixteen() -> None:
    graded = advantages([1.0] + [0.0] * 15, [0] * 16, "group")
    std = math.sqrt(1 / 16 * 15 / 16)
    assert graded.std_N.tolist() == pytest.approx([std])
    assert graded.advantage_S.tolist() == pytest.approx([15 / 16 / (std + 1e-4)] + [-1 / 16 / (std + 1e-4)] * 15)
    assert [round(float(a), 2) for a in graded.advantage_S[:2]] == [3.87, -0.26]
    # Before the 1e-4: sqrt((1 - p) / p) and -sqrt(p / (1 - p)).
    bare = graded.advantage_S * (std + STD_FLOOR) / std
    assert bare[:2].tolist() == pytest.approx([math.sqrt(15), -math.sqrt(1 / 15)])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Group 0 has rewards 1, 0, 0, 0: mean 1/4, variance 3/16. Group 1 has 2, 1: mean 3/2, variance 1/4.
        ("mean", [0.75, -0.25, -0.25, -0.25, 0.5, -0.5]),
        ("group", [x / (math.sqrt(3) / 4 + 1e-4) for x in (0.75, -0.25, -0.25, -0.25)] + [0.5 / 0.5001, -0.5 / 0.5001]),
        # The batch has mean 2/3 and mean square 1: variance 5/9.
        ("batch", [x / (math.sqrt(5) / 3 + 1e-4) for x in (0.75, -0.25, -0.25, -0.25, 0.5, -0.5)]),
        # The siblings' means: 0, 1/3, 1/3, 1/3; 1, 2.
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3, 1.0, -1.0]),
        ("none", [1.0, 0.0, 0.0, 0.0, 2.0, 1.0]),
    ],
)
def test_every_estimator_by_hand(estimator: Estimator, expected: list[float]) -> None:
    assert values([1.0, 0.0, 0.0, 0.0, 2.0, 1.0], [0, 0, 0, 0, 1, 1], estimator) == pytest.approx(expected, rel=1e-12)


def test_ddof_one_is_the_sample_deviation() -> None:
    assert values([1.0, 0.0, 0.0, 0.0], [0] * 4, "group", ddof=1) == pytest.approx(
        [x / (0.5 + 1e-4) for x in (0.75, -0.25, -0.25, -0.25)], rel=1e-12
    )
    batch_std = math.sqrt(6 * 5 / 9 / 5)
    assert values([1.0, 0.0, 0.0, 0.0, 2.0, 1.0], [0, 0, 0, 0, 1, 1], "batch", ddof=1) == pytest.approx(
        [x / (batch_std + 1e-4) for x in (0.75, -0.25, -0.25, -0.25, 0.5, -0.5)], rel=1e-12
    )


@pytest.mark.parametrize("group_size", range(2, 17))
@pytest.mark.parametrize("estimator", ("group", "mean", "batch", "rloo"))
def test_equal_rewards_give_exactly_zero(group_size: int, estimator: Estimator) -> None:
    """The mean of equal floats need not equal them: a spread judged by the deviation would give 0.1s up to 0.8."""
    graded = advantages([0.1] * group_size + [0.0, 1.0], [0] * group_size + [1, 1], estimator)
    assert graded.advantage_S[:group_size].tolist() == [0.0] * group_size
    assert graded.is_dead_N.tolist() == [True, False]
    assert graded.std_N[0] == 0.0


def test_the_smallest_difference_is_alive() -> None:
    alive = advantages([1.0, 1.0 + 2**-52], [0, 0], "mean")
    assert alive.is_dead_N.tolist() == [False] and alive.advantage_S[1] > 0 >= alive.advantage_S[0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_unscored_completions_leave_the_statistics(estimator: Estimator) -> None:
    with_none = advantages([1.0, None, 0.0, 0.0, None], [0, 0, 0, 1, 1], estimator)
    without = advantages([1.0, 0.0, 0.0], [0, 0, 1], estimator)
    assert with_none.advantage_S[[0, 2, 3]].tolist() == without.advantage_S.tolist()
    assert with_none.advantage_S[[1, 4]].tolist() == [0.0, 0.0]
    assert with_none.is_scored_S.tolist() == [True, False, True, True, False]
    assert with_none.is_dead_N.tolist() == [False, True]  # one scored member teaches nothing


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_scored(estimator: Estimator) -> None:
    graded = advantages([None, None], [0, 0], estimator)
    assert graded.advantage_S.tolist() == [0.0, 0.0] and graded.is_dead_N.tolist() == [True]
    assert graded.std_N.tolist() == [0.0]
    assert advantages([], [], estimator).advantage_S.tolist() == []


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_members_of_a_group_need_not_be_adjacent(estimator: Estimator) -> None:
    rewards: list[float | None] = [1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 3.0, 3.0]
    group_S = [0, 0, 0, 0, 1, 1, 2, 2]
    order = [4, 0, 6, 1, 5, 2, 7, 3]
    shuffled = values([rewards[s] for s in order], [group_S[s] for s in order], estimator)
    straight = values(rewards, group_S, estimator)
    assert shuffled == pytest.approx([straight[s] for s in order], rel=1e-12, abs=0)


def test_equal_prompts_stay_two_groups() -> None:
    """Groups are ids: merged, the four would have the mean 1/2 and an advantage each."""
    assert values([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], "group") == [0.0] * 4


def test_no_warning_and_full_precision() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graded = advantages([1.0, 0.0], [0, 0], "group")
    assert graded.advantage_S.dtype == torch.float64
    assert graded.is_scored_S.dtype == graded.is_dead_N.dtype == torch.bool


@pytest.mark.parametrize(
    ("rewards", "group_S", "estimator", "message"),
    [
        ([1.0], [0, 0], "group", "1 rewards and 2 groups"),
        ([math.nan, 0.0], [0, 0], "group", "an unscored completion is None"),
        ([math.inf, 0.0], [0, 0], "none", "expected finite rewards"),
        ([1.0, 0.0], [0, 0], "best", "group, mean, batch, rloo or none, got 'best'"),
    ],
)
def test_wrong_input(rewards: list[float | None], group_S: list[int], estimator: Estimator, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(rewards, group_S, estimator)
