"""Triton kernels of `sample_update`: partials of vocabulary blocks, then one program a slot that draws and keeps books.

The arithmetic of a draw is that of `sampling.py`: fp32 maxima, exponentials and sums of blocks, then running masses and
the threshold in int64, so that no order of additions can change a token. A parked slot (context_len 0) is not read and
writes nothing.

All that changes from step to step or from rollout to rollout is read from tensors: a captured graph replays it right.
`num_alive` is lowered with an atomic, the only one of this project: it adds integers, whose order cannot matter, for
the few rows that finish in a step; a reduction would be a third launch in every step.

B slots, V columns of the head, N blocks of BLOCK columns.
Bytes: the logits of live slots once, 4 V B, and one block of each again; 8 N B of partials written and read.
"""

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels import sampling
from sparkgrpo.kernels.philox import PURPOSE_SAMPLE
from sparkgrpo.kernels.triton_launch import CompileCase, check_triton, launch

BLOCKS_PER_PROGRAM = 4
"""16 KiB of a row: four 16-byte loads in flight for each of 256 threads."""
INF = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(sampling.LOG2_E)
UNITS = tl.constexpr(1 / sampling.MASS_UNIT)
UNIFORM_BITS = tl.constexpr(sampling.UNIFORM_BITS)
UNIFORM_MASK = tl.constexpr((1 << sampling.UNIFORM_BITS) - 1)
PURPOSE = tl.constexpr(PURPOSE_SAMPLE)
NUM_STOP_IDS = tl.constexpr(sampling.NUM_STOP_IDS)
STOP = tl.constexpr(sampling.STOP)
LENGTH = tl.constexpr(sampling.LENGTH)
INVALID = tl.constexpr(sampling.INVALID)


@triton.jit
def _scale(inv_temperature_ptr):
    """(is it greedy, 1 / T; greedy has T = 1)."""
    inv_temperature = tl.load(inv_temperature_ptr)
    is_greedy = inv_temperature == 0.0
    return is_greedy, tl.where(is_greedy, 1.0, inv_temperature)


@triton.jit
def _exponentials(x, top, scale_log2):
    """exp2 of (x - top) scale; the difference first, so that no fused multiply-add can round it otherwise."""
    return tl.exp2((x - tl.where(top == -INF, 0.0, top)) * scale_log2)


@triton.jit(do_not_specialize=["num_valid"])
def _block_partials_kernel(
    logits_ptr,
    context_len_ptr,
    inv_temperature_ptr,
    block_top_ptr,
    block_sum_ptr,
    num_valid,
    stride_row,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    pid_b = tl.program_id(0).to(tl.int64)
    if tl.load(context_len_ptr + pid_b) > 0:
        num_blocks = tl.cdiv(num_valid, BLOCK)
        _, scale = _scale(inv_temperature_ptr)
        offs_n = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)  # [BLOCKS]
        offs_v = offs_n[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, BLOCK]
        logits_ptr += pid_b * stride_row
        # A mask whose bound is no known multiple of 16 would split 16-byte loads: whole tiles go without one.
        if (tl.program_id(1) + 1) * BLOCKS * BLOCK <= num_valid:
            x = tl.load(logits_ptr + offs_v)
        else:
            x = tl.load(logits_ptr + offs_v, mask=offs_v < num_valid, other=-INF)
        top = tl.max(x, 1)  # [BLOCKS]; what a NaN does to a maximum is undefined, but it makes the sum NaN
        total = tl.sum(_exponentials(x, tl.expand_dims(top, 1), scale * LOG2_E), 1)
        mask_n = offs_n < num_blocks
        tl.store(block_top_ptr + pid_b * num_blocks + offs_n, top, mask=mask_n)
        tl.store(block_sum_ptr + pid_b * num_blocks + offs_n, total, mask=mask_n)


@triton.jit
def _threshold(total, word):
    """floor(u total): the products with the total's halves are exact."""
    u = (word >> (32 - UNIFORM_BITS)).to(tl.int64)
    return u * (total >> UNIFORM_BITS) + ((u * (total & UNIFORM_MASK)) >> UNIFORM_BITS)


