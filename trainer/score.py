"""Log-probs of given completions under a model: one code path scores the policy, the old policy and the reference.

Letters: T packed tokens, R head rows (completion tokens), D width.
"""

import torch

from sparkgrpo.kernels.linear_logprob import linear_logprob
from sparkgrpo.kernels.prefix_attention import prefix_attention
from sparkgrpo.trainer.batching import MicroBatch
from sparkgrpo.trainer.model.decoder import Decoder, Rope, decoder_hidden, rotated


def head_hidden(model: Decoder, micro: MicroBatch) -> torch.Tensor:
    """Hidden states [R, D] of the rows that predict a completion token; differentiable."""

    def attend(layer_idx: int, qk_TJE: torch.Tensor, v_TKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        return prefix_attention(*rotated(qk_TJE, rope, model.config.num_heads), v_TKE, micro.layout)

    hidden_TD = decoder_hidden(model, micro.token_T, micro.position_T, attend)
    return hidden_TD.index_select(0, micro.head_row_R)


@torch.no_grad()
def score(model: Decoder, micro: MicroBatch, *, temperature: float, num_valid: int) -> torch.Tensor:
    """Log-prob [R] of every completion token, fp32 nats, at the sampling temperature over the valid vocabulary."""
    return linear_logprob(
        head_hidden(model, micro),
        model.head_VD,
        micro.target_R,
        temperature=temperature,
        num_valid=num_valid,
        anchor_logprob_T=micro.rollout_logprob_R,
        want_entropy=False,
    ).logprob_T
