"""Temperature sampling, the token's log-prob, the stop test and all bookkeeping of a decode step, as one op.

    p_j = exp(logits_j / T - lse)  over j < num_valid;   block ~ mass of blocks of 1,024,  token ~ p inside the block
    logprob = logits_token / T - lse

Each row makes one Philox call: word 0 picks the vocabulary block by inverse CDF, word 1 the token inside it. The
counter is the token's position and the row's stream, so a draw does not depend on slot, batch or order. T = 0 is
greedy: the lowest index of the maximum, its log-prob at T = 1.

The arithmetic of a draw is fixed, so that every implementation picks the same token:

    m_n = max_{j in n} logits_j      e_j = exp2((logits_j - m_n) log2(e) / T)      S_n = sum_{j in n} e_j       fp32
    masses S_n exp2((m_n - m) log2(e) / T) of the blocks, and e_j of the tokens in one, as int64 multiples of 2^-40
    first index whose running mass exceeds floor(u total),  u = word >> 8 in units of 2^-24: in int64, without rounding

Integer sums have no order, and an index without mass cannot be the first to exceed. What is left are the last bits of
exp2 and of S_n, which differ between processors: by them 1.1e-5 of all draws at most go to a neighbour (expected, from
the shifts of all boundaries; V 1,024 to 151,665, normal logits of deviation 0 to 5, exp2 wrong by up to 2^-22).

`context_len == 0` marks a finished row or an empty slot: it writes nothing (the torch path: to the spare row S).
Results go to `row_id`, never to the slot, so compaction may permute slots. Triton serves CUDA (`sampling_kernels.py`),
torch the CPU. top_k, top_p and min_p, for evaluation, mask logits before all this.

Letters: B slots, S result rows (one spare row behind them), C most new tokens, V vocabulary of the head, N blocks.
Bytes: the logits once, and 1,024 of them again (4 V B); the torch path also one fp32 buffer of their size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.philox import draw_uniforms

BLOCK_V = 1024
RUNNING, STOP, LENGTH, INVALID = 0, 1, 2, 3
"""Finish reasons: alive; a stop id was sampled; the limit was reached; the logits were not finite."""

LOG2_E = 1.4426950408889634
MASS_UNIT = 2.0**-40
"""Of a running mass: 1,024 blocks of 1,024 tokens sum to 2^60 at most, and what is smaller is beyond a 24-bit word."""
UNIFORM_BITS = 24
RUN_COLUMNS = 32
MAX_COLUMNS = 1 << 20
NUM_STOP_IDS = 8


class Filters(NamedTuple):
    """Which tokens may be drawn, for evaluation alone: a policy is scored under its full softmax."""

    top_k_1: torch.Tensor
    """i32 [1]: keep the k largest logits and what equals the k-th; 0 keeps all."""
    top_p_1: torch.Tensor
    """fp32 [1]: keep the fewest tokens, likeliest first, whose mass reaches p; 1 keeps all."""
    min_p_1: torch.Tensor
    """fp32 [1]: keep tokens at least p times as likely as the likeliest; 0 keeps all."""


def check_filters(top_k: int, top_p: float, min_p: float) -> None:
    """Raises ValueError unless top_k is 0 (off) or more, top_p in (0, 1] (1: off) and min_p in [0, 1] (0: off)."""
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k must be a number of tokens, 1 or more, or 0 to keep all, got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(
            f"top_p must be above 0 and at most 1 (1 keeps all), got {top_p!r}; for greedy set temperature 0"
        )
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1] (0 keeps all), a share of the top probability, got {min_p!r}")


def filter_logits_(
    logits_BV: torch.Tensor, *, num_valid: int, inv_temperature_1: torch.Tensor, filters: Filters
) -> None:
    """Set the logits of tokens that may not be drawn to -inf, in place; reads nothing on the host.

    Temperature first, then top_k, top_p, min_p: the order of transformers (`GenerationMixin._get_logits_processor`).
    vLLM agrees on the first three and has min_p before top_k (`v1/sample/sampler.py`), where top_p's mass is then that
    of fewer tokens. Each keeps at least one token. top_k and min_p judge by value, so equal logits share their fate; of
    equal ones at top_p's edge the lowest indices stay (arbitrary ones in both of those), as greedy takes the lowest.
    Greedy rows are left alone: their log-prob is the full softmax's. A row that is not finite keeps what makes it so.

    Args:
        logits_BV: fp32, changed in the first num_valid columns. inv_temperature_1: fp32, 1/T, 0: greedy.

    Bytes: six passes over [B, V] and a sort; 26 bytes an element of scratch.
    """
    valid_BV = logits_BV[:, :num_valid]
    is_greedy = inv_temperature_1 == 0
    sorted_BV, index_BV = valid_BV.sort(dim=1, descending=True, stable=True)
    num_kept = torch.where(filters.top_k_1 > 0, filters.top_k_1, num_valid).clamp(max=num_valid).long()
    edge_B1 = sorted_BV.gather(1, (num_kept - 1).expand(len(sorted_BV), 1))
    sorted_BV.masked_fill_((sorted_BV < edge_B1) & ~is_greedy, -torch.inf)
    prob_BV = (sorted_BV * inv_temperature_1).softmax(1)
    mass_before_BV = prob_BV.cumsum(1).sub_(prob_BV)
    is_dropped_BV = mass_before_BV >= torch.where(filters.top_p_1 < 1, filters.top_p_1, torch.inf)
    is_dropped_BV |= prob_BV < filters.min_p_1 * prob_BV[:, :1]
    valid_BV.scatter_(1, index_BV, sorted_BV.masked_fill_(is_dropped_BV & ~is_greedy, -torch.inf))


def _draw(mass_BC: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """First index whose running mass exceeds uniform * total: int64 [B], one beyond the columns where there is no mass.

    mass_BC: fp32, at most 1,024 each. The products with the total's halves are exact in int64, and so are the sums:
    first over runs of 32 columns, then inside one of them, since torch's running sum takes 3 ns an element.
    """
    padded_BC = F.pad(mass_BC * (1 / MASS_UNIT), (0, -mass_BC.shape[1] % RUN_COLUMNS)).long()
    mass_BRC = padded_BC.unflatten(1, (-1, RUN_COLUMNS))
    running_BR = mass_BRC.sum(2).cumsum(1)
    u_B, total_B = (uniform_B * 2.0**UNIFORM_BITS).long(), running_BR[:, -1]
    low_B = total_B & ((1 << UNIFORM_BITS) - 1)
    threshold_B1 = (u_B * (total_B >> UNIFORM_BITS) + ((u_B * low_B) >> UNIFORM_BITS))[:, None]
    run_B1 = torch.searchsorted(running_BR, threshold_B1, right=True).clamp_(max=running_BR.shape[1] - 1)
    inside_BC = mass_BRC.gather(1, run_B1[..., None].expand(-1, -1, RUN_COLUMNS))[:, 0].cumsum(1)
    left_B1 = threshold_B1 - running_BR.gather(1, run_B1) + inside_BC[:, -1:]
    return (run_B1 * RUN_COLUMNS + torch.searchsorted(inside_BC, left_B1, right=True))[:, 0]


def _above(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """x - top, -inf where the maximum itself is -inf."""
    return x - top.masked_fill(top == -torch.inf, 0.0)


def _block_maxima_and_sums(logits_BV: torch.Tensor, scale_log2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """m_n and S_n, fp32 [B, N]."""
    B, V = logits_BV.shape
    num_full = V // BLOCK_V
    top_BN, sum_BN = (logits_BV.new_empty(B, -(-V // BLOCK_V)) for _ in range(2))
    split = num_full * BLOCK_V
    whole_BNC = logits_BV[:, :split].unflatten(1, (num_full, BLOCK_V))
    for place, x in ((slice(0, num_full), whole_BNC), (slice(num_full, None), logits_BV[:, None, split:])):
        if x.shape[1] and x.shape[2]:
            top_BN[:, place] = x.amax(2)
            sum_BN[:, place] = _above(x, top_BN[:, place, None]).mul_(scale_log2).exp2_().sum(2)
    return top_BN, sum_BN


def sample_tokens(
    logits_BV: torch.Tensor,
    *,
    num_valid: int,
    inv_temperature_1: torch.Tensor,
    uniform_2B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        uniform_2B: fp32 [2, B], as `draw_uniforms` makes them: one picks the block, one the token in it.

    Returns:
        (token_B int64, logprob_B fp32 under the distribution sampled from; 0 and NaN where logits are not finite).
    """
    is_greedy = inv_temperature_1 == 0
    scale = torch.where(is_greedy, 1.0, inv_temperature_1)
    scale_log2 = scale * LOG2_E
    logits_BV = logits_BV[:, :num_valid].float()
    u_block, u_token = uniform_2B.unbind()
    if num_valid <= BLOCK_V:  # one block, and nothing to pick among
        x_BC, first_B = logits_BV, 0
        top_B1 = x_BC.amax(1, keepdim=True)
        e_BC = _above(x_BC, top_B1).mul_(scale_log2).exp2_()
        total_B = e_BC.sum(1)
    else:
        top_BN, sum_BN = _block_maxima_and_sums(logits_BV, scale_log2)
        top_B1 = top_BN.amax(1, keepdim=True)
        mass_BN = sum_BN * _above(top_BN, top_B1).mul_(scale_log2).exp2_()
        total_B = mass_BN.sum(1)
        block_B = torch.where(is_greedy, top_BN.argmax(1), _draw(mass_BN, u_block)).clamp_(max=top_BN.shape[1] - 1)
        first_B = block_B * BLOCK_V
        column_BC = first_B[:, None] + torch.arange(BLOCK_V, device=logits_BV.device)
        x_BC = logits_BV.gather(1, column_BC.clamp(max=num_valid - 1))
        x_BC.masked_fill_(column_BC >= num_valid, -torch.inf)
        e_BC = _above(x_BC, top_BN.gather(1, block_B[:, None])).mul_(scale_log2).exp2_()
    inside_B = torch.where(is_greedy, x_BC.argmax(1), _draw(e_BC, u_token)).clamp_(max=x_BC.shape[1] - 1)
    above_B = x_BC.gather(1, inside_B[:, None])[:, 0] - top_B1[:, 0]
    logprob_B = above_B * scale - total_B.log()
    is_finite = logprob_B.isfinite()
    token_B = torch.where(is_finite, first_B + inside_B, 0)
    return token_B, torch.where(is_finite, logprob_B, torch.nan)


