"""fp32 products on a CPU, by either library."""

import pytest
import torch

from sparkgrpo.kernels import cpu_products
from sparkgrpo.kernels.cpu_products import has_onednn_products, product_


@pytest.fixture(params=["oneDNN", "torch.mm"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "oneDNN" and not has_onednn_products():
        pytest.skip("needs AVX-512 and a torch with oneDNN")
    monkeypatch.setattr(cpu_products, "has_onednn_products", lambda: request.param == "oneDNN")
    return request.param


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 48, 301), (37, 301, 48), (301, 37, 48), (3, 0, 5), (0, 4, 5)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_equals_float64(library: str, shape: tuple[int, int, int], adds: bool, is_transposed: bool) -> None:
    M, K, N = shape
    torch.manual_seed(M)
    a_MK, b_KN = torch.randn(M, K), torch.randn(K, N)
    if is_transposed:
        a_MK, b_KN = a_MK.T.contiguous().T, b_KN.T.contiguous().T
    out_MN = torch.randn(M, N) if adds else torch.full((M, N), float("nan"))
    old_MN = out_MN.double() if adds else torch.zeros(M, N, dtype=torch.float64)
    want_MN = a_MK.double() @ b_KN.double() + old_MN
    # K products and K additions, in whatever order, are off by at most K + 1 half units of the sum of sizes (Higham,
    # Accuracy and Stability of Numerical Algorithms, 3.5)
    bound_MN = (K + 1) * 2.0**-24 * (a_MK.double().abs() @ b_KN.double().abs() + old_MN.abs())
    product_(out_MN, a_MK, b_KN, adds=adds)
    assert ((out_MN.double() - want_MN).abs() <= bound_MN).all()


def test_writes_into_a_slice(library: str) -> None:
    wide = torch.full((16, 40), float("nan"))
    a, b = torch.randn(16, 8), torch.randn(8, 20)
    product_(wide[:, 10:30], a, b)
    torch.testing.assert_close(wide[:, 10:30], a @ b)
    assert bool(wide[:, :10].isnan().all()) and bool(wide[:, 30:].isnan().all())


def test_rows_do_not_depend_on_their_number(library: str) -> None:
    a, b = torch.randn(256, 96), torch.randn(96, 301)
    whole, part = torch.empty(256, 301), torch.empty(16, 301)
    product_(whole, a, b)
    product_(part, a[:16], b)
    assert torch.equal(whole[:16], part)


@pytest.mark.parametrize("fault", ["missing", "other arguments", "other result"])
def test_an_operator_that_changed_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is private to torch: one that has gone or means something else leaves the plain products."""

    class Namespace:
        def __getattr__(self, name: str) -> object:
            if fault == "missing":
                raise AttributeError(name)
            return (lambda a: a) if fault == "other arguments" else (lambda *_: torch.zeros(1, 2))

    monkeypatch.setattr(torch.ops, "mkldnn", Namespace())
    assert not has_onednn_products.__wrapped__()
