"""Log-probs of given completions under a model: one code path scores the policy, the old policy and the reference.

Letters: T packed tokens, R head rows (completion tokens), D width.
"""

from dataclasses import dataclass

import torch

from sparkgrpo.kernels.linear_logprob import linear_logprob
from sparkgrpo.kernels.prefix_attention import prefix_attention
from sparkgrpo.trainer.batching import MicroBatch
from sparkgrpo.trainer.flash_attention import Varlen, flash_plan, flash_prefix_attention
from sparkgrpo.trainer.model.decoder import Attend, Decoder, Rope, decoder_hidden, rotated


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOptions:
    """How the decoder runs over a micro-batch; no choice changes what is computed."""

    recomputes: bool = False
    """Activation checkpointing."""
    varlen: Varlen | None = None
    """flash-attn's kernel; None: PyTorch's attention."""


PLAIN = ForwardOptions()


def head_hidden(model: Decoder, micro: MicroBatch, options: ForwardOptions = PLAIN) -> torch.Tensor:
    """Hidden states [R, D] of the rows that predict a completion token; differentiable."""
    attend = _attend(model, micro, options)
    hidden_TD = decoder_hidden(model, micro.token_T, micro.position_T, attend, recomputes=options.recomputes)
    return hidden_TD.index_select(0, micro.head_row_R)


def _attend(model: Decoder, micro: MicroBatch, options: ForwardOptions) -> Attend:
    num_heads, varlen = model.config.num_heads, options.varlen
    if varlen is None:

        def attend(layer_idx: int, qk_TJE: torch.Tensor, v_TKE: torch.Tensor, rope: Rope) -> torch.Tensor:
            return prefix_attention(*rotated(qk_TJE, rope, num_heads), v_TKE, micro.layout)

        return attend
    plan = flash_plan(micro.layout, model.device)

    def attend_flash(layer_idx: int, qk_TJE: torch.Tensor, v_TKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        return flash_prefix_attention(*rotated(qk_TJE, rope, num_heads), v_TKE, plan, varlen)

    return attend_flash


@torch.no_grad()
def score(
    model: Decoder, micro: MicroBatch, *, temperature: float, num_valid: int, options: ForwardOptions = PLAIN
) -> torch.Tensor:
    """Log-prob [R] of every completion token, fp32 nats, at the sampling temperature over the valid vocabulary."""
    return linear_logprob(
        head_hidden(model, micro, options),
        model.head_VD,
        micro.target_R,
        temperature=temperature,
        num_valid=num_valid,
        anchor_logprob_T=micro.rollout_logprob_R,
        want_entropy=False,
    ).logprob_T
