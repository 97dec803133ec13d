"""Triton kernels that write the paged cache: a decode step's tokens, a prefill's, and whole pages.

A place in the pool is one number, page * 16 + offset; addresses are 64-bit, since a pool can exceed 2^31 numbers. A
program of the decode kernel serves the R query heads, the key and the value of one row and key head.

Letters: B slots, T tokens, C page copies, K key heads, R query heads a key head, E head width, M pages a row, L layers.
"""

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.kv_cache import PAGE_TOKENS
from sparkgrpo.kernels.triton_launch import ROW_WARPS, CompileCase, check_triton, launch

COPY_BYTES = 16 * 32 * ROW_WARPS * 2
"""Of a page, for a program of the copy: two loads of 16 bytes a thread, from keys and from values each."""


@triton.jit(
    do_not_specialize=["stride_table", "capacity"],
    do_not_specialize_on_alignment=["block_table_ptr", "context_len_ptr"],
)
def _rotate_and_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_pages_ptr, v_pages_ptr, block_table_ptr, context_len_ptr, out_ptr,
    num_queries, half, stride_q_row, stride_q_head, stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_table, capacity,
    PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`half` is E/2; capacity the tokens that a row's table has room for."""
    pid_b, pid_k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_key_heads = tl.num_programs(1)
    offs_r, offs_e = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)  # [BLOCK_R], [BLOCK_E]
    mask_e = offs_e < half
    mask = (offs_r < num_queries)[:, None] & mask_e[None, :]  # [BLOCK_R, BLOCK_E]
    # All loads first: none waits for another but the page for the length.
    context_len = tl.load(context_len_ptr + pid_b)
    cos = tl.load(cos_ptr + pid_b * half + offs_e, mask=mask_e, other=0.0)  # [BLOCK_E]
    sin = tl.load(sin_ptr + pid_b * half + offs_e, mask=mask_e, other=0.0)  # [BLOCK_E]
    head = pid_k * num_queries + offs_r  # [BLOCK_R]
    offs_q = (pid_b * stride_q_row + head * stride_q_head)[:, None] + offs_e[None, :]
    first_q = tl.load(q_ptr + offs_q, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_E]
    second_q = tl.load(q_ptr + half + offs_q, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_E]
    offs_k = pid_b * stride_k_row + pid_k * stride_k_head + offs_e  # [BLOCK_E]
    first_k = tl.load(k_ptr + offs_k, mask=mask_e, other=0.0).to(tl.float32)  # [BLOCK_E]
    second_k = tl.load(k_ptr + half + offs_k, mask=mask_e, other=0.0).to(tl.float32)  # [BLOCK_E]
    offs_v = pid_b * stride_v_row + pid_k * stride_v_head + offs_e  # [BLOCK_E]
    first_v = tl.load(v_ptr + offs_v, mask=mask_e, other=0.0)  # [BLOCK_E]
    second_v = tl.load(v_ptr + half + offs_v, mask=mask_e, other=0.0)  # [BLOCK_E]

    offs_out = ((pid_b * num_key_heads * num_queries + head) * (2 * half))[:, None] + offs_e[None, :]
    tl.store(out_ptr + offs_out, first_q * cos[None, :] - second_q * sin[None, :], mask=mask)
    tl.store(out_ptr + half + offs_out, second_q * cos[None, :] + first_q * sin[None, :], mask=mask)

    if (context_len > 0) & (context_len <= capacity):
        position = context_len - 1
        page = tl.load(block_table_ptr + pid_b * stride_table + position // PAGE).to(tl.int64)
        offs_page = ((page * PAGE + position % PAGE) * num_key_heads + pid_k) * (2 * half) + offs_e  # [BLOCK_E]
        tl.store(k_pages_ptr + offs_page, first_k * cos - second_k * sin, mask=mask_e)
        tl.store(k_pages_ptr + half + offs_page, second_k * cos + first_k * sin, mask=mask_e)
        tl.store(v_pages_ptr + offs_page, first_v, mask=mask_e)
        tl.store(v_pages_ptr + half + offs_page, second_v, mask=mask_e)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["page_slot_ptr"])
