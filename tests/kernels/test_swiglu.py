"""swiglu against float64: values, gradients, strides, extreme gates; on the CPU the bits of PyTorch's own ops.

T rows, F width. Bounds, u = 2^-24: e^-x is good to (2 + |x|) u relative, for x log2(e) is rounded before it becomes an
exponent; with a division and a few products each term is good to (8 + 2 |gate|) u. Below 2^-126 all is flushed to 0.
bf16 results add 2^-8 of the value, half a step; the interpreter truncates where a GPU rounds: a whole step, 2^-7.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from sparkgrpo.kernels.swiglu import swiglu, swiglu_reference

U = 2.0**-24
FLUSHED = 2.0**-126


@pytest.fixture
def triton_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels serve CPU tensors too, and memory that is allocated starts as NaN."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(was_deterministic)


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run(gate_up_T2F: torch.Tensor, dy_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = gate_up_T2F.detach().requires_grad_()
    y_TF = swiglu(leaf)
    return y_TF, torch.autograd.grad(y_TF, leaf, dy_TF)[0]


def assert_equals_float64(gate_up_T2F: torch.Tensor, dy_TF: torch.Tensor) -> None:
    y_TF, grad_T2F = run(gate_up_T2F, dy_TF)
    exact_T2F = gate_up_T2F.double().requires_grad_()
    want_TF = swiglu_reference(exact_T2F)
    want_grad_T2F = torch.autograd.grad(want_TF, exact_T2F, dy_TF.double())[0]
    step = 0.0 if y_TF.dtype == torch.float32 else 2.0**-8 if y_TF.is_cuda else 2.0**-7
    gate_TF, up_TF = exact_T2F.detach().chunk(2, -1)
    num_u_TF = 8 + 2 * gate_TF.abs()
    assert y_TF.shape == dy_TF.shape and y_TF.dtype == grad_T2F.dtype == gate_up_T2F.dtype
    floor_TF = FLUSHED * (1 + gate_TF.abs()) * (1 + up_TF.abs()) * (1 + dy_TF.double().abs())
    assert ((y_TF - want_TF).abs() <= (step + num_u_TF * U) * want_TF.abs() + floor_TF).all()
    terms_TF = dy_TF.double().abs() * torch.sigmoid(gate_TF) * (1 + gate_TF.abs())
    terms_T2F = torch.cat((terms_TF * up_TF.abs(), terms_TF), -1)
    bound_T2F = step * want_grad_T2F.abs() + num_u_TF.tile(2) * U * terms_T2F
    assert ((grad_T2F - want_grad_T2F).abs() <= bound_T2F + floor_TF.tile(2)).all()


@pytest.mark.parametrize("shape", [(0, 48), (1, 2), (37, 96), (3, 254), (2, 4098), (2, 3, 64), (0, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("triton_path")
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    dy_TF = draw((*shape[:-1], shape[-1] // 2), dtype, device, 1)
    assert_equals_float64(4 * draw(shape, dtype, device, 0), dy_TF)


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's NumPy: an exponential that a GPU makes infinite
@pytest.mark.usefixtures("triton_path")
def test_extreme_gates(device: torch.device) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e-30, -20, 20, -80, 87, -88, 90, -103, -110, 110, -1e4, 1e4, -1e30, 1e30]])
    up = torch.tensor([[3.0, -2, 1, 1e3]]).tile(4)
    assert_equals_float64(torch.cat((gate, up), 1).to(device), torch.full((1, 16), 0.5, device=device))


@pytest.mark.usefixtures("triton_path")
def test_infinite_and_nan_inputs_are_not_hidden(device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    gate_up_T2F = torch.tensor([[inf, 1, nan, 1, 1, inf, 1, nan]], device=device)
    y_TF = swiglu(gate_up_T2F)
    assert y_TF[0, 0] == inf and y_TF[0, 1] == inf and y_TF[0, 2:].isnan().tolist() == [True, True]


@pytest.mark.usefixtures("triton_path")
def test_strides_change_no_bit(device: torch.device) -> None:
    gate_up_T2F, dy_TF = draw((37, 96), torch.bfloat16, device, 0), draw((37, 48), torch.bfloat16, device, 1)
    want = run(gate_up_T2F, dy_TF)
    wide_TC = draw((40, 113), torch.bfloat16, device, 2)
    wide_TC[1:38, 5:101] = gate_up_T2F
    wide_dy_TC = draw((37, 64), torch.bfloat16, device, 3)
    wide_dy_TC[:, 16:] = dy_TF
    columns_first = gate_up_T2F.T.contiguous().T, dy_TF.T.contiguous().T
    for pair in ((wide_TC[1:38, 5:101], wide_dy_TC[:, 16:]), columns_first):
        got = run(*pair)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    ones_TF = torch.ones_like(dy_TF)
    assert torch.equal(run(gate_up_T2F, ones_TF[:1, :1].expand(37, 48))[1], run(gate_up_T2F, ones_TF)[1])


@pytest.mark.usefixtures("triton_path")
def test_row_strides_beyond_32_bits(device: torch.device) -> None:
    stride = 2**30 + 16
    torch.use_deterministic_algorithms(False)  # nothing may touch the pages between the rows
    storage = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    gate_up_T2F = storage.as_strided((3, 64), (stride, 1))
    gate_up_T2F.copy_(draw((3, 64), torch.bfloat16, device, 0))
    assert torch.equal(swiglu(gate_up_T2F), swiglu(gate_up_T2F.clone()))


@pytest.mark.usefixtures("triton_path")
def test_a_row_does_not_depend_on_the_batch_nor_is_the_input_written(device: torch.device) -> None:
    gate_up_T2F, dy_TF = draw((37, 96), torch.bfloat16, device, 0), draw((37, 48), torch.bfloat16, device, 1)
    before = gate_up_T2F.clone(), dy_TF.clone()
    y_TF, grad_T2F = run(gate_up_T2F, dy_TF)
    assert torch.equal(gate_up_T2F, before[0]) and torch.equal(dy_TF, before[1])
    for idx_N in (torch.tensor([36]), torch.arange(36, -1, -1)):
        part = run(gate_up_T2F[idx_N], dy_TF[idx_N])
        assert torch.equal(part[0], y_TF[idx_N]) and torch.equal(part[1], grad_T2F[idx_N])


@pytest.mark.usefixtures("triton_path")
def test_no_second_derivative(device: torch.device) -> None:
    gate_up_T2F = draw((3, 96), torch.float32, device, 0).requires_grad_()
    with pytest.raises(RuntimeError, match="swiglu has no second derivative"):
        torch.autograd.grad(swiglu(gate_up_T2F).sum(), gate_up_T2F, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("T", [0, 1, 37])
def test_cpu_bits_are_those_of_torch(dtype: torch.dtype, T: int) -> None:
    cpu = torch.device("cpu")
    gate_up_T2F, dy_TF = draw((T, 96), dtype, cpu, 0), draw((T, 48), dtype, cpu, 1)
    got = run(gate_up_T2F, dy_TF)
    leaf = gate_up_T2F.clone().requires_grad_()
    want_TF = F.silu(leaf[:, :48]) * leaf[:, 48:]
    assert torch.equal(got[0], want_TF) and torch.equal(got[1], torch.autograd.grad(want_TF, leaf, dy_TF)[0])


def test_compiles_without_a_graph_break_on_the_cpu() -> None:
    gate_up_T2F = draw((5, 96), torch.float32, torch.device("cpu"), 0).requires_grad_()
    got, want = (op(gate_up_T2F) for op in (torch.compile(swiglu, fullgraph=True, backend="aot_eager"), swiglu))
    assert torch.equal(got, want)
    got_grad, want_grad = (torch.autograd.grad(y.square().sum(), gate_up_T2F) for y in (got, want))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-5, atol=1e-5)  # the compiler's own formula of backward


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (torch.ones(3, 95), torch.ones(())):
        with pytest.raises(ValueError, match="must end in 2F columns"):
            swiglu(wrong)
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    with pytest.raises(ValueError, match=r"must be bfloat16 or float32, got torch\.float16"):
        swiglu(torch.ones(3, 96).half())
