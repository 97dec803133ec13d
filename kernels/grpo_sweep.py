"""`linear_grpo` as sweeps over the vocabulary: which rows, which design, and the two schedules.

Single pass (designs `anchored` and `chunked`): a chunk's exponentials give its statistics, its loss and, while they
still exist, its gradient products; three products. Two passes (`recompute`): a sweep for statistics, the loss of all
rows, and a second sweep that makes the gradients; four products, and no chunk is stored in the first. It serves a
sequence with one ratio that is longer than the chunk, whose derivative is known after all its rows alone.

T rows given, N rows computed, C rows a chunk, S sequences, V vocabulary, D width. Bytes and flops: linear_grpo.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.active_rows import check_active_idx, check_cu_seqlens, find_active_rows, sequence_lengths
from sparkgrpo.kernels.grpo_row_loss import GrpoObjective, RowInputs, RowLoss, grpo_row_loss
from sparkgrpo.kernels.head_chunks import GradientBuffers, HeadSweep, KnownRows, scatter_rows, take_rows
from sparkgrpo.kernels.head_plan import Design, plan_linear_grpo
from sparkgrpo.kernels.head_sweep import Statistics, Sweep, open_head_sweep
from sparkgrpo.kernels.launch import (
    check_choice,
    check_chunk_tokens,
    check_device,
    check_head,
    check_num_valid,
    check_row_input,
    check_temperature,
)

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
        """Raises ValueError for operands and arguments that do not fit each other; reads no value of a tensor."""
        check_head(hidden_TD, weight_VD)
        T, device = hidden_TD.shape[0], hidden_TD.device
        check_num_valid(self.num_valid, weight_VD.shape[0])
        check_row_input("target_id_T", self.target_id_T, T, device, (torch.int32, torch.int64))
        for name in ("advantage_T", "token_weight_T", "old_logprob_T", "ref_logprob_T", "anchor_logprob_T"):
            check_row_input(name, getattr(self, name), T, device, is_optional=name.endswith("logprob_T"))
        check_temperature(self.temperature, T, device)
        check_chunk_tokens(self.chunk_tokens)
        self._check_options(hidden_TD)
        if self.grad_weight_VD is not None:
            _check_grad_weight(self.grad_weight_VD, weight_VD)

    def check_values(self, num_rows: int, device: torch.device) -> None:
        """Raises ValueError for bounds of sequences and row numbers that are none."""
        check_cu_seqlens(self.cu_seqlens_S1, num_rows)
        check_active_idx(self.active_idx_N, num_rows, device)

    def _check_options(self, hidden_TD: torch.Tensor) -> None:
        if not isinstance(self.objective, GrpoObjective):
            raise ValueError(f"objective must be a GrpoObjective, got {type(self.objective).__name__}")
        if self.objective.beta > 0 and self.ref_logprob_T is None:
            raise ValueError(
                f"beta {self.objective.beta} needs ref_logprob_T, got None; score the reference, or set beta 0"
            )
        if self.objective.ratio == "sequence" and self.cu_seqlens_S1 is None:
            raise ValueError("ratio 'sequence' needs cu_seqlens_S1, the sequences' bounds, got None")
        check_choice("design", self.design, ("auto", "anchored", "chunked", "recompute"))
        if self.design == "anchored" and not dispatch.runs_triton(hidden_TD.device):
            raise ValueError(
                f"design 'anchored' is made of Triton tiles, which serve CUDA, got tensors on {hidden_TD.device}; use"
                " design 'auto'"
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

    def write_statistics(self, start: int, stop: int, stats: Statistics) -> None:
        """Keeps log-prob and entropy of rows [start, stop)."""
        self.logprob_N[start:stop] = stats.logprob()
        if self.entropy_N is not None:
            self.entropy_N[start:stop] = stats.entropy()

    def row_loss(self, start: int, stop: int, seq_len_S: Lengths | None) -> RowLoss:
        """The objective on rows [start, stop), whose statistics are written; keeps what it reports."""
        lengths_S = None if seq_len_S is None else _sent_to(self.loss_N.device, torch.tensor(seq_len_S))
        inputs = self.rows.inputs.chunk(start, stop, lengths_S)
        entropy_C = None if self.entropy_N is None else self.entropy_N[start:stop]
        loss = _row_loss(inputs)(self.objective, self.logprob_N[start:stop], entropy_C, inputs)
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


def _sent_to(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """On the device, without waiting for it: only pinned memory may be copied behind the host's back."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _row_loss(inputs: RowInputs) -> Callable[..., RowLoss]:
    """The objective for these rows: one kernel where each has its own ratio and Triton serves, else its twin."""
    if inputs.seq_len_S is None and dispatch.runs_triton(inputs.weight_C.device):
        from sparkgrpo.kernels.grpo_row_kernels import grpo_row_loss_fused

        return grpo_row_loss_fused
    return grpo_row_loss


