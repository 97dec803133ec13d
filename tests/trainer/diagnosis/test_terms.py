"""The terms of diagnosis against plain Python, and the episodes by hand."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from sparkgrpo.trainer.diagnosis.curves import Curves, direction, rolling_median, run_length
from sparkgrpo.trainer.diagnosis.episode import Episode, episode_of


def noisy(num_steps: int, seed: int, null_share: float = 0.2) -> list[float | None]:
    draw = random.Random(seed)
    return [None if draw.random() < null_share else draw.gauss(1.0, 0.3) + 0.01 * t for t in range(num_steps)]


def curves(values: list[float | None]) -> Curves:
    return Curves([{"step": t + 1, "x": value} for t, value in enumerate(values)], (), {})


@pytest.mark.parametrize("seed", range(3))
def test_medians_against_statistics(seed: int) -> None:
    values = noisy(60, seed)
    found, early = curves(values).med10("x"), curves(values).early("x")
    for t in range(60):
        known = [v for v in values[max(0, t - 9) : t + 1] if v is not None]
        expected = statistics.median(known) if len(known) >= 6 else math.nan
        assert found[t] == pytest.approx(expected, nan_ok=True)
        first = [v for v in values[: min(t + 1, 10)] if v is not None]
        assert early[t] == pytest.approx(statistics.median(first) if len(first) >= 6 else math.nan, nan_ok=True)


def plain_trend(values: list[float | None], t: int) -> tuple[float, float] | None:
    w = min(20, (t + 1) // 2)
    if w < 8:
        return None
    last = values[t + 1 - 2 * w : t + 1]
    before, now = ([v for v in half if v is not None] for half in (last[:w], last[w:]))
    steps = [abs(b - a) for a, b in itertools.pairwise(last) if a is not None and b is not None]
    sigma = 1.4826 * statistics.median(steps) / math.sqrt(2)
    return statistics.fmean(now) - statistics.fmean(before), 2 * sigma * math.sqrt(2 / w)


@pytest.mark.parametrize("seed", range(3))
def test_trend_against_plain_python(seed: int) -> None:
    values = noisy(60, seed)
    change, limit = curves(values).trend("x")
    for t in range(60):
        expected = plain_trend(values, t)
        assert (change[t], limit[t]) == pytest.approx(expected or (math.nan, math.nan), nan_ok=True)
    assert curves(values).rising("x")[-1] == (change[-1] > limit[-1])
    assert direction(values) == (1 if change[-1] > limit[-1] else -1 if change[-1] < -limit[-1] else 0)


def test_terms_do_not_depend_on_later_steps() -> None:
    values = noisy(60, 7)
    for length in (5, 16, 33, 59):
        for whole, part in zip(
            (curves(values).med10("x"), *curves(values).trend("x")),
            (curves(values[:length]).med10("x"), *curves(values[:length]).trend("x")),
            strict=True,
        ):
            np.testing.assert_array_equal(whole[:length], part)


def test_empty_and_short_curves() -> None:
    empty = Curves([], [], {})
    assert empty.med10("x").size == empty.trend("x")[0].size == 0 and not empty.has("x")
    assert direction([1.0] * 10) == 0 and direction([]) == 0
    assert rolling_median(np.array([1.0, np.nan]), 10, 1).tolist() == [1.0, 1.0]
    assert run_length(np.array([1, 1, 0, 1, 1, 1], bool)).tolist() == [1, 2, 0, 1, 2, 3]


def episode(severities: str, at_once: str = "") -> Episode | None:
    lasting = [int(c) for c in severities]
    return episode_of(lasting, [int(c) for c in at_once] if at_once else [0] * len(lasting))


def test_five_in_a_row_raise() -> None:
    assert episode("0022220222200") is None
    found = episode("0022222")
    assert found and (found.severity, found.first_idx, found.raised_idx, found.is_active) == (2, 2, 6, True)


def test_at_once_does_not_wait() -> None:
    found = episode("0000", "0300")
    assert found and (found.severity, found.first_idx, found.raised_idx, found.last_idx) == (3, 1, 1, 1)


def test_it_clears_after_ten_without_and_then_stays_quiet_for_twenty() -> None:
    found = episode("22222" + "0" * 9)
    assert found and found.is_active
    found = episode("22222" + "0" * 10)
    assert found and not found.is_active and found.last_idx == 4
    again = episode("22222" + "0" * 10 + "2" * 19)
    assert again and not again.is_active  # quiet
    again = episode("22222" + "0" * 10 + "2" * 21)
    assert again and again.is_active and again.num_episodes == 2 and again.first_idx == 0


def test_severity_rises_and_falls_with_the_condition() -> None:
    found = episode("22222" + "33333")
    assert found and found.severity == 3
    found = episode("33333" + "2" * 9)
    assert found and found.severity == 3
    found = episode("33333" + "2" * 10)
    assert found and found.severity == 2 and found.is_active
    assert (mixed := episode("23232")) and mixed.severity == 2
