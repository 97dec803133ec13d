"""Interval arithmetic against arithmetic on single nanoseconds."""

import numpy as np
import pytest

from sparkgrpo.profiling import intervals

SPAN = 60


def random_intervals(seed: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, SPAN - 10, num)
    return start, start + rng.integers(0, 10, num)


def moments(start: np.ndarray, end: np.ndarray) -> set[int]:
    return {t for a, b in zip(start.tolist(), end.tolist(), strict=True) for t in range(a, b)}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num_a", "num_b"), [(0, 0), (0, 5), (5, 0), (1, 1), (7, 9), (30, 3)])
def test_sets_of_moments(seed: int, num_a: int, num_b: int) -> None:
    a, b = random_intervals(seed, num_a), random_intervals(seed + 99, num_b)
    in_a, in_b = moments(*a), moments(*b)
    assert intervals.union_ns(*a) == len(in_a)
    start, end = intervals.merged(*a)
    assert moments(start, end) == in_a and (start[1:] > end[:-1]).all()
    assert intervals.overlap_ns(*a, *b) == len(in_a & in_b)
    assert moments(*intervals.intersection(*a, *b)) == in_a & in_b
    assert moments(*intervals.difference(*a, *b)) == in_a - in_b
    assert moments(*intervals.gaps(*a, 5, 50)) == set(range(5, 50)) - in_a


@pytest.mark.parametrize("seed", range(30))
def test_innermost_is_the_latest_start_that_contains(seed: int) -> None:
    """Also where intervals cross or begin together."""
    start, end = random_intervals(seed, 25)
    query_start, query_end = random_intervals(seed + 7, 40)
    query_end = np.maximum(query_end, query_start + 1)
    found = intervals.innermost(start, end, query_start, query_end)
    for begin, stop, place in zip(query_start, query_end, found, strict=True):
        holding = [i for i in range(25) if start[i] <= begin and end[i] >= stop]
        if not holding:
            assert place == -1
        else:
            assert place in holding and (start[place], -end[place]) == max((start[i], -end[i]) for i in holding)


def test_groups_do_not_see_each_other() -> None:
    group, start, end = np.array([1, 2]), np.array([0, 0]), np.array([10, 10])
    found = intervals.innermost_by_group(group, start, end, np.array([2, 1, 3]), np.ones(3), np.full(3, 2))
    assert found.tolist() == [1, 0, -1]


def test_self_time_is_what_the_children_leave() -> None:
    """outer 0-100 with 10-40 (with 20-30 inside) and 50-60; a neighbour after it; another thread at the same time."""
    start = np.array([0, 10, 20, 50, 100, 0])
    end = np.array([100, 40, 30, 60, 120, 90])
    assert intervals.self_ns(np.array([1, 1, 1, 1, 1, 2]), start, end).tolist() == [60, 20, 10, 10, 20, 90]


def test_two_calls_of_equal_times_are_nested() -> None:
    """A wrapper that lasts as long as what it calls has no time of its own; nothing is counted twice."""
    own = intervals.self_ns(np.zeros(2), np.array([5, 5]), np.array([9, 9]))
    assert sorted(own.tolist()) == [0, 4]
