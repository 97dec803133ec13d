"""rms_norm against float64: values, all gradients, strides, batch invariance; on the CPU the bits of PyTorch's own ops.

T rows, H heads, D width. Bounds, u = 2^-24: a sum of D squares is good to log2(D) u relative, the square root that
follows to 4 u, a handful of products to 1 u each; a gradient to that much of the sum of its terms' absolute values,
dweight with sqrt(T) u for its walk over the rows. bf16 results add 2^-8 of the value, half a step; the interpreter
truncates where a GPU rounds: there a whole step, 2^-7.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from sparkgrpo.kernels.rms_norm import MAX_WIDTH, RmsNorm, rms_norm, rms_norm_reference

U = 2.0**-24
EPS = 1e-6


@pytest.fixture
def triton_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels serve CPU tensors too, and memory that is allocated starts as NaN."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
    yield
    torch.use_deterministic_algorithms(was_deterministic)


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative_step(x: torch.Tensor) -> float:
    """What storing a result in x's dtype costs, relative."""
    return 0.0 if x.dtype == torch.float32 else 2.0**-8 if x.is_cuda else 2.0**-7


def run(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    residual_TD: torch.Tensor | None,
    dy_TD: torch.Tensor | None,
    dsum_TD: torch.Tensor | None,
) -> tuple[RmsNorm, list[torch.Tensor | None]]:
    """Outputs, and the gradients of x, weight and residual for gradients that arrive at one output or both."""
    leaves = [t.detach().requires_grad_() for t in (x_TD, weight_D, residual_TD) if t is not None]
    out = rms_norm(leaves[0], leaves[1], eps=EPS, residual_TD=leaves[2] if residual_TD is not None else None)
    arriving = [(y, dy) for y, dy in ((out.y_TD, dy_TD), (out.sum_TD, dsum_TD)) if dy is not None]
    grads = torch.autograd.grad([y for y, _ in arriving], leaves, [dy for _, dy in arriving], allow_unused=True)
    return out, [*grads, *[None] * (3 - len(grads))]


