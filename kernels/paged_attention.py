"""Decode attention over a paged cache: one query a row, its keys wherever its block table says.

    out_bh = softmax_t(q_bh . k_t / sqrt(E)) v_t        t < context_len_b;  k_t, v_t in page block_table[b, t // 16]

On a GPU a row's context is cut into splits of fixed length, each attended to by a program of its own, and merged by
their log-sum-exp. Scores, sums and the merge are fp32; the exponentials take the pages' dtype for their product with
the values, as in flash attention; out is rounded once. The torch path gathers all M pages of a row: a specification,
not a fast path (a CPU decodes with `grouped_attention`).

Letters: B slots, H query heads, K key heads, R = H / K, E head width, M pages a row of 16 tokens, X splits, P partials.
Bytes, b a number's: 2 K E b a token of context, read once; partials 4 H (E + 2) a split, written and read (2.7 % of the
cache's bytes at R 7, E 64, bf16, splits of 512). Flops: 4 H E a token.
Source: Dao et al., Flash-Decoding (2023), with lengths in place of numbers of splits; Kwon et al., PagedAttention
(arXiv:2309.06180).
"""

from dataclasses import dataclass

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.kv_cache import PAGE_TOKENS, check_pages, check_queries, check_rows
from sparkgrpo.kernels.launch import check_device

MAX_WIDTH, MAX_QUERIES = 256, 32
"""Largest E and R that the kernel's tile takes without spilling."""
FEW_ROWS = 64
SPLIT_FEW, SPLIT_MANY = 256, 512
"""Tokens of a split below FEW_ROWS slots, and from there on, where the rows alone fill a GPU (48 to 132
multiprocessors) and longer splits halve the partials."""


def split_length(num_rows: int) -> int:
    """Tokens of a split: a function of the bucket alone, so that a graph's grid is constant."""
    return SPLIT_FEW if num_rows < FEW_ROWS else SPLIT_MANY