def _write_pages_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, page_slot_ptr, num_rows, num_key_heads, width,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A row is a token and key head: ROWS of them a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token = (row.to(tl.int32) // num_key_heads).to(tl.int64)  # [ROWS]; a 64-bit division is a subroutine
    head = row - token * num_key_heads  # [ROWS]
    offs_e = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    slot = tl.load(page_slot_ptr + token, mask=row < num_rows, other=-1)  # [ROWS]
    mask = (slot >= 0)[:, None] & (offs_e < width)[None, :]  # [ROWS, BLOCK_E]
    offs_page = ((slot * num_key_heads + head) * width)[:, None] + offs_e[None, :]
    offs_k = (token * stride_k_token + head * stride_k_head)[:, None] + offs_e[None, :]
    offs_v = (token * stride_v_token + head * stride_v_head)[:, None] + offs_e[None, :]
    tl.store(k_pages_ptr + offs_page, tl.load(k_ptr + offs_k, mask=mask, other=0.0), mask=mask)
    tl.store(v_pages_ptr + offs_page, tl.load(v_ptr + offs_v, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def _copy_pages_kernel(
    k_pages_ptr, v_pages_ptr, source_ptr, target_ptr, num_pages, page_size, BLOCK: tl.constexpr
):  # fmt: skip
    """One copy (axis 0), one layer (axis 1), BLOCK numbers of the page (axis 2)."""
    layer_page = tl.program_id(1).to(tl.int64) * num_pages
    source = layer_page + tl.load(source_ptr + tl.program_id(0))
    target = layer_page + tl.load(target_ptr + tl.program_id(0))
    offs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < page_size
    k = tl.load(k_pages_ptr + source * page_size + offs, mask=mask, other=0.0)
    v = tl.load(v_pages_ptr + source * page_size + offs, mask=mask, other=0.0)
    tl.store(k_pages_ptr + target * page_size + offs, k, mask=mask)
    tl.store(v_pages_ptr + target * page_size + offs, v, mask=mask)


def _dense_heads(x_TKE: torch.Tensor) -> torch.Tensor:
    return x_TKE if x_TKE.stride(2) == 1 else x_TKE.contiguous()


def _rotate_tile(num_queries: int, half: int) -> dict[str, int]:
    return {"BLOCK_R": triton.next_power_of_2(num_queries), "BLOCK_E": max(16, triton.next_power_of_2(half))}


def _rotate_warps(tile: dict[str, int], dtype: torch.dtype) -> int:
    """As many warps as have 16 bytes a thread of each half of the queries; 1 for Qwen2.5-0.5B, whose heads are few."""
    num_threads = tile["BLOCK_R"] * tile["BLOCK_E"] * dtype.itemsize // 16
    return min(ROW_WARPS, max(1, num_threads // 32))


def rotate_and_write_fwd(
    q_BHE: torch.Tensor,
    k_BKE: torch.Tensor,
    v_BKE: torch.Tensor,
    cos_B1E: torch.Tensor,
    sin_B1E: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table_BM: torch.Tensor,
    context_len_B: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries, contiguous; keys and values in their pages."""
    check_triton(q_BHE.device)
    (B, H, E), K = q_BHE.shape, k_pages.shape[2]
    q_BHE, k_BKE, v_BKE = _dense_heads(q_BHE), _dense_heads(k_BKE), _dense_heads(v_BKE)
    block_table_BM = block_table_BM if block_table_BM.stride(1) == 1 else block_table_BM.contiguous()
    out_BHE = torch.empty_like(q_BHE, memory_format=torch.contiguous_format)
    tile = _rotate_tile(H // K, E // 2)
    strides = (*q_BHE.stride()[:2], *k_BKE.stride()[:2], *v_BKE.stride()[:2], block_table_BM.stride(0))
    rows = (block_table_BM, context_len_B.contiguous())
    tensors = (q_BHE, k_BKE, v_BKE, cos_B1E.contiguous(), sin_B1E.contiguous(), k_pages, v_pages, *rows, out_BHE)
    args = (*tensors, H // K, E // 2, *strides, block_table_BM.shape[1] * PAGE_TOKENS)
    num_warps = _rotate_warps(tile, q_BHE.dtype)
    launch(_rotate_and_write_kernel, (B, K), args, {"PAGE": PAGE_TOKENS, **tile}, num_warps=num_warps)
    return out_BHE


def _write_tile(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows and columns of a program: 16 bytes for each of its threads."""
    block_e = max(16, triton.next_power_of_2(width))
    return {"ROWS": max(1, 32 * ROW_WARPS * (16 // dtype.itemsize) // block_e), "BLOCK_E": block_e}


def write_pages_fwd(
    k_TKE: torch.Tensor, v_TKE: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_slot_T: torch.Tensor
) -> None:
    """Every token with a place at its place."""
    check_triton(k_TKE.device)
    k_TKE, v_TKE = _dense_heads(k_TKE), _dense_heads(v_TKE)
    T, K, E = k_TKE.shape
    tile = _write_tile(E, k_TKE.dtype)
    strides = (*k_TKE.stride()[:2], *v_TKE.stride()[:2])
    args = (k_TKE, v_TKE, k_pages, v_pages, page_slot_T.contiguous(), T * K, K, E, *strides)
    launch(_write_pages_kernel, (triton.cdiv(T * K, tile["ROWS"]),), args, tile)


def copy_pages_fwd(
    k_pages: torch.Tensor, v_pages: torch.Tensor, source_C: torch.Tensor, target_C: torch.Tensor
) -> None:
    """Every copy in every layer."""
    check_triton(k_pages.device)
    num_pages, page_size = k_pages.shape[-4], k_pages.shape[-3:].numel()
    num_layers = len(k_pages) if k_pages.ndim == 5 else 1
    block = COPY_BYTES // k_pages.dtype.itemsize
    grid = (len(source_C), num_layers, triton.cdiv(page_size, block))
    args = (k_pages, v_pages, source_C.contiguous(), target_C.contiguous(), num_pages, page_size)
    launch(_copy_pages_kernel, grid, args, {"BLOCK": block})


def compile_cases(capability: int) -> list[CompileCase]:
    """The same on every GPU: the head widths, and query heads a key head from 1 to the most."""
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        for width, num_queries in ((64, 1), (64, 7), (80, 4), (96, 1), (128, 4), (128, 8), (128, 32), (256, 4)):
            tile = _rotate_tile(num_queries, width // 2)
            kind = f"rotate_and_write E {width} R {num_queries}"
            warps = _rotate_warps(tile, dtype)
            cases.append(_case(kind, _rotate_and_write_kernel, dtype, {"PAGE": PAGE_TOKENS, **tile}, warps))
        for width in (64, 80, 128):
            cases.append(_case(f"write_pages E {width}", _write_pages_kernel, dtype, _write_tile(width, dtype)))
        cases.append(_case("copy_pages", _copy_pages_kernel, dtype, {"BLOCK": COPY_BYTES // dtype.itemsize}))
    return cases


def _case(
    kind: str,
    kernel: triton.JITFunction,
    dtype: torch.dtype,
    constexprs: dict[str, int],
    num_warps: int = ROW_WARPS,
) -> CompileCase:
    element = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    types = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    types |= dict.fromkeys(("block_table_ptr", "context_len_ptr"), "*i32")
    types |= dict.fromkeys(("page_slot_ptr", "source_ptr", "target_ptr"), "*i64")
    constexprs = constexprs | ({"num_queries": 1} if kind.endswith(" R 1") else {})
    names = [name for name in kernel.arg_names if name not in constexprs]
    multiples = ("half", "width", "page_size")
    return CompileCase(
        name=f"kv_cache {element} {kind}",
        kernel=kernel,
        signature={name: types.get(name, f"*{element}" if name.endswith("_ptr") else "i32") for name in names},
        constexprs=constexprs,
        aligned=tuple(n for n in names if (n.startswith("stride_") and n != "stride_table") or n in multiples),
        num_warps=num_warps,
    )
