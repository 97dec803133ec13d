"""The linear layer against float64: values and all gradients, on either library."""

import pytest
import torch
import torch.nn.functional as F

from sparkgrpo.kernels import linear as linear_file
from sparkgrpo.kernels.linear import linear, linear_reference


@pytest.fixture(params=["oneDNN", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either library, whatever the size."""
    if request.param == "oneDNN" and not linear_file.has_onednn_products():
        pytest.skip("needs AVX-512 and a torch with oneDNN")
    monkeypatch.setattr(linear_file, "SMALL_MULTIPLICATIONS", 0 if request.param == "oneDNN" else 1 << 60)
    return request.param


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 48, 301), (130, 576, 96), (5, 0, 3), (0, 4, 5)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)])
def test_equals_float64(shape: tuple[int, int, int], has_bias: bool, frozen: tuple[int, ...]) -> None:
    T, D, N = shape
    rng = torch.Generator().manual_seed(T + D + N)
    inputs = [torch.randn(T, D, generator=rng), torch.randn(N, D, generator=rng), torch.randn(N, generator=rng)]
    inputs = inputs if has_bias else inputs[:2]
    dy_TN = torch.randn(T, N, generator=rng)
    trained = [i for i in range(len(inputs)) if i not in frozen]
    results = []
    for op, dtype in ((linear, torch.float32), (linear_reference, torch.float64)):
        own = [x.to(dtype).requires_grad_(i in trained) for i, x in enumerate(inputs)]
        y_TN = op(*own)
        grads = torch.autograd.grad(y_TN, [own[i] for i in trained], dy_TN.to(dtype)) if trained else ()
        results.append((y_TN, *grads))
    for got, want in zip(*results, strict=True):
        assert got.dtype == torch.float32
        # sums of at most 576 numbers around 1 in fp32, as a random walk
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-5)


@pytest.mark.usefixtures("library")
def test_strides() -> None:
    """Slices, transposes and an expanded gradient, as the decoder hands them over."""
    rng = torch.Generator().manual_seed(0)
    x_TD = torch.randn(40, 64, generator=rng)[3:, 5:53].requires_grad_()
    weight_ND = torch.randn(48, 70, generator=rng).T.requires_grad_()
    got = torch.autograd.grad(linear(x_TD, weight_ND).sum(), (x_TD, weight_ND))
    want = torch.autograd.grad(F.linear(x_TD, weight_ND).sum(), (x_TD, weight_ND))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("library")
def test_rows_do_not_depend_on_their_number() -> None:
    x_TD, weight_ND = torch.randn(256, 96), torch.randn(301, 96)
    assert torch.equal(linear(x_TD, weight_ND)[:64], linear(x_TD[:64], weight_ND))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    x_TD, weight_ND = torch.randn(64, 32).to(dtype), torch.randn(16, 32).to(dtype)
    assert torch.equal(linear(x_TD, weight_ND), F.linear(x_TD, weight_ND))


@pytest.mark.usefixtures("library")
def test_autocast_and_compilers_keep_their_say() -> None:
    x_TD, weight_ND = torch.randn(64, 32), torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x_TD, weight_ND).dtype == torch.bfloat16
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x_TD, weight_ND), F.linear(x_TD, weight_ND))


@pytest.mark.usefixtures("library")
def test_shapes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(RuntimeError):
        linear(torch.randn(64, 32), torch.randn(16, 31))
    with pytest.raises(RuntimeError):
        linear(torch.randn(64, 32), torch.randn(16, 32), torch.randn(15))
