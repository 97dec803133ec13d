"""Triton kernels of `paged_attention`: attention over one split of a row's context, then the merge of its splits.

    split x of row b:   m_x = max_t s_t      l_x = sum_t 2^(s_t - m_x)      a_x = sum_t 2^(s_t - m_x) v_t
    merge, in the order of x:   m' = max(m, m_x)   l = l 2^(m - m') + l_x 2^(m_x - m')   a likewise   out = a / l

s_t = (q . k_t) log2(e) / sqrt(E). A program of the split kernel holds the R query heads of one key head as the rows of
one product, padded to the 16 that a tensor core takes, so that keys and values are read once for all of them, 16 bytes
a thread and load. Rows are the fastest axis of the grid: siblings meet at their shared pages while these are in L2.

Which splits a row has follows from its own length, and tile, warps and order from E and dtype: its bits do not depend
on the batch, on the table's width or on where its pages lie. Splits beyond a row are neither written nor read.

Letters: B slots, H query heads, K key heads, R = H / K, E head width, M pages a row, X splits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.kv_cache import PAGE_TOKENS
from sparkgrpo.kernels.triton_launch import CompileCase, as_operand, capability_of, check_triton, launch

LOG2_E = 1.4426950408889634
MERGE_WARPS = 4


@triton.jit(
    do_not_specialize=["stride_table", "capacity", "split_len"],
    do_not_specialize_on_alignment=["block_table_ptr", "context_len_ptr", "top_ptr", "total_ptr"],
)
def _paged_attention_split_kernel(
    q_ptr, k_ptr, v_ptr, block_table_ptr, context_len_ptr, top_ptr, total_ptr, acc_ptr,
    num_queries, stride_q_row, stride_q_head, stride_table, capacity, split_len, scale_log2,
    PAGE: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """num_queries is R, capacity the tokens a table has room for; a longer row is read nowhere and merged to NaN."""
    pid_b, pid_k, pid_x = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    context_len = tl.load(context_len_ptr + pid_b)
    begin = pid_x * split_len  # tokens of a row fit 32 bits, and a 64-bit division by PAGE would be slower
    end = tl.minimum(begin + split_len, context_len)
    if (begin >= end) | (context_len > capacity):
        return
    offs_m, offs_e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)  # [BLOCK_M], [BLOCK_E]
    mask_m, mask_e = offs_m < num_queries, (offs_e < E)[None, :]
    head = pid_k * num_queries + offs_m  # [BLOCK_M]
    offs_q = (pid_b * stride_q_row + head * stride_q_head)[:, None] + offs_e[None, :]
    q = tl.load(q_ptr + offs_q, mask=mask_m[:, None] & mask_e, other=0.0)  # [BLOCK_M, BLOCK_E]
    stride_token = tl.num_programs(1) * E
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for start in range(begin, end, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        mask_t = offs_t < end
        page = tl.load(block_table_ptr + pid_b * stride_table + offs_t // PAGE, mask=mask_t, other=0)  # [BLOCK_T]
        slot = page.to(tl.int64) * PAGE + offs_t % PAGE
        offs_kv = (slot * stride_token + pid_k * E)[:, None] + offs_e[None, :]
        k = tl.load(k_ptr + offs_kv, mask=mask_t[:, None] & mask_e, other=0.0)  # [BLOCK_T, BLOCK_E]
        v = tl.load(v_ptr + offs_kv, mask=mask_t[:, None] & mask_e, other=0.0)  # [BLOCK_T, BLOCK_E]
        score = tl.dot(q, k.T, input_precision=PRECISION) * scale_log2  # [BLOCK_M, BLOCK_T]
        score = tl.where(mask_t[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight, shrink = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    part = (pid_b * tl.num_programs(1) * num_queries + head) * tl.num_programs(2) + pid_x  # [BLOCK_M]
    tl.store(top_ptr + part, top, mask=mask_m)
    tl.store(total_ptr + part, total, mask=mask_m)
    tl.store(acc_ptr + part[:, None] * E + offs_e[None, :], acc, mask=mask_m[:, None] & mask_e)


@triton.jit(
    do_not_specialize=["num_splits", "capacity", "split_len"],
    do_not_specialize_on_alignment=["context_len_ptr", "top_ptr", "total_ptr"],
)
def _paged_attention_merge_kernel(
    top_ptr, total_ptr, acc_ptr, context_len_ptr, out_ptr, num_queries, num_splits, capacity, split_len,
    E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The R query heads of one row and key head."""
    pid_b, pid_k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_len_ptr + pid_b)
    is_overlong = context_len > capacity
    num_own = tl.where(is_overlong, 0, tl.cdiv(context_len, split_len))
    offs_r, offs_e = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)  # [BLOCK_R], [BLOCK_E]
    mask_r = offs_r < num_queries
    mask = mask_r[:, None] & (offs_e < E)[None, :]  # [BLOCK_R, BLOCK_E]
    head = (pid_b * tl.num_programs(1) + pid_k) * num_queries + offs_r  # [BLOCK_R], over all rows
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    for x in range(num_own):
        part = head * num_splits + x  # [BLOCK_R]
        part_top = tl.load(top_ptr + part, mask=mask_r, other=0.0)
        part_total = tl.load(total_ptr + part, mask=mask_r, other=1.0)
        part_acc = tl.load(acc_ptr + part[:, None] * E + offs_e[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, part_top)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        total = total * shrink + part_total * weight
        acc = acc * shrink[:, None] + part_acc * weight[:, None]
        top = new_top
    out = acc / tl.where(num_own > 0, total, 1.0)[:, None]  # no token: exact zeros
    out = tl.where(is_overlong, float("nan"), out)
    tl.store(out_ptr + head[:, None] * E + offs_e[None, :], out, mask=mask)


class _Tile(NamedTuple):
    """Shape and launch of the split kernel. A row's bits follow all of it but the stages, so B has no say in it."""

    block_m: int
    """Query heads of one key head, padded to the tensor core's 16."""
    block_t: int
    """Tokens of an iteration: 8 KB of keys and 8 of values in bf16, in flight while the tile before is multiplied."""
    block_e: int
    num_warps: int
    num_stages: int
    """3: one tile ahead, and its pages another one ahead. 5: two and two, where shared memory has room for it."""


def _tile(num_queries: int, width: int, dtype: torch.dtype, capability: int) -> _Tile:
    block_m, block_e = max(16, triton.next_power_of_2(num_queries)), max(16, triton.next_power_of_2(width))
    if dtype == torch.float32:  # IEEE products on the ordinary cores: for tests, not for speed
        return _Tile(block_m, max(16, 2048 // block_e), block_e, num_warps=8, num_stages=3)
    # On sm_12x 5 stages would leave two blocks a multiprocessor in place of four: as many bytes, fewer rows in flight.
    return _Tile(block_m, max(32, 4096 // block_e), block_e, num_warps=4, num_stages=5 if capability == 90 else 3)


def paged_attention_fwd(
    q_BHE: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table_BM: torch.Tensor,
    context_len_B: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    split_len: int,
) -> torch.Tensor:
    """out_BHE, contiguous, by splits of `split_len` tokens; partials: top, total and acc of `AttentionScratch`."""
    check_triton(q_BHE.device)
    (B, H, E), K = q_BHE.shape, k_pages.shape[2]
    q_BHE = q_BHE if q_BHE.stride(2) == 1 else q_BHE.contiguous()
    block_table_BM = block_table_BM if block_table_BM.stride(1) == 1 else block_table_BM.contiguous()
    context_len_B = context_len_B.contiguous()
    capacity = block_table_BM.shape[1] * PAGE_TOKENS
    num_splits = triton.cdiv(capacity, split_len)
    tile = _tile(H // K, E, q_BHE.dtype, capability_of(q_BHE.device))
    operands = (as_operand(q_BHE), as_operand(k_pages), as_operand(v_pages))
    strides = (*operands[0].stride()[:2], block_table_BM.stride(0))
    launch(
        _paged_attention_split_kernel,
        (B, K, num_splits),
        (
            *operands, block_table_BM, context_len_B, *partials,
            H // K, *strides, capacity, split_len, E**-0.5 * LOG2_E,
        ),
        {
            "PAGE": PAGE_TOKENS, "E": E, "BLOCK_M": tile.block_m, "BLOCK_T": tile.block_t, "BLOCK_E": tile.block_e,
            "PRECISION": "ieee",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    out_BHE = torch.empty_like(q_BHE, memory_format=torch.contiguous_format)
    launch(
        _paged_attention_merge_kernel,
        (B, K),
        (*partials, context_len_B, out_BHE, H // K, num_splits, capacity, split_len),
        {"E": E, "BLOCK_R": triton.next_power_of_2(H // K), "BLOCK_E": tile.block_e},
        num_warps=MERGE_WARPS,
    )
    return out_BHE


def compile_cases(capability: int) -> list[CompileCase]:
    """Every head width, and the query heads a key head of the models this is for: Qwen2.5 0.5B has 7, 7B too."""
    bf16 = [(64, R) for R in (1, 2, 4, 7, 8)] + [(128, R) for R in (1, 2, 4, 7, 8, 32)] + [(80, 4), (96, 1), (256, 4)]
    cases = [_split_case(E, R, torch.bfloat16, capability) for E, R in bf16]
    cases += [_split_case(E, R, torch.float32, capability) for E, R in ((64, 7), (128, 4), (256, 4))]
    cases += [_merge_case(E, R, torch.bfloat16) for E, R in ((64, 1), (64, 7), (128, 8), (128, 32), (256, 4))]
    return [*cases, _merge_case(64, 7, torch.float32)]


ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _signature(kernel: triton.JITFunction, dtype: torch.dtype) -> dict[str, str]:
    fp32 = dict.fromkeys(("top_ptr", "total_ptr", "acc_ptr"), "*fp32")
    special = fp32 | {"block_table_ptr": "*i32", "context_len_ptr": "*i32", "scale_log2": "fp32"}
    names = [name for name in kernel.arg_names if name.islower()]
    return {name: special.get(name, f"*{ELEMENTS[dtype]}" if name.endswith("_ptr") else "i32") for name in names}


def _split_case(width: int, num_queries: int, dtype: torch.dtype, capability: int) -> CompileCase:
    tile = _tile(num_queries, width, dtype, capability)
    signature = _signature(_paged_attention_split_kernel, dtype)
    if num_queries == 1:
        del signature["num_queries"]
    constexprs = {"PAGE": PAGE_TOKENS, "E": width, "BLOCK_M": tile.block_m, "BLOCK_T": tile.block_t}
    constexprs |= {"BLOCK_E": tile.block_e, "PRECISION": "ieee"} | ({"num_queries": 1} if num_queries == 1 else {})
    return CompileCase(
        name=f"paged_attention {ELEMENTS[dtype]} E {width} R {num_queries} split",
        kernel=_paged_attention_split_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=("stride_q_row", "stride_q_head"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        is_product=dtype == torch.bfloat16,
    )


def _merge_case(width: int, num_queries: int, dtype: torch.dtype) -> CompileCase:
    signature = _signature(_paged_attention_merge_kernel, dtype)
    constexprs: dict[str, int] = {"E": width, "BLOCK_R": triton.next_power_of_2(num_queries)}
    constexprs["BLOCK_E"] = max(16, triton.next_power_of_2(width))
    if num_queries == 1:
        del signature["num_queries"]
        constexprs["num_queries"] = 1
    return CompileCase(
        name=f"paged_attention {ELEMENTS[dtype]} E {width} R {num_queries} merge",
        kernel=_paged_attention_merge_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=MERGE_WARPS,
    )
