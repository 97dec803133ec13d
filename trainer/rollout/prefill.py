"""Prefill: every prompt once, whole prompts in packed chunks, through the forward and the attention of training.

Letters: N prompts, T packed prompt tokens of a chunk, D width.
"""

from collections.abc import Sequence

import torch

from sparkgrpo.kernels.prefix_attention import TreeLayout, prefix_attention, tree_layout
from sparkgrpo.trainer.model.decoder import Decoder, Rope, decoder_hidden, rotated
from sparkgrpo.trainer.rollout.state import Cache

PREFILL_CHUNK_TOKENS = 8192
"""Tokens of one forward of the prefill, filler included."""


def prefill(model: Decoder, cache: Cache, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Write the keys and values of all prompts to the cache; the last hidden state of each, [N, D]."""
    last_rows = [_prefill_chunk(model, cache, prompts, chunk) for chunk in chunks_of_prompts(prompts)]
    cache.end_prompts()
    return torch.cat(last_rows)


def _prefill_chunk(model: Decoder, cache: Cache, prompts: Sequence[Sequence[int]], chunk: range) -> torch.Tensor:
    lengths = [len(prompts[n]) for n in chunk]
    layout: TreeLayout = tree_layout(lengths, (), (), device=model.device)

    def attend(layer_idx: int, qk_TJE: torch.Tensor, v_TKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        q_THE, k_TKE = rotated(qk_TJE, rope, model.config.num_heads)
        cache.write_prompt(layer_idx, chunk, k_TKE, v_TKE, layout)
        return prefix_attention(q_THE, k_TKE, v_TKE, layout)

    token_T = torch.tensor([token for n in chunk for token in prompts[n]], device=model.device)
    position_T = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
    hidden_TD = decoder_hidden(model, token_T, position_T, attend)
    last_N = torch.tensor(lengths).cumsum(0) - 1
    return hidden_TD[last_N.to(model.device)]


def chunks_of_prompts(prompts: Sequence[Sequence[int]]) -> list[range]:
    """Consecutive prompts whose rectangle, count * longest tokens, stays within PREFILL_CHUNK_TOKENS.

    A longer one is alone.
    """
    chunks: list[range] = []
    longest = 0
    for n, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if chunks and (len(chunks[-1]) + 1) * longest <= PREFILL_CHUNK_TOKENS:
            chunks[-1] = range(chunks[-1].start, n + 1)
        else:
            chunks.append(range(n, n + 1))
            longest = len(prompt)
    return chunks
