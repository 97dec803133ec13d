"""The head's row kernels: what stands before and after its large products.

    target logit      z_y = (hidden . weight_y) / tau; a the guess of log p_y (0 without a usable one); c = z_y - a
    row exponentials  the chunk's fp32 logits become E = e^(z - c) in place, narrowed to bf16 (design "chunked")
    combine           R, M: partial sums of the splits, in index order; S = R + e^a; logp, H, lse; is the row far?
    reanchor          a far row is anchored at its largest logit, so that its second sweep cannot overflow
    entropy gradient  E_j := E_j (g + h (log(E_j/S) + H)), E_y := target term, in place

logp = -log1p(R/e) if R < e, else a - log S, e = e^a; H = log S - (M + a e)/S; lse = c + log S. A row is far when log S
is not within 60 nats: there E may have left the range of bf16 and fp32.

Bytes: target logit 2 D itemsize a row; row exponentials 6 a logit; entropy gradient 4 a logit; the others nothing.
C rows of the chunk, V valid vocabulary, D width, S also the number of splits in shapes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.triton_launch import CompileCase, as_operand, launch

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FULL, TAIL = tl.constexpr(False), tl.constexpr(True)
MAX_LOG_SUM = tl.constexpr(60.0)
"""Nats between a row's log-sum-exp and its anchor that bf16 and fp32 carry, whatever the row's weight."""
ROW_COLUMNS = 4096
"""Columns that a row kernel holds at a time: 16 a thread."""
ENTROPY_COLUMNS = 2048
"""4,096 spill on sm_90."""
LOGIT_COLUMNS = 512
COMBINE_ROWS = 128


@triton.jit
def _log(x):
    return tl.log2(x) * LN_2


@triton.jit
def _log1p(x):
    """log(1 + x) with the digits of x: the rounding of 1 + x is divided out (Kahan; HP-15C handbook)."""
    w = 1.0 + x
    return tl.where(w == 1.0, x, _log(w) * (x / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit(do_not_specialize_on_alignment=["target_ptr", "inv_tau_ptr", "anchor_ptr", "shift_ptr", "guess_ptr"])
def _target_logit_kernel(
    hidden_ptr, weight_ptr, target_ptr, inv_tau_ptr, anchor_ptr, logit_ptr, shift_ptr, guess_ptr,
    num_valid, width, stride_hidden, stride_weight, HAS_ANCHOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. A target that does not exist gives NaN, and with it all that the row makes."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    is_real = (target >= 0) & (target < num_valid)
    target = tl.where(is_real, target, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, width, BLOCK):
        offs = k + tl.arange(0, BLOCK)  # [BLOCK]
        mask = offs < width
        x = tl.load(hidden_ptr + row * stride_hidden + offs, mask=mask, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + target * stride_weight + offs, mask=mask, other=0.0).to(tl.float32)
    logit = tl.where(is_real, tl.sum(total, 0) * tl.load(inv_tau_ptr + row), float("nan"))
    guess = 0.0
    if HAS_ANCHOR:
        guess = tl.load(anchor_ptr + row)
        guess = tl.where((guess <= 0.0) & (guess > float("-inf")), guess, 0.0)  # NaN compares false
    tl.store(logit_ptr + row, logit)
    tl.store(shift_ptr + row, logit - guess)
    tl.store(guess_ptr + row, guess)


@triton.jit
def _row_exponential_block(
    logits_row, exp_row, start, num_valid, target, inv_tau, shift, rest, moment,
    BLOCK: tl.constexpr, IS_TAIL: tl.constexpr,
):  # fmt: skip
    """Full blocks go without a mask, so that their loads and stores are 16 bytes wide at any vocabulary."""
    offs = start + tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < num_valid if IS_TAIL else None
    z = tl.load(logits_row + offs, mask=mask)
    tl.debug_barrier()
    is_rest = offs != target
    if IS_TAIL:
        is_rest = is_rest & mask
    y = tl.where(is_rest, z * inv_tau - shift, float("-inf"))
    e = tl.exp2(y * LOG2_E)
    tl.store(exp_row + offs, e.to(exp_row.dtype.element_ty), mask=mask)
    return rest + e, moment + e * tl.where(e > 0, y, 0.0)


@triton.jit(do_not_specialize_on_alignment=["target_ptr", "inv_tau_ptr", "shift_ptr", "moment_ptr"])
def _row_exponential_kernel(
    logits_ptr, exp_ptr, target_ptr, inv_tau_ptr, shift_ptr, rest_ptr, moment_ptr,
    num_valid, stride_logits, stride_exp, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row; logits and E share their storage. A block's stores reach bytes that were read already: the
    barrier makes that true of every thread, not of one's own loads alone."""
    row = tl.program_id(0).to(tl.int64)
    logits_row, exp_row = logits_ptr + row * stride_logits, exp_ptr + row * stride_exp
    target = tl.load(target_ptr + row)
    inv_tau, shift = tl.load(inv_tau_ptr + row), tl.load(shift_ptr + row)
    rest, moment = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    num_full = num_valid // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        rest, moment = _row_exponential_block(
            logits_row, exp_row, start, num_valid, target, inv_tau, shift, rest, moment, BLOCK, FULL
        )
    if num_full < num_valid:
        rest, moment = _row_exponential_block(
            logits_row, exp_row, num_full, num_valid, target, inv_tau, shift, rest, moment, BLOCK, TAIL
        )
    tl.store(rest_ptr + row, tl.sum(rest, 0))
    tl.store(moment_ptr + row, tl.sum(moment, 0))


