"""The head's sweeps on a GPU: the same steps as `head_chunks.py`, made of Triton kernels and cuBLAS products.

    design      E comes from                                        exposed bytes a logit    products
    anchored    the tile: product, exponential in its epilogue      0                        3 (forward 1, gradients 2)
    chunked     cuBLAS to fp32, then one row pass in place          6 (read 4, write 2)      3
    recompute   the tile twice, the second time with g and h known  0                        4

All of them anchor a row at a guess of its log-prob (head_tile_kernels.py has the maths), and redo the rows whose guess
was more than 60 nats off in a second sweep that nobody waits for. Operands are bf16 or fp32, logits and sums fp32, E
has the operands' dtype; both gradient products accumulate in fp32 and dweight is summed in fp32.

T rows given, N rows computed, C rows a chunk, V valid vocabulary, D width.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from sparkgrpo.kernels.head_chunks import GradientBuffers, KnownRows, take_rows
from sparkgrpo.kernels.head_row_kernels import CombinedRows, RowAnchors, combine, entropy_gradient, row_exponentials
from sparkgrpo.kernels.head_sweep import DWEIGHT_BLOCK_ROWS
from sparkgrpo.kernels.head_tile_kernels import TileOperands, sweep_tiles
from sparkgrpo.kernels.tile_table import SPLIT_COLUMNS, Tile, head_tile, interpreted_tile
from sparkgrpo.kernels.triton_launch import capability_of, check_triton, is_interpreted

ALIGNED_COLUMNS = 16
"""Rows of E are padded to this many columns: 16-byte accesses and descriptors. A store through a descriptor writes
whole pieces of 16 bytes, up to seven numbers beyond V: they fall into the padding."""
PRODUCT_COLUMNS = 8
"""cuBLAS wants sizes, not only strides, in multiples of 16 bytes; len(tokenizer) is odd for Qwen2.5 (151,665). The few
columns behind the last multiple are a product of their own."""


class SweepStatistics(NamedTuple):
    """Statistics of the chunk's rows, with what the gradients need; fp32 [C]."""

    combined: CombinedRows
    guess_C: torch.Tensor

    @property
    def rest_C(self) -> torch.Tensor:
        """R, the exponentials of all but the target."""
        return self.combined.rest_C

    @property
    def total_C(self) -> torch.Tensor:
        """S, all exponentials."""
        return self.combined.total_C

    def logprob(self) -> torch.Tensor:
        """log p_y in nats."""
        return self.combined.logprob_C

    def entropy(self) -> torch.Tensor:
        """Entropy of the row's softmax in nats."""
        return self.combined.entropy_C

    def lse(self) -> torch.Tensor:
        """log of the sum of the row's exponentials, in nats."""
        return self.combined.lse_C


