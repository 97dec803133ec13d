"""The curves of a run as arrays over its steps, and the terms that the rules of diagnosis are written in.

Every array has one entry a step, is NaN where nothing is known, and is causal: entry t depends on steps up to t alone,
so a run that is still going and the same run read later get the same verdicts.

Letters: T steps, E evaluations.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from sparkgrpo.trainer.dashboard import number

Array = np.ndarray

WINDOW, MIN_KNOWN = 10, 6
TREND_WINDOW, MIN_TREND_WINDOW = 20, 8


class Curves:
    """Rows of metrics.jsonl and evals.jsonl, ascending by step.

    Args:
        steps: Lines of metrics.jsonl. evals: Lines of evals.jsonl.
        config: The resolved configuration, from run.json.
        run: The rest of run.json.
    """

    def __init__(
        self,
        steps: Sequence[Mapping[str, object]],
        evals: Sequence[Mapping[str, object]],
        config: Mapping[str, object],
        run: Mapping[str, object] | None = None,
    ) -> None:
        self.rows, self.config, self.run = steps, config, run or {}
        self.T = len(steps)
        self.step_T = np.array([number(row.get("step")) or 0.0 for row in steps])
        known = [row for row in evals if number(row.get("accuracy")) is not None]
        self.eval_rows = known
        self.eval_step_E = np.array([number(row.get("step")) or 0.0 for row in known])
        self.accuracy_E = np.array([number(row.get("accuracy")) for row in known], dtype=float)
        self.accuracy_se_E = np.array([number(row.get("accuracy_se")) or 0.0 for row in known])
        self._cached: dict[tuple[object, ...], Array] = {}

    def _once(self, key: tuple[object, ...], make: Callable[[], Array]) -> Array:
        if key not in self._cached:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a window of nulls is NaN, as it should be
                self._cached[key] = make()
        return self._cached[key]

    def setting(self, name: str, default: float) -> float:
        """A number of the configuration."""
        found = number(self.config.get(name))
        return default if found is None else found

    def has(self, key: str) -> bool:
        """Whether the metric was ever known."""
        return bool(np.isfinite(self.raw(key)).any())

    def raw(self, key: str) -> Array:
        """The metric at every step [T]."""
        return self._once(
            ("raw", key),
            lambda: np.array([np.nan if (v := number(r.get(key))) is None else v for r in self.rows], dtype=float),
        )

    def med10(self, key: str) -> Array:
        """Median of the last 10 values (6 at least, nulls left out) [T]."""
        return self._once(("med10", key), lambda: rolling_median(self.raw(key), WINDOW, MIN_KNOWN))

    def early(self, key: str) -> Array:
        """Median of the first 10 values; NaN until 6 of them are known [T]."""
        return self._once(("early", key), lambda: self._early(self.raw(key)))

    def _early(self, raw_T: Array) -> Array:
        found = np.full(self.T, np.nan)
        first = raw_T[:WINDOW]
        for t in range(min(self.T, WINDOW)):
            known = first[: t + 1][np.isfinite(first[: t + 1])]
            if len(known) >= MIN_KNOWN:
                found[t] = np.median(known)
        if self.T > WINDOW:
            found[WINDOW:] = found[WINDOW - 1]
        return found

    def trend(self, key: str) -> tuple[Array, Array]:
        """Mean of the last w steps less that of the w before, and what it has to exceed to be no noise; each [T].

        w = min(20, step // 2), at least 8. The noise is estimated from differences of neighbours, so that a trend is
        no noise: sigma = 1.4826 median |x_t - x_(t-1)| / sqrt(2), and the limit is 2 sigma sqrt(2 / w).
        """
        both = self._once(("trend", key), lambda: _trend(self.raw(key)))
        return both[0], both[1]

    def rising(self, key: str) -> Array:
        """bool [T]: it rises by more than noise."""
        change_T, limit_T = self.trend(key)
        return np.nan_to_num(change_T, nan=-1.0) > np.nan_to_num(limit_T, nan=np.inf)

    def falling(self, key: str) -> Array:
        """bool [T]: it falls by more than noise, and by 0.05."""
        change_T, limit_T = self.trend(key)
        return (-np.nan_to_num(change_T) > np.nan_to_num(limit_T, nan=np.inf)) & (np.nan_to_num(change_T) <= -0.05)

    @cached_property
    def num_evals_T(self) -> Array:
        """Evaluations known at each step [T]."""
        return np.searchsorted(self.eval_step_E, self.step_T, side="right") if self.T else np.zeros(0, int)

    def at_evals(self, of_prefix: Callable[[Array], float], at_least: int) -> Array:
        """``of_prefix`` of the accuracies known at each step, NaN where there are fewer than ``at_least`` [T]."""
        values = np.array(
            [np.nan if n < at_least else of_prefix(self.accuracy_E[:n]) for n in range(len(self.accuracy_E) + 1)]
        )
        return values[self.num_evals_T]

    @cached_property
    def learning(self) -> Array:
        """bool [T]: the share of right answers rises, by 0.02 at least; where it is not known, the reward."""
        if not self.has("frac_right"):
            return self.rising("reward_mean")
        return self.rising("frac_right") & (np.nan_to_num(self.trend("frac_right")[0]) >= 0.02)

    @cached_property
    def right_noise(self) -> Array:
        """Standard error of the median of 10 of frac_right, from differences of neighbours [T]."""
        step_T = rolling_median(np.abs(np.diff(self.raw("frac_right"), prepend=np.nan)), 50, MIN_KNOWN)
        return np.nan_to_num(1.4826 * step_T / np.sqrt(2) * np.sqrt(1.57 / WINDOW))

    @cached_property
    def fall_from_best(self) -> Array:
        """How far the median of frac_right lies below its best so far [T]."""
        now_T = self.med10("frac_right")
        best_T = np.fmax.accumulate(now_T) if self.T else now_T
        return best_T - now_T

    @cached_property
    def thriving(self) -> Array:
        """bool [T]: more answers are right than at first (0.05), and hardly fewer than ever (0.05, or noise).

        `learning` misses slow progress under the noise of small batches.
        """
        gained_T = self.med10("frac_right") - self.early("frac_right")
        return (gained_T >= 0.05) & (self.fall_from_best <= np.maximum(0.05, 2.5 * self.right_noise))

    @cached_property
    def solved(self) -> Array:
        """bool [T]: nearly all answers are right, held-out ones too where they were looked at."""
        last_T = self.at_evals(lambda accuracy: accuracy[-1], 1)
        return (self.med10("frac_right") >= 0.85) & ((last_T >= 0.8) | np.isnan(last_T))

    @cached_property
    def hurt(self) -> Array:
        """bool [T]: it was better before: held-out by 0.08 (mean of the last two), or in training by 0.15.

        Both beyond noise: the best of many noisy values lies above the truth (2.5 and 5 standard errors). And a fall in
        training is none while held-out accuracy stays at its best.
        """
        fall_T = self.at_evals(lambda accuracy: accuracy.max() - accuracy[-2:].mean(), 3)
        se = np.median(self.accuracy_se_E) if len(self.accuracy_se_E) else 0.0
        by_training_T = self.fall_from_best >= np.maximum(0.15, 5 * self.right_noise)
        lowered_T = self.at_evals(lambda accuracy: accuracy.max() - accuracy[-2:].max(), 3)
        by_training_T &= np.isnan(lowered_T) | (lowered_T >= float(se))
        return (fall_T >= max(0.08, 2.5 * float(se) * np.sqrt(1.5))) | by_training_T

    @property
    def is_one_update(self) -> bool:
        """One optimiser update a batch: ratio and clip have nothing to do."""
        if self.config.keys().isdisjoint(("inner_epochs", "mini_batches")):  # another trainer's log
            return not np.nan_to_num(self.raw("clip_frac")).any()
        return self.setting("inner_epochs", 1) * self.setting("mini_batches", 1) == 1


def rolling_median(raw_T: Array, window: int, min_known: int) -> Array:
    """Median of the last ``window`` entries, NaN where fewer than ``min_known`` of them are known [T]."""
    if not len(raw_T):
        return raw_T
    padded = np.concatenate([np.full(window - 1, np.nan), raw_T])
    windows_TW = np.lib.stride_tricks.sliding_window_view(padded, window)
    return np.where(np.isfinite(windows_TW).sum(axis=1) >= min_known, _known_median(windows_TW), np.nan)


def run_length(condition_T: Array) -> Array:
    """How many steps in a row, up to and with each, the condition held [T]."""
    steps = np.arange(1, len(condition_T) + 1)
    broken = np.maximum.accumulate(np.where(condition_T, 0, steps)) if len(condition_T) else steps
    return steps - broken


def direction(values: Sequence[float | None]) -> int:
    """1, -1 or 0: whether the newest values rise or fall by more than noise (the terms of `Curves.trend`)."""
    raw_T = np.array([np.nan if value is None else value for value in values], dtype=float)
    w = min(TREND_WINDOW, len(raw_T) // 2)
    if w < MIN_TREND_WINDOW:
        return 0
    change, limit = _changes(raw_T[None, -2 * w :], w)
    return int(np.sign(change[0])) if abs(np.nan_to_num(change[0])) > np.nan_to_num(limit[0], nan=np.inf) else 0


def _trend(raw_T: Array) -> Array:
    T = len(raw_T)
    change, limit = np.full(T, np.nan), np.full(T, np.nan)
    widths = np.minimum(TREND_WINDOW, np.arange(1, T + 1) // 2)
    for w in np.unique(widths[widths >= MIN_TREND_WINDOW]):
        at = np.flatnonzero(widths == w)
        index = at[:, None] - np.arange(2 * w)[None, ::-1]  # the last 2 w steps of each, in order; never negative
        change[at], limit[at] = _changes(raw_T[index], w)
    return np.stack([change, limit])


def _changes(values_NW: Array, w: int) -> tuple[Array, Array]:
    """Mean of the last w less mean of the first w of each row, and two standard errors of that [N]."""
    change_N = _known_mean(values_NW[:, w:]) - _known_mean(values_NW[:, :w])
    sigma_N = 1.4826 * _known_median(np.abs(np.diff(values_NW, axis=1))) / np.sqrt(2)
    return change_N, 2 * sigma_N * np.sqrt(2 / w)


def _known_mean(values_NW: Array) -> Array:
    known = np.isfinite(values_NW)
    count_N = known.sum(axis=1)
    return np.where(count_N > 0, np.where(known, values_NW, 0.0).sum(axis=1) / np.maximum(count_N, 1), np.nan)


def _known_median(values_NW: Array) -> Array:
    sorted_NW = np.sort(values_NW, axis=1)  # NaN goes to the end
    count_N = np.isfinite(sorted_NW).sum(axis=1)
    rows = np.arange(len(values_NW))
    low, high = np.maximum(count_N - 1, 0) // 2, np.minimum(count_N // 2, values_NW.shape[1] - 1)
    return np.where(count_N > 0, (sorted_NW[rows, low] + sorted_NW[rows, high]) / 2, np.nan)
