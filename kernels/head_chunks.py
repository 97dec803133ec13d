"""The head's sweeps on a CPU: exponentials of a chunk of logits, and gradient products, in torch ops alone.

`linear_logprob` and `linear_grpo` are this, or `tile_sweep.py` on a GPU, plus a row loss. Forward of a chunk of C rows,
c = the row's largest logit:

    z_j = (hidden . weight_j) / tau      E_j = e^(z_j - c), j != y      R = sum_j E_j      M = sum_j (z_j - c) E_j
    a = z_y - c     e = e^a     S = R + e     logp = -log1p(R/e) if R < e, else a - log S     H = log S - (M + a e)/S

and its gradient, (g, h) = (dloss/dlogp, dloss/dH), which needs no further pass over the vocabulary when h is 0:

    h = 0:  E_y := -R                                                                      scale = -g/(tau S)
    h != 0: E_j := E_j (g + h (log(E_j/S) + H)), E_y := -g R + h e (logp + H)              scale = -1/(tau S)
    dhidden = diag(scale) (E @ weight)                dweight += E^T @ (diag(scale) hidden)

R is kept apart from e because 1 - p_y = R/S keeps its digits where the model is certain and 1 - e^logp does not.

Precision: logits, E and all sums are fp32. bf16 operands are widened, exactly, a block of the weight at a time: a CPU
product of them would round its result.
Bytes: one fp32 chunk [C, V], blocks of a few MB, three [C, D] buffers. Flops: 2 C V D for the forward, 4 C V D for both
gradients. T rows given, N rows computed, C rows a chunk, V valid vocabulary, D width, y the row's target.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sparkgrpo.kernels.cpu_products import product_
from sparkgrpo.kernels.launch import check_counted_rows, check_num_valid

CHUNK_BYTES = 160 << 20
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 128, 256
"""Smaller chunks reread dweight (8 V D bytes a chunk) for too little work (V 49,152: 128 rows take 1.04 times as long
as 256). Larger ones leave the cache between product, exponentials, gradients (V 1,536, D 144: 512 rows 1.4 times)."""
PAD_ROWS = 16
"""CPU products of fewer rows take another kernel and differ in the last bit: such chunks are padded with zero rows."""
BLOCK_ELEMENTS = 1 << 18
"""Logits (1 MiB) that are made exponentials while they stay in the core's L2 cache."""
BLOCK_COLUMNS = 2048
PRODUCT_ROWS = 2048
"""Rows of the weight that a product takes at a time: what it gives is still in the cache when it is copied or added,
and a bf16 weight is widened to fp32 in a buffer of that size."""
FAR_BELOW = 200.0
"""Nats below the row's maximum at which e^z is 0 in fp32, while z e^z is still 0 and not NaN."""


class RowStatistics(NamedTuple):
    """What one sweep over the vocabulary leaves of a row, fp32 [C]; the letters are those of the head of this file."""

    shift_C: torch.Tensor
    """c"""
    guess_C: torch.Tensor
    """a = z_y - c"""
    rest_C: torch.Tensor
    """R"""
    total_C: torch.Tensor
    """S"""
    moment_C: torch.Tensor | None
    """M, None unless the entropy is wanted"""

    def logprob(self) -> torch.Tensor:
        """log p_y in nats."""
        certain_C = -torch.log1p(self.rest_C / self.guess_C.exp())
        return torch.where(self.rest_C < self.guess_C.exp(), certain_C, self.guess_C - self.total_C.log())

    def entropy(self) -> torch.Tensor:
        """Entropy of the row's softmax in nats, never negative."""
        assert self.moment_C is not None, "the sweep was made without the moment"
        e_C = self.guess_C.exp()
        target_part_C = torch.where(e_C > 0, self.guess_C * e_C, 0.0)
        return (self.total_C.log() - (self.moment_C + target_part_C) / self.total_C).clamp(min=0.0)

    def lse(self) -> torch.Tensor:
        """log of the sum of the row's exponentials, in nats."""
        return self.shift_C + self.total_C.log()


class KnownRows(NamedTuple):
    """What an earlier sweep left of rows, fp32 [N]."""

    logprob: torch.Tensor
    entropy: torch.Tensor | None
    """None unless it is wanted; an entropy gradient needs it."""
    lse: torch.Tensor
    rest_frac: torch.Tensor
    """R/S = 1 - p_y, which keeps its digits where the model is certain."""

    def rows(self, picked: slice | torch.Tensor) -> "KnownRows":
        """The same of some rows: a slice, or int64 row numbers."""
        entropy = None if self.entropy is None else self.entropy[picked]
        return KnownRows(self.logprob[picked], entropy, self.lse[picked], self.rest_frac[picked])


