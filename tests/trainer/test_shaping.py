"""What is added to rewards."""

import pytest

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.shaping import overlong_penalty, shaped_rewards


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0)]
)
def test_overlong_penalty(length: int, expected: float) -> None:
    """Room for 100 tokens, of which the last 20 are the cache: equation 13 of the paper."""
    assert overlong_penalty(length, 100, 20.0) == pytest.approx(expected, abs=1e-12)


def test_without_a_cache_nothing_is_added() -> None:
    assert overlong_penalty(100, 100, 0.0) == 0.0
    assert shaped_rewards([1.0, 0.1, None], [100, 100, 100], Config(max_new_tokens=100)) == [1.0, 0.1, None]


def test_a_cache_of_the_whole_length_punishes_every_token() -> None:
    assert overlong_penalty(25, 100, 100.0) == -0.25


def test_shift_and_penalty_are_added_and_unscored_stays_unscored() -> None:
    config = Config(max_new_tokens=10, overlong_cache=0.5, reward_shift=5.0)
    assert shaped_rewards([1.0, 0.0, None, 1.0], [5, 10, 10, 7], config) == pytest.approx([6.0, 4.0, None, 5.6])
