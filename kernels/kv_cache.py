"""The paged cache of keys and values: what writes it in decoding and prefill, and copies whole pages of it.

    page, offset of row b's last token:   block_table[b, (context_len_b - 1) // 16],   (context_len_b - 1) % 16
    rotate_and_write   q' = rotate(q)     k_pages[page, offset] = rotate(k)     v_pages[page, offset] = v

A page holds 16 tokens of one layer. Page 0 belongs to nobody: the reference sends there what must not be written, since
it has no masks; the kernels write nothing. A slot of context 0 is parked (finished or empty). All ops have fixed
shapes, read nothing on the host and change the pages in place; none has a backward.

Letters: B slots, T tokens of a prefill, C page copies, H query heads, K key heads, E head width, M pages a row, L
layers. Bytes, b a number's: rotate_and_write reads and writes B (H + 2 K) E b each; write_pages 2 T K E b each;
copy_pages 2 L C 16 K E b each. Flops: 3 B (H + K) E for the rotation, else none.
Source: Kwon et al., PagedAttention (arXiv:2309.06180); the rotation is that of `rotary`.
"""

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.launch import check_device
from sparkgrpo.kernels.rotary import rotary_reference

PAGE_TOKENS = 16


def last_token_slot(block_table_BM: torch.Tensor, context_len_B: torch.Tensor) -> torch.Tensor:
    """page * 16 + offset of every row's last token, int64 [B]; 0 where a row is parked or longer than its table."""
    has_slot_B = (context_len_B > 0) & (context_len_B <= block_table_BM.shape[1] * PAGE_TOKENS)
    position_B = torch.where(has_slot_B, context_len_B - 1, 0).long()
    page_B = block_table_BM.gather(1, position_B[:, None] // PAGE_TOKENS)[:, 0].long()
    return torch.where(has_slot_B, page_B * PAGE_TOKENS + position_B % PAGE_TOKENS, 0)


def rotate_and_write_reference(
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
    """`rotate_and_write` as plain PyTorch; fp64 inside for fp64, else fp32."""
    page_slot_B = last_token_slot(block_table_BM, context_len_B)
    write_pages_reference(rotary_reference(k_BKE, cos_B1E, sin_B1E), v_BKE, k_pages, v_pages, page_slot_B)
    return rotary_reference(q_BHE, cos_B1E, sin_B1E)


def rotate_and_write(
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
    """Turns a decode step's queries and keys by their angles and writes keys and values to the rows' pages.

    A parked slot writes nothing, nor does a row that is longer than its table (`paged_attention` makes it NaN).

    Args:
        q_BHE: [B, H, E], k_BKE, v_BKE: [B, K, E]; one dtype, E even, any strides (slices of the fused projection).
        cos_B1E, sin_B1E: fp32 [B, 1, E/2], of position context_len - 1; anything finite for parked slots.
        k_pages, v_pages: [num_pages, 16, K, E], contiguous, the same dtype; changed in place.
        block_table_BM: int32 [B, M], physical page of each 16 tokens. No two live rows may share their last page.
        context_len_B: int32 [B], tokens with the one to be written; 0: parked.

    Returns:
        Rotated queries, contiguous, of all slots.

    Raises:
        ValueError: shape, dtype, device, strides of the pages, a tensor that requires a gradient.
    """
    check_pages(k_pages, v_pages)
    check_queries(q_BHE, k_pages)
    B, _, E = q_BHE.shape
    if E % 2:
        raise ValueError(f"q_BHE must have an even head width, got {E}: channels are turned in pairs")
    for name, x_BKE in (("k_BKE", k_BKE), ("v_BKE", v_BKE)):
        _check_tokens(name, x_BKE, k_pages, B)
    check_rows(block_table_BM, context_len_B, B, q_BHE.device)
    for name, table_B1E in (("cos_B1E", cos_B1E), ("sin_B1E", sin_B1E)):
        if table_B1E.shape != (B, 1, E // 2) or table_B1E.dtype != torch.float32:
            raise ValueError(
                f"{name} must be float32 [{B}, 1, {E // 2}], an angle a slot and pair of channels, got"
                f" {table_B1E.dtype} {tuple(table_B1E.shape)}; make it from the positions of these slots"
            )
        check_device(name, table_B1E, q_BHE.device)
    args = (q_BHE, k_BKE, v_BKE, cos_B1E, sin_B1E, k_pages, v_pages, block_table_BM, context_len_B)
    if dispatch.runs_triton(q_BHE.device):
        from sparkgrpo.kernels.kv_cache_kernels import rotate_and_write_fwd

        return rotate_and_write_fwd(*args)
    return rotate_and_write_reference(*args)


def write_pages_reference(
    k_TKE: torch.Tensor, v_TKE: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_slot_T: torch.Tensor
) -> None:
    """`write_pages` as plain PyTorch; tokens without a place go to page 0."""
    slot_T = page_slot_T.clamp(min=0)
    for pages, x_TKE in ((k_pages, k_TKE), (v_pages, v_TKE)):
        pages.view(-1, *pages.shape[2:])[slot_T] = x_TKE


def write_pages(
    k_TKE: torch.Tensor, v_TKE: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_slot_T: torch.Tensor
) -> None:
    """Writes keys and values of a prefill, already rotated, each token to its place.

    Args:
        k_TKE, v_TKE: [T, K, E] in the pages' dtype, any strides.
        k_pages, v_pages: [num_pages, 16, K, E], contiguous; changed in place.
        page_slot_T: int64 [T], page * 16 + offset, no place twice; negative: the token is not written.

    Raises:
        ValueError: shape, dtype, device, strides of the pages, a tensor that requires a gradient.
    """
    check_pages(k_pages, v_pages)
    for name, x_TKE in (("k_TKE", k_TKE), ("v_TKE", v_TKE)):
        _check_tokens(name, x_TKE, k_pages, len(k_TKE))
    _check_index("page_slot_T", page_slot_T, len(k_TKE), k_pages.device)
    if dispatch.runs_triton(k_pages.device):
        from sparkgrpo.kernels.kv_cache_kernels import write_pages_fwd

        write_pages_fwd(k_TKE, v_TKE, k_pages, v_pages, page_slot_T)
    else:
        write_pages_reference(k_TKE, v_TKE, k_pages, v_pages, page_slot_T)


def copy_pages_reference(
    k_pages: torch.Tensor, v_pages: torch.Tensor, source_C: torch.Tensor, target_C: torch.Tensor
) -> None:
    """`copy_pages` as plain PyTorch."""
    for pages in (k_pages, v_pages):
        pages.index_copy_(pages.ndim - 4, target_C, pages.index_select(pages.ndim - 4, source_C))


def copy_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, source_C: torch.Tensor, target_C: torch.Tensor) -> None:
    """Copies whole pages, in one launch for all layers: a prompt's partial page to the siblings of its first row.

    Args:
        k_pages, v_pages: [L, num_pages, 16, K, E], or [num_pages, 16, K, E] of one layer, contiguous; changed in place.
        source_C, target_C: int64 [C] page numbers. No target twice, and none that is a source of another copy.

    Raises:
        ValueError: shape, dtype, device, strides of the pages.
    """
    check_pages(k_pages, v_pages, allow_layers=True)
    _check_index("source_C", source_C, len(source_C), k_pages.device)
    _check_index("target_C", target_C, len(source_C), k_pages.device)
    if dispatch.runs_triton(k_pages.device):
        from sparkgrpo.kernels.kv_cache_kernels import copy_pages_fwd

        copy_pages_fwd(k_pages, v_pages, source_C, target_C)
    else:
        copy_pages_reference(k_pages, v_pages, source_C, target_C)


def check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, *, allow_layers: bool = False) -> None:
    """Raises ValueError unless these are the pages of a layer (or of all)."""
    wanted = "[num_pages, 16, K, E]" + (" or [L, num_pages, 16, K, E]" if allow_layers else "")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.ndim not in ((4, 5) if allow_layers else (4,)) or pages.shape[-3] != PAGE_TOKENS or 0 in pages.shape:
            raise ValueError(f"{name} must be {wanted}, pages of 16 tokens, got {tuple(pages.shape)}")
        if not pages.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got strides {pages.stride()}; allocate [L, num_pages, 16, K, E] and take"
                " one layer of it"
            )
        if pages.requires_grad:
            raise ValueError(f"{name} is changed in place and gets no gradient, but requires_grad is True; detach it")
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"k_pages and v_pages must have one shape and dtype, got {k_pages.dtype} {tuple(k_pages.shape)} and"
            f" {v_pages.dtype} {tuple(v_pages.shape)}; allocate both alike"
        )
    check_device("v_pages", v_pages, k_pages.device)
    if dispatch.runs_triton(k_pages.device) and k_pages.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"on a GPU k_pages must be bfloat16 or float32, got {k_pages.dtype}; allocate one of these")


