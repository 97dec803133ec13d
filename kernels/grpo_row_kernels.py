"""The objective on rows as one Triton kernel: `grpo_row_loss` where every token has its own ratio.

Its twin, with the formulas, is `grpo_row_loss.py`; under the ratio per sequence that twin serves on every device (a
mean over rows stands in the middle of it, and it is a few microseconds against the products' milliseconds).

Bytes: at most 45 a row. C rows of the chunk.
"""

import math

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.grpo_row_loss import MAX_LOG_RATIO, GrpoObjective, RowInputs, RowLoss
from sparkgrpo.kernels.triton_launch import CompileCase, launch

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_RATIO_LOG = tl.constexpr(MAX_LOG_RATIO)
BLOCK_ROWS = 256
KL_KINDS = {"k1": 1, "k2": 2, "k3": 3}
NO_KL = 0


@triton.jit
def _expm1(x):
    """e^x - 1 with the digits of x: its series below a half, where the subtraction would lose them."""
    series = 1.0 + x * (1.0 / 8.0) * (1.0 + x * (1.0 / 9.0))
    series = 1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0) * series)
    series = 1.0 + x * (1.0 / 4.0) * (1.0 + x * (1.0 / 5.0) * series)
    series = 1.0 + x * (1.0 / 2.0) * (1.0 + x * (1.0 / 3.0) * series)
    is_small = tl.abs(x) < 0.5
    return tl.where(is_small, x * series, tl.exp2(tl.where(is_small, 0.0, x) * LOG2_E) - 1.0)


@triton.jit
def _kl(q, KL: tl.constexpr):
    """K and K' = dK/dlogp of one estimator; past MAX_RATIO_LOG nats k3 is a straight line."""
    if KL == 1:
        return -q, tl.zeros_like(q) + 1.0
    if KL == 2:
        return q * q * 0.5, -q
    capped = tl.where(q > MAX_RATIO_LOG, MAX_RATIO_LOG, q)  # keeps NaN
    growth = _expm1(capped)
    return growth - capped + growth * (q - capped), -growth


