"""y = x W^T + b: torch's linear layer, and on a CPU the same product by the faster of its two libraries.

`cpu_products.py` says why there are two. Measured here, one thread of an AMD EPYC, rows x inputs x outputs, times as
fast as F.linear: 64 x 96 x 288 1.3, 256 x 96 x 288 2.0, 64 x 576 x 3,072 2.1, 2,048 x 1,536 x 576 2.2; below about a
million multiplications (8 x 96 x 288: 0.5) the call itself costs more, so those stay with F.linear. Both libraries are
IEEE fp32; oneDNN's sums carry 1.5 times the rounding error (logits of SmolLM2-135M against float64, root mean square:
2.0e-5, MKL 1.4e-5, the largest logit being 38).

The gradient of a weight has both operands the wrong way round, and oneDNN copies the first. Where that is the wide one
and the layer is narrow, the transposed product is made instead: 5,812 rows, 128 inputs, 1,024 outputs 23 in place of
36 ms, 256 outputs 2.5 in place of 6.4. At 576 inputs the other way is as fast or faster (3,072 outputs: 125, not 152).

Bytes: operands and result once. Flops: 2 T N D forward, 4 T N D backward. T rows, D inputs, N outputs.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sparkgrpo.kernels.cpu_products import has_onednn_products

SMALL_MULTIPLICATIONS = 1 << 20
"""Products of at most so many stay with F.linear."""
NARROW = 256
"""Inputs up to which a layer's weight gradient is made transposed."""


def linear_reference(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` as plain PyTorch."""
    y_TN = x_TD @ weight_ND.t()
    return y_TN if bias_N is None else y_TN + bias_N


def _product(a_MK: torch.Tensor, b_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b^T + bias by oneDNN; any strides."""
    return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, bias_N, "none", [], "")


def _weight_gradient(dy_TN: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    """dy^T x, contiguous."""
    num_outputs, num_inputs = dy_TN.shape[1], x_TD.shape[1]
    if num_inputs <= NARROW and num_inputs < num_outputs:
        return _product(x_TD.t(), dy_TN.t()).t().contiguous()
    return _product(dy_TN.t(), x_TD.t())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x_TD, weight_ND)
        return _product(x_TD, weight_ND, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, weight_ND = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad
        return (
            _product(dy_TN, weight_ND.t()) if needs_dx else None,
            _weight_gradient(dy_TN, x_TD) if needs_dweight else None,
            dy_TN.sum(0) if needs_dbias else None,
        )


def linear(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b for rows of any device and float dtype; differentiable once.

    Args:
        x_TD: [T, D]. weight_ND: [N, D], same dtype. bias_N: [N] or None.

    Returns:
        y_TN in x's dtype.

    Raises:
        RuntimeError: Shapes or dtypes that do not fit, as F.linear says it.
    """
    num_multiplications = x_TD.numel() * weight_ND.shape[0]
    is_fp32 = x_TD.dtype == weight_ND.dtype == torch.float32 and x_TD.device.type == "cpu"
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return F.linear(x_TD, weight_ND, bias_N)  # a compiler makes its own choice, and a cast is autocast's to make
    is_large = num_multiplications > SMALL_MULTIPLICATIONS and x_TD.dim() == 2
    if not (is_fp32 and is_large and has_onednn_products()):
        return F.linear(x_TD, weight_ND, bias_N)
    if not torch.is_grad_enabled():
        return _product(x_TD, weight_ND, bias_N)
    return _Linear.apply(x_TD, weight_ND, bias_N)
