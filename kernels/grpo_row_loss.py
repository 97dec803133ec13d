"""The objective on rows: from a row's log-prob to its loss and to the derivative that the head carries on.

    rho = e^min(logp - old, 20) per token; old = None: exactly 1
    rho = e^min(mean over u in the sequence, w_u != 0, of (logp_u - old_u), 20) per sequence (GSPO)
    lo = 1 - eps_low     hi = 1 + eps_high     top = delta, or infinity
    clip   A > 0: P = -min(rho, hi) A              P' = -rho A if rho <= hi, else 0
           A < 0: P = -max(min(rho, top), lo) A    P' = -rho A if lo <= rho <= top, else 0
           A = 0: P = P' = 0
    cispo  P = -min(rho, hi) A logp                P' = -min(rho, hi) A
    q = ref - logp      k1 = -q, k1' = 1      k2 = q^2/2, k2' = -q      k3 = e^q - 1 - q, k3' = 1 - e^q
           k3 by expm1; past q = 20 it goes on as a straight line, k3' = 1 - e^20
    loss = sum_t w_t (P_t + beta K_t - entropy_coef H_t)
    g = dloss/dlogp = w (P' + beta K')            h = dloss/dH = -w entropy_coef

With the sequence ratio under clip each of a sequence's n tokens with w != 0 gets g = (1/n) sum_u w_u P'_u + w beta K'.
CISPO's ratio is a constant of the gradient, so there P' stays the token's own. k1 as a loss has zero expected gradient
on policy: it is there for comparison. Past 20 nats rho stays at e^20 and its derivative goes on as rho.

Sources: PPO clip (Schulman et al. 2017), GRPO (DeepSeekMath, Shao et al. 2024), clip-higher (DAPO, Yu et al. 2025),
dual clip delta (Ye et al. 2020), GSPO (Zheng et al. 2025), CISPO (MiniMax-M1, 2025), k1, k2, k3 (Schulman 2020).

C rows of one chunk, S sequences that end in it; everything fp32 [C]. About 150 bytes and 60 operations a row: nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from sparkgrpo.kernels.launch import check_choice

MAX_LOG_RATIO = 20.0
"""Nats; e^20 is the largest ratio, and the point from where k3 is a straight line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoObjective:
    """Which GRPO. Normalisers and masks are not here: they are data, in the token weights."""

    surrogate: Literal["clip", "cispo"] = "clip"
    """PPO's clipped surrogate, or CISPO's clipped importance weight times log-prob."""
    ratio: Literal["token", "sequence"] = "token"
    """One ratio a token, or the geometric mean over the sequence (GSPO)."""
    eps_low: float = 0.2
    """The ratio is clipped below 1 - eps_low; in [0, 1]."""
    eps_high: float = 0.2
    """The ratio is clipped above 1 + eps_high; in [0, inf]."""
    delta: float | None = None
    """Upper bound of the ratio where the advantage is negative (clip only); None, or above 1 + eps_high."""
    beta: float = 0.0
    """Weight of the KL term to the reference; not negative."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; negative values punish entropy."""

    def __post_init__(self) -> None:
        check_choice("surrogate", self.surrogate, ("clip", "cispo"))
        check_choice("ratio", self.ratio, ("token", "sequence"))
        check_choice("kl", self.kl, ("k1", "k2", "k3"))
        if not 0.0 <= self.eps_low <= 1.0:
            raise ValueError(f"eps_low must be in [0, 1], got {self.eps_low}; 0.2 clips the ratio below 0.8")
        if not self.eps_high >= 0.0:
            raise ValueError(f"eps_high must be in [0, inf], got {self.eps_high}; 0.2 clips the ratio above 1.2")
        if self.delta is not None and not self.delta > 1.0 + self.eps_high:
            raise ValueError(f"delta must be above 1 + eps_high = {1.0 + self.eps_high}, got {self.delta}; None is off")
        if self.delta is not None and self.surrogate != "clip":
            raise ValueError(f"delta belongs to surrogate 'clip', got {self.surrogate!r}; set delta None")
        if not (math.isfinite(self.beta) and self.beta >= 0.0):
            raise ValueError(f"beta must be finite and not negative, got {self.beta}; 0 needs no reference")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef must be finite, got {self.entropy_coef}; 0 is off")


