"""Triton kernels of `rms_norm`: one pass forward, one backward, a sum of partials for the weight's gradient.

N rows in [num_outer, num_inner]: tokens, or tokens and heads; D width; P programs of the backward. A program holds ROWS
whole rows of BLOCK_D columns in registers, 16 bytes a thread and load. ROWS and BLOCK_D follow from D and dtype alone,
and so does the order in which a row is summed: its bits do not depend on the batch, its strides or its alignment.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.triton_launch import ROW_WARPS, CompileCase, check_triton, launch

MAX_PARTIALS = 512
"""Programs of the backward, each with one fp32 row of dweight: enough to fill the GPUs this is for (48 to 132
multiprocessors), few enough that their sum is small beside the pass. Not the device's own number: bits would follow."""
MIN_BWD_ROWS = 16
"""Rows of a backward program at least: in bf16 its partial, written and read, is then 1/16 of the rows' traffic."""


@triton.jit
def _load_weight(weight_ptr, offs_d, mask_d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The weight once a row, fp32 [ROWS, BLOCK_D]: loaded as [BLOCK_D] it would pass through shared memory."""
    offs = tl.broadcast_to(offs_d[None, :], (ROWS, BLOCK_D))
    mask = tl.broadcast_to(mask_d[None, :], (ROWS, BLOCK_D))
    return tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, num_rows, num_inner, width, eps,
    stride_x_outer, stride_x_inner, stride_residual_outer, stride_residual_inner,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """residual_ptr and sum_ptr are None together: then x is the sum."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    mask_row = row < num_rows
    outer = (row.to(tl.int32) // num_inner).to(tl.int64)  # [ROWS]; a 64-bit division is a subroutine
    inner = row - outer * num_inner  # [ROWS]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_d = offs_d < width
    mask = mask_row[:, None] & mask_d[None, :]  # [ROWS, BLOCK_D]

    offs_x = (outer * stride_x_outer + inner * stride_x_inner)[:, None] + offs_d[None, :]
    offs_out = (row * width)[:, None] + offs_d[None, :]
    s = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_D]
    if residual_ptr is not None:
        offs_residual = (outer * stride_residual_outer + inner * stride_residual_inner)[:, None] + offs_d[None, :]
        s += tl.load(residual_ptr + offs_residual, mask=mask, other=0.0).to(tl.float32)
        stored = s.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offs_out, stored, mask=mask)
        s = stored.to(tl.float32)

    rstd = tl.rsqrt(tl.sum(s * s, axis=1) / width + eps)  # [ROWS]
    weight = _load_weight(weight_ptr, offs_d, mask_d, ROWS, BLOCK_D)
    tl.store(rstd_ptr + row, rstd, mask=mask_row)
    tl.store(y_ptr + offs_out, s * rstd[:, None] * weight, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def _rms_norm_bwd_kernel(
    sum_ptr, weight_ptr, rstd_ptr, dy_ptr, dsum_ptr, ds_ptr, partial_ptr, num_rows, num_inner, width, rows_per_program,
    stride_sum_outer, stride_sum_inner, stride_dy_outer, stride_dy_inner, stride_dsum_outer, stride_dsum_inner,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dsum_ptr None: no gradient arrives at the sum; partial_ptr None: no dweight is wanted."""
    pid = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask_d = offs_d < width
    weight = _load_weight(weight_ptr, offs_d, mask_d, ROWS, BLOCK_D)
    dweight = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)  # [ROWS, BLOCK_D]
    for start in range(0, rows_per_program, ROWS):
        row = pid * rows_per_program + start + tl.arange(0, ROWS)  # [ROWS]
        mask_row = row < num_rows
        outer = (row.to(tl.int32) // num_inner).to(tl.int64)  # [ROWS]
        inner = row - outer * num_inner  # [ROWS]
        mask = mask_row[:, None] & mask_d[None, :]  # [ROWS, BLOCK_D]
        offs_sum = (outer * stride_sum_outer + inner * stride_sum_inner)[:, None] + offs_d[None, :]
        offs_dy = (outer * stride_dy_outer + inner * stride_dy_inner)[:, None] + offs_d[None, :]
        s = tl.load(sum_ptr + offs_sum, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_D]
        dy = tl.load(dy_ptr + offs_dy, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_D]
        rstd = tl.load(rstd_ptr + row, mask=mask_row, other=0.0)  # [ROWS]

        n = s * rstd[:, None]
        dweight += dy * n
        dn = dy * weight
        mean = tl.sum(dn * n, axis=1) / width  # [ROWS]
        ds = rstd[:, None] * (dn - n * mean[:, None])
        if dsum_ptr is not None:
            offs_dsum = (outer * stride_dsum_outer + inner * stride_dsum_inner)[:, None] + offs_d[None, :]
            ds += tl.load(dsum_ptr + offs_dsum, mask=mask, other=0.0).to(tl.float32)
        tl.store(ds_ptr + (row * width)[:, None] + offs_d[None, :], ds, mask=mask)
    if partial_ptr is not None:
        tl.store(partial_ptr + pid * width + offs_d, tl.sum(dweight, axis=0), mask=mask_d)


class _Rows(NamedTuple):
    """A tensor as a kernel reads it: contiguous rows from a start on 16 bytes."""

    x_NID: torch.Tensor
    """[num_outer, num_inner, D]."""
    strides: tuple[int, int]
    """Numbers from one outer index to the next, and from one inner index to the next."""


def _as_rows(x: torch.Tensor) -> _Rows:
    """A view of `x`, or a copy where its strides or start would have the kernel compiled with narrower loads.

    With other loads the threads would hold other columns and sum a row in another order.
    """
    x_NID = x.flatten(0, -3) if x.ndim >= 3 else x.reshape(-1, 1, x.shape[-1])
    num_inner, D = x_NID.shape[1:]
    if D % 16 or x_NID.stride(2) != 1 or x_NID.stride(0) % 16 or x_NID.stride(1) % 16:
        x_NID = x_NID.contiguous()
    if x_NID.data_ptr() % 16:
        x_NID = x_NID.clone(memory_format=torch.contiguous_format)
    is_dense = x_NID.is_contiguous()  # a dimension of size 1 may then have any stride
    return _Rows(x_NID, (num_inner * D, D) if is_dense else (x_NID.stride(0), x_NID.stride(1)))


def _tile(width: int, dtype: torch.dtype) -> Mapping[str, int]:
    """Rows and columns of a program: 16 bytes for each of its threads, or one row where that is longer."""
    block_d = max(16, triton.next_power_of_2(width))
    return {"ROWS": max(1, 32 * ROW_WARPS * (16 // dtype.itemsize) // block_d), "BLOCK_D": block_d}


def rms_norm_fwd(
    x_TD: torch.Tensor, weight_D: torch.Tensor, residual_TD: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the sum (x itself without a residual) and rstd, fp32 [N]; what is new is contiguous, in x's shape."""
    check_triton(x_TD.device)
    x = _as_rows(x_TD)
    residual = _Rows(x.x_NID, (0, 0)) if residual_TD is None else _as_rows(residual_TD)
    num_outer, num_inner, D = x.x_NID.shape
    num_rows = num_outer * num_inner
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    rstd_N = torch.empty(num_rows, dtype=torch.float32, device=x_TD.device)
    residual_arg, new_sum_TD = (None, None) if residual_TD is None else (residual.x_NID, torch.empty_like(y_TD))
    tensors = (x.x_NID, residual_arg, _as_rows(weight_D).x_NID, y_TD, new_sum_TD, rstd_N)
    args = (*tensors, num_rows, num_inner, D, eps, *x.strides, *residual.strides)
    tile = _tile(D, x_TD.dtype)
    launch(_rms_norm_fwd_kernel, (triton.cdiv(num_rows, tile["ROWS"]),), args, tile)
    return y_TD, x_TD if new_sum_TD is None else new_sum_TD, rstd_N


def rms_norm_bwd(
    sum_TD: torch.Tensor,
    weight_D: torch.Tensor,
    rstd_N: torch.Tensor,
    dy_TD: torch.Tensor,
    dsum_TD: torch.Tensor | None,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ds, contiguous, and dweight in the weight's dtype (None unless needed)."""
    rows, dy = _as_rows(sum_TD), _as_rows(dy_TD)
    dsum = _Rows(dy.x_NID, (0, 0)) if dsum_TD is None else _as_rows(dsum_TD)
    num_outer, num_inner, D = rows.x_NID.shape
    num_rows, tile = num_outer * num_inner, _tile(D, sum_TD.dtype)
    rows_per_program = max(MIN_BWD_ROWS, triton.cdiv(num_rows, MAX_PARTIALS))
    rows_per_program = triton.cdiv(rows_per_program, tile["ROWS"]) * tile["ROWS"]
    num_programs = triton.cdiv(num_rows, rows_per_program)
    ds_TD = torch.empty_like(sum_TD, memory_format=torch.contiguous_format)
    partial_PD = torch.empty(num_programs, D, dtype=torch.float32, device=sum_TD.device) if needs_dweight else None
    dsum_arg = None if dsum_TD is None else dsum.x_NID
    tensors = (rows.x_NID, _as_rows(weight_D).x_NID, rstd_N, dy.x_NID, dsum_arg, ds_TD, partial_PD)
    args = (*tensors, num_rows, num_inner, D, rows_per_program, *rows.strides, *dy.strides, *dsum.strides)
    launch(_rms_norm_bwd_kernel, (num_programs,), args, tile)
    return ds_TD, None if partial_PD is None else partial_PD.sum(0).to(weight_D.dtype)


def compile_cases(capability: int) -> list[CompileCase]:
    """The same on every GPU: head widths, those of Qwen2.5 0.5B, 1.5B and 7B, and the widest; fp32 at the extremes."""
    widths = {torch.bfloat16: (64, 128, 896, 1536, 3584, 8192), torch.float32: (128, 896, 8192)}
    return [case for dtype, sizes in widths.items() for width in sizes for case in _cases(width, dtype)]


def _cases(width: int, dtype: torch.dtype) -> list[CompileCase]:
    """Forward without and with a residual, and backward; rows of a head's width come as [tokens, heads]."""
    name = str(dtype).removeprefix("torch.")
    element = {"bfloat16": "*bf16", "float32": "*fp32"}[name]
    constexprs = dict(_tile(width, dtype)) | ({} if width <= 128 else {"num_inner": 1})

    def case(kind: str, kernel: triton.JITFunction, absent: tuple[str, ...] = ()) -> CompileCase:
        names = [arg for arg in kernel.arg_names if arg not in ("ROWS", "BLOCK_D")]
        fp32 = {"rstd_ptr": "*fp32", "partial_ptr": "*fp32", "eps": "fp32"}
        return CompileCase(
            name=f"rms_norm {name} D {width} {kind}",
            kernel=kernel,
            signature={arg: fp32.get(arg, element if arg.endswith("_ptr") else "i32") for arg in names},
            constexprs=constexprs | dict.fromkeys(absent),
            aligned=tuple(arg for arg in names if arg == "width" or arg.startswith("stride_")),
        )

    return [
        case("forward", _rms_norm_fwd_kernel, ("residual_ptr", "sum_ptr")),
        case("forward, residual", _rms_norm_fwd_kernel),
        case("backward", _rms_norm_bwd_kernel),
    ]