# Vectors that lie side by side in one allocation start where the number of rows puts them: no alignment is promised.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "moment_part_ptr", "shift_ptr", "guess_ptr", "total_ptr", "logprob_ptr", "entropy_ptr", "lse_ptr",
    ],
)  # fmt: skip
def _combine_kernel(
    rest_part_ptr, moment_part_ptr, shift_ptr, guess_ptr,
    rest_ptr, total_ptr, logprob_ptr, entropy_ptr, lse_ptr, is_far_ptr,
    num_rows, num_splits, IS_REPAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """IS_REPAIR: far rows alone, from the sums of their second sweep; else all rows, and which are far is written."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < num_rows
    if IS_REPAIR:
        mask = mask & (tl.load(is_far_ptr + offs, mask=mask, other=0) != 0)
        if tl.sum(mask.to(tl.int32)) == 0:
            return
    rest, moment = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    offs_part = offs
    for _ in range(0, num_splits):
        rest += tl.load(rest_part_ptr + offs_part, mask=mask, other=0.0)
        moment += tl.load(moment_part_ptr + offs_part, mask=mask, other=0.0)
        offs_part += num_rows
    guess = tl.load(guess_ptr + offs, mask=mask, other=0.0)
    e = tl.exp2(guess * LOG2_E)
    total = rest + e
    log_total = _log(total)
    is_certain = rest < e
    certain = -_log1p(tl.where(is_certain, rest / tl.where(is_certain, e, 1.0), 0.0))
    entropy = log_total - (moment + tl.where(e > 0, guess * e, 0.0)) / total
    tl.store(rest_ptr + offs, rest, mask)
    tl.store(total_ptr + offs, total, mask)
    tl.store(logprob_ptr + offs, tl.where(is_certain, certain, guess - log_total), mask)
    tl.store(entropy_ptr + offs, tl.where(entropy < 0.0, 0.0, entropy), mask)  # keeps NaN
    tl.store(lse_ptr + offs, tl.load(shift_ptr + offs, mask=mask, other=0.0) + log_total, mask)
    if not IS_REPAIR:
        is_near = (log_total >= -MAX_LOG_SUM) & (log_total <= MAX_LOG_SUM)
        tl.store(is_far_ptr + offs, tl.where(is_near, 0, 1), mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["shift_ptr", "guess_ptr"])
def _reanchor_kernel(
    max_part_ptr, logit_ptr, is_far_ptr, shift_ptr, guess_ptr, num_rows, num_splits, BLOCK: tl.constexpr
):  # fmt: skip
    """Far rows alone: a row that was near keeps its anchor, and with it its bits."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < num_rows
    is_far = (tl.load(is_far_ptr + offs, mask=mask, other=0) != 0) & mask
    if tl.sum(is_far.to(tl.int32)) == 0:
        return
    logit = tl.load(logit_ptr + offs, mask=mask, other=0.0)
    highest, offs_part = logit, offs
    for _ in range(0, num_splits):
        part = tl.load(max_part_ptr + offs_part, mask=is_far, other=float("-inf"))
        highest = tl.where(part > highest, part, highest)  # a NaN target logit stays NaN
        offs_part += num_rows
    tl.store(shift_ptr + offs, highest, is_far)
    tl.store(guess_ptr + offs, logit - highest, is_far)


@triton.jit
def _entropy_gradient_block(
    exp_row, start, num_valid, target, constant, h, target_term, BLOCK: tl.constexpr, IS_TAIL: tl.constexpr
):  # fmt: skip
    offs = start + tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < num_valid if IS_TAIL else None
    e = tl.load(exp_row + offs, mask=mask).to(tl.float32)
    dz = e * (constant + h * tl.where(e > 0, _log(tl.where(e > 0, e, 1.0)), 0.0))
    dz = tl.where(offs == target, target_term, dz)
    tl.store(exp_row + offs, dz.to(exp_row.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize_on_alignment=["target_ptr", "total_ptr", "g_ptr", "h_ptr", "entropy_ptr", "target_term_ptr"]
)
def _entropy_gradient_kernel(
    exp_ptr, target_ptr, total_ptr, g_ptr, h_ptr, entropy_ptr, target_term_ptr,
    num_valid, stride_exp, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, in place; log(E/S) of an E that underflowed to 0 is never looked at."""
    row = tl.program_id(0).to(tl.int64)
    exp_row, target, h = exp_ptr + row * stride_exp, tl.load(target_ptr + row), tl.load(h_ptr + row)
    constant = tl.load(g_ptr + row) + h * (tl.load(entropy_ptr + row) - _log(tl.load(total_ptr + row)))
    target_term = tl.load(target_term_ptr + row)
    num_full = num_valid // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        _entropy_gradient_block(exp_row, start, num_valid, target, constant, h, target_term, BLOCK, FULL)
    if num_full < num_valid:
        _entropy_gradient_block(exp_row, num_full, num_valid, target, constant, h, target_term, BLOCK, TAIL)


class RowAnchors:
    """Target logit z_y, shift c and guess a of a chunk's rows, fp32 [C]; `reanchor` moves those of far rows."""

    def __init__(
        self,
        hidden_CD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_C: torch.Tensor,
        inv_tau_C: torch.Tensor,
        anchor_logprob_C: torch.Tensor | None,
    ) -> None:
        hidden_CD, weight_VD = as_operand(hidden_CD), as_operand(weight_VD)
        self.num_rows, (V, D) = hidden_CD.shape[0], weight_VD.shape
        self.logit_C, self.shift_C, self.guess_C = inv_tau_C.new_empty(3, self.num_rows)
        launch(
            _target_logit_kernel,
            (self.num_rows,),
            (
                hidden_CD, weight_VD, target_C, inv_tau_C, anchor_logprob_C, self.logit_C, self.shift_C, self.guess_C,
                V, D, hidden_CD.stride(0), weight_VD.stride(0),
            ),
            {"HAS_ANCHOR": anchor_logprob_C is not None, "BLOCK": LOGIT_COLUMNS},
            num_warps=4,
        )  # fmt: skip

    def reanchor(self, max_SC: torch.Tensor, is_far_C: torch.Tensor) -> None:
        """Anchor the far rows at their largest logit; max_SC: fp32 [splits, C], the largest but the target's."""
        grid = (triton.cdiv(self.num_rows, COMBINE_ROWS),)
        args = (max_SC, self.logit_C, is_far_C, self.shift_C, self.guess_C, self.num_rows, max_SC.shape[0])
        launch(_reanchor_kernel, grid, args, {"BLOCK": COMBINE_ROWS}, num_warps=4)


class CombinedRows(NamedTuple):
    """What the sweeps leave of a chunk's rows; fp32 [C], nats, but for is_far_C."""

    rest_C: torch.Tensor
    """R"""
    total_C: torch.Tensor
    """S"""
    logprob_C: torch.Tensor
    entropy_C: torch.Tensor
    lse_C: torch.Tensor
    is_far_C: torch.Tensor
    """int32, 1 where the first sweep's anchor was too far off."""


def combine(partials_2SC: torch.Tensor, anchors: RowAnchors, repaired: CombinedRows | None = None) -> CombinedRows:
    """Statistics of every row from partial sums of R and M; of `repaired` the far rows are written again, in place."""
    num_splits, num_rows = partials_2SC.shape[1:]
    rows = repaired
    if rows is None:
        new = partials_2SC.new_empty(5, num_rows).unbind(0)
        rows = CombinedRows(new[0], new[1], new[2], new[3], new[4], torch.empty_like(new[0], dtype=torch.int32))
    launch(
        _combine_kernel,
        (triton.cdiv(num_rows, COMBINE_ROWS),),
        (partials_2SC[0], partials_2SC[1], anchors.shift_C, anchors.guess_C, *rows, num_rows, num_splits),
        {"IS_REPAIR": repaired is not None, "BLOCK": COMBINE_ROWS},
        num_warps=4,
    )
    return rows


def row_exponentials(
    logits_CV: torch.Tensor,
    exp_CV: torch.Tensor,
    target_C: torch.Tensor,
    inv_tau_C: torch.Tensor,
    shift_C: torch.Tensor,
    partials_2SC: torch.Tensor,
) -> None:
    """Turns fp32 products hidden . weight into E, in place; R and M go to the one split of `partials_2SC`."""
    args = (logits_CV, exp_CV, target_C, inv_tau_C, shift_C, partials_2SC[0], partials_2SC[1], logits_CV.shape[1])
    strides = (logits_CV.stride(0), exp_CV.stride(0))
    launch(_row_exponential_kernel, (logits_CV.shape[0],), (*args, *strides), {"BLOCK": ROW_COLUMNS})


def entropy_gradient(
    exp_CV: torch.Tensor,
    target_C: torch.Tensor,
    total_C: torch.Tensor,
    slopes: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Makes E, in place, -tau S dz for g and h that both count; slopes: g, h, entropy, target term, fp32 [C]."""
    args = (exp_CV, target_C, total_C, *slopes, exp_CV.shape[1], exp_CV.stride(0))
    launch(_entropy_gradient_kernel, (exp_CV.shape[0],), args, {"BLOCK": ENTROPY_COLUMNS})


def compile_cases(capability: int) -> list[CompileCase]:
    """Every kernel, for bf16 and for the fp32 of the tests."""
    sizes = {"num_rows": "i32", "num_splits": "i32"}
    cases = [
        _case("combine", _combine_kernel, sizes, {"IS_REPAIR": False, "BLOCK": COMBINE_ROWS}, num_warps=4),
        _case("combine repair", _combine_kernel, sizes, {"IS_REPAIR": True, "BLOCK": COMBINE_ROWS}, num_warps=4),
        _case("reanchor", _reanchor_kernel, sizes, {"BLOCK": COMBINE_ROWS}, num_warps=4),
    ]
    for element in ("bf16", "fp32"):
        matrices: dict[str, str] = dict.fromkeys(("hidden_ptr", "weight_ptr", "exp_ptr"), f"*{element}")
        strides: dict[str, str] = dict.fromkeys(
            ("num_valid", "width", "stride_hidden", "stride_weight", "stride_exp"), "i32"
        )
        for has_anchor in (True, False):
            anchor = {} if has_anchor else {"anchor_ptr": None}
            constexprs = {"HAS_ANCHOR": has_anchor, "BLOCK": LOGIT_COLUMNS} | anchor
            name = f"target_logit {element}{' anchored' if has_anchor else ''}"
            cases.append(_case(name, _target_logit_kernel, matrices | strides, constexprs, num_warps=4))
        rows: dict[str, str] = matrices | strides | {"stride_logits": "i32"}
        cases.append(_case(f"row_exponential {element}", _row_exponential_kernel, rows, {"BLOCK": ROW_COLUMNS}))
        entropy = {"BLOCK": ENTROPY_COLUMNS}
        cases.append(_case(f"entropy_gradient {element}", _entropy_gradient_kernel, rows, entropy))
    return cases


def _case(name: str, kernel, known: Mapping[str, str], constexprs: dict, *, num_warps: int = 8) -> CompileCase:
    """Arguments that are not named are fp32 vectors, but for targets and flags, which are int32."""
    is_integer = ("target_ptr", "is_far_ptr")
    names = [x for x in kernel.arg_names if x not in constexprs]
    signature = {x: known.get(x, "*i32" if x in is_integer else "*fp32") for x in names}
    strides = tuple(x for x in names if x.startswith("stride") or x == "width")
    return CompileCase(
        name=name, kernel=kernel, signature=signature, constexprs=constexprs, aligned=strides, num_warps=num_warps
    )