class RowInputs(NamedTuple):
    """The data of a chunk's rows, fp32 [C]; values of rows with weight 0 are never used."""

    advantage_C: torch.Tensor
    weight_C: torch.Tensor
    old_C: torch.Tensor | None
    ref_C: torch.Tensor | None
    seq_len_S: torch.Tensor | None = None
    """int64, rows of each sequence in the chunk, which they fill in order; None unless the ratio is per sequence."""

    def chunk(self, start: int, stop: int, seq_len_S: torch.Tensor | None) -> "RowInputs":
        """Rows [start, stop), which hold these sequences."""
        old_C = None if self.old_C is None else self.old_C[start:stop]
        ref_C = None if self.ref_C is None else self.ref_C[start:stop]
        return RowInputs(self.advantage_C[start:stop], self.weight_C[start:stop], old_C, ref_C, seq_len_S)


class RowLoss(NamedTuple):
    """What the objective makes of a chunk's rows; fp32 [C], 0 in rows of weight 0."""

    loss_C: torch.Tensor
    g_C: torch.Tensor
    h_C: torch.Tensor | None
    """None without an entropy bonus."""
    ratio_C: torch.Tensor
    kl_C: torch.Tensor | None
    """None without a reference."""
    clip_side_C: torch.Tensor
    """int8: 0, or where the clip binds -1 below lo, +1 above hi, +2 above delta."""


def grpo_row_loss_reference(
    objective: GrpoObjective, logprob_C: torch.Tensor, entropy_C: torch.Tensor | None, inputs: RowInputs
) -> torch.Tensor:
    """Loss of every row [C] as plain PyTorch, differentiable once in log-prob and entropy; any float dtype."""
    old_C = logprob_C.detach() if inputs.old_C is None else inputs.old_C
    is_counted_C = inputs.weight_C != 0
    log_ratio_C = torch.where(is_counted_C, logprob_C - old_C, 0.0)
    if inputs.seq_len_S is not None:
        means, lengths = [], inputs.seq_len_S.tolist()
        for log_ratios, is_counted in zip(log_ratio_C.split(lengths), is_counted_C.split(lengths), strict=True):
            means.append((log_ratios.sum() / max(int(is_counted.sum()), 1)).expand_as(log_ratios))
        log_ratio_C = torch.cat(means) if means else log_ratio_C
    # The ratio's derivative is the ratio, also where the exponent is capped: so the factor below is 1 with slope 1.
    finite_C = torch.where(log_ratio_C.isfinite(), log_ratio_C, logprob_C)
    ratio_C = log_ratio_C.detach().clamp(max=MAX_LOG_RATIO).exp() * (1 + finite_C - finite_C.detach())
    adv_C, lo, hi = inputs.advantage_C, 1 - objective.eps_low, 1 + objective.eps_high
    if objective.surrogate == "cispo":
        policy_C = -ratio_C.detach().clamp(max=hi) * adv_C * logprob_C
    else:
        top = math.inf if objective.delta is None else objective.delta
        policy_C = torch.where(adv_C > 0, -ratio_C.clamp(max=hi) * adv_C, -ratio_C.clamp(max=top).clamp(min=lo) * adv_C)
    loss_C = torch.where(adv_C == 0, 0.0, policy_C)
    if objective.beta and inputs.ref_C is not None:
        loss_C = loss_C + objective.beta * kl_reference(objective, logprob_C, inputs.ref_C)
    if objective.entropy_coef and entropy_C is not None:
        loss_C = loss_C - objective.entropy_coef * entropy_C
    return torch.where(is_counted_C, inputs.weight_C * loss_C, 0.0)


def kl_reference(objective: GrpoObjective, logprob_C: torch.Tensor, ref_C: torch.Tensor) -> torch.Tensor:
    """The KL estimator of every row, differentiable."""
    q_C = ref_C - logprob_C
    if objective.kl == "k1":
        return -q_C
    if objective.kl == "k2":
        return q_C**2 / 2
    capped_C = q_C.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(capped_C) - capped_C + math.expm1(MAX_LOG_RATIO) * (q_C - MAX_LOG_RATIO).clamp(min=0.0)