def assert_equals_float64(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, dy_TD: torch.Tensor | None, dsum_TD: torch.Tensor | None
) -> None:
    D, step = x_TD.shape[-1], relative_step(x_TD)
    weight_D = 1 + draw((D,), x_TD.dtype, x_TD.device, 9)
    out, (dx_TD, dweight_D, dresidual_TD) = run(x_TD, weight_D, residual_TD, dy_TD, dsum_TD)
    exact_sum_TD = x_TD.double() if residual_TD is None else x_TD.double() + residual_TD.double()
    assert ((out.sum_TD - exact_sum_TD).abs() <= (step + U) * exact_sum_TD.abs()).all()

    # y and the gradients are functions of the sum as stored.
    sum_TD, weight_D = out.sum_TD.detach().double().requires_grad_(), weight_D.double().requires_grad_()
    want = rms_norm_reference(sum_TD, weight_D, eps=EPS)
    num_u = 12 + math.log2(D)
    assert out.y_TD.shape == x_TD.shape and out.y_TD.dtype == x_TD.dtype
    assert ((out.y_TD - want.y_TD).abs() <= (step + num_u * U) * want.y_TD.abs()).all()

    zeros_TD = torch.zeros_like(sum_TD)
    dy, dsum = (zeros_TD if g is None else g.double() for g in (dy_TD, dsum_TD))
    want_ds_TD, want_dweight_D = torch.autograd.grad(want.y_TD, (sum_TD, weight_D), dy)
    want_ds_TD = want_ds_TD + dsum
    rstd_T1 = (sum_TD.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n_TD, dn_TD = sum_TD * rstd_T1, dy * weight_D
    terms_TD = rstd_T1 * (dn_TD.abs() + n_TD.abs() * (dn_TD * n_TD).abs().mean(-1, keepdim=True)) + dsum.abs()
    assert dx_TD is not None and dx_TD.dtype == x_TD.dtype
    assert ((dx_TD - want_ds_TD).abs() <= step * want_ds_TD.abs() + num_u * U * terms_TD).all()
    assert dresidual_TD is None or torch.equal(dresidual_TD, dx_TD)
    if dy_TD is None:
        assert dweight_D is None
        return
    assert dweight_D is not None and dweight_D.dtype == x_TD.dtype
    terms_D = (dy * n_TD).abs().flatten(0, -2).sum(0)
    num_u += math.sqrt(x_TD.shape[:-1].numel())
    assert ((dweight_D - want_dweight_D).abs() <= step * want_dweight_D.abs() + num_u * U * terms_D).all()


SHAPES = [(0, 48), (1, 1), (1, 48), (37, 48), (3, 127), (5, 896), (7, 3, 24), (0, 3, 24), (2, 3, 2, 16), (3, MAX_WIDTH)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.usefixtures("triton_path")
def test_values_and_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, has_residual: bool, device: torch.device
) -> None:
    x_TD, residual_TD, dy_TD, dsum_TD = (draw(shape, dtype, device, seed) for seed in range(4))
    assert_equals_float64(3 * x_TD, residual_TD if has_residual else None, dy_TD, dsum_TD)


@pytest.mark.parametrize("arrives_at", ["y", "sum"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.usefixtures("triton_path")
def test_gradient_at_one_output(arrives_at: str, has_residual: bool, device: torch.device) -> None:
    x_TD, residual_TD, grad_TD = (draw((37, 48), torch.float32, device, seed) for seed in range(3))
    dy_TD, dsum_TD = (grad_TD, None) if arrives_at == "y" else (None, grad_TD)
    assert_equals_float64(x_TD, residual_TD if has_residual else None, dy_TD, dsum_TD)


@pytest.mark.usefixtures("triton_path")
def test_many_rows_a_program(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from sparkgrpo.kernels import rms_norm_kernels

    monkeypatch.setattr(rms_norm_kernels, "MAX_PARTIALS", 2)
    x_TD, residual_TD, dy_TD, dsum_TD = (draw((301, 48), torch.float32, device, seed) for seed in range(4))
    assert_equals_float64(x_TD, residual_TD, dy_TD, dsum_TD)


@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e15])
@pytest.mark.usefixtures("triton_path")
def test_extreme_rows(scale: float, device: torch.device) -> None:
    x_TD, dy_TD = (draw((5, 48), torch.float32, device, seed) for seed in range(2))
    assert_equals_float64(scale * x_TD, None, dy_TD, None)


def strided_variants(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers under other strides, storage offsets and alignments."""
    wide = x.new_zeros(*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 16)
    wide[..., 1:-2, :-16] = x
    shifted = x.new_zeros(x.numel() + 1)
    shifted[1:] = x.flatten()
    return {
        "wide rows": wide[..., 1:-2, :-16],
        "columns first": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "misaligned": shifted[1:].view(x.shape),
    }


@pytest.mark.parametrize("shape", [(37, 48), (7, 3, 64), (9, 43)])
@pytest.mark.parametrize("layout", ["wide rows", "columns first", "misaligned"])
@pytest.mark.usefixtures("triton_path")
def test_strides_change_no_bit(shape: tuple[int, ...], layout: str, device: torch.device) -> None:
    dense = [draw(shape, torch.bfloat16, device, seed) for seed in range(4)]
    weight_D = draw(shape[-1:], torch.bfloat16, device, 9)
    x_TD, residual_TD, dy_TD, dsum_TD = (strided_variants(x)[layout] for x in dense)
    got, got_grads = run(x_TD, weight_D, residual_TD, dy_TD, dsum_TD)
    want, want_grads = run(dense[0], weight_D, *dense[1:])
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("triton_path")
def test_expanded_gradient(device: torch.device) -> None:
    x_TD, weight_D = draw((37, 48), torch.float32, device, 0), draw((48,), torch.float32, device, 1)
    one = torch.ones((), device=device)
    _, got = run(x_TD, weight_D, None, one.expand(37, 48), draw((1, 48), torch.float32, device, 2).expand(37, 48))
    dsum_TD = draw((1, 48), torch.float32, device, 2).repeat(37, 1)
    _, want = run(x_TD, weight_D, None, one.repeat(37, 48), dsum_TD)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.usefixtures("triton_path")
def test_row_strides_beyond_32_bits(device: torch.device) -> None:
    stride = 2**30 + 16
    torch.use_deterministic_algorithms(False)  # nothing may touch the pages between the rows
    storage = torch.empty(2 * stride + 48, dtype=torch.bfloat16, device=device)
    x_TD = storage.as_strided((3, 48), (stride, 1))
    x_TD.copy_(draw((3, 48), torch.bfloat16, device, 0))
    weight_D = torch.ones(48, dtype=torch.bfloat16, device=device)
    assert torch.equal(rms_norm(x_TD, weight_D, eps=EPS).y_TD, rms_norm(x_TD.clone(), weight_D, eps=EPS).y_TD)


@pytest.mark.parametrize("D", [48, 896])
@pytest.mark.usefixtures("triton_path")
def test_a_row_does_not_depend_on_the_batch(D: int, device: torch.device) -> None:
    x_TD, residual_TD, dy_TD, dsum_TD = (draw((37, D), torch.bfloat16, device, seed) for seed in range(4))
    weight_D = draw((D,), torch.bfloat16, device, 9)
    out, (ds_TD, _, _) = run(x_TD, weight_D, residual_TD, dy_TD, dsum_TD)
    for idx_N in (torch.tensor([36]), torch.randperm(37, generator=torch.Generator().manual_seed(0)), torch.arange(5)):
        rows = [t[idx_N.to(device)] for t in (x_TD, residual_TD, dy_TD, dsum_TD)]
        part, (part_ds_TD, _, _) = run(rows[0], weight_D, *rows[1:])
        assert torch.equal(part.y_TD, out.y_TD[idx_N]) and torch.equal(part.sum_TD, out.sum_TD[idx_N])
        assert ds_TD is not None and part_ds_TD is not None and torch.equal(part_ds_TD, ds_TD[idx_N])


@pytest.mark.usefixtures("triton_path")
def test_repeats_bit_for_bit_and_writes_to_no_input(device: torch.device) -> None:
    tensors = [draw((137, 48), torch.float32, device, seed) for seed in range(4)]
    weight_D = draw((48,), torch.float32, device, 9)
    copies = [t.clone() for t in tensors]
    first, second = (run(tensors[0], weight_D, *tensors[1:]) for _ in range(2))
    for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


@pytest.mark.usefixtures("triton_path")
def test_only_what_needs_a_gradient_gets_one(device: torch.device) -> None:
    x_TD, weight_D = draw((37, 48), torch.float32, device, 0), draw((48,), torch.float32, device, 1)
    _, (dx_TD, dweight_D, _) = run(x_TD, weight_D, None, x_TD.cos(), None)
    alone_TD = x_TD.clone().requires_grad_()
    rms_norm(alone_TD, weight_D, eps=EPS).y_TD.backward(x_TD.cos())
    alone_D = weight_D.clone().requires_grad_()
    rms_norm(x_TD, alone_D, eps=EPS).y_TD.backward(x_TD.cos())
    assert torch.equal(alone_TD.grad, dx_TD) and torch.equal(alone_D.grad, dweight_D)
    with torch.no_grad():
        out = rms_norm(x_TD, weight_D, eps=EPS)
    assert not out.y_TD.requires_grad and out.sum_TD.data_ptr() == x_TD.data_ptr()


@pytest.mark.usefixtures("triton_path")
def test_no_second_derivative(device: torch.device) -> None:
    x_TD = draw((3, 48), torch.float32, device, 0).requires_grad_()
    y_TD = rms_norm(x_TD, torch.ones(48, device=device), eps=EPS).y_TD
    with pytest.raises(RuntimeError, match="rms_norm has no second derivative"):
        torch.autograd.grad(y_TD.sum(), x_TD, create_graph=True)


@pytest.mark.usefixtures("triton_path")
def test_agrees_with_the_cpu_path_to_a_bf16_step(device: torch.device) -> None:
    x_TD, weight_D = draw((37, 48), torch.bfloat16, device, 0), draw((48,), torch.bfloat16, device, 1)
    y_TD = rms_norm(x_TD, weight_D, eps=EPS).y_TD.float()
    assert ((y_TD - F.rms_norm(x_TD, (48,), weight_D, EPS).float()).abs() <= 2.0**-7 * y_TD.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("T", [0, 1, 37])
def test_cpu_bits_are_those_of_torch(dtype: torch.dtype, T: int) -> None:
    cpu = torch.device("cpu")
    x_TD, residual_TD, dy_TD, dsum_TD = (draw((T, 48), dtype, cpu, seed) for seed in range(4))
    weight_D = draw((48,), dtype, cpu, 9)
    assert rms_norm(x_TD, weight_D, eps=EPS).sum_TD is x_TD
    got, got_grads = run(x_TD, weight_D, residual_TD, dy_TD, dsum_TD)
    leaves = [t.clone().requires_grad_() for t in (x_TD, weight_D, residual_TD)]
    sum_TD = leaves[0] + leaves[2]
    y_TD = F.rms_norm(sum_TD, (48,), leaves[1], EPS)
    want_grads = torch.autograd.grad((y_TD, sum_TD), leaves, (dy_TD, dsum_TD))
    for a, b in zip((*got, *got_grads), (y_TD, sum_TD, *want_grads), strict=True):
        assert torch.equal(a, b)


def test_compiles_without_a_graph_break_on_the_cpu() -> None:
    x_TD, weight_D = (draw(shape, torch.float32, torch.device("cpu"), 0).requires_grad_() for shape in ((5, 48), (48,)))
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    got, want = (op(x_TD, weight_D, eps=EPS, residual_TD=x_TD.cos()) for op in (compiled, rms_norm))
    assert torch.equal(got.y_TD, want.y_TD) and torch.equal(got.sum_TD, want.sum_TD)
    got_grads, want_grads = (torch.autograd.grad(sum(out).square().sum(), (x_TD, weight_D)) for out in (got, want))
    torch.testing.assert_close(got_grads, want_grads, rtol=1e-5, atol=1e-5)  # the compiler's own formula of backward


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TD, weight_D = torch.ones(3, 48), torch.ones(48)
    for wrong_D in (torch.ones(47), torch.ones(3, 48), torch.ones(48, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"weight_D must be one torch\.float32 number for each column"):
            rms_norm(x_TD, wrong_D, eps=EPS)
    for wrong_TD in (torch.ones(48), torch.ones(3, 48).double()):
        with pytest.raises(ValueError, match="nothing is broadcast or cast"):
            rms_norm(x_TD, weight_D, eps=EPS, residual_TD=wrong_TD)
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    with pytest.raises(ValueError, match="weight_D must be on cpu"):
        rms_norm(x_TD, weight_D.to("meta"), eps=EPS)
    for wrong_TD in (x_TD.half(), torch.ones(1, MAX_WIDTH + 1)):
        with pytest.raises(ValueError, match="bfloat16 or float32 of width up to 8,192"):
            rms_norm(wrong_TD, torch.ones(wrong_TD.shape[1], dtype=wrong_TD.dtype), eps=EPS)