def check_rows(block_table_BM: torch.Tensor, context_len_B: torch.Tensor, num_rows: int, device: torch.device) -> None:
    """Raises ValueError unless these are a block table and the context lengths of `num_rows` slots."""
    if block_table_BM.ndim != 2 or len(block_table_BM) != num_rows or not block_table_BM.shape[1]:
        raise ValueError(
            f"block_table_BM must be [{num_rows}, M], a row of pages for each slot, got {tuple(block_table_BM.shape)};"
            " cut it to the slots of this bucket"
        )
    if context_len_B.shape != (num_rows,):
        raise ValueError(f"context_len_B must be [{num_rows}], one length a slot, got {tuple(context_len_B.shape)}")
    for name, x in (("block_table_BM", block_table_BM), ("context_len_B", context_len_B)):
        if x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {x.dtype}; convert it once with .int() and keep the result")
        check_device(name, x, device)


def check_queries(q_BHE: torch.Tensor, k_pages: torch.Tensor) -> None:
    """Raises ValueError unless these are queries that the pages' key heads can serve, as data."""
    K, E = k_pages.shape[-2:]
    if q_BHE.ndim != 3 or q_BHE.shape[2] != E or q_BHE.shape[1] % K or not q_BHE.shape[1]:
        raise ValueError(
            f"q_BHE must be [B, H, {E}] with H a multiple of {K}, as the pages are, got {tuple(q_BHE.shape)}"
        )
    _check_like_pages("q_BHE", q_BHE, k_pages)