class GradientBuffers(NamedTuple):
    """Where the gradients of a chunk go."""

    dhidden_CD: torch.Tensor | None
    """The chunk's rows, in the operands' dtype, written; None: not wanted."""
    dweight_VD: torch.Tensor | None
    """fp32, added to; rows from num_valid on are not touched."""
    is_first: bool
    """dweight holds nothing yet, and may be uninitialised: it is written."""


def row_blocks(num_rows: int, num_columns: int, most_columns: int) -> Iterator[tuple[slice, slice]]:
    """Rectangles of about BLOCK_ELEMENTS that cover [rows, columns], columns inner."""
    block_columns = min(num_columns, most_columns)
    block_rows = max(1, BLOCK_ELEMENTS // block_columns)
    for row in range(0, num_rows, block_rows):
        for column in range(0, num_columns, block_columns):
            yield slice(row, min(row + block_rows, num_rows)), slice(column, min(column + block_columns, num_columns))


def exponentiate_(
    z_CV: torch.Tensor, shift_C: torch.Tensor, want_moment: bool, block_columns: int = BLOCK_COLUMNS
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turns logits into E in place, block by block; returns (R, M or None) over all columns.

    The width of a block decides the order of the sums, so it is the caller's and not made from the number of rows.

    The caller has set the target's logit FAR_BELOW the shift, so that its term is exactly 0.
    """
    num_rows, num_columns = z_CV.shape
    rest_C = z_CV.new_zeros(num_rows)
    moment_C = z_CV.new_zeros(num_rows) if want_moment else None
    y_buffer = z_CV.new_empty(min(num_rows * num_columns, max(BLOCK_ELEMENTS, block_columns))) if want_moment else None
    for rows, columns in row_blocks(num_rows, num_columns, block_columns):
        z, shift = z_CV[rows, columns], shift_C[rows, None]
        if moment_C is None or y_buffer is None:
            z.sub_(shift).exp_()
        else:
            y = y_buffer[: z.numel()].view(z.shape)
            torch.sub(z, shift, out=y)
            torch.exp(y, out=z)
            moment_C[rows] += y.mul_(z).sum(1)
        rest_C[rows] += z.sum(1)
    return rest_C, moment_C


def chunk_rows(vocab: int, chunk_tokens: int | None) -> int:
    """Rows a chunk: what the caller asked for, else CHUNK_BYTES of logits, within MIN_ and MAX_CHUNK_ROWS."""
    if chunk_tokens is not None:
        return chunk_tokens
    return min(max(CHUNK_BYTES // (4 * vocab), MIN_CHUNK_ROWS), MAX_CHUNK_ROWS)


@dataclass(kw_only=True, slots=True)
class HeadSweep:
    """The operands of one call and the buffers that its chunks share. Made by `open_sweep`."""

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    """Rows that exist alone: the first num_valid."""
    row_idx_N: torch.Tensor | None
    """int64, the rows that are computed; None is all of them."""
    target_N: torch.Tensor
    """int64, in [0, V)."""
    inv_temperature: float | torch.Tensor
    """A number, or fp32 [N]."""
    num_rows: int
    max_rows: int
    exp_CV: torch.Tensor
    """The chunk: fp32 logits, then E."""
    rows_CD: torch.Tensor
    """The chunk's hidden rows as the products take them."""
    scaled_CD: torch.Tensor
    """The same times the row scale."""
    num_repaired: torch.Tensor
    """int32 scalar, 0: no row depends on an anchor here."""

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of every chunk of the rows that are computed."""
        for start in range(0, self.num_rows, max(self.max_rows, 1)):
            yield start, min(start + self.max_rows, self.num_rows)

    def of_rows(self, kept_K: torch.Tensor) -> "HeadSweep":
        """The same buffers over some of this sweep's rows; kept_K: int64, rising."""
        inv_temperature = self.inv_temperature
        return replace(
            self,
            row_idx_N=kept_K if self.row_idx_N is None else self.row_idx_N[kept_K],
            target_N=self.target_N[kept_K],
            inv_temperature=inv_temperature[kept_K] if isinstance(inv_temperature, torch.Tensor) else inv_temperature,
            num_rows=kept_K.numel(),
        )

    def _load_rows(self, start: int, stop: int) -> torch.Tensor:
        """Hidden rows of the chunk, dense, divided by the temperature, padded to PAD_ROWS with zeros.

        Dense, because a product of the same numbers with other strides may differ in the last bit.
        """
        num = stop - start
        if self.row_idx_N is None:
            rows_CD = self.hidden_TD[start:stop]
        else:
            rows_CD = self.hidden_TD.index_select(0, self.row_idx_N[start:stop])
        is_as_given = rows_CD.dtype == self.rows_CD.dtype and rows_CD.is_contiguous() and self._temperature_is_one()
        if is_as_given and num >= PAD_ROWS:
            return rows_CD
        out_CD = self.rows_CD[: max(num, PAD_ROWS)]
        out_CD[num:] = 0.0
        out_CD[:num] = rows_CD
        if not self._temperature_is_one():
            out_CD[:num] *= self._inv_temperature(start, stop)
        return out_CD

    def statistics(self, start: int, stop: int, want_entropy: bool) -> RowStatistics:
        """The statistics of rows [start, stop) alone."""
        return self.exponentials(start, stop, want_entropy)

    def exponentials(self, start: int, stop: int, want_entropy: bool) -> RowStatistics:
        """Makes the chunk the exponentials E of rows [start, stop), and returns the rows' statistics."""
        rows_CD = self._load_rows(start, stop)
        z_CV = self.exp_CV[: rows_CD.shape[0]]
        self._logits(rows_CD, z_CV)
        z_CV = z_CV[: stop - start]
        target_C1 = self.target_N[start:stop, None]
        shift_C = z_CV.amax(1)
        guess_C = z_CV.gather(1, target_C1)[:, 0] - shift_C
        z_CV.scatter_(1, target_C1, (shift_C - FAR_BELOW)[:, None])
        rest_C, moment_C = exponentiate_(z_CV, shift_C, want_entropy)
        return RowStatistics(shift_C, guess_C, rest_C, rest_C + guess_C.exp(), moment_C)

    def gradients(
        self,
        chunk: slice,
        stats: RowStatistics,
        g_C: torch.Tensor,
        h_C: torch.Tensor | None,
        into: GradientBuffers,
    ) -> None:
        """The gradients of the rows whose exponentials the chunk holds; it uses them up."""
        dhidden_CD, dweight_VD, is_first = into
        num, rows_CD = chunk.stop - chunk.start, self._load_rows(chunk.start, chunk.stop)
        finish_exponentials_(self.exp_CV[:num], self.target_N[chunk], stats, g_C, h_C)
        scale_C1 = ((-1.0 if h_C is not None else -g_C) / stats.total_C)[:, None]
        scale_hidden_C1 = scale_C1 * self._inv_temperature(chunk.start, chunk.stop)
        exp_CV = self.exp_CV[: rows_CD.shape[0]]
        if dweight_VD is not None:
            scaled_CD = torch.mul(rows_CD[:num], scale_C1, out=self.scaled_CD[:num])
            self._add_dweight(exp_CV[:num], scaled_CD, dweight_VD[: self.weight_VD.shape[0]], is_first)
        if dhidden_CD is not None:
            torch.mul(self._dhidden(exp_CV, rows_CD.shape)[:num], scale_hidden_C1, out=dhidden_CD)

    def known_gradients(
        self,
        chunk: slice,
        known: KnownRows,
        g_C: torch.Tensor,
        h_C: torch.Tensor | None,
        into: GradientBuffers,
    ) -> None:
        """The gradients of rows that no chunk holds any more, swept again; what is `known` of them serves a GPU."""
        stats = self.exponentials(chunk.start, chunk.stop, h_C is not None)
        self.gradients(chunk, stats, g_C, h_C, into)

    def _temperature_is_one(self) -> bool:
        return not isinstance(self.inv_temperature, torch.Tensor) and self.inv_temperature == 1.0

    def _inv_temperature(self, start: int, stop: int) -> float | torch.Tensor:
        """The chunk's 1 / tau, as something that multiplies [C, ...] rows."""
        if isinstance(self.inv_temperature, torch.Tensor):
            return self.inv_temperature[start:stop, None]
        return self.inv_temperature

    def _weight_blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The weight in dense fp32, PRODUCT_ROWS rows at a time; one that is not is copied into one buffer."""
        V, D = self.weight_VD.shape
        is_as_given = self.weight_VD.dtype == torch.float32 and self.weight_VD.is_contiguous()
        buffer = None if is_as_given else self.rows_CD.new_empty(min(V, PRODUCT_ROWS), D)
        for start in range(0, V, PRODUCT_ROWS):
            columns = slice(start, min(start + PRODUCT_ROWS, V))
            block = self.weight_VD[columns]
            yield columns, block if buffer is None else buffer[: columns.stop - start].copy_(block)

    def _logits(self, rows_CD: torch.Tensor, z_CV: torch.Tensor) -> None:
        for columns, block in self._weight_blocks():
            product_(z_CV[:, columns], rows_CD, block.t())

    def _dhidden(self, exp_CV: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        product_CD = exp_CV.new_zeros(shape)
        for columns, block in self._weight_blocks():
            product_(product_CD, exp_CV[:, columns], block, adds=True)
        return product_CD

    def _add_dweight(
        self, exp_CV: torch.Tensor, scaled_CD: torch.Tensor, dweight_VD: torch.Tensor, is_first: bool
    ) -> None:
        for start in range(0, dweight_VD.shape[0], PRODUCT_ROWS):
            columns = slice(start, start + PRODUCT_ROWS)
            product_(dweight_VD[columns], exp_CV[:, columns].t(), scaled_CD, adds=not is_first)


def finish_exponentials_(
    exp_CV: torch.Tensor,
    target_C: torch.Tensor,
    stats: RowStatistics,
    g_C: torch.Tensor,
    h_C: torch.Tensor | None,
    block_columns: int = BLOCK_COLUMNS,
) -> None:
    """Makes E, in place, dz up to the row scale: the target's term, and the entropy's part where h is given."""
    target_term_C = -stats.rest_C
    if h_C is not None:
        entropy_C, e_C = stats.entropy(), stats.guess_C.exp()
        constant_C = g_C + h_C * (entropy_C - stats.total_C.log())
        tiny = torch.finfo(torch.float32).tiny
        for rows, columns in row_blocks(exp_CV.shape[0], exp_CV.shape[1], block_columns):
            block = exp_CV[rows, columns]
            factor = block.clamp(min=tiny).log_()  # a column of probability 0 gets 0 times a finite number
            block.mul_(factor.mul_(h_C[rows, None]).add_(constant_C[rows, None]))
        target_term_C = g_C * target_term_C + torch.where(e_C > 0, h_C * e_C * (stats.logprob() + entropy_C), 0.0)
    exp_CV.scatter_(1, target_C[:, None], target_term_C[:, None])


def take_rows(values_T: torch.Tensor, row_idx_N: torch.Tensor | None) -> torch.Tensor:
    """Rows row_idx_N of [T, ...]; all of them, as they are, when it is None."""
    return values_T if row_idx_N is None else values_T.index_select(0, row_idx_N)


def scatter_rows(values_N: torch.Tensor, row_idx_N: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """Rows [N, ...] at their places among num_rows rows of zeros; as they are when row_idx_N is None (all rows)."""
    if row_idx_N is None:
        return values_N
    return values_N.new_zeros(num_rows, *values_N.shape[1:]).index_copy_(0, row_idx_N, values_N)


def open_sweep(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    num_valid: int | None,
    row_idx_N: torch.Tensor | None,
    is_counted_N: torch.Tensor | None = None,
    chunk_tokens: int | None,
) -> HeadSweep:
    """Gathers the row inputs of the rows that are computed and makes the buffers.

    row_idx_N: int64 rows, None for all. is_counted_N: bool, which of them count (None: all); the others may hold any
    target. Raises ValueError on the CPU for a counted target outside [0, num_valid).
    """
    num_valid = check_num_valid(num_valid, weight_VD.shape[0])
    target_N = take_rows(target_id_T, row_idx_N).long()
    if isinstance(temperature, torch.Tensor):
        temperature = take_rows(temperature, row_idx_N)
    if is_counted_N is not None:
        target_N = torch.where(is_counted_N, target_N, 0)
        if isinstance(temperature, torch.Tensor):
            temperature = torch.where(is_counted_N, temperature, 1.0)
    check_counted_rows(target_N, temperature, num_valid)
    num_rows, D = target_N.numel(), hidden_TD.shape[1]
    max_rows = min(chunk_rows(num_valid, chunk_tokens), num_rows)
    buffer_rows = max(max_rows, PAD_ROWS) if num_rows else 0
    return HeadSweep(
        hidden_TD=hidden_TD,
        weight_VD=weight_VD[:num_valid],
        row_idx_N=row_idx_N,
        target_N=target_N,
        inv_temperature=1.0 / temperature,
        num_rows=num_rows,
        max_rows=max_rows,
        exp_CV=hidden_TD.new_empty(buffer_rows, num_valid, dtype=torch.float32),
        rows_CD=hidden_TD.new_empty(buffer_rows, D, dtype=torch.float32),
        scaled_CD=hidden_TD.new_empty(buffer_rows, D, dtype=torch.float32),
        num_repaired=torch.zeros((), dtype=torch.int32),
    )
