"""`linear_grpo` in torch ops alone: the CPU's implementation, and CUDA's until its kernels serve the call.

Single pass (design `chunked`): a chunk's exponentials give its statistics, its loss and, while they still exist, its
gradient products; three products. Two passes (`recompute`): under the sequence ratio a sequence longer than the chunk
has its derivative after all its rows alone; a second sweep makes the gradients of the rows with one; four products.

T rows given, N rows computed, C rows a chunk, S sequences, V vocabulary, D width. Bytes and flops: linear_grpo.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from sparkgrpo.kernels.active_rows import check_active_idx, check_cu_seqlens, find_active_rows, sequence_lengths
from sparkgrpo.kernels.grpo_row_loss import GrpoObjective, RowInputs, RowLoss, grpo_row_loss
from sparkgrpo.kernels.head_chunks import HeadSweep, RowStatistics, open_sweep, scatter_rows, take_rows
from sparkgrpo.kernels.launch import (
    check_choice,
    check_chunk_tokens,
    check_device,
    check_head,
    check_num_valid,
    check_row_input,
    check_temperature,
)

Design = Literal["auto", "anchored", "chunked", "recompute"]
Lengths = tuple[int, ...]
"""Computed rows of consecutive sequences, none of them 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoCall:
    """The arguments of `linear_grpo` that are not differentiated, as they came."""

    target_id_T: torch.Tensor
    advantage_T: torch.Tensor
    token_weight_T: torch.Tensor
    objective: GrpoObjective
    temperature: float | torch.Tensor
    num_valid: int | None
    old_logprob_T: torch.Tensor | None
    ref_logprob_T: torch.Tensor | None
    anchor_logprob_T: torch.Tensor | None
    cu_seqlens_S1: torch.Tensor | None
    active_idx_N: torch.Tensor | None
    want_entropy: bool
    chunk_tokens: int | None
    design: Design
    grad_weight_VD: torch.Tensor | None

    def check(self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> None:
        """Raises ValueError for operands and arguments that do not fit each other."""
        check_head(hidden_TD, weight_VD)
        T, device = hidden_TD.shape[0], hidden_TD.device
        check_num_valid(self.num_valid, weight_VD.shape[0])
        check_row_input("target_id_T", self.target_id_T, T, device, (torch.int32, torch.int64))
        for name in ("advantage_T", "token_weight_T", "old_logprob_T", "ref_logprob_T", "anchor_logprob_T"):
            check_row_input(name, getattr(self, name), T, device, is_optional=name.endswith("logprob_T"))
        check_temperature(self.temperature, T, device)
        check_chunk_tokens(self.chunk_tokens)
        check_cu_seqlens(self.cu_seqlens_S1, T)
        check_active_idx(self.active_idx_N, T, device)
        self._check_options()
        if self.grad_weight_VD is not None:
            _check_grad_weight(self.grad_weight_VD, weight_VD)

    def _check_options(self) -> None:
        if not isinstance(self.objective, GrpoObjective):
            raise ValueError(f"objective must be a GrpoObjective, got {type(self.objective).__name__}")
        if self.objective.beta > 0 and self.ref_logprob_T is None:
            raise ValueError(
                f"beta {self.objective.beta} needs ref_logprob_T, got None; score the reference, or set beta 0"
            )
        if self.objective.ratio == "sequence" and self.cu_seqlens_S1 is None:
            raise ValueError("ratio 'sequence' needs cu_seqlens_S1, the sequences' bounds, got None")
        check_choice("design", self.design, ("auto", "anchored", "chunked", "recompute"))
        if self.design == "anchored":
            raise ValueError(
                "design 'anchored' has no implementation in torch ops, which serve this call; use design 'auto'"
            )


def _check_grad_weight(grad_weight_VD: torch.Tensor, weight_VD: torch.Tensor) -> None:
    check_device("grad_weight_VD", grad_weight_VD, weight_VD.device)
    is_right = grad_weight_VD.shape == weight_VD.shape and grad_weight_VD.dtype == torch.float32
    if not is_right or not grad_weight_VD.is_contiguous() or grad_weight_VD.requires_grad:
        raise ValueError(
            f"grad_weight_VD must be contiguous float32 {tuple(weight_VD.shape)} without requires_grad, got"
            f" {grad_weight_VD.dtype} {tuple(grad_weight_VD.shape)}, strides {grad_weight_VD.stride()}"
        )


class ComputedRows(NamedTuple):
    """The rows that are computed and their data."""

    row_idx_N: torch.Tensor | None
    """int64; None is all rows."""
    is_counted_N: torch.Tensor
    """bool; on the CPU always True."""
    inputs: RowInputs
    seq_len_S: Lengths | None
    """None unless the ratio is per sequence."""

    @classmethod
    def of(cls, call: GrpoCall) -> "ComputedRows":
        """Finds the rows and gathers their data."""
        row_idx_N = find_active_rows(
            call.objective, call.advantage_T, call.token_weight_T, call.cu_seqlens_S1, call.active_idx_N
        )
        seq_len_S = sequence_lengths(call.cu_seqlens_S1, row_idx_N) if call.objective.ratio == "sequence" else None
        inputs = RowInputs(
            advantage_C=take_rows(call.advantage_T, row_idx_N),
            weight_C=take_rows(call.token_weight_T, row_idx_N),
            old_C=None if call.old_logprob_T is None else take_rows(call.old_logprob_T, row_idx_N),
            ref_C=None if call.ref_logprob_T is None else take_rows(call.ref_logprob_T, row_idx_N),
        )
        return cls(row_idx_N, inputs.weight_C != 0, inputs, seq_len_S)


class RowOutputs:
    """What the chunks write of the computed rows, [N]: fp32, clip_side int8."""

    def __init__(self, call: GrpoCall, rows: ComputedRows) -> None:
        def zeros(dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros_like(rows.is_counted_N, dtype=dtype)

        self.objective, self.rows = call.objective, rows
        self.logprob_N, self.ratio_N, self.loss_N, self.clip_side_N = zeros(), zeros(), zeros(), zeros(torch.int8)
        self.entropy_N = zeros() if call.want_entropy or call.objective.entropy_coef else None
        self.kl_N = None if call.ref_logprob_T is None else zeros()

    def write_statistics(self, start: int, stop: int, stats: RowStatistics) -> None:
        """Keeps log-prob and entropy of rows [start, stop)."""
        self.logprob_N[start:stop] = stats.logprob()
        if self.entropy_N is not None:
            self.entropy_N[start:stop] = stats.entropy()

    def row_loss(self, start: int, stop: int, seq_len_S: Lengths | None) -> RowLoss:
        """The objective on rows [start, stop), whose statistics are written; keeps what it reports."""
        lengths_S = None if seq_len_S is None else torch.tensor(seq_len_S).to(self.loss_N.device, non_blocking=True)
        inputs = self.rows.inputs.chunk(start, stop, lengths_S)
        entropy_C = None if self.entropy_N is None else self.entropy_N[start:stop]
        loss = grpo_row_loss(self.objective, self.logprob_N[start:stop], entropy_C, inputs)
        self.loss_N[start:stop], self.ratio_N[start:stop] = loss.loss_C, loss.ratio_C
        self.clip_side_N[start:stop] = loss.clip_side_C
        if self.kl_N is not None and loss.kl_C is not None:
            self.kl_N[start:stop] = loss.kl_C
        return loss

    def scatter(self, values_N: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
        """A row output at its T places: 0 in rows that were not computed or do not count."""
        if values_N is None:
            return None
        return scatter_rows(values_N.masked_fill(~self.rows.is_counted_N, 0), self.rows.row_idx_N, num_rows)


class Gradients:
    """dhidden [N, D] in the operands' dtype, and dweight [V, D] fp32 (the caller's, when grad_weight_VD is given)."""

    def __init__(
        self, call: GrpoCall, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, needs: tuple[bool, bool]
    ) -> None:
        self.hidden_TD = hidden_TD
        self.needs_dhidden, needs_dweight = needs
        self.dhidden_ND: torch.Tensor | None = None
        self.row_idx_N: torch.Tensor | None = None
        """int64, the rows of dhidden; None is all."""
        self.dweight_VD = call.grad_weight_VD if needs_dweight else None
        self.is_unwritten = needs_dweight and call.grad_weight_VD is None
        if self.is_unwritten:
            self.dweight_VD = torch.empty_like(weight_VD, dtype=torch.float32, memory_format=torch.contiguous_format)
        self.is_needed = self.needs_dhidden or needs_dweight

    def open(self, sweep: HeadSweep) -> None:
        """Makes room for the rows of the sweep that computes the gradients."""
        self.row_idx_N = sweep.row_idx_N
        if self.needs_dhidden:
            self.dhidden_ND = self.hidden_TD.new_empty(sweep.num_rows, self.hidden_TD.shape[1])
        if self.dweight_VD is not None and self.is_unwritten:  # the first chunk writes the rows that exist
            self.dweight_VD[sweep.weight_VD.shape[0] if sweep.num_rows else 0 :] = 0.0
            self.is_unwritten = sweep.num_rows > 0

    def add(
        self, sweep: HeadSweep, chunk: slice, stats: RowStatistics, g_C: torch.Tensor, h_C: torch.Tensor | None
    ) -> None:
        """The gradient products of the chunk that the sweep holds."""
        dhidden_CD = None if self.dhidden_ND is None else self.dhidden_ND[chunk]
        sweep.gradients(chunk, stats, g_C, h_C, dhidden_CD, self.dweight_VD, is_first=self.is_unwritten)
        self.is_unwritten = False


def _sequence_chunks(seq_len_S: Lengths, max_rows: int) -> Iterator[tuple[int, int, Lengths]]:
    """(start, stop, sequences inside) of chunks that end on sequence ends; each holds one sequence at least."""
    start = stop = 0
    inside: list[int] = []
    for length in seq_len_S:
        if inside and stop + length - start > max_rows:
            yield start, stop, tuple(inside)
            start, inside = stop, []
        stop += length
        inside.append(length)
    if inside:
        yield start, stop, tuple(inside)


def _single_pass(sweep: HeadSweep, outputs: RowOutputs, gradients: Gradients) -> None:
    gradients.open(sweep)
    if outputs.rows.seq_len_S is None:
        chunks = ((start, stop, None) for start, stop in sweep.chunks())
    else:
        chunks = _sequence_chunks(outputs.rows.seq_len_S, sweep.max_rows)
    for start, stop, seq_len_S in chunks:
        stats = sweep.exponentials(start, stop, outputs.entropy_N is not None)
        outputs.write_statistics(start, stop, stats)
        loss = outputs.row_loss(start, stop, seq_len_S)
        if gradients.is_needed:
            gradients.add(sweep, slice(start, stop), stats, loss.g_C, loss.h_C)


def _two_passes(sweep: HeadSweep, outputs: RowOutputs, gradients: Gradients) -> None:
    for start, stop in sweep.chunks():
        outputs.write_statistics(start, stop, sweep.exponentials(start, stop, outputs.entropy_N is not None))
    loss = outputs.row_loss(0, sweep.num_rows, outputs.rows.seq_len_S)
    if not gradients.is_needed:
        return
    g_N, h_N = loss.g_C, loss.h_C
    if h_N is None and g_N.device.type == "cpu":  # on CUDA the number of rows would be a sync
        kept_K = (g_N != 0).nonzero()[:, 0]
        sweep, g_N = sweep.of_rows(kept_K), g_N[kept_K]
    gradients.open(sweep)
    for start, stop in sweep.chunks():
        stats = sweep.exponentials(start, stop, h_N is not None)
        gradients.add(sweep, slice(start, stop), stats, g_N[start:stop], None if h_N is None else h_N[start:stop])


def run_chunks(
    call: GrpoCall, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, needs: tuple[bool, bool]
) -> tuple[RowOutputs, Gradients]:
    """Loss, row outputs and gradients of a checked call; needs: (dhidden, dweight) are wanted.

    Raises ValueError on the CPU for a counted target that does not exist, and for design "chunked" where a sequence
    with one ratio is longer than the chunk.
    """
    rows = ComputedRows.of(call)
    sweep = open_sweep(
        hidden_TD,
        weight_VD,
        call.target_id_T,
        temperature=call.temperature,
        num_valid=call.num_valid,
        row_idx_N=rows.row_idx_N,
        is_counted_N=rows.is_counted_N,
        chunk_tokens=call.chunk_tokens,
    )
    longest = max(rows.seq_len_S or (0,))
    if call.design == "chunked" and longest > sweep.max_rows:
        raise ValueError(
            f"design 'chunked' under ratio 'sequence' needs whole sequences in a chunk: the longest has {longest} rows,"
            f" the chunk {sweep.max_rows}; raise chunk_tokens, or use design 'auto'"
        )
    outputs, gradients = RowOutputs(call, rows), Gradients(call, hidden_TD, weight_VD, needs)
    is_recomputing = call.design == "recompute" or longest > sweep.max_rows
    (_two_passes if is_recomputing else _single_pass)(sweep, outputs, gradients)
    return outputs, gradients
