"""One decode step: forward, head, sampling and bookkeeping, on buffers that never move.

Letters: B slots, D width, V vocabulary.
"""

import torch

from sparkgrpo.kernels.cpu_products import product_
from sparkgrpo.kernels.sampling import Filters, sample_update
from sparkgrpo.trainer.model.decoder import Decoder, decoder_hidden
from sparkgrpo.trainer.rollout.state import DecodeState


def decode_step(
    state: DecodeState, model: Decoder, head_VD: torch.Tensor, num_slots: int, filters: Filters | None = None
) -> None:
    """Advance the first slots by one token, in place; slots whose row has finished change nothing."""
    view = state.view(num_slots)
    view.cache.extend()
    position_B = (view.context_len_B - 1).clamp_(min=0)
    hidden_BD = decoder_hidden(model, view.token_B, position_B, view.cache.attend)
    finish_step(hidden_BD, view, head_VD, filters)


def finish_step(
    hidden_BD: torch.Tensor, view: DecodeState, head_VD: torch.Tensor, filters: Filters | None = None
) -> None:
    """Head and sampling; prefill ends here too, so the first token is drawn by the code that draws all others.

    Args:
        head_VD: The head's rows below num_valid, in the model's dtype, or in fp32 where a bf16 product would round.
        filters: Which tokens may be drawn, in an evaluation; None: all.
    """
    _head_product(hidden_BD, head_VD, view.logits_BV)
    sample_update(
        view.logits_BV,
        num_valid=view.num_valid,
        token_B=view.token_B,
        context_len_B=view.context_len_B,
        prompt_len_B=view.prompt_len_B,
        row_id_B=view.row_id_B,
        stream_B=view.stream_B,
        out_token_SC=view.out_token_SC,
        out_logprob_SC=view.out_logprob_SC,
        num_new_S=view.num_new_S,
        finish_S=view.finish_S,
        num_alive_1=view.num_alive_1,
        seed_1=view.seed_1,
        inv_temperature_1=view.inv_temperature_1,
        eos_ids_8=view.eos_ids_8,
        max_new_1=view.max_new_1,
        filters=filters,
        uniform_2SC=view.uniform_2SC,
        partials=(view.top_BN, view.sum_BN),
    )


def _head_product(hidden_BD: torch.Tensor, head_VD: torch.Tensor, logits_BV: torch.Tensor) -> None:
    """fp32 logits of the words that exist; on a GPU the last few, past a multiple of 8, are a product of their own."""
    num_valid = len(head_VD)
    if hidden_BD.device.type == "cpu":
        product_(logits_BV[:, :num_valid], hidden_BD.to(head_VD.dtype), head_VD.t())
        return
    even = num_valid // 8 * 8
    for words in (slice(0, even), slice(even, num_valid)):
        if words.start < words.stop:
            out_BV, part_DV = logits_BV[:, words], head_VD[words].t()
            if hidden_BD.dtype == torch.float32:
                torch.mm(hidden_BD, part_DV, out=out_BV)
            else:
                torch.mm(hidden_BD, part_DV, out_dtype=torch.float32, out=out_BV)
