"""What each token of an update did: the statistics of the objective, token-weighted.

Kept on the device, and not looked at, until a step is over. A micro-batch holds rows with a gradient alone, so that
every token of it takes part. Letters: R completion tokens of a micro-batch.
"""

import math

import torch

from sparkgrpo.kernels.linear_grpo import GrpoLoss
from sparkgrpo.trainer.batching import MicroBatch


class TokenStats:
    """Collects one update."""

    def __init__(self) -> None:
        self.num_trained = 0
        self.loss: list[torch.Tensor] = []
        self.clip_side: list[torch.Tensor] = []
        self.ratio: list[torch.Tensor] = []
        self.kl: list[torch.Tensor] = []
        self.entropy: list[torch.Tensor] = []
        self.gap: list[torch.Tensor] = []
        self.importance: list[torch.Tensor] = []
        self.is_capped: list[torch.Tensor] = []

    def add(
        self,
        micro: MicroBatch,
        loss: GrpoLoss,
        ref_logprob_R: torch.Tensor | None,
        at_start_R: torch.Tensor | None,
        *,
        is_first_pass: bool,
    ) -> None:
        """Remember one micro-batch. Clip and ratio count in every pass, the rest in the first.

        Args:
            at_start_R: The trainer's log-probs at the weights that sampled; None where nobody computed them.
        """
        self.clip_side.append(loss.clip_side_T)
        self.ratio.append(loss.ratio_T)
        if not is_first_pass:
            return
        self.num_trained += len(micro.target_R)
        self.loss.append(loss.loss.detach())
        if at_start_R is not None:
            self.gap.append(micro.rollout_logprob_R - at_start_R)
        if ref_logprob_R is not None:  # k3, whichever estimator the loss has: runs with different ones compare
            log_ratio = ref_logprob_R - loss.logprob_T
            self.kl.append(torch.expm1(log_ratio) - log_ratio)
        if loss.entropy_T is not None:
            self.entropy.append(loss.entropy_T)

    def add_importance(self, factor_R: torch.Tensor, is_capped_R: torch.Tensor) -> None:
        """Remember the mismatch correction of one micro-batch."""
        self.importance.append(factor_R)
        self.is_capped.append(is_capped_R)

    def metrics(self, *, num_tokens: int, mini_batches: int) -> dict[str, float | int | None]:
        """Means over tokens. Where nothing was trained most are not known, and a key that is left out reads as null."""
        if not self.loss:
            return {"frac_tokens_trained": 0.0}
        gap, side = torch.cat(self.gap), torch.cat(self.clip_side)
        kl = torch.cat(self.kl) if self.kl else None
        return {
            "loss": float(torch.stack(self.loss).sum()) / mini_batches,
            "frac_tokens_trained": self.num_trained / num_tokens,
            "logprob_gap_mean": float(gap.abs().mean()),
            "logprob_gap_p99": _percentile(gap.abs(), 0.99),
            "logprob_gap_max": float(gap.abs().max()),
            "logprob_gap_signed": float(gap.mean()),
            "importance_mean": float(torch.cat(self.importance).mean()) if self.importance else None,
            "frac_importance_capped": float(torch.cat(self.is_capped).float().mean()) if self.is_capped else None,
            "kl_mean": None if kl is None else float(kl.mean()),
            "kl_max": None if kl is None else float(kl.max()),
            "entropy_mean": float(torch.cat(self.entropy).mean()) if self.entropy else None,
            "clip_frac": float((side != 0).float().mean()),
            "clip_frac_low": float((side < 0).float().mean()),
            "clip_frac_high": float((side == 1).float().mean()),
            "ratio_max": float(torch.cat(self.ratio).max()),
        }


def _percentile(values: torch.Tensor, frac: float) -> float:
    """The value that this share of them does not exceed (nearest rank)."""
    return float(values.kthvalue(max(1, math.ceil(frac * len(values)))).values)
