"""RMSNorm, with the residual addition before it in the same pass.

    s = x + residual (rounded to x's dtype; x itself without a residual)      n = s rstd      y = n weight
    rstd = (mean_D s^2 + eps)^-1/2
    ds = rstd (dy weight - n mean_D(dy weight n)) + dsum      dweight = sum_T dy n      dsum: gradient of s elsewhere

T rows, which may have any leading dimensions, such as [T, H, E] with D = E; D width. fp32 inside, y is rounded once.
y is computed from s as stored: what backward differentiates is what forward computed, and s is what the stream holds.
Bytes, b a number's: forward reads 2 T D b and writes 2 T D b (without a residual half of that) and saves s and T fp32;
backward reads 3 T D b, writes T D b. Flops: about 4 T D forward, 10 T D backward.
Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467), equation 4.
"""

from typing import NamedTuple

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.launch import check_device, refuse_second_order

MAX_WIDTH = 8192
"""Widest row on a GPU: one block holds it in registers."""


class RmsNorm(NamedTuple):
    """Two tensors of x's shape and dtype, both differentiable."""

    y_TD: torch.Tensor
    """The normed rows."""
    sum_TD: torch.Tensor
    """x + residual, the stream that the next residual is added to; x where there was no residual."""


def rms_norm_reference(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, residual_TD: torch.Tensor | None = None
) -> RmsNorm:
    """`rms_norm` as plain PyTorch with autograd; fp64 inside for fp64, else fp32."""
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    sum_wide_TD = sum_TD.to(wide)
    rstd_T1 = (sum_wide_TD.square().mean(-1, keepdim=True) + eps).rsqrt()
    return RmsNorm((sum_wide_TD * rstd_T1 * weight_D.to(wide)).to(x_TD.dtype), sum_TD)


class _RmsNorm(torch.autograd.Function):
    """The Triton path. Without a residual x itself is the second output: its two gradients then meet in one kernel."""

    @staticmethod
    def forward(
        ctx, x_TD: torch.Tensor, weight_D: torch.Tensor, residual_TD: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from sparkgrpo.kernels.rms_norm_kernels import rms_norm_fwd

        ctx.set_materialize_grads(False)
        y_TD, sum_TD, rstd_T = rms_norm_fwd(x_TD, weight_D, residual_TD, eps)
        ctx.save_for_backward(sum_TD, weight_D, rstd_T)
        ctx.has_residual = residual_TD is not None
        return y_TD, sum_TD

    @staticmethod
    def backward(ctx, dy_TD: torch.Tensor | None, dsum_TD: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from sparkgrpo.kernels.rms_norm_kernels import rms_norm_bwd

        refuse_second_order("rms_norm")
        ds_TD, dweight_D = dsum_TD, None
        if dy_TD is not None:
            sum_TD, weight_D, rstd_T = ctx.saved_tensors
            ds_TD, dweight_D = rms_norm_bwd(sum_TD, weight_D, rstd_T, dy_TD, dsum_TD, ctx.needs_input_grad[1])
        return ds_TD, dweight_D, ds_TD if ctx.has_residual else None, None


def _check_residual(x_TD: torch.Tensor, residual_TD: torch.Tensor) -> None:
    if residual_TD.shape != x_TD.shape or residual_TD.dtype != x_TD.dtype:
        raise ValueError(
            f"residual_TD must be {x_TD.dtype} {tuple(x_TD.shape)} like x_TD, got {residual_TD.dtype}"
            f" {tuple(residual_TD.shape)}; nothing is broadcast or cast"
        )


def _check_for_triton(x_TD: torch.Tensor, weight_D: torch.Tensor, residual_TD: torch.Tensor | None) -> None:
    check_device("weight_D", weight_D, x_TD.device)
    if residual_TD is not None:
        check_device("residual_TD", residual_TD, x_TD.device)
    if x_TD.dtype not in (torch.bfloat16, torch.float32) or x_TD.shape[-1] > MAX_WIDTH:
        raise ValueError(
            f"on a GPU x_TD must be bfloat16 or float32 of width up to {MAX_WIDTH:,}, got {x_TD.dtype} and"
            f" {x_TD.shape[-1]:,}; cast it, or use rms_norm_reference"
        )


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, residual_TD: torch.Tensor | None = None
) -> RmsNorm:
    """Rows divided by their root mean square, times a weight; the residual is added first.

    On the CPU these are PyTorch's own ops. The forward and ds of a row do not depend on the other rows, bit for bit;
    dweight sums over them in an order that their number alone decides.

    Args:
        x_TD: [..., D], any strides; on a GPU bf16 or fp32 and D up to MAX_WIDTH, on the CPU any floating dtype.
        weight_D: [D], x's dtype.
        eps: added to the mean square, above 0.
        residual_TD: shape and dtype of x, or None.

    Returns:
        RmsNorm(y, x + residual).

    Raises:
        ValueError: shape, dtype, device, width.
        RuntimeError: a second derivative, on a GPU.
    """
    if weight_D.shape != x_TD.shape[-1:] or weight_D.dtype != x_TD.dtype:
        raise ValueError(
            f"weight_D must be one {x_TD.dtype} number for each column of x_TD {tuple(x_TD.shape)}, got"
            f" {weight_D.dtype} {tuple(weight_D.shape)}; pass this layer's weight, in the dtype of its input"
        )
    if residual_TD is not None:
        _check_residual(x_TD, residual_TD)
    if dispatch.runs_triton(x_TD.device):
        _check_for_triton(x_TD, weight_D, residual_TD)
        return RmsNorm(*_RmsNorm.apply(x_TD, weight_D, residual_TD, eps))
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    return RmsNorm(torch.rms_norm(sum_TD, weight_D.shape, weight_D, eps), sum_TD)
