"""Rewards of one batch -> one advantage a completion.

Pure functions on the host in float64. Groups are explicit ids: two groups with the same prompt text stay two.
A group is **dead** when its rewards have max == min exactly (the mean of equal floats need not cancel, so never by the
standard deviation), or when fewer than two of them were scored; every baseline then gives its members exactly 0.
Unscored completions (None) leave their group's statistics and get 0.

Letters: S completions, N groups. Sources: `group` DeepSeekMath (arXiv:2402.03300), `mean` Dr. GRPO (arXiv:2503.20783),
`rloo` Ahmadian et al. (arXiv:2402.14740).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Estimator = Literal["group", "mean", "batch", "rloo", "none"]
STD_FLOOR = 1e-4
"""Added to the standard deviation before it divides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """One batch."""

    advantage_S: torch.Tensor
    """float64; exactly 0 where a completion teaches nothing (unscored, or in a dead group under any baseline)."""
    is_scored_S: torch.Tensor
    """bool."""
    is_dead_N: torch.Tensor
    """bool: no two scored rewards of the group differ."""
    std_N: torch.Tensor
    """float64, population standard deviation of each group's scored rewards; exactly 0 for a dead group."""


def advantages(
    rewards: Sequence[float | None], group_S: Sequence[int], estimator: Estimator, *, ddof: int = 0
) -> Advantages:
    """Grade every completion against its group.

    Args:
        rewards: One for each completion; None is unscored.
        group_S: Group index of each completion, 0 .. N - 1.
        estimator: `group`: (r - mean) / (std + 1e-4); `mean`: r - mean; `batch`: r - mean, over the batch's std + 1e-4;
            `rloo`: r - mean of the siblings; `none`: r.
        ddof: Divisor of the variances is n - ddof: 0 is DeepSeekMath's, 1 is TRL's.

    Raises:
        ValueError: Unlike lengths, an unknown estimator, a non-finite reward.
    """
    if len(rewards) != len(group_S):
        raise ValueError(f"expected a group for each reward, got {len(rewards)} rewards and {len(group_S)} groups")
    reward_S = torch.tensor([0.0 if r is None else r for r in rewards], dtype=torch.float64)
    if not reward_S.isfinite().all():
        raise ValueError("expected finite rewards, got NaN or infinity; an unscored completion is None")
    is_scored_S = torch.tensor([r is not None for r in rewards], dtype=torch.bool)
    group = torch.tensor(group_S, dtype=torch.int64)
    N = int(group.max()) + 1 if len(group) else 0

    def sums(x_S: torch.Tensor) -> torch.Tensor:
        return torch.zeros(N, dtype=torch.float64).index_add_(0, group, torch.where(is_scored_S, x_S, 0.0))

    count_N = sums(torch.ones_like(reward_S))
    highest_N, lowest_N = (
        torch.full((N,), start, dtype=torch.float64).scatter_reduce_(
            0, group[is_scored_S], reward_S[is_scored_S], extreme
        )
        for extreme, start in (("amax", -torch.inf), ("amin", torch.inf))
    )
    is_dead_N = highest_N <= lowest_N  # one member: equal; none: -inf <= inf
    mean_N = sums(reward_S) / count_N.clamp(min=1)
    centred_S = reward_S - mean_N[group]
    variance_N = sums(centred_S**2) / (count_N - ddof).clamp(min=1)
    std_N = torch.where(is_dead_N, 0.0, variance_N.sqrt())
    is_live_S = is_scored_S & ~is_dead_N[group]
    if estimator == "group":
        advantage_S = centred_S / (std_N[group] + STD_FLOOR)
    elif estimator == "mean":
        advantage_S = centred_S
    elif estimator == "batch":
        scored = reward_S[is_scored_S]
        std = ((scored - scored.mean()) ** 2).sum().div(max(len(scored) - ddof, 1)).sqrt() if len(scored) else 0.0
        advantage_S = centred_S / (std + STD_FLOOR)
    elif estimator == "rloo":
        advantage_S = centred_S * (count_N / (count_N - 1).clamp(min=1))[group]
    elif estimator == "none":
        advantage_S, is_live_S = reward_S, is_scored_S
    else:
        raise ValueError(f"expected an advantage of group, mean, batch, rloo or none, got {estimator!r}")
    return Advantages(
        advantage_S=torch.where(is_live_S, advantage_S, 0.0),
        is_scored_S=is_scored_S,
        is_dead_N=is_dead_N,
        std_N=std_N,
    )