def result_uniforms(
    seed_1: torch.Tensor, prompt_len_S: torch.Tensor, stream_S: torch.Tensor, num_new: int
) -> torch.Tensor:
    """The draws of the first num_new places of every row at once: fp32 [2, S, num_new], bit for bit those of a step.

    Args:
        seed_1: i64. prompt_len_S: i32. stream_S: i64.

    A step on a CPU is as long as its number of torch calls; drawn a step at a time, ten rounds of Philox were a fifth
    of them.
    """
    position_SC = prompt_len_S[:, None] + torch.arange(num_new, device=prompt_len_S.device)
    return torch.stack(draw_uniforms(seed_1, position_SC, stream_S[:, None]))


_STATE_DTYPES = {
    "stream_B": torch.int64,
    "out_logprob_SC": torch.float32,
    "finish_S": torch.int8,
    "seed_1": torch.int64,
    "inv_temperature_1": torch.float32,
}
"""The others are int32."""


def _check_update(logits_BV: torch.Tensor, num_valid: int, state: dict[str, torch.Tensor]) -> None:
    """Raises ValueError unless the tensors are as `sample_update` says: kernels would read others as if they were."""
    B, num_rows = len(logits_BV), len(state["num_new_S"])
    if logits_BV.ndim != 2 or logits_BV.dtype != torch.float32 or logits_BV.stride(1) != 1:
        raise ValueError(
            f"logits_BV must be float32 [B, V] with contiguous rows, got {logits_BV.dtype} {tuple(logits_BV.shape)}; a"
            " head product in bfloat16 takes out_dtype=torch.float32: rounded logits have other log-probs"
        )
    if not 1 <= num_valid <= min(logits_BV.shape[1], MAX_COLUMNS):
        raise ValueError(
            f"num_valid must be in [1, {min(logits_BV.shape[1], MAX_COLUMNS)}] (len(tokenizer)), got {num_valid}"
        )
    most_new = state["out_token_SC"].shape[1]
    sizes = {"B": (B,), "S": (num_rows,), "SC": (num_rows, most_new), "1": (1,), "8": (NUM_STOP_IDS,)}
    for name, x in state.items():
        size, dtype = sizes[name.rsplit("_", 1)[1]], _STATE_DTYPES.get(name, torch.int32)
        if x.shape != size or x.dtype != dtype or x.device != logits_BV.device or not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {list(size)} on {logits_BV.device}, got {x.dtype} {list(x.shape)}"
                f" on {x.device}, {'' if x.is_contiguous() else 'not '}contiguous; allocate it so once"
            )


