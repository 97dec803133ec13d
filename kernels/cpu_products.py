"""Matrix products in fp32 on a CPU, by the faster of the two libraries that torch carries.

`torch.mm` runs MKL, which leaves half of an AMD processor with AVX-512 unused. oneDNN does not; of its fp32 products
torch offers the one that its compiler emits for linear layers. It gives a new tensor, so that callers work in blocks
that stay in the cache, and a copy from there costs little. Both are IEEE fp32 and sum in a fixed order.

Measured, GFLOP/s of one thread (AMD EPYC, 256 x 896 against 16,384 x 896, copies included):

    hidden @ weight^T   MKL 97, oneDNN 219      E @ weight   106, 219      E^T @ hidden   109, 180

M, K, N: rows, summed dimension, columns of any product.
"""

import functools

import torch


@functools.cache
def has_onednn_products() -> bool:
    """Whether products go to oneDNN: where it was measured to win, on x86 processors with AVX-512.

    The operator is no public one: it is tried once, and a torch that has changed it goes on with its own products.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    a, b = torch.tensor([[2.0, 3.0]]), torch.tensor([[5.0, 7.0], [1.0, 1.0]])
    try:
        product = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(product, torch.tensor([[31.0, 5.0]]))


def product_(out_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor, *, adds: bool = False) -> None:
    """out = a @ b, or out += a @ b; fp32, any strides. What stands in `out` is not read unless `adds`."""
    if has_onednn_products() and a_MK.numel() and b_KN.numel():
        product_MN = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
        (out_MN.add_ if adds else out_MN.copy_)(product_MN)
    elif adds:
        out_MN.addmm_(a_MK, b_KN)
    else:
        torch.mm(a_MK, b_KN, out=out_MN)