def _check_tokens(name: str, x_TKE: torch.Tensor, k_pages: torch.Tensor, num_tokens: int) -> None:
    """Raises ValueError unless `x_TKE` holds `num_tokens` tokens of the pages' key heads, as data."""
    shape = (num_tokens, *k_pages.shape[-2:])
    if x_TKE.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, tokens of the pages' heads, got {tuple(x_TKE.shape)}")
    _check_like_pages(name, x_TKE, k_pages)


def _check_like_pages(name: str, x: torch.Tensor, k_pages: torch.Tensor) -> None:
    if x.dtype != k_pages.dtype:
        raise ValueError(f"{name} must be {k_pages.dtype} like the pages, got {x.dtype}; cast one to the other's")
    check_device(name, x, k_pages.device)
    if x.requires_grad:
        raise ValueError(f"{name} requires a gradient, which decoding does not give; run it under torch.no_grad()")


def _check_index(name: str, index_T: torch.Tensor, num_indices: int, device: torch.device) -> None:
    """Raises ValueError unless `index_T` is int64 [num_indices]."""
    if index_T.shape != (num_indices,) or index_T.dtype != torch.int64:
        raise ValueError(
            f"{name} must be int64 [{num_indices}], got {index_T.dtype} {tuple(index_T.shape)}; one number each"
        )
    check_device(name, index_T, device)
