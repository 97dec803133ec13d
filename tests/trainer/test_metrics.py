"""The schema, and the metrics that follow from rewards and lengths, against values worked out by hand."""

import math
from collections.abc import Sequence

import pytest

from sparkgrpo.trainer.metrics import METRICS, PHASES, Batch, batch_metrics, is_dead, metric_of


def batch(
    rewards: Sequence[float | None],
    group_ids: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    texts: Sequence[object] | None = None,
    strict: Sequence[bool] | None = (),
    is_truncated: Sequence[bool] | None = None,
) -> Batch:
    is_right = [reward == 1.0 for reward in rewards]
    return Batch(
        group_ids=group_ids,
        rewards=rewards,
        is_right=is_right,
        is_right_strict=is_right if strict == () else strict,
        reasons=["ok" if right else "wrong_value" for right in is_right],
        parts=[{"answer": 1.0} if right else {} for right in is_right],
        lengths=lengths or [10] * len(rewards),
        is_truncated=is_truncated or [False] * len(rewards),
        texts=tuple(texts or range(len(rewards))),  # type: ignore[arg-type]
    )


def test_schema_has_no_key_twice_and_knows_families() -> None:
    keys = [metric.key for metric in METRICS]
    assert len(keys) == len(set(keys))
    assert all(metric.definition for metric in METRICS)
    assert metric_of("reason/ok") is metric_of("reason/no_answer")
    assert metric_of("reward") is None
    assert all(metric_of(phase) for phase in PHASES)


def test_every_key_of_a_batch_is_in_the_schema() -> None:
    assert [key for key in batch_metrics(batch([1.0, 0.0], [0, 0])) if metric_of(key) is None] == []


def test_rewards_by_hand() -> None:
    # Groups: (1, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0), interleaved.
    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    found = batch_metrics(batch(rewards, [5, 2, 9] * 4))
    assert found["reward_mean"] == pytest.approx(5 / 12)
    assert found["reward_std"] == pytest.approx(math.sqrt(5 / 12 * 7 / 12))
    assert found["reward_std_within"] == pytest.approx(math.sqrt(3 / 16) / 3)
    assert found["reward_best_mean"] == pytest.approx(2 / 3)
    assert found["num_right"] == [1, 4, 0]
    assert found["frac_zero_std"] == pytest.approx(2 / 3)
    assert found["frac_all_right"] == found["frac_all_wrong"] == pytest.approx(1 / 3)
    assert found["frac_zero_std_floor"] == pytest.approx((5 / 12) ** 4 + (7 / 12) ** 4)
    assert (found["reason/ok"], found["reason/wrong_value"]) == (5 / 12, 7 / 12)
    assert found["part/answer"] == 1.0


@pytest.mark.parametrize("size", range(2, 17))
def test_equal_floats_are_dead_and_have_no_spread(size: int) -> None:
    """The mean of equal floats need not equal them: 0.1 summed three times is not 0.3."""
    found = batch_metrics(batch([0.1] * size, [0] * size))
    assert found["reward_std"] == found["reward_std_within"] == 0.0
    assert (found["frac_zero_std"], found["frac_all_right"], found["frac_all_wrong"]) == (1.0, 0.0, 1.0)


def test_nearly_equal_rewards_are_alive() -> None:
    assert not is_dead([0.1, math.nextafter(0.1, 1.0)])


def test_unscored_leave_the_statistics() -> None:
    # Group 0: (1, None, 0); group 1: (None, None, 1): fewer than two scored, so dead; its scored member is right.
    found = batch_metrics(batch([1.0, None, 0.0, None, None, 1.0], [0, 0, 0, 1, 1, 1]))
    assert found["reward_mean"] == found["frac_right"] == pytest.approx(2 / 3)
    assert found["num_right"] == [1, 1]
    assert (found["frac_zero_std"], found["frac_all_right"]) == (0.5, 0.5)
    assert found["reward_std_within"] == 0.25


def test_nothing_scored_is_null_not_zero() -> None:
    found = batch_metrics(batch([None, None], [0, 0]))
    keys = ("reward_mean", "reward_std", "reward_std_within", "reward_best_mean", "frac_right", "hack_gap")
    assert [found[key] for key in (*keys, "frac_zero_std_floor")] == [None] * 7
    assert (found["frac_zero_std"], found["frac_all_wrong"]) == (1.0, 1.0)


def test_hack_gap_is_what_the_reward_overpays() -> None:
    found = batch_metrics(batch([1.0, 1.0, 0.0, 0.0], [0] * 4, strict=[True, False, False, False]))
    assert (found["frac_right"], found["frac_right_strict"], found["hack_gap"]) == (0.5, 0.25, 0.25)
    assert batch_metrics(batch([1.0, 0.0], [0, 0], strict=None))["hack_gap"] is None


def test_floor_needs_two_valued_rewards() -> None:
    assert batch_metrics(batch([0.0, 0.5, 1.0], [0] * 3))["frac_zero_std_floor"] is None


def test_lengths_by_hand() -> None:
    found = batch_metrics(
        batch([1.0, 0.0, 1.0, 0.0], [0] * 4, lengths=[2, 10, 4, 20], is_truncated=[False, False, True, True])
    )
    assert (found["len_mean"], found["len_max"], found["len_right_mean"], found["len_wrong_mean"]) == (9, 20, 3, 15)
    assert (found["frac_truncated"], found["frac_truncated_right"]) == (0.5, 0.25)
    assert batch_metrics(batch([1.0], [0]))["len_wrong_mean"] is None


def test_distinct_completions() -> None:
    found = batch_metrics(batch([0.0] * 4 + [1.0, 0.0], [0, 0, 1, 1, 2, 2], texts=["a", "a", "a", "b", "a", "a"]))
    assert found["frac_unique"] == pytest.approx((1 / 2 + 1 + 1 / 2) / 3)
    assert found["frac_dead_identical"] == 0.5
    assert batch_metrics(batch([1.0, 0.0], [0, 0]))["frac_dead_identical"] is None


def test_a_reason_seen_before_is_zero_when_absent() -> None:
    found = batch_metrics(batch([1.0, 1.0], [0, 0]), seen_reasons={"no_answer", "ok"})
    assert (found["reason/no_answer"], found["reason/ok"]) == (0.0, 1.0)
    assert "reason/wrong_value" not in found


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        batch([1.0, 0.0], [0])
    with pytest.raises(ValueError, match="at least 1"):
        batch([], [])
