"""Expected dead groups: formulas against draws, the fit against what it was drawn from."""

import math

import numpy as np
import pytest

from sparkgrpo.trainer.diagnosis.dead_groups import (
    dead_groups_note,
    dead_share,
    fit_pass_rates,
    recent_counts,
    subset_dead_share,
)


@pytest.mark.parametrize(
    ("p", "group_size", "share"), [(0.5, 8, 0.0078), (0.1, 8, 0.43), (0.9, 8, 0.43), (0.05, 8, 0.66), (0.05, 16, 0.44)]
)
def test_dead_share(p: float, group_size: int, share: float) -> None:
    assert dead_share(p, group_size) == pytest.approx(share, abs=0.005)


def draws(a: float, b: float, group_size: int, num_groups: int) -> list[int]:
    rng = np.random.default_rng(0)
    return rng.binomial(group_size, rng.beta(a, b, num_groups)).tolist()


def test_subsets_of_larger_groups_give_the_share_of_smaller_ones() -> None:
    counts = draws(0.5, 1.5, 16, 40_000)
    smaller = np.array(draws(0.5, 1.5, 8, 40_000))
    measured = float(((smaller == 0) | (smaller == 8)).mean())
    assert subset_dead_share(counts, 16, 8) == pytest.approx(measured, abs=4 * math.sqrt(2 * 0.25 / 40_000))
    assert subset_dead_share([0, 16, 8], 16, 16) == pytest.approx(2 / 3)
    assert subset_dead_share([3], 16, 1) == 1.0


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 2.0), (5.0, 1.0), (30.0, 30.0)])
def test_fit_finds_the_distribution_and_predicts_twice_the_size(a: float, b: float) -> None:
    fit = fit_pass_rates(draws(a, b, 8, 20_000), 8)
    assert fit and fit.fits and fit.mean == pytest.approx(a / (a + b), abs=0.02)
    larger = np.array(draws(a, b, 16, 20_000))
    assert fit.dead(16) == pytest.approx(float(((larger == 0) | (larger == 16)).mean()), abs=0.02)


def test_pass_rates_spread_evenly_give_22_percent_at_8() -> None:
    fit = fit_pass_rates(draws(1.0, 1.0, 8, 20_000), 8)
    assert fit and fit.dead(8) == pytest.approx(2 / 9, abs=0.01)


@pytest.mark.parametrize("counts", [[0] * 100, [8] * 100, [4] * 100, [0, 8] * 50])
def test_extreme_counts_do_not_raise(counts: list[int]) -> None:
    fit = fit_pass_rates(counts, 8)
    assert fit and 0 <= fit.dead(8) <= 1.0001 and math.isfinite(fit.dead(16))


def test_no_fit_for_few_groups_or_changing_sizes() -> None:
    assert fit_pass_rates([1] * 19, 8) is None and fit_pass_rates([1] * 50, 1) is None
    assert recent_counts([{"num_right": [1], "group_size": 8}, {"num_right": [1], "group_size": 16}]) is None
    assert (
        recent_counts([{"num_right": "x", "group_size": 8}]) == ([], 8) or recent_counts([{"num_right": "x"}]) is None
    )
    assert dead_groups_note([]) is None
    note = dead_groups_note([{"num_right": [0, 4, 8, 2] * 8, "group_size": 8}] * 3)
    assert note and "50 % of the last 96" in note and "with group size 4" in note
