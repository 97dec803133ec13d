"""Rotary position embedding of query and key heads: channel i turns with channel i + E/2 by the token's angle.

    y_i = x_i cos - x_(i + E/2) sin      y_(i + E/2) = x_(i + E/2) cos + x_i sin      0 <= i < E/2
    backward: the same rotation of dy by the negative angle

T tokens, H heads (queries and keys together), E head width. On a GPU angles and products are fp32 and y is rounded
once; on the CPU cos and sin take x's dtype first, as in transformers, and each product is rounded.
Bytes, b a number's: reads T H E b and 4 T E, writes T H E b, forward and backward alike; saves cos and sin, which are
shared by all layers. Flops: 3 T H E.
Source: Su et al., RoFormer (arXiv:2104.09864), equation 34, with the pairing of channels of the Llama checkpoints.
"""

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.launch import check_device, refuse_second_order


def rotary_reference(qk_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    """`rotary` as plain PyTorch with autograd; fp64 inside for fp64, else fp32."""
    wide = torch.promote_types(qk_THE.dtype, torch.float32)
    first, second = qk_THE.to(wide).chunk(2, dim=-1)
    cos_T1E, sin_T1E = cos_T1E.to(wide), sin_T1E.to(wide)
    return torch.cat((first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E), -1).to(qk_THE.dtype)


class _Rotary(torch.autograd.Function):
    """The Triton path; cos and sin are data."""

    @staticmethod
    def forward(ctx, qk_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        from sparkgrpo.kernels.rotary_kernels import rotary_fwd

        ctx.save_for_backward(cos_T1E, sin_T1E)
        return rotary_fwd(qk_THE, cos_T1E, sin_T1E)

    @staticmethod
    def backward(ctx, dy_THE: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from sparkgrpo.kernels.rotary_kernels import rotary_bwd

        refuse_second_order("rotary")
        return rotary_bwd(dy_THE, *ctx.saved_tensors), None, None


def _check_for_triton(qk_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> None:
    if qk_THE.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"on a GPU qk_THE must be bfloat16 or float32, got {qk_THE.dtype}; cast it")
    for name, table_T1E in (("cos_T1E", cos_T1E), ("sin_T1E", sin_T1E)):
        check_device(name, table_T1E, qk_THE.device)
        if table_T1E.dtype != torch.float32 or table_T1E.requires_grad:
            raise ValueError(
                f"{name} must be float32 data without a gradient, got {table_T1E.dtype}, requires_grad"
                f" {table_T1E.requires_grad}; angles need float32, the result takes the dtype of qk_THE"
            )


def rotary(qk_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    """Turns every head of every token by the token's angles, out of place.

    On the CPU these are PyTorch's own ops. A token does not depend on the others.

    Args:
        qk_THE: [T, H, E], E even, any strides (a slice of the fused projection); on a GPU bf16 or fp32, on the CPU any
            floating dtype.
        cos_T1E, sin_T1E: fp32 [T, 1, E/2].

    Returns:
        y_THE in the same dtype, contiguous.

    Raises:
        ValueError: shape; on a GPU dtype, device, angles that require a gradient.
        RuntimeError: a second derivative, on a GPU.
    """
    if qk_THE.ndim != 3 or qk_THE.shape[-1] % 2:
        raise ValueError(
            f"qk_THE must be [T, H, E] with an even E, got {tuple(qk_THE.shape)}; unflatten the heads first"
        )
    T, _, E = qk_THE.shape
    if cos_T1E.shape != (T, 1, E // 2) or sin_T1E.shape != cos_T1E.shape or sin_T1E.dtype != cos_T1E.dtype:
        raise ValueError(
            f"cos_T1E and sin_T1E must be [{T}, 1, {E // 2}] of one dtype, an angle a token and pair of channels, got"
            f" {cos_T1E.dtype} {tuple(cos_T1E.shape)} and {sin_T1E.dtype} {tuple(sin_T1E.shape)}; make them from the"
            " positions of these tokens"
        )
    if dispatch.runs_triton(qk_THE.device):
        _check_for_triton(qk_THE, cos_T1E, sin_T1E)
        return _Rotary.apply(qk_THE, cos_T1E, sin_T1E)  # pyright: ignore[reportReturnType]
    if cos_T1E.dtype != qk_THE.dtype:  # a conversion to the same dtype costs 1 of the 11 us of a few tokens
        cos_T1E, sin_T1E = cos_T1E.to(qk_THE.dtype), sin_T1E.to(qk_THE.dtype)
    first, second = qk_THE.chunk(2, dim=-1)
    return torch.cat((first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E), dim=-1)