def num_partials(num_rows: int, num_heads: int, num_pages: int) -> int:
    """Partial results of one call, P = B H X, for tables of `num_pages` pages a row."""
    return num_rows * num_heads * -(-num_pages * PAGE_TOKENS // split_length(num_rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionScratch:
    """Partial results of the splits, overwritten by every call; one serves all layers and all smaller batches."""

    top_P: torch.Tensor
    """fp32 [P]: largest score, in units of log 2."""
    total_P: torch.Tensor
    """fp32 [P]: sum of the exponentials relative to it."""
    acc_PE: torch.Tensor
    """fp32 [P, E]: the values so weighted."""

    @classmethod
    def allocate(
        cls, *, max_rows: int, num_heads: int, width: int, num_pages: int, device: torch.device
    ) -> "AttentionScratch":
        """Room for any number of rows up to max_rows, with tables of up to `num_pages` pages; uninitialised."""
        buckets = (max_rows, min(max_rows, FEW_ROWS - 1))  # fewer rows have shorter splits, and may need more of them
        P = max(num_partials(rows, num_heads, num_pages) for rows in buckets)
        top_P, total_P = (torch.empty(P, dtype=torch.float32, device=device) for _ in range(2))
        return cls(top_P=top_P, total_P=total_P, acc_PE=torch.empty(P, width, dtype=torch.float32, device=device))


def paged_attention_reference(
    q_BHE: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table_BM: torch.Tensor,
    context_len_B: torch.Tensor,
    *,
    scratch: AttentionScratch | None = None,
) -> torch.Tensor:
    """`paged_attention` as plain PyTorch, each row at once and without scratch; fp64 inside for fp64, else fp32."""
    K, capacity = k_pages.shape[2], block_table_BM.shape[1] * PAGE_TOKENS
    wide = torch.promote_types(q_BHE.dtype, torch.float32)
    is_own_BT = torch.arange(capacity, device=q_BHE.device) < context_len_B[:, None]

    def gather(pages: torch.Tensor) -> torch.Tensor:  # [B, T, K, E]; 0 where there is no token, whatever lies there
        return torch.where(is_own_BT[:, :, None, None], pages[block_table_BM.long()].flatten(1, 2).to(wide), 0.0)

    q_BKRE = q_BHE.to(wide).unflatten(1, (K, -1))
    score_BKRT = torch.einsum("bkre,btke->bkrt", q_BKRE, gather(k_pages)) * q_BHE.shape[2] ** -0.5
    is_own_B11T = is_own_BT[:, None, None]
    prob_BKRT = score_BKRT.masked_fill(~is_own_B11T, -torch.inf).softmax(-1)
    prob_BKRT = torch.where(is_own_B11T, prob_BKRT, 0.0)  # the softmax over nothing is NaN
    out_BHE = torch.einsum("bkrt,btke->bkre", prob_BKRT, gather(v_pages)).flatten(1, 2)
    return out_BHE.masked_fill((context_len_B > capacity)[:, None, None], torch.nan).to(q_BHE.dtype)


def paged_attention(
    q_BHE: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table_BM: torch.Tensor,
    context_len_B: torch.Tensor,
    *,
    scratch: AttentionScratch | None = None,
) -> torch.Tensor:
    """Each row's query over the tokens of its own pages; reads nothing on the host, its grid follows from shapes.

    A row's bits are the same for every batch of less than 64 rows, and for every batch of 64 or more, whatever the
    other rows, its slot, the table's width and the places of its pages; between the two they may differ in the last
    bits, since splits are 256 and 512 tokens long.

    Args:
        q_BHE: [B, H, E], rotated; any strides; on a GPU bf16 or fp32.
        k_pages, v_pages: [num_pages, 16, K, E], contiguous, the same dtype; H a multiple of K. What no row owns is
            never read, not even as a factor of 0.
        block_table_BM: int32 [B, M], physical page of each 16 tokens; read up to a row's context.
        context_len_B: int32 [B], tokens of each row; 0: finished or empty, nothing is read and the result is exactly 0.
            A row longer than its table, 16 M, gives NaN.
        scratch: room for the partials, for a loop that must not allocate; None: allocated here.

    Returns:
        out_BHE, contiguous, in q's dtype.

    Raises:
        ValueError: shape, dtype, device, strides of the pages, a scratch too small, a tensor that requires a gradient.
    """
    check_pages(k_pages, v_pages)
    check_queries(q_BHE, k_pages)
    (B, H, E), K = q_BHE.shape, k_pages.shape[2]
    check_rows(block_table_BM, context_len_B, B, q_BHE.device)
    if scratch is not None:
        _check_scratch(scratch, num_partials(B, H, block_table_BM.shape[1]), E, q_BHE.device)
    if not dispatch.runs_triton(q_BHE.device):
        return paged_attention_reference(q_BHE, k_pages, v_pages, block_table_BM, context_len_B)
    if E % 16 or E > MAX_WIDTH or H // K > MAX_QUERIES:
        raise ValueError(
            f"on a GPU heads must be a multiple of 16 and at most {MAX_WIDTH} wide, and a key head serve at most"
            f" {MAX_QUERIES} query heads, got {E} and {H // K}; use paged_attention_reference"
        )
    from sparkgrpo.kernels.paged_attention_kernels import paged_attention_fwd

    if scratch is None:
        scratch = AttentionScratch.allocate(
            max_rows=B, num_heads=H, width=E, num_pages=block_table_BM.shape[1], device=q_BHE.device
        )
    partials = (scratch.top_P, scratch.total_P, scratch.acc_PE)
    return paged_attention_fwd(q_BHE, k_pages, v_pages, block_table_BM, context_len_B, partials, split_length(B))


def _check_scratch(scratch: AttentionScratch, num_needed: int, width: int, device: torch.device) -> None:
    check_device("scratch", scratch.acc_PE, device)
    P, E = scratch.acc_PE.shape
    if num_needed > P or width != E:
        raise ValueError(
            f"scratch must have room for {num_needed} partials of width {width}, got {P} of {E}; make it by"
            " AttentionScratch.allocate for the most rows, their heads and the pages of the block table"
        )