def product_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """a @ b into fp32 `out`: bf16 operands on the tensor cores, never rounded on the way."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)  # the interpreter's tensors: a CPU product would round its result


def _column_blocks(num_columns: int, block: int | None = None) -> list[slice]:
    """The vocabulary in blocks, the last of them cut where its size stops being a multiple of PRODUCT_COLUMNS."""
    even = num_columns // PRODUCT_COLUMNS * PRODUCT_COLUMNS
    bounds = sorted({*range(0, even, block or max(even, 1)), even, num_columns} | {0})
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


def _is_tma_aligned(matrix: torch.Tensor) -> bool:
    """Base, row stride and unit column stride are what a descriptor demands."""
    is_aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return is_aligned and matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


@dataclass(kw_only=True, slots=True)
class TileSweep:
    """The operands of one call and the chunk in work. Made by `open_tile_sweep`."""

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    """Rows that exist alone: the first num_valid."""
    row_idx_N: torch.Tensor | None
    """int64, the rows that are computed; None is all of them."""
    is_counted_N: torch.Tensor | None
    """bool: rows that do not count are computed from zeros; None where all count."""
    target_N: torch.Tensor
    """int32; one outside [0, V) makes its row NaN."""
    inv_tau_N: torch.Tensor
    """fp32."""
    anchor_N: torch.Tensor | None
    """fp32, guesses of the log-prob."""
    num_rows: int
    max_rows: int
    makes_tiles: bool
    """E comes from the tile (anchored), else from a cuBLAS product and the row pass (chunked)."""
    num_repaired: torch.Tensor
    """int32 scalar on the device: rows that were swept again."""
    exp_buffer: torch.Tensor | None = None
    """The chunk, made when E is first stored."""
    hidden_CD: torch.Tensor | None = None
    """Rows of the chunk in work."""

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every chunk of the rows that are computed."""
        for start in range(0, self.num_rows, max(self.max_rows, 1)):
            yield start, min(start + self.max_rows, self.num_rows)

    def statistics(self, start: int, stop: int, want_entropy: bool) -> SweepStatistics:
        """Statistics of rows [start, stop); nothing is stored. The entropy costs nothing and is always made."""
        operands = self._load(start, stop, has_exp=False)
        return self._anchored_sweep("score", operands, start, stop, makes_tiles=True)

    def exponentials(self, start: int, stop: int, want_entropy: bool) -> SweepStatistics:
        """Makes the chunk the exponentials E of rows [start, stop), and returns the rows' statistics."""
        operands = self._load(start, stop, has_exp=True)
        return self._anchored_sweep("store", operands, start, stop, makes_tiles=self.makes_tiles)

    def gradients(
        self,
        chunk: slice,
        stats: SweepStatistics,
        g_C: torch.Tensor,
        h_C: torch.Tensor | None,
        into: GradientBuffers,
    ) -> None:
        """The gradients of the rows whose exponentials the chunk holds; it uses them up."""
        exp_CV = self._exp(chunk.stop - chunk.start)
        target_C, inv_tau_C = self.target_N[chunk], self.inv_tau_N[chunk]
        term_C = -stats.rest_C
        if h_C is None:
            # A target that does not exist would be an index out of bounds; its row is NaN whatever is written.
            column_C1 = target_C.clamp(0, self.weight_VD.shape[0] - 1).long()[:, None]
            exp_CV.scatter_(1, column_C1, term_C.to(exp_CV.dtype)[:, None])
            scale_C = -g_C * inv_tau_C / stats.total_C
        else:
            e_C, logprob_C, entropy_C = stats.guess_C.exp(), stats.logprob(), stats.entropy()
            term_C = g_C * term_C + torch.where(e_C > 0, h_C * e_C * (logprob_C + entropy_C), 0.0)
            entropy_gradient(exp_CV, target_C, stats.total_C, (g_C.contiguous(), h_C.contiguous(), entropy_C, term_C))
            scale_C = -inv_tau_C / stats.total_C
        self._products(exp_CV, scale_C[:, None], into)

    def known_gradients(
        self,
        chunk: slice,
        known: KnownRows,
        g_C: torch.Tensor,
        h_C: torch.Tensor | None,
        into: GradientBuffers,
    ) -> None:
        """The gradients of rows whose statistics an earlier sweep left; `known` holds the chunk's."""
        operands = self._load(chunk.start, chunk.stop, has_exp=True)
        assert operands.exp_CV is not None
        term_C, h_or_0_C = -g_C * known.rest_frac, torch.zeros_like(g_C)
        entropy_C = h_or_0_C
        if h_C is not None and known.entropy is not None:
            h_or_0_C, entropy_C = h_C.contiguous(), known.entropy.contiguous()
            prob_C = known.logprob.exp()
            term_C = term_C + torch.where(prob_C > 0, h_C * prob_C * (known.logprob + entropy_C), 0.0)
        slopes = (g_C.contiguous(), h_or_0_C, entropy_C, term_C)
        sweep_tiles("gradient", operands, known.lse.contiguous(), tile=self._tile(operands), slopes=slopes)
        self._products(operands.exp_CV, -self.inv_tau_N[chunk][:, None], into)

    def _load(self, start: int, stop: int, *, has_exp: bool) -> TileOperands:
        """The chunk's rows as the kernels take them: packed where rows are picked, zeros where they do not count."""
        if self.row_idx_N is None:
            hidden_CD = self.hidden_TD[start:stop]
        else:
            hidden_CD = self.hidden_TD.index_select(0, self.row_idx_N[start:stop])
        if self.is_counted_N is not None:
            hidden_CD = torch.where(self.is_counted_N[start:stop, None], hidden_CD, 0.0)
        if not _is_tma_aligned(hidden_CD):
            hidden_CD = hidden_CD.clone(memory_format=torch.contiguous_format)
        self.hidden_CD = hidden_CD
        return TileOperands(
            hidden_CD=hidden_CD,
            weight_VD=self.weight_VD,
            exp_CV=self._exp(stop - start) if has_exp else None,
            target_C=self.target_N[start:stop],
            inv_tau_C=self.inv_tau_N[start:stop],
        )

    def _exp(self, num_rows: int) -> torch.Tensor:
        """E of the chunk in the operands' dtype; under `chunked` it lies in the storage of the fp32 logits."""
        V = self.weight_VD.shape[0]
        if self.exp_buffer is None:
            dtype = self.hidden_TD.dtype if self.makes_tiles else torch.float32
            padded = -(-V // ALIGNED_COLUMNS) * ALIGNED_COLUMNS
            self.exp_buffer = self.hidden_TD.new_empty(self.max_rows, padded, dtype=dtype)
        return self.exp_buffer.view(self.hidden_TD.dtype)[:num_rows, :V]

    def _tile(self, operands: TileOperands, *, stores_tiles: bool = True) -> Tile:
        """The table's tile; by pointers where E lies in rows of fp32 logits, whose extent no descriptor should carry
        (Triton reckons it in 32 bits) and where tiles serve the repair alone."""
        is_aligned = _is_tma_aligned(operands.hidden_CD) and _is_tma_aligned(operands.weight_VD) and stores_tiles
        if is_interpreted():
            return interpreted_tile(use_tma=is_aligned)
        return head_tile(capability_of(self.hidden_TD.device), self.hidden_TD.dtype, is_tma_aligned=is_aligned)

    def _anchored_sweep(
        self, kind: str, operands: TileOperands, start: int, stop: int, *, makes_tiles: bool
    ) -> SweepStatistics:
        """One sweep, then a second of the rows whose anchor was too far off; it does nothing when there are none."""
        anchor_C = None if self.anchor_N is None else self.anchor_N[start:stop]
        target_C, inv_tau_C = operands.target_C, operands.inv_tau_C
        anchors = RowAnchors(operands.hidden_CD, operands.weight_VD, target_C, inv_tau_C, anchor_C)
        tile, num_splits = (
            self._tile(operands, stores_tiles=makes_tiles or operands.exp_CV is None),
            triton.cdiv(self.weight_VD.shape[0], SPLIT_COLUMNS),
        )
        partials_2SC = inv_tau_C.new_empty(2, num_splits, stop - start)
        if makes_tiles:
            sweep_tiles(kind, operands, anchors.shift_C, tile=tile, partials_2SC=partials_2SC)
            rows = combine(partials_2SC, anchors)
        else:
            rows = combine(self._row_pass(operands, anchors), anchors)
        self.num_repaired += rows.is_far_C.sum(dtype=torch.int32)
        sweep_tiles("max", operands, anchors.shift_C, tile=tile, partials_2SC=partials_2SC, is_far_C=rows.is_far_C)
        anchors.reanchor(partials_2SC[0], rows.is_far_C)
        sweep_tiles(kind, operands, anchors.shift_C, tile=tile, partials_2SC=partials_2SC, is_far_C=rows.is_far_C)
        return SweepStatistics(combine(partials_2SC, anchors, repaired=rows), anchors.guess_C)

    def _row_pass(self, operands: TileOperands, anchors: RowAnchors) -> torch.Tensor:
        """Product to fp32 and exponentials in its place; returns the partial sums [2, 1, C]."""
        assert self.exp_buffer is not None and operands.exp_CV is not None
        num_rows, V = operands.exp_CV.shape
        logits_CV = self.exp_buffer[:num_rows, :V]
        for columns in _column_blocks(V):
            product_fp32(operands.hidden_CD, operands.weight_VD[columns].t(), logits_CV[:, columns])
        sums_21C = anchors.shift_C.new_empty(2, 1, num_rows)
        row_exponentials(logits_CV, operands.exp_CV, operands.target_C, operands.inv_tau_C, anchors.shift_C, sums_21C)
        return sums_21C

    def _products(self, exp_CV: torch.Tensor, scale_C1: torch.Tensor, into: GradientBuffers) -> None:
        """dhidden = diag(scale) (E @ weight) and dweight += E^T @ (diag(scale) hidden)."""
        assert self.hidden_CD is not None
        dhidden_CD, dweight_VD, is_first = into
        if dweight_VD is not None:
            scaled_CD = (self.hidden_CD * scale_C1).to(exp_CV.dtype)
            block_VD = None
            if not is_first:
                num_block_rows = min(self.weight_VD.shape[0], DWEIGHT_BLOCK_ROWS)
                block_VD = dweight_VD.new_empty(num_block_rows, dweight_VD.shape[1])
            for rows in _column_blocks(self.weight_VD.shape[0], None if is_first else DWEIGHT_BLOCK_ROWS):
                exp_VC = exp_CV[:, rows].t()
                if block_VD is None:
                    product_fp32(exp_VC, scaled_CD, dweight_VD[rows])
                else:
                    dweight_VD[rows] += product_fp32(exp_VC, scaled_CD, block_VD[: rows.stop - rows.start])
        if dhidden_CD is not None:
            product_CD, *rest = (self._dhidden_part(exp_CV, part) for part in _column_blocks(self.weight_VD.shape[0]))
            for part_CD in rest:
                product_CD += part_CD
            dhidden_CD.copy_(product_CD.mul_(scale_C1))

    def _dhidden_part(self, exp_CV: torch.Tensor, columns: slice) -> torch.Tensor:
        product_CD = exp_CV.new_empty(len(exp_CV), self.weight_VD.shape[1], dtype=torch.float32)
        return product_fp32(exp_CV[:, columns], self.weight_VD[columns], product_CD)


def open_tile_sweep(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    row_idx_N: torch.Tensor | None,
    is_counted_N: torch.Tensor | None,
    anchor_logprob_T: torch.Tensor | None,
    chunk_tokens: int,
    makes_tiles: bool,
) -> TileSweep:
    """Gathers the row inputs of the rows that are computed; weight_VD: the rows that exist. Nothing waits for the
    device. Raises RuntimeError where the installed Triton cannot serve it."""
    check_triton(hidden_TD.device)
    target_N = take_rows(target_id_T, row_idx_N).clamp(-1, weight_VD.shape[0]).int()  # not one that wraps into range
    if isinstance(temperature, torch.Tensor):
        inv_tau_N = 1.0 / take_rows(temperature, row_idx_N)
    else:
        inv_tau_N = hidden_TD.new_full((target_N.numel(),), 1.0 / temperature, dtype=torch.float32)
    anchor_N = None if anchor_logprob_T is None else take_rows(anchor_logprob_T, row_idx_N).contiguous()
    if is_counted_N is not None:
        target_N = torch.where(is_counted_N, target_N, 0)
        inv_tau_N = torch.where(is_counted_N, inv_tau_N, 1.0)
    return TileSweep(
        hidden_TD=hidden_TD,
        weight_VD=weight_VD,
        row_idx_N=row_idx_N,
        is_counted_N=is_counted_N,
        target_N=target_N.contiguous(),
        inv_tau_N=inv_tau_N.contiguous(),
        anchor_N=anchor_N,
        num_rows=target_N.numel(),
        max_rows=min(chunk_tokens, target_N.numel()),
        makes_tiles=makes_tiles,
        num_repaired=torch.zeros((), dtype=torch.int32, device=hidden_TD.device),
    )
