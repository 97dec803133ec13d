"""SwiGLU on the output of the fused projection: the first half of a row gates the second.

    y = gate sig(gate) up      sig(x) = 1 / (1 + e^-x)
    dup = dy gate sig          dgate = dy up sig (1 + gate (1 - sig))

T rows, which may have any leading dimensions; F width of the feed-forward, 2F a row of gates, then of ups. fp32 inside,
rounded once. Bytes, b a number's: forward reads 2 T F b and writes T F b, saving only its input; backward reads 3 T F b
and writes 2 T F b. Flops: about 5 T F forward, 12 T F backward.
Source: Shazeer, GLU Variants Improve Transformer (arXiv:2002.05202), equation 6.
"""

import torch
import torch.nn.functional as F

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.launch import refuse_second_order


def swiglu_reference(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """`swiglu` as plain PyTorch with autograd; fp64 inside for fp64, else fp32."""
    wide = torch.promote_types(gate_up_T2F.dtype, torch.float32)
    gate_TF, up_TF = gate_up_T2F.to(wide).chunk(2, dim=-1)
    return (gate_TF * torch.sigmoid(gate_TF) * up_TF).to(gate_up_T2F.dtype)


class _SwiGlu(torch.autograd.Function):
    """The Triton path; the sigmoid is made again in backward."""

    @staticmethod
    def forward(ctx, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        from sparkgrpo.kernels.swiglu_kernels import swiglu_fwd

        ctx.save_for_backward(gate_up_T2F)
        return swiglu_fwd(gate_up_T2F)

    @staticmethod
    def backward(ctx, dy_TF: torch.Tensor) -> torch.Tensor:
        from sparkgrpo.kernels.swiglu_kernels import swiglu_bwd

        refuse_second_order("swiglu")
        (gate_up_T2F,) = ctx.saved_tensors
        return swiglu_bwd(gate_up_T2F, dy_TF)


def swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, out of place. On the CPU these are PyTorch's own ops. A row does not depend on the others.

    Args:
        gate_up_T2F: [..., 2F], any strides; on a GPU bf16 or fp32, on the CPU any floating dtype.

    Returns:
        y_TF [..., F] in the same dtype, contiguous on a GPU.

    Raises:
        ValueError: an odd last dimension; on a GPU another dtype.
        RuntimeError: a second derivative, on a GPU.
    """
    if gate_up_T2F.ndim == 0 or gate_up_T2F.shape[-1] % 2:
        raise ValueError(
            f"gate_up_T2F must end in 2F columns, gates first, got shape {tuple(gate_up_T2F.shape)}; pass the output of"
            " the fused projection whole"
        )
    if dispatch.runs_triton(gate_up_T2F.device):
        if gate_up_T2F.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"on a GPU gate_up_T2F must be bfloat16 or float32, got {gate_up_T2F.dtype}; cast it")
        return _SwiGlu.apply(gate_up_T2F)  # pyright: ignore[reportReturnType]
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF
