"""One way to open a sweep over the vocabulary: the producer of exponentials that serves the device.

A sweep has `chunks()`; `statistics(start, stop, want_entropy)`, which stores nothing; `exponentials(start, stop,
want_entropy)`, after which `gradients(...)` of the same chunk needs no further product of the logits; and
`known_gradients(...)`, which makes the gradients of rows whose statistics an earlier sweep left. `head_chunks.py` is
the CPU's producer, `tile_sweep.py` the GPU's.

T rows given, N rows computed, C rows a chunk.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.head_chunks import GradientBuffers, KnownRows, RowStatistics, open_sweep

if TYPE_CHECKING:
    from sparkgrpo.kernels.tile_sweep import SweepStatistics

Statistics: TypeAlias = "RowStatistics | SweepStatistics"


class Sweep(Protocol):
    """What both producers offer; the head of this file says what each method is for."""

    num_rows: int
    max_rows: int
    row_idx_N: torch.Tensor | None
    num_repaired: torch.Tensor

    def chunks(self) -> Iterator[tuple[int, int]]: ...  # noqa: D102  all of them above
    def statistics(self, start: int, stop: int, want_entropy: bool) -> Statistics: ...  # noqa: D102
    def exponentials(self, start: int, stop: int, want_entropy: bool) -> Statistics: ...  # noqa: D102
    def gradients(  # noqa: D102
        self,
        chunk: slice,
        stats: Any,  # noqa: ANN401  the producer's own
        g_C: torch.Tensor,
        h_C: torch.Tensor | None,
        into: GradientBuffers,
    ) -> None: ...
    def known_gradients(  # noqa: D102
        self,
        chunk: slice,
        known: KnownRows,
        g_C: torch.Tensor,
        h_C: torch.Tensor | None,
        into: GradientBuffers,
    ) -> None: ...


CUDA_CHUNK_ROWS = 4096
"""dweight is read and written once a chunk, 8 V D bytes: at D 896 GB10 balances that with so many rows' product."""
CUDA_SCORE_ROWS = 1024
"""Without dweight a chunk costs nothing but launches."""
DWEIGHT_BLOCK_ROWS = 16_384
"""Rows of dweight whose product exists at a time where it is added to an earlier chunk's (59 MB at D 896)."""


def open_head_sweep(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    num_valid: int,
    row_idx_N: torch.Tensor | None,
    is_counted_N: torch.Tensor | None = None,
    anchor_logprob_T: torch.Tensor | None = None,
    chunk_tokens: int | None,
    makes_tiles: bool = True,
) -> Sweep:
    """Gathers the row inputs of the rows that are computed.

    row_idx_N: int64 rows, None for all. is_counted_N: bool, which of them count (None: all); the others may hold any
    target. makes_tiles: on a GPU E comes from the tile, else from a stored product. Raises ValueError on the CPU for a
    counted target outside [0, num_valid); on CUDA such a row's results are NaN.
    """
    if not dispatch.runs_triton(hidden_TD.device):
        return open_sweep(
            hidden_TD, weight_VD, target_id_T, temperature=temperature, num_valid=num_valid, row_idx_N=row_idx_N,
            is_counted_N=is_counted_N, chunk_tokens=chunk_tokens,
        )  # fmt: skip
    from sparkgrpo.kernels.tile_sweep import open_tile_sweep

    return open_tile_sweep(
        hidden_TD, weight_VD[:num_valid], target_id_T, temperature=temperature, row_idx_N=row_idx_N,
        is_counted_N=is_counted_N, anchor_logprob_T=anchor_logprob_T, chunk_tokens=chunk_tokens or CUDA_CHUNK_ROWS,
        makes_tiles=makes_tiles,
    )  # fmt: skip
