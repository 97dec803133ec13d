"""How many dead groups to expect, and what another group size would give.

A group is dead when its G answers are all right or all wrong. One prompt with pass rate p: p^G + (1 - p)^G exactly.
Prompts differ, so the batch's mean p gives a lower bound only (the function is convex). A beta-binomial distribution of
pass rates, fitted to the counts of right answers, must give this G's share again and then predicts another. For g < G
no model is needed: a random subset of g siblings of a group with k right is dead with
[C(k, g) + C(G - k, g)] / C(G, g).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparkgrpo.trainer.diagnosis.curves import Array

_MIN_GROUPS = 20


def dead_share(p: float | Array, group_size: int) -> float | Array:
    """p^G + (1 - p)^G: the chance that a group of one prompt with pass rate p is dead."""
    return p**group_size + (1 - p) ** group_size


def subset_dead_share(num_right: Sequence[int], group_size: int, smaller: int) -> float:
    """The share of dead groups that groups of ``smaller`` would have had: exact, from the counts of larger groups.

    Args:
        num_right: Right answers of each group of ``group_size``.
        smaller: Members taken, 1 to group_size.
    """
    total = math.comb(group_size, smaller)
    dead = [math.comb(k, smaller) + math.comb(group_size - k, smaller) for k in num_right]
    return math.fsum(d / total for d in dead) / len(dead)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRates:
    """A beta distribution of pass rates over prompts."""

    a: float
    b: float
    group_size: int
    num_groups: int
    measured: float
    """Share of dead groups among those it was fitted to."""

    @property
    def mean(self) -> float:
        """Mean pass rate."""
        return self.a / (self.a + self.b)

    def dead(self, group_size: int) -> float:
        """Expected share of dead groups of this size: P(all right) + P(all wrong)."""
        i = np.arange(group_size)
        below = np.log(self.a + self.b + i).sum()
        return float(np.exp(np.log(self.a + i).sum() - below) + np.exp(np.log(self.b + i).sum() - below))

    @property
    def fits(self) -> bool:
        """Whether it gives the measured share again, within three standard errors."""
        share = self.dead(self.group_size)
        return abs(share - self.measured) <= 3 * math.sqrt(max(share * (1 - share), 1e-4) / self.num_groups)


def fit_pass_rates(num_right: Sequence[int], group_size: int) -> PassRates | None:
    """The likeliest beta distribution for counts of right answers; None for fewer than 20 groups or size 1.

    The likelihood is looked at on a grid over (mean, log concentration) that is refined four times.
    """
    counts = np.array([k for k in num_right if 0 <= k <= group_size], dtype=int)
    if len(counts) < _MIN_GROUPS or group_size < 2:
        return None
    histogram = np.bincount(counts, minlength=group_size + 1)
    low, high = np.array([-6.0, -4.0]), np.array([6.0, 7.0])  # logit of the mean, log of a + b
    best = (low + high) / 2
    for _ in range(5):
        grids = [np.linspace(low[i], high[i], 25) for i in (0, 1)]
        logit, log_sum = np.meshgrid(*grids, indexing="ij")
        mean, total = 1 / (1 + np.exp(-logit)), np.exp(log_sum)
        likelihood = _log_likelihood(mean * total, (1 - mean) * total, histogram)
        at = np.unravel_index(np.argmax(likelihood), likelihood.shape)
        best = np.array([logit[at], log_sum[at]])
        width = (high - low) / 8
        low, high = best - width, best + width
    mean, total = 1 / (1 + math.exp(-best[0])), math.exp(best[1])
    dead = (counts == 0) | (counts == group_size)
    return PassRates(
        a=mean * total,
        b=(1 - mean) * total,
        group_size=group_size,
        num_groups=len(counts),
        measured=float(dead.mean()),
    )


def _log_likelihood(a: Array, b: Array, histogram: Array) -> Array:
    """Beta-binomial log-likelihood, without the binomial factors, which do not depend on a and b."""
    G = len(histogram) - 1
    i = np.arange(G)
    rising = [np.concatenate([np.zeros((*x.shape, 1)), np.log(x[..., None] + i).cumsum(-1)], -1) for x in (a, b, a + b)]
    k = np.arange(G + 1)
    return ((rising[0][..., k] + rising[1][..., G - k] - rising[2][..., [G]]) * histogram).sum(-1)


def recent_counts(steps: Sequence[Mapping[str, object]], num_steps: int = 20) -> tuple[list[int], int] | None:
    """The counts of right answers of the last steps and their group size; None where it changed or is not known."""
    counts: list[int] = []
    sizes = set()
    for row in steps[-num_steps:]:
        here = row.get("num_right")
        if isinstance(here, list):
            counts += [k for k in here if isinstance(k, int)]
            sizes.add(row.get("group_size"))
    size = sizes.pop() if len(sizes) == 1 else None
    return (counts, size) if isinstance(size, int) and not isinstance(size, bool) and 2 <= size <= 65536 else None


def dead_groups_note(steps: Sequence[Mapping[str, object]]) -> str | None:
    """What was measured, what equal difficulty would give, and what half and twice the group size would, in words."""
    found = recent_counts(steps)
    fit = None if found is None else fit_pass_rates(*found)
    if found is None or fit is None:
        return None
    counts, G = found
    p = sum(counts) / (len(counts) * G)
    text = (
        f"dead groups: {100 * fit.measured:.0f} % of the last {len(counts)}, {100 * dead_share(p, G):.0f} % "
        f"if all prompts were equally hard (pass rate {100 * p:.0f} %)"
    )
    if G >= 4:
        text += f"; {100 * subset_dead_share(counts, G, G // 2):.0f} % with group size {G // 2}"
    if fit.fits:
        text += f", {100 * fit.dead(2 * G):.0f} % expected with {2 * G}"
    return text
