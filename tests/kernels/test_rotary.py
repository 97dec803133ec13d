"""rotary against float64: values, gradients, strides; on the CPU the bits of PyTorch's own ops.

T tokens, H heads, E head width. Bounds, u = 2^-24: two products and a sum, 2 u of the sum of their absolute values.
bf16 results add 2^-8 of the value, half a step; the interpreter truncates where a GPU rounds: a whole step, 2^-7.
"""

from collections.abc import Iterator

import pytest
import torch

from sparkgrpo.kernels.rotary import rotary, rotary_reference

U = 2.0**-24


@pytest.fixture
def triton_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels serve CPU tensors too, and memory that is allocated starts as NaN."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
    yield
    torch.use_deterministic_algorithms(was_deterministic)


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def angles(T: int, E: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin at positions that do not follow the row index."""
    position_T = torch.randint(0, 4096, (T,), generator=torch.Generator().manual_seed(7)).float()
    angle_T1E = position_T[:, None, None] * 10_000.0 ** (-torch.arange(E // 2) / (E / 2))
    return angle_T1E.cos().to(device), angle_T1E.sin().to(device)


def run(
    qk_THE: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], dy_THE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = qk_THE.detach().requires_grad_()
    y_THE = rotary(leaf, *table)
    return y_THE, torch.autograd.grad(y_THE, leaf, dy_THE)[0]


@pytest.mark.parametrize("shape", [(0, 3, 48), (1, 1, 2), (37, 3, 48), (5, 16, 64), (3, 10, 128), (7, 5, 34)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("triton_path")
def test_values_and_gradients(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    T, _, E = shape
    qk_THE, dy_THE, table = draw(shape, dtype, device, 0), draw(shape, dtype, device, 1), angles(T, E, device)
    y_THE, grad_THE = run(qk_THE, table, dy_THE)
    exact_THE = qk_THE.double().requires_grad_()
    want_THE = rotary_reference(exact_THE, *table)
    want_grad_THE = torch.autograd.grad(want_THE, exact_THE, dy_THE.double())[0]
    step = 0.0 if dtype == torch.float32 else 2.0**-8 if y_THE.is_cuda else 2.0**-7
    cos_THE, sin_THE = (t.double().abs().tile(2) for t in table)
    for got, want, x_THE in ((y_THE, want_THE, qk_THE), (grad_THE, want_grad_THE, dy_THE)):
        terms_THE = x_THE.double().abs() * cos_THE + x_THE.double().abs().roll(E // 2, -1) * sin_THE
        assert got.shape == shape and got.dtype == dtype and got.is_contiguous()
        assert ((got - want).abs() <= step * want.abs() + 2 * U * terms_THE).all()


@pytest.mark.usefixtures("triton_path")
def test_angle_zero_changes_no_bit_and_backward_turns_back(device: torch.device) -> None:
    qk_THE = draw((37, 3, 48), torch.float32, device, 0)
    zero = torch.ones(37, 1, 24, device=device), torch.zeros(37, 1, 24, device=device)
    assert torch.equal(rotary(qk_THE, *zero), qk_THE)
    leaf = qk_THE.clone().requires_grad_()
    y_THE = rotary(leaf, *angles(37, 48, device))
    turned_back_THE = torch.autograd.grad(y_THE, leaf, y_THE.detach())[0]
    # Two rotations, each 2 u of two terms, and cos^2 + sin^2 is 1 to 2 u: relative to the pair's length.
    length_THE = qk_THE.unflatten(-1, (2, 24)).norm(dim=-2, keepdim=True).expand(-1, -1, 2, -1).flatten(-2)
    assert ((turned_back_THE - qk_THE).abs() <= 8 * U * length_THE).all()


@pytest.mark.parametrize("E", [34, 64])
@pytest.mark.usefixtures("triton_path")
def test_strides_change_no_bit(E: int, device: torch.device) -> None:
    qkv_THE = draw((37, 7, E), torch.bfloat16, device, 0)
    qk_THE, dy_THE, table = qkv_THE[:, 1:6], draw((37, 5, E), torch.bfloat16, device, 1), angles(37, E, device)
    want = run(qk_THE.contiguous(), table, dy_THE)
    heads_first = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (qk_THE, dy_THE))
    channels_first = tuple(t.transpose(0, 2).contiguous().transpose(0, 2) for t in (qk_THE, dy_THE))
    table_of_columns = tuple(t.transpose(0, 2).contiguous().transpose(0, 2) for t in table)
    for x_THE, angle, dy in (
        (qk_THE, table, dy_THE),
        (heads_first[0], table, heads_first[1]),
        (channels_first[0], table_of_columns, channels_first[1]),
    ):
        got = run(x_THE, angle, dy)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    ones_THE = torch.ones_like(dy_THE)
    expanded_THE = ones_THE[:1, :1, :1].expand(37, 5, E)
    assert torch.equal(run(qk_THE, table, expanded_THE)[1], run(qk_THE, table, ones_THE)[1])


@pytest.mark.usefixtures("triton_path")
def test_row_strides_beyond_32_bits(device: torch.device) -> None:
    stride = 2**30 + 16
    torch.use_deterministic_algorithms(False)  # nothing may touch the pages between the rows
    storage = torch.empty(2 * stride + 128, dtype=torch.bfloat16, device=device)
    qk_THE = storage.as_strided((3, 2, 64), (stride, 64, 1))
    qk_THE.copy_(draw((3, 2, 64), torch.bfloat16, device, 0))
    table = angles(3, 64, device)
    assert torch.equal(rotary(qk_THE, *table), rotary(qk_THE.clone(), *table))


@pytest.mark.usefixtures("triton_path")
def test_a_token_does_not_depend_on_the_batch_nor_is_the_input_written(device: torch.device) -> None:
    qk_THE, table = draw((37, 3, 48), torch.bfloat16, device, 0), angles(37, 48, device)
    before = qk_THE.clone()
    y_THE = rotary(qk_THE, *table)
    assert torch.equal(qk_THE, before)
    for idx_N in (torch.tensor([36]), torch.arange(36, -1, -1)):
        assert torch.equal(rotary(qk_THE[idx_N], table[0][idx_N], table[1][idx_N]), y_THE[idx_N])


@pytest.mark.usefixtures("triton_path")
def test_no_second_derivative(device: torch.device) -> None:
    qk_THE = draw((3, 2, 48), torch.float32, device, 0).requires_grad_()
    with pytest.raises(RuntimeError, match="rotary has no second derivative"):
        torch.autograd.grad(rotary(qk_THE, *angles(3, 48, device)).sum(), qk_THE, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("T", [0, 1, 37])
def test_cpu_bits_are_those_of_torch(dtype: torch.dtype, T: int) -> None:
    """The formula of transformers, `x * cos + rotate_half(x) * sin`, whose angles take x's dtype."""
    cpu = torch.device("cpu")
    qk_THE, dy_THE, table = draw((T, 5, 48), dtype, cpu, 0)[:, :3], draw((T, 3, 48), dtype, cpu, 1), angles(T, 48, cpu)
    got = run(qk_THE, table, dy_THE)
    leaf = qk_THE.clone().requires_grad_()
    cos_T1E, sin_T1E = (t.to(dtype).tile(2) for t in table)
    want_THE = leaf * cos_T1E + torch.cat((-leaf[..., 24:], leaf[..., :24]), -1) * sin_T1E
    assert torch.equal(got[0], want_THE) and torch.equal(got[1], torch.autograd.grad(want_THE, leaf, dy_THE)[0])


def test_compiles_without_a_graph_break_on_the_cpu() -> None:
    cpu = torch.device("cpu")
    qk_THE, table = draw((5, 3, 48), torch.bfloat16, cpu, 0).requires_grad_(), angles(5, 48, cpu)
    got, want = (op(qk_THE, *table) for op in (torch.compile(rotary, fullgraph=True, backend="aot_eager"), rotary))
    assert torch.equal(got, want)
    got_grad, want_grad = (torch.autograd.grad(y.square().sum(), qk_THE) for y in (got, want))
    assert torch.equal(got_grad[0], want_grad[0])


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    qk_THE, (cos_T1E, sin_T1E) = torch.ones(3, 2, 48), angles(3, 48, torch.device("cpu"))
    for wrong in (torch.ones(3, 96), torch.ones(3, 2, 47)):
        with pytest.raises(ValueError, match=r"must be \[T, H, E\] with an even E"):
            rotary(wrong, cos_T1E, sin_T1E)
    for table in ((cos_T1E[:2], sin_T1E[:2]), (cos_T1E, sin_T1E[:, 0]), (cos_T1E, sin_T1E.double())):
        with pytest.raises(ValueError, match=r"must be \[3, 1, 24\] of one dtype"):
            rotary(qk_THE, *table)
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    with pytest.raises(ValueError, match="qk_THE must be bfloat16 or float32"):
        rotary(qk_THE.half(), cos_T1E, sin_T1E)
    with pytest.raises(ValueError, match="cos_T1E must be float32 data"):
        rotary(qk_THE, cos_T1E.bfloat16(), sin_T1E.bfloat16())
    with pytest.raises(ValueError, match="sin_T1E must be float32 data without a gradient"):
        rotary(qk_THE, cos_T1E, sin_T1E.clone().requires_grad_())
    with pytest.raises(ValueError, match="cos_T1E must be on cpu"):
        rotary(qk_THE, cos_T1E.to("meta"), sin_T1E.to("meta"))
