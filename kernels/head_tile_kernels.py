"""The head's product as Triton tiles whose epilogue makes the exponentials: no logit is ever stored.

    z_j = (hidden . weight_j) / tau        y = the target        c = z_y - a, a a guess of log p_y (the rollout's)
    E_j = e^(z_j - c) for j != y           R = sum_j E_j         M = sum_j (z_j - c) E_j          (partial sums a split)

A softmax needs a shift near its log-sum-exp; the guess gives one before the vocabulary is swept, so there is no running
maximum and E can be stored at once. The result does not depend on the guess, only the exponent range does: a row whose
log-sum-exp is further than 60 nats from c is found by `head_row_kernels.py` and redone around its maximum by the same
kernel, which returns at once where a block of rows holds none (nobody on the host waits to know).

Kinds of a sweep: "score" sums alone; "store" writes E too; "max" writes max_{j != y} z_j in the place of R; "gradient"
knows g = dloss/dlogp and h = dloss/dH beforehand and c is the true log-sum-exp:
    E_j = p_j (g + h (log p_j + H)) for j != y, E_y = target_term, dz = -E / tau

Bytes: hidden once, the weight once per GROUP_ROWS rows, E once (2 bytes a logit); 8 bytes a row and split. Flops: 2 C V
D. C rows of the chunk, V valid vocabulary, D width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sparkgrpo.kernels.tile_table import GROUP_ROWS, SPLIT_COLUMNS, Tile, head_tile
from sparkgrpo.kernels.triton_launch import CompileCase, as_operand, launch

LOG2_E = tl.constexpr(1.4426950408889634)
KINDS = {"score": 0, "store": 1, "max": 2, "gradient": 3}
STORE, MAX, GRADIENT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _product_tile(
    hidden, weight, row_0, column_0, num_rows, num_valid, width, stride_hidden, stride_weight,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden[row_0 : row_0 + M] @ weight[column_0 : column_0 + N].T, fp32 [M, N]; 0 beyond the edges."""
    offs_m = (row_0 + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = (column_0 + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask_m, mask_n = offs_m < num_rows, offs_n < num_valid
    logits = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, width, BLOCK_K):
        if USE_TMA:
            a, b = hidden.load([row_0, k]), weight.load([column_0, k])
        else:
            offs_k = k + tl.arange(0, BLOCK_K)
            mask_k = (offs_k < width)[None, :]
            a = tl.load(hidden + offs_m[:, None] * stride_hidden + offs_k[None, :], mask_m[:, None] & mask_k, 0.0)
            b = tl.load(weight + offs_n[:, None] * stride_weight + offs_k[None, :], mask_n[:, None] & mask_k, 0.0)
        logits = tl.dot(a, b.T, logits, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    return logits


# What depends on the number of rows is not specialised: any batch runs one compiled variant.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "target_ptr", "inv_tau_ptr", "shift_ptr", "moment_ptr", "g_ptr", "h_ptr", "entropy_ptr", "target_term_ptr",
    ],
)  # fmt: skip
def _head_tile_kernel(
    hidden, weight, exp_out, target_ptr, inv_tau_ptr, shift_ptr, rest_ptr, moment_ptr,
    g_ptr, h_ptr, entropy_ptr, target_term_ptr, is_far_ptr,
    num_rows, num_valid, width, stride_hidden, stride_weight, stride_exp, num_splits,
    KIND: tl.constexpr, IS_REPAIR: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row block, one split. hidden, weight, exp_out are host-side tensor descriptors when USE_TMA, else pointers.

    Row blocks are inner, in groups of GROUP_M, so that a group's programs read one stripe of the weight together.
    """
    pid = tl.program_id(0)
    num_m = tl.cdiv(num_rows, BLOCK_M)
    group = pid // (GROUP_M * num_splits)
    group_m = min(num_m - group * GROUP_M, GROUP_M)
    within = pid - group * GROUP_M * num_splits
    pid_m, split = group * GROUP_M + within % group_m, within // group_m
    row_0 = pid_m * BLOCK_M
    offs_m = (row_0 + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask_m = offs_m < num_rows
    if IS_REPAIR:  # noqa: SIM102  a compile-time branch: without repair there is no pointer to load from
        if tl.sum(tl.load(is_far_ptr + offs_m, mask=mask_m, other=0)) == 0:
            return
    target = tl.load(target_ptr + offs_m, mask=mask_m, other=-1)
    inv_tau = tl.load(inv_tau_ptr + offs_m, mask=mask_m, other=1.0)
    shift = tl.load(shift_ptr + offs_m, mask=mask_m, other=0.0)
    rest = tl.full((BLOCK_M,), float("-inf") if KIND == MAX else 0.0, tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
    if KIND == GRADIENT:
        g = tl.load(g_ptr + offs_m, mask=mask_m, other=0.0)
        h = tl.load(h_ptr + offs_m, mask=mask_m, other=0.0)
        constant = g + h * tl.load(entropy_ptr + offs_m, mask=mask_m, other=0.0)
        target_term = tl.load(target_term_ptr + offs_m, mask=mask_m, other=0.0)
    first = split * SPLIT
    for column_0 in range(first, min(first + SPLIT, num_valid), BLOCK_N):
        logits = _product_tile(
            hidden, weight, row_0, column_0, num_rows, num_valid, width, stride_hidden, stride_weight,
            BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, PRECISION,
        )  # fmt: skip
        offs_n = column_0 + tl.arange(0, BLOCK_N)
        is_target = offs_n[None, :] == target[:, None]
        is_rest = (offs_n[None, :] < num_valid) & ~is_target
        z = logits * inv_tau[:, None]  # [BLOCK_M, BLOCK_N]
        if KIND == MAX:
            rest = tl.maximum(rest, tl.max(tl.where(is_rest, z, float("-inf")), 1))
        else:
            y = tl.where(is_rest, z - shift[:, None], float("-inf"))
            e = tl.exp2(y * LOG2_E)
            y = tl.where(e > 0, y, 0.0)  # a masked column gives 0, not 0 x -inf
            if KIND == GRADIENT:
                e = tl.where(is_target, target_term[:, None], e * (constant[:, None] + h[:, None] * y))
            else:
                rest += tl.sum(e, 1)
                moment += tl.sum(e * y, 1)
            if KIND == STORE or KIND == GRADIENT:  # noqa: SIM109  Triton compares compile-time values one by one
                if USE_TMA:
                    exp_out.store([row_0, column_0], e.to(exp_out.dtype))
                else:
                    mask_mn = mask_m[:, None] & (offs_n < num_valid)[None, :]
                    offs_e = offs_m[:, None] * stride_exp + offs_n[None, :]
                    tl.store(exp_out + offs_e, e.to(exp_out.dtype.element_ty), mask_mn)
    if KIND != GRADIENT:
        offs_partial = split.to(tl.int64) * num_rows + offs_m
        tl.store(rest_ptr + offs_partial, rest, mask_m)
        if KIND != MAX:
            tl.store(moment_ptr + offs_partial, moment, mask_m)


@dataclass(frozen=True, kw_only=True, slots=True)
class TileOperands:
    """What every sweep of a chunk reads and writes."""

    hidden_CD: torch.Tensor
    weight_VD: torch.Tensor
    """The rows that exist alone."""
    exp_CV: torch.Tensor | None
    """E in bf16 or fp32, unit column stride; None where nothing is stored."""
    target_C: torch.Tensor
    """int32."""
    inv_tau_C: torch.Tensor
    """fp32."""


def sweep_tiles(
    kind: str,
    operands: TileOperands,
    shift_C: torch.Tensor,
    *,
    tile: Tile,
    partials_2SC: torch.Tensor | None = None,
    slopes: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    is_far_C: torch.Tensor | None = None,
) -> None:
    """One sweep of a chunk over the vocabulary.

    Args:
        kind: "score", "store", "max" or "gradient", see the head of this file.
        operands: The chunk. shift_C: fp32, c of every row.
        tile: The table's row for these operands.
        partials_2SC: fp32 [2, splits, C], gets R (or the maximum) and M of every split; all kinds but "gradient".
        slopes: g, h, entropy and target term, fp32 [C]; kind "gradient" alone.
        is_far_C: int32, rows to redo; row blocks without one are left as they are. None: all rows.
    """
    hidden_CD, weight_VD = as_operand(operands.hidden_CD), as_operand(operands.weight_VD)
    exp_CV = operands.exp_CV if kind in ("store", "gradient") else None
    (C, D), V = hidden_CD.shape, weight_VD.shape[0]
    num_splits = triton.cdiv(V, SPLIT_COLUMNS)
    exp_stride = 0 if exp_CV is None else exp_CV.stride(0)
    strides = (hidden_CD.stride(0), weight_VD.stride(0), exp_stride)
    matrices = (hidden_CD, weight_VD, exp_CV)
    if tile.use_tma:
        blocks = ((tile.block_m, tile.block_k), (tile.block_n, tile.block_k), (tile.block_m, tile.block_n))
        matrices = tuple(
            None if x is None else TensorDescriptor.from_tensor(x, list(block))
            for x, block in zip(matrices, blocks, strict=True)
        )
    rest_SC, moment_SC = (None, None) if partials_2SC is None else partials_2SC
    launch(
        _head_tile_kernel,
        (triton.cdiv(C, tile.block_m) * num_splits,),
        (
            *matrices, operands.target_C, operands.inv_tau_C, shift_C, rest_SC, moment_SC,
            *(slopes or (None,) * 4), is_far_C, C, V, D, *strides, num_splits,
        ),
        {
            "KIND": KINDS[kind], "IS_REPAIR": is_far_C is not None, "USE_TMA": tile.use_tma,
            "PRECISION": "ieee", "SPLIT": SPLIT_COLUMNS, "GROUP_M": max(1, GROUP_ROWS // tile.block_m),
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def compile_cases(capability: int) -> list[CompileCase]:
    """Every kind by descriptors and by pointers in bf16, and the fp32 tile of the tests."""
    cases = []
    for dtype, is_aligned in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        tile = head_tile(capability, dtype, is_tma_aligned=is_aligned)
        for kind in KINDS:
            for is_repair in (False, True) if kind in ("score", "store") else (kind == "max",):
                cases.append(_compile_case(tile, dtype, kind, is_repair, is_aligned))
    return cases


def _compile_case(tile: Tile, dtype: torch.dtype, kind: str, is_repair: bool, is_aligned: bool) -> CompileCase:
    element = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    has_exp, is_gradient = kind in ("store", "gradient"), kind == "gradient"
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    shapes = {"hidden": (m, k), "weight": (n, k), "exp_out": (m, n)}
    signature = {
        name: f"tensordesc<{element}[{rows}, {columns}]>" if tile.use_tma else f"*{element}"
        for name, (rows, columns) in shapes.items()
        if name != "exp_out" or has_exp
    }
    signature |= {"target_ptr": "*i32", "inv_tau_ptr": "*fp32", "shift_ptr": "*fp32"}
    if is_gradient:
        signature |= dict.fromkeys(("g_ptr", "h_ptr", "entropy_ptr", "target_term_ptr"), "*fp32")
    else:
        signature |= dict.fromkeys(("rest_ptr", "moment_ptr"), "*fp32")
    if is_repair:
        signature["is_far_ptr"] = "*i32"
    strides = ("width", "stride_hidden", "stride_weight", "stride_exp")
    signature |= dict.fromkeys(("num_rows", "num_valid", *strides, "num_splits"), "i32")
    constexprs = {"KIND": KINDS[kind], "IS_REPAIR": is_repair, "USE_TMA": tile.use_tma, "PRECISION": "ieee"}
    constexprs |= {"SPLIT": SPLIT_COLUMNS, "GROUP_M": max(1, GROUP_ROWS // m), "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    constexprs |= {name: None for name in _head_tile_kernel.arg_names if name not in signature | constexprs}
    loads = "tma" if tile.use_tma else "pointers"
    return CompileCase(
        name=f"head_tile {element} {m}x{n}x{k} {loads} {kind}{' repair' if is_repair else ''}",
        kernel=_head_tile_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=strides if is_aligned else (),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        is_product=dtype == torch.bfloat16,
        uses_tma=tile.use_tma,
    )