class Gradients:
    """dhidden [T, D] in the operands' dtype, and dweight [V, D] fp32 (the caller's, when grad_weight_VD is given).

    dweight starts uninitialised: the first chunk writes the rows that exist, `close` zeroes what nothing wrote.
    """

    def __init__(
        self, call: GrpoCall, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, needs: tuple[bool, bool]
    ) -> None:
        needs_dhidden, needs_dweight = needs
        self.dhidden_TD = torch.zeros_like(hidden_TD, memory_format=torch.contiguous_format) if needs_dhidden else None
        self.dweight_VD = call.grad_weight_VD if needs_dweight else None
        self.is_unwritten = needs_dweight and call.grad_weight_VD is None
        self.num_valid = weight_VD.shape[0] if call.num_valid is None else call.num_valid
        if self.is_unwritten:
            self.dweight_VD = torch.empty_like(weight_VD, dtype=torch.float32, memory_format=torch.contiguous_format)
            self.dweight_VD[self.num_valid :] = 0.0
        self.is_needed = needs_dhidden or needs_dweight

    @contextmanager
    def chunk(self, sweep: Sweep, rows: slice) -> Iterator[GradientBuffers]:
        """Where a chunk's gradients go; dhidden is brought to its rows' places afterwards."""
        picked_C = None if sweep.row_idx_N is None else sweep.row_idx_N[rows]
        if self.dhidden_TD is None or picked_C is None:
            own_CD = None if self.dhidden_TD is None else self.dhidden_TD[rows]
            yield GradientBuffers(own_CD, self.dweight_VD, self.is_unwritten)
        else:
            dhidden_CD = self.dhidden_TD.new_empty(rows.stop - rows.start, self.dhidden_TD.shape[1])
            yield GradientBuffers(dhidden_CD, self.dweight_VD, self.is_unwritten)
            self.dhidden_TD.index_copy_(0, picked_C, dhidden_CD)
        self.is_unwritten = False

    def close(self) -> None:
        """No chunk comes any more."""
        if self.is_unwritten and self.dweight_VD is not None:
            self.dweight_VD[: self.num_valid] = 0.0


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


def _single_pass(sweep: Sweep, outputs: RowOutputs, gradients: Gradients) -> None:
    if outputs.rows.seq_len_S is None:
        chunks = ((start, stop, None) for start, stop in sweep.chunks())
    else:
        chunks = _sequence_chunks(outputs.rows.seq_len_S, sweep.max_rows)
    sweep_rows = sweep.exponentials if gradients.is_needed else sweep.statistics
    for start, stop, seq_len_S in chunks:
        stats = sweep_rows(start, stop, outputs.entropy_N is not None)
        outputs.write_statistics(start, stop, stats)
        loss = outputs.row_loss(start, stop, seq_len_S)
        if gradients.is_needed:
            rows = slice(start, stop)
            with gradients.chunk(sweep, rows) as into:
                sweep.gradients(rows, stats, loss.g_C, loss.h_C, into)


def _two_passes(sweep: Sweep, outputs: RowOutputs, gradients: Gradients) -> None:
    lse_N, rest_frac_N = outputs.logprob_N.new_empty(2, sweep.num_rows).unbind(0)
    for start, stop in sweep.chunks():
        stats = sweep.statistics(start, stop, outputs.entropy_N is not None)
        outputs.write_statistics(start, stop, stats)
        lse_N[start:stop] = stats.lse()
        torch.div(stats.rest_C, stats.total_C, out=rest_frac_N[start:stop])
    if sweep.num_rows == 0:
        return
    loss = outputs.row_loss(0, sweep.num_rows, outputs.rows.seq_len_S)
    if not gradients.is_needed:
        return
    g_N, h_N, known = loss.g_C, loss.h_C, KnownRows(outputs.logprob_N, outputs.entropy_N, lse_N, rest_frac_N)
    if h_N is None and isinstance(sweep, HeadSweep):  # on CUDA the number of rows would be a sync
        kept_K = (g_N != 0).nonzero()[:, 0]
        sweep, g_N, known = sweep.of_rows(kept_K), g_N[kept_K], known.rows(kept_K)
    for start, stop in sweep.chunks():
        rows = slice(start, stop)
        h_C = None if h_N is None else h_N[rows]
        with gradients.chunk(sweep, rows) as into:
            sweep.known_gradients(rows, known.rows(rows), g_N[rows], h_C, into)


def run_sweeps(
    call: GrpoCall, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, needs: tuple[bool, bool]
) -> tuple[RowOutputs, Gradients, torch.Tensor]:
    """Loss, row outputs, gradients and the number of repaired rows; needs: (dhidden, dweight) are wanted.

    Raises ValueError on the CPU for a counted target that does not exist, and for a forced design "anchored" or
    "chunked" where a sequence with one ratio is longer than the chunk.
    """
    (T, D), device = hidden_TD.shape, hidden_TD.device
    call.check_values(T, device)
    rows = ComputedRows.of(call)
    plan = plan_linear_grpo(
        rows.is_counted_N.numel(), weight_VD.shape[0], D, objective=call.objective, dtype=hidden_TD.dtype,
        device=device, needs_dweight=needs[1], design=call.design, chunk_tokens=call.chunk_tokens,
        longest_sequence=max(rows.seq_len_S or (0,)),
    )  # fmt: skip
    sweep = open_head_sweep(
        hidden_TD,
        weight_VD,
        call.target_id_T,
        temperature=call.temperature,
        num_valid=weight_VD.shape[0] if call.num_valid is None else call.num_valid,
        row_idx_N=rows.row_idx_N,
        is_counted_N=rows.is_counted_N if call.active_idx_N is not None else None,
        anchor_logprob_T=call.anchor_logprob_T,
        chunk_tokens=plan.chunk_tokens,
        makes_tiles=plan.design != "chunked",
    )
    outputs, gradients = RowOutputs(call, rows), Gradients(call, hidden_TD, weight_VD, needs)
    (_two_passes if plan.design == "recompute" else _single_pass)(sweep, outputs, gradients)
    gradients.close()
    return outputs, gradients, sweep.num_repaired
