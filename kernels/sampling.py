"""Temperature sampling, the token's log-prob, the stop test and all bookkeeping of a decode step, as one op.

    p_j = exp(logits_j / T - lse)  over j < num_valid;   block ~ mass of blocks of 1,024,  token ~ p inside the block
    logprob = logits_token / T - lse

Each row makes one Philox call: word 0 picks the vocabulary block by inverse CDF, word 1 the token inside it. The
counter is the token's position and the row's stream, so a draw does not depend on slot, batch or order. T = 0 is
greedy: the lowest index of the maximum, its log-prob at T = 1.

`context_len == 0` marks a finished row or an empty slot: it writes nothing (here: to the spare row S). Results go to
`row_id`, never to the slot, so compaction may permute slots.

Letters: B slots, S result rows (one spare row behind them), C most new tokens, V vocabulary of the head.
Bytes: the logits twice and one fp32 buffer of their size (4 V B each time).
"""

import torch

from sparkgrpo.kernels.philox import draw_uniforms

BLOCK_V = 1024
RUNNING, STOP, LENGTH, INVALID = 0, 1, 2, 3
"""Finish reasons: alive; a stop id was sampled; the limit was reached; the logits were not finite."""


def _draw(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First index whose running mass exceeds uniform * total, but never one without mass: int64 [B]."""
    running = mass.cumsum(1)
    index = (running <= uniform[:, None] * running[:, -1:]).sum(1)
    offs = torch.arange(mass.shape[1], device=mass.device)
    return torch.minimum(index, torch.where(mass > 0, offs, -1).amax(1)).clamp_(min=0)


def sample_tokens(
    logits_BV: torch.Tensor,
    *,
    num_valid: int,
    seed_1: torch.Tensor,
    inv_temperature_1: torch.Tensor,
    position_B: torch.Tensor,
    stream_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Returns:
        (token_B int64, logprob_B fp32 under the distribution sampled from; NaN where logits are not finite).
    """
    is_greedy = inv_temperature_1 == 0
    scale = torch.where(is_greedy, 1.0, inv_temperature_1)
    logits_BV = logits_BV[:, :num_valid].float()
    top_B, best_B = logits_BV.max(1)
    width = min(BLOCK_V, num_valid)
    num_blocks = -(-num_valid // width)
    mass_BV = logits_BV.new_empty(len(logits_BV), num_blocks * width)
    torch.sub(logits_BV, top_B[:, None], out=mass_BV[:, :num_valid]).mul_(scale).exp_()
    mass_BV[:, num_valid:].zero_()
    mass_BNC = mass_BV.unflatten(1, (num_blocks, width))
    block_mass_BN = mass_BNC.sum(2)
    u_block, u_token = draw_uniforms(seed_1, position_B, stream_B)
    block_B = _draw(block_mass_BN, u_block)
    inside_B = _draw(mass_BNC[torch.arange(len(block_B), device=block_B.device), block_B], u_token)
    token_B = torch.where(is_greedy, best_B, block_B * width + inside_B)
    above_B = logits_BV.gather(1, token_B[:, None])[:, 0] - top_B
    return token_B, above_B * scale - block_mass_BN.sum(1).log()


def sample_update(
    logits_BV: torch.Tensor,
    *,
    num_valid: int,
    token_B: torch.Tensor,
    context_len_B: torch.Tensor,
    prompt_len_B: torch.Tensor,
    row_id_B: torch.Tensor,
    stream_B: torch.Tensor,
    out_token_SC: torch.Tensor,
    out_logprob_SC: torch.Tensor,
    num_new_S: torch.Tensor,
    finish_S: torch.Tensor,
    num_alive_1: torch.Tensor,
    seed_1: torch.Tensor,
    inv_temperature_1: torch.Tensor,
    eos_ids_8: torch.Tensor,
    max_new_1: torch.Tensor,
) -> None:
    """Sample a token for every live slot and update the decode state in place; reads nothing on the host.

    Args:
        logits_BV: fp32; columns from num_valid on do not exist.
        token_B, context_len_B: i32, replaced: the sampled token, and the context with it (0: the row has finished).
        prompt_len_B, row_id_B: i32. stream_B: i64, (prompt's stream << 16) + sibling.
        out_token_SC, out_logprob_SC, num_new_S, finish_S: [S + 1, C] and [S + 1] results; the last row is the spare.
        num_alive_1: i32, lowered by the rows that finish.
        seed_1: i64. inv_temperature_1: fp32, 1/T or 0 for greedy. eos_ids_8: i32, padded with -1. max_new_1: i32.
    """
    is_alive = context_len_B > 0
    token, logprob = sample_tokens(
        logits_BV,
        num_valid=num_valid,
        seed_1=seed_1,
        inv_temperature_1=inv_temperature_1,
        position_B=context_len_B.long(),
        stream_B=stream_B,
    )
    spare = len(num_new_S) - 1
    row = torch.where(is_alive, row_id_B, spare).long()
    index = torch.where(is_alive, context_len_B - prompt_len_B, 0).long()
    is_stop = (token[:, None] == eos_ids_8).any(1)
    finish = torch.where(is_stop, STOP, torch.where(index + 1 >= max_new_1, LENGTH, RUNNING))
    finish = torch.where(logprob.isfinite(), finish, INVALID)  # a stop id in the last place is STOP
    has_finished = is_alive & (finish != RUNNING)
    out_token_SC[row, index] = token.to(out_token_SC.dtype)
    out_logprob_SC[row, index] = logprob
    num_new_S[row] = (index + 1).to(num_new_S.dtype)
    finish_S[row] = finish.to(finish_S.dtype)
    token_B.copy_(torch.where(is_alive, token, token_B))
    context_len_B.copy_(torch.where(is_alive & ~has_finished, context_len_B + 1, 0))
    num_alive_1.sub_(has_finished.sum())
