"""Which rows of a GRPO batch have a gradient, and so are computed; and which sequences they belong to.

A row is dead before any product when its token weight is 0, or when its advantage is 0 and neither a KL nor an entropy
term exists. Under the sequence ratio a row of advantage 0 still carries its sequence's ratio: there a sequence is dead
when all its counted rows have advantage 0.

T rows given, N rows computed, S sequences. Bytes: a few vectors of T.
"""

import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.launch import check_device


def check_cu_seqlens(cu_seqlens_S1: torch.Tensor | None, num_rows: int) -> None:
    """Raises ValueError unless sequence bounds are int32 [S + 1] on the host, 0 first, T last, never falling."""
    if cu_seqlens_S1 is None:
        return
    is_tensor = isinstance(cu_seqlens_S1, torch.Tensor)
    if not is_tensor or cu_seqlens_S1.ndim != 1 or cu_seqlens_S1.dtype != torch.int32 or cu_seqlens_S1.numel() < 1:
        came = f"{cu_seqlens_S1.dtype} {tuple(cu_seqlens_S1.shape)}" if is_tensor else type(cu_seqlens_S1).__name__
        raise ValueError(f"cu_seqlens_S1 must be int32 of shape [S + 1], got {came}")
    if cu_seqlens_S1.device.type != "cpu":
        raise ValueError(f"cu_seqlens_S1 must be on the host, got {cu_seqlens_S1.device}; build it there, it is small")
    first, last = int(cu_seqlens_S1[0]), int(cu_seqlens_S1[-1])
    if first != 0 or last != num_rows or bool((cu_seqlens_S1.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens_S1 must start at 0, never fall and end at the number of rows {num_rows}, got first {first},"
            f" last {last}"
        )


def check_active_idx(active_idx_N: torch.Tensor | None, num_rows: int, device: torch.device) -> None:
    """Raises ValueError unless active rows are int32 or int64 [N]; on the CPU also rising and in [0, T)."""
    if active_idx_N is None:
        return
    if active_idx_N.ndim != 1 or active_idx_N.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"active_idx_N must be int32 row numbers [N], got {active_idx_N.dtype} {tuple(active_idx_N.shape)};"
            " for a mask pass mask.nonzero()[:, 0].int()"
        )
    check_device("active_idx_N", active_idx_N, device)
    if device.type != "cpu" or active_idx_N.numel() == 0:
        return
    is_rising = bool((active_idx_N.diff() > 0).all())
    if not is_rising or int(active_idx_N[0]) < 0 or int(active_idx_N[-1]) >= num_rows:
        raise ValueError(
            f"active_idx_N must hold rising row numbers in [0, {num_rows}), got {active_idx_N[:8].tolist()}...; sort it"
        )


def is_active_reference(
    objective: GrpoObjective,
    advantage_T: torch.Tensor,
    token_weight_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor | None,
    active_idx_N: torch.Tensor | None,
) -> torch.Tensor:
    """bool [T]: rows that count and may have a gradient, one sequence after the other."""
    is_active_T = token_weight_T != 0
    if active_idx_N is not None:
        return is_active_T & torch.zeros_like(is_active_T).index_fill(0, active_idx_N.long(), True)
    if objective.beta or objective.entropy_coef:
        return is_active_T
    has_advantage_T = (advantage_T != 0) & is_active_T
    if objective.ratio == "token" or cu_seqlens_S1 is None:
        return has_advantage_T
    for start, stop in zip(cu_seqlens_S1[:-1].tolist(), cu_seqlens_S1[1:].tolist(), strict=True):
        is_active_T[start:stop] &= has_advantage_T[start:stop].any()
    return is_active_T


def find_active_rows(
    objective: GrpoObjective,
    advantage_T: torch.Tensor,
    token_weight_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor | None,
    active_idx_N: torch.Tensor | None,
) -> torch.Tensor | None:
    """int64 [N], the rows that are computed; None when all are. Without `active_idx_N` the one host sync of the op.

    Rows that `active_idx_N` does not name are dead. A named row of weight 0 is dropped on the CPU; on CUDA, where
    dropping it would be a sync, it is computed and counts for nothing.
    """
    T = token_weight_T.numel()
    if active_idx_N is not None:
        row_idx_N = active_idx_N.long()
        if row_idx_N.device.type == "cpu":
            row_idx_N = row_idx_N[token_weight_T[row_idx_N] != 0]
        return None if row_idx_N.numel() == T else row_idx_N
    is_active_T = token_weight_T != 0
    if not objective.beta and not objective.entropy_coef:
        has_advantage_T = is_active_T & (advantage_T != 0)
        if objective.ratio == "sequence" and cu_seqlens_S1 is not None and T:
            seq_len_S = cu_seqlens_S1.diff().long().to(is_active_T.device)
            count_S = torch.segment_reduce(has_advantage_T.float(), "sum", lengths=seq_len_S, axis=0, unsafe=True)
            has_advantage_T = (count_S > 0).repeat_interleave(seq_len_S, output_size=T)
        is_active_T = is_active_T & has_advantage_T
    row_idx_N = is_active_T.nonzero()[:, 0]
    return None if row_idx_N.numel() == T else row_idx_N


def sequence_lengths(cu_seqlens_S1: torch.Tensor | None, row_idx_N: torch.Tensor | None) -> tuple[int, ...]:
    """Computed rows of each sequence that has any, in order. Reads row numbers on the host."""
    if cu_seqlens_S1 is None:
        return ()
    bounds_S1 = cu_seqlens_S1.long()
    if row_idx_N is not None:
        bounds_S1 = torch.searchsorted(row_idx_N.cpu(), bounds_S1)
    return tuple(length for length in bounds_S1.diff().tolist() if length)