def grpo_row_loss(
    objective: GrpoObjective, logprob_C: torch.Tensor, entropy_C: torch.Tensor | None, inputs: RowInputs
) -> RowLoss:
    """Loss, derivatives and metrics of a chunk of rows. entropy_C is needed with an entropy bonus alone."""
    is_counted_C, weight_C = inputs.weight_C != 0, inputs.weight_C
    adv_C = torch.where(is_counted_C, inputs.advantage_C, 0.0)
    ratio_C = _ratio(logprob_C, inputs, is_counted_C)
    policy_C, slope_C, clip_side_C = _surrogate(objective, logprob_C, ratio_C, adv_C)
    slope_C = weight_C * slope_C
    if inputs.seq_len_S is not None and objective.surrogate == "clip":
        slope_C = _mean_over_sequences(slope_C, is_counted_C, inputs.seq_len_S)
    kl_C = None
    if inputs.ref_C is not None:
        kl_C, kl_slope_C = _kl(objective.kl, torch.where(is_counted_C, inputs.ref_C - logprob_C, 0.0))
        if objective.beta:
            policy_C = policy_C + objective.beta * kl_C
            slope_C = slope_C + (objective.beta * weight_C) * kl_slope_C
    if not objective.entropy_coef or entropy_C is None:
        return RowLoss(weight_C * policy_C, slope_C, None, ratio_C * is_counted_C, kl_C, clip_side_C)
    policy_C = policy_C - objective.entropy_coef * torch.where(is_counted_C, entropy_C, 0.0)
    h_C = -objective.entropy_coef * weight_C
    return RowLoss(weight_C * policy_C, slope_C, h_C, ratio_C * is_counted_C, kl_C, clip_side_C)


def _ratio(logprob_C: torch.Tensor, inputs: RowInputs, is_counted_C: torch.Tensor) -> torch.Tensor:
    if inputs.old_C is None:
        return torch.ones_like(logprob_C)
    log_ratio_C = torch.where(is_counted_C, logprob_C - inputs.old_C, 0.0)
    if inputs.seq_len_S is not None:
        log_ratio_C = _mean_over_sequences(log_ratio_C, is_counted_C, inputs.seq_len_S)
    return log_ratio_C.clamp(max=MAX_LOG_RATIO).exp_()


def _mean_over_sequences(values_C: torch.Tensor, is_counted_C: torch.Tensor, seq_len_S: torch.Tensor) -> torch.Tensor:
    """Each counted row gets the mean over its sequence's counted rows; sums go in row order."""
    counts_S = torch.segment_reduce(is_counted_C.to(values_C.dtype), "sum", lengths=seq_len_S, axis=0, unsafe=True)
    means_S = torch.segment_reduce(values_C, "sum", lengths=seq_len_S, axis=0, unsafe=True) / counts_S.clamp(min=1.0)
    means_C = means_S.repeat_interleave(seq_len_S, output_size=values_C.numel())
    return torch.where(is_counted_C, means_C, 0.0)


def _surrogate(
    objective: GrpoObjective, logprob_C: torch.Tensor, ratio_C: torch.Tensor, adv_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P, P' and the side at which the clip binds. One comparison decides: a ratio that a bound moved has no slope."""
    hi = 1.0 + objective.eps_high
    if objective.surrogate == "cispo":
        slope_C = -ratio_C.clamp(max=hi) * adv_C
        is_zero_C = adv_C == 0
        clip_side_C = (ratio_C > hi).logical_and_(~is_zero_C).to(torch.int8)
        return torch.where(is_zero_C, 0.0, slope_C * logprob_C), slope_C, clip_side_C
    lo, top = 1.0 - objective.eps_low, math.inf if objective.delta is None else objective.delta
    bounded_C = torch.where(adv_C > 0, ratio_C.clamp(max=hi), ratio_C.clamp(lo, top))
    policy_C = -bounded_C * adv_C
    is_bound_C = (bounded_C != ratio_C).logical_and_(adv_C != 0)
    side_C = torch.where(adv_C > 0, 1, torch.where(ratio_C < lo, -1, 2))
    return policy_C, torch.where(is_bound_C, 0.0, policy_C), (side_C * is_bound_C).to(torch.int8)


def _kl(kind: str, q_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and K' = dK/dlogp."""
    if kind == "k1":
        return -q_C, torch.ones_like(q_C)
    if kind == "k2":
        return q_C.square() / 2, -q_C
    capped_C = q_C.clamp(max=MAX_LOG_RATIO)
    growth_C = torch.expm1(capped_C)
    return growth_C - capped_C + growth_C * (q_C - capped_C), -growth_C