# A chunk may start at any row: pointers into row vectors promise no alignment, and one variant serves all.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "logprob_ptr", "entropy_ptr", "advantage_ptr", "weight_ptr", "old_ptr", "ref_ptr",
        "loss_ptr", "slope_ptr", "ratio_ptr", "kl_ptr", "clip_side_ptr",
    ],
)  # fmt: skip
def _row_loss_kernel(
    logprob_ptr, entropy_ptr, advantage_ptr, weight_ptr, old_ptr, ref_ptr,
    loss_ptr, slope_ptr, ratio_ptr, kl_ptr, clip_side_ptr,
    num_rows, low, high, top, beta, entropy_coef,
    HAS_OLD: tl.constexpr, HAS_ENTROPY: tl.constexpr, IS_CISPO: tl.constexpr, KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Branches by select: no infinity ever meets a zero, and what belongs to a row of weight 0 is never used."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < num_rows
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    is_counted = weight != 0
    logprob = tl.load(logprob_ptr + offs, mask=mask, other=0.0)
    advantage = tl.where(is_counted, tl.load(advantage_ptr + offs, mask=mask, other=0.0), 0.0)
    ratio = tl.full((BLOCK,), 1.0, tl.float32)
    if HAS_OLD:
        gap = tl.where(is_counted, logprob - tl.load(old_ptr + offs, mask=mask, other=0.0), 0.0)
        ratio = tl.exp2(tl.where(gap > MAX_RATIO_LOG, MAX_RATIO_LOG, gap) * LOG2_E)
    below_high = tl.where(ratio > high, high, ratio)
    if IS_CISPO:
        slope = -below_high * advantage
        policy = tl.where(advantage == 0.0, 0.0, slope * logprob)
        side = tl.where((ratio > high) & (advantage != 0.0), 1, 0)
    else:
        below_top = tl.where(ratio > top, top, ratio)
        bounded = tl.where(advantage > 0.0, below_high, tl.where(below_top < low, low, below_top))
        policy = -bounded * advantage
        is_bound = (bounded != ratio) & (advantage != 0.0)
        slope = tl.where(is_bound, 0.0, policy)
        side = tl.where(is_bound, tl.where(advantage > 0.0, 1, tl.where(ratio < low, -1, 2)), 0)
    slope = weight * slope
    if KL != 0:
        q = tl.where(is_counted, tl.load(ref_ptr + offs, mask=mask, other=0.0) - logprob, 0.0)
        kl, kl_slope = _kl(q, KL)
        tl.store(kl_ptr + offs, kl, mask)
        if beta != 0.0:
            policy += beta * kl
            slope += beta * weight * kl_slope
    if HAS_ENTROPY:
        policy -= entropy_coef * tl.where(is_counted, tl.load(entropy_ptr + offs, mask=mask, other=0.0), 0.0)
    tl.store(loss_ptr + offs, weight * policy, mask)
    tl.store(slope_ptr + offs, slope, mask)
    tl.store(ratio_ptr + offs, tl.where(is_counted, ratio, 0.0), mask)
    tl.store(clip_side_ptr + offs, side.to(tl.int8), mask)


def grpo_row_loss_fused(
    objective: GrpoObjective, logprob_C: torch.Tensor, entropy_C: torch.Tensor | None, inputs: RowInputs
) -> RowLoss:
    """`grpo_row_loss` in one launch; the inputs must not be per sequence."""
    assert inputs.seq_len_S is None, "a sequence's ratio needs a mean over its rows"
    loss_C, slope_C, ratio_C = logprob_C.new_empty(3, logprob_C.numel()).unbind(0)
    kl_C = None if inputs.ref_C is None else torch.empty_like(loss_C)
    clip_side_C = torch.empty_like(loss_C, dtype=torch.int8)
    has_entropy = bool(objective.entropy_coef) and entropy_C is not None
    vectors = (logprob_C, entropy_C if has_entropy else None, *inputs[:4])
    launch(
        _row_loss_kernel,
        (triton.cdiv(logprob_C.numel(), BLOCK_ROWS),),
        (
            *(None if x is None else x.contiguous() for x in vectors), loss_C, slope_C, ratio_C, kl_C, clip_side_C,
            logprob_C.numel(), 1.0 - objective.eps_low, 1.0 + objective.eps_high,
            math.inf if objective.delta is None else float(objective.delta),
            float(objective.beta), float(objective.entropy_coef),
        ),
        {
            "HAS_OLD": inputs.old_C is not None, "HAS_ENTROPY": has_entropy,
            "IS_CISPO": objective.surrogate == "cispo",
            "KL": NO_KL if inputs.ref_C is None else KL_KINDS[objective.kl], "BLOCK": BLOCK_ROWS,
        },
        num_warps=4,
    )  # fmt: skip
    h_C = -objective.entropy_coef * inputs.weight_C if has_entropy else None
    return RowLoss(loss_C, slope_C, h_C, ratio_C, kl_C, clip_side_C)


def compile_cases(capability: int) -> list[CompileCase]:
    """Every estimator and surrogate, with all inputs."""
    pointers = [name for name in _row_loss_kernel.arg_names if name.endswith("_ptr")]
    signature = {name: "*i8" if name == "clip_side_ptr" else "*fp32" for name in pointers} | {"num_rows": "i32"}
    signature |= dict.fromkeys(("low", "high", "top", "beta", "entropy_coef"), "fp32")
    cases = []
    for kl, number in KL_KINDS.items():
        for is_cispo in (False, True):
            constexprs = {"HAS_OLD": True, "HAS_ENTROPY": True, "IS_CISPO": is_cispo, "KL": number, "BLOCK": BLOCK_ROWS}
            cases.append(
                CompileCase(
                    name=f"row_loss {'cispo' if is_cispo else 'clip'} {kl}",
                    kernel=_row_loss_kernel,
                    signature=signature,
                    constexprs=constexprs,
                    num_warps=4,
                )
            )
    return cases