def _update_torch(
    logits_BV: torch.Tensor, num_valid: int, state: dict[str, torch.Tensor], uniform_2SC: torch.Tensor | None
) -> None:
    """The specification of the bookkeeping: a parked slot's writes go to the spare row, or put back what was there."""
    context_len_B, num_new_S, token_B = state["context_len_B"], state["num_new_S"], state["token_B"]
    spare = len(num_new_S) - 1
    is_parked = context_len_B == 0
    row = state["row_id_B"].masked_fill(is_parked, spare).long()
    index = (context_len_B - state["prompt_len_B"]).masked_fill_(is_parked, 0).long()
    if uniform_2SC is None:
        uniform_2B = torch.stack(draw_uniforms(state["seed_1"], context_len_B, state["stream_B"]))
    else:
        uniform_2B = uniform_2SC[:, row, index]
    token, logprob = sample_tokens(
        logits_BV, num_valid=num_valid, inv_temperature_1=state["inv_temperature_1"], uniform_2B=uniform_2B
    )
    is_stop = (token[:, None] == state["eos_ids_8"]).any(1)
    num_new = (index + 1).int()
    finish = (num_new >= state["max_new_1"]).to(torch.int8).mul_(LENGTH)  # RUNNING is 0
    finish.masked_fill_(is_stop, STOP).masked_fill_(logprob.isnan(), INVALID)  # a stop id in the last place is STOP
    is_over = finish != RUNNING
    state["out_token_SC"][row, index] = token.int()
    state["out_logprob_SC"][row, index] = logprob
    num_new_S[row] = num_new
    state["finish_S"][row] = finish
    token_B.copy_(torch.where(is_parked, token_B, token))
    context_len_B.add_(1).masked_fill_(is_over | is_parked, 0)
    state["num_alive_1"].sub_((is_over & ~is_parked).sum())


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
    filters: Filters | None = None,
    uniform_2SC: torch.Tensor | None = None,
    partials: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Sample a token for every live slot and update the decode state in place; reads nothing on the host.

    Args:
        logits_BV: fp32; columns from num_valid on do not exist. On CUDA rows whose stride is a multiple of 16 elements
            are read with wide loads.
        token_B, context_len_B: i32, replaced: the sampled token, and the context with it (0: the row has finished).
        prompt_len_B, row_id_B: i32. stream_B: i64, (prompt's stream << 16) + sibling.
        out_token_SC, out_logprob_SC, num_new_S, finish_S: i32, fp32 [S + 1, C], i32, i8 [S + 1]: results; the last row
            is the spare. A row that is not finite ends as INVALID with token 0 and log-prob NaN.
        num_alive_1: i32, lowered by the rows that finish.
        seed_1: i64. inv_temperature_1: fp32, 1/T or 0 for greedy. eos_ids_8: i32, padded with -1. max_new_1: i32.
        filters: Which tokens may be drawn; the log-prob is then that of the filtered softmax, and logits_BV is changed.
        uniform_2SC: fp32 [2, S + 1, C], the draws of every place of the results where `result_uniforms` has made them
            beforehand; the kernels make their own, one call a row.
        partials: Two fp32 tensors [B, ceil(num_valid / 1024)] of the kernels, allocated where None.

    Raises:
        ValueError: A tensor of another shape, dtype, device or layout; num_valid outside the head.
    """
    state = dict(
        token_B=token_B, context_len_B=context_len_B, prompt_len_B=prompt_len_B, row_id_B=row_id_B, stream_B=stream_B,
        out_token_SC=out_token_SC, out_logprob_SC=out_logprob_SC, num_new_S=num_new_S, finish_S=finish_S,
        num_alive_1=num_alive_1, seed_1=seed_1, inv_temperature_1=inv_temperature_1, eos_ids_8=eos_ids_8,
        max_new_1=max_new_1,
    )  # fmt: skip
    _check_update(logits_BV, num_valid, state)
    if filters is not None:
        filter_logits_(logits_BV, num_valid=num_valid, inv_temperature_1=inv_temperature_1, filters=filters)
    if not dispatch.runs_triton(logits_BV.device):
        _update_torch(logits_BV, num_valid, state, uniform_2SC)
        return
    from sparkgrpo.kernels.sampling_kernels import sample_update_kernels

    sample_update_kernels(logits_BV, num_valid=num_valid, state=state, partials=partials, block_columns=BLOCK_V)