@triton.jit
def _draw(mass, word):
    """First index whose running mass exceeds uniform * total; the length of `mass` where there is none."""
    units = (tl.where(mass > 0, mass, 0.0) * UNITS).to(tl.int64)  # NaN is none
    return tl.sum((tl.cumsum(units, 0) <= _threshold(tl.sum(units, 0), word)).to(tl.int32), 0)


@triton.jit
def _first_equal(x, top):
    """Lowest index of the maximum, or the length of `x` where nothing equals it."""
    offs = tl.arange(0, x.shape[0])
    return tl.min(tl.where(x == top, offs, x.shape[0]), 0)


@triton.jit
def _sample(
    logits_ptr,
    block_top_ptr,
    block_sum_ptr,
    inv_temperature_ptr,
    word_block,
    word_token,
    num_valid,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    """(token, log-prob) of one slot, whose logits and partials the pointers name."""
    is_greedy, scale = _scale(inv_temperature_ptr)
    num_blocks = tl.cdiv(num_valid, BLOCK)
    offs_n = tl.arange(0, BLOCKS_PAD)  # [BLOCKS_PAD]
    mask_n = offs_n < num_blocks
    top_n = tl.load(block_top_ptr + offs_n, mask=mask_n, other=-INF)
    top = tl.max(top_n, 0)
    sum_n = tl.load(block_sum_ptr + offs_n, mask=mask_n, other=0.0)
    mass_n = sum_n * _exponentials(top_n, top, scale * LOG2_E)
    block = tl.where(is_greedy, _first_equal(top_n, top), _draw(mass_n, word_block))
    block = tl.minimum(block, num_blocks - 1)
    offs = tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(logits_ptr + block * BLOCK + offs, mask=block * BLOCK + offs < num_valid, other=-INF)
    block_top = tl.load(block_top_ptr + block)
    e = _exponentials(x, block_top, scale * LOG2_E)
    inside = tl.where(is_greedy, _first_equal(x, block_top), _draw(e, word_token))
    above = tl.sum(tl.where(offs == inside, x - top, 0.0), 0)
    logprob = above * scale - tl.log(tl.sum(mass_n, 0))
    return block * BLOCK + inside, logprob


@triton.jit(do_not_specialize=["num_valid", "stride_out"])
def _sample_update_kernel(
    logits_ptr,
    block_top_ptr,
    block_sum_ptr,
    token_ptr,
    context_len_ptr,
    prompt_len_ptr,
    row_id_ptr,
    stream_ptr,
    out_token_ptr,
    out_logprob_ptr,
    num_new_ptr,
    finish_ptr,
    num_alive_ptr,
    seed_ptr,
    inv_temperature_ptr,
    eos_ids_ptr,
    max_new_ptr,
    num_valid,
    stride_row,
    stride_out,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    pid_b = tl.program_id(0).to(tl.int64)
    context_len = tl.load(context_len_ptr + pid_b)
    if context_len > 0:
        stream = tl.load(stream_ptr + pid_b)
        stream_low, stream_high = stream.to(tl.int32), (stream >> 32).to(tl.int32)
        word_block, word_token, _, _ = tl.philox(tl.load(seed_ptr), context_len, stream_low, stream_high, PURPOSE)
        first_block = pid_b * tl.cdiv(num_valid, BLOCK)
        token, logprob = _sample(
            logits_ptr + pid_b * stride_row,
            block_top_ptr + first_block,
            block_sum_ptr + first_block,
            inv_temperature_ptr,
            word_block,
            word_token,
            num_valid,
            BLOCK,
            BLOCKS_PAD,
        )
        is_finite = tl.abs(logprob) < INF  # no for NaN
        token = tl.where(is_finite, token, 0)
        index = context_len - tl.load(prompt_len_ptr + pid_b)
        stop_ids = tl.load(eos_ids_ptr + tl.arange(0, NUM_STOP_IDS))  # [NUM_STOP_IDS]
        is_stop = tl.sum((stop_ids == token).to(tl.int32), 0) != 0
        finish = tl.where(is_stop, STOP, tl.where(index + 1 >= tl.load(max_new_ptr), LENGTH, 0))
        finish = tl.where(is_finite, finish, INVALID)  # a stop id in the last place is STOP
        row = tl.load(row_id_ptr + pid_b).to(tl.int64)
        tl.store(out_token_ptr + row * stride_out + index, token)
        tl.store(out_logprob_ptr + row * stride_out + index, tl.where(is_finite, logprob, float("nan")))
        tl.store(num_new_ptr + row, index + 1)
        tl.store(finish_ptr + row, finish.to(tl.int8))
        tl.store(token_ptr + pid_b, token)
        tl.store(context_len_ptr + pid_b, tl.where(finish > 0, 0, context_len + 1))
        tl.atomic_add(num_alive_ptr, -1, mask=finish > 0, sem="relaxed")


def sample_update_kernels(
    logits_BV: torch.Tensor,
    *,
    num_valid: int,
    state: dict[str, torch.Tensor],
    partials: tuple[torch.Tensor, torch.Tensor] | None,
    block_columns: int,
) -> None:
    """Both launches; grids from shapes alone.

    Args:
        state: The tensors of `sample_update` by name, in its order.
        partials: fp32, contiguous, at least [B, N]; allocated where None.
        block_columns: 1,024, or another power of two for tests: many blocks of a small vocabulary.
    """
    check_triton(logits_BV.device)
    B, num_blocks = len(logits_BV), triton.cdiv(num_valid, block_columns)
    if partials is None:
        partials = (logits_BV.new_empty(B, num_blocks), logits_BV.new_empty(B, num_blocks))
    for x in partials:
        if x.shape != (B, num_blocks) or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(
                f"partials must be two contiguous float32 [{B}, {num_blocks}], got {x.dtype} {list(x.shape)}; cut them"
                " to the slots that run"
            )
    stride_row = logits_BV.stride(0)
    launch(
        _block_partials_kernel,
        (B, triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM)),
        (logits_BV, state["context_len_B"], state["inv_temperature_1"], *partials, num_valid, stride_row),
        {"BLOCK": block_columns, "BLOCKS": BLOCKS_PER_PROGRAM},
    )
    launch(
        _sample_update_kernel,
        (B,),
        (logits_BV, *partials, *state.values(), num_valid, stride_row, state["out_token_SC"].stride(0)),
        {"BLOCK": block_columns, "BLOCKS_PAD": triton.next_power_of_2(num_blocks)},
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """Both kernels with rows that are a multiple of 16 elements apart and with others; three vocabularies."""
    read = {"logits_ptr": "*fp32", "block_top_ptr": "*fp32", "block_sum_ptr": "*fp32", "inv_temperature_ptr": "*fp32"}
    read |= {"context_len_ptr": "*i32", "num_valid": "i32", "stride_row": "i32"}
    books = {f"{name}_ptr": "*i32" for name in ("token", "prompt_len", "row_id", "out_token", "num_new", "num_alive")}
    books |= {"stream_ptr": "*i64", "out_logprob_ptr": "*fp32", "finish_ptr": "*i8", "seed_ptr": "*i64"}
    books |= {"eos_ids_ptr": "*i32", "max_new_ptr": "*i32", "stride_out": "i32"}
    cases = []
    for is_aligned in (True, False):
        name, aligned = ("wide rows", ("stride_row",)) if is_aligned else ("odd rows", ())
        tile = {"BLOCK": sampling.BLOCK_V, "BLOCKS": BLOCKS_PER_PROGRAM}
        cases.append(
            CompileCase(
                name=f"sampling partials, {name}",
                kernel=_block_partials_kernel,
                signature=read,
                constexprs=tile,
                aligned=aligned,
            )
        )
        cases += [
            CompileCase(
                name=f"sample_update up to {blocks_pad} blocks, {name}",
                kernel=_sample_update_kernel,
                signature=read | books,
                constexprs={"BLOCK": sampling.BLOCK_V, "BLOCKS_PAD": blocks_pad},
                aligned=aligned,
            )
            for blocks_pad in (1, 64, 256)
        ]
    return cases
