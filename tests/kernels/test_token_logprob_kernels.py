"""The Triton path of token_logprob against float64 autograd, and the op as torch.compile sees it.

T rows, V vocabulary. Bounds as for the CPU path: u = 2^-24, 8 u max(1, |value|) for values with |value| the largest of
logit, log-prob and lse, relative L2 1e-5 for the gradient. A block has 64 columns here, so that a row has several; what
is allocated is filled with NaN before a kernel writes it.
"""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparkgrpo.kernels import token_logprob as op_file
from sparkgrpo.kernels.token_logprob import TokenLogprob, token_logprob, token_logprob_reference

pytest.importorskip("triton", reason="Triton comes with Linux only")
kernels = pytest.importorskip("sparkgrpo.kernels.token_logprob_kernels")

U = 2.0**-24
INF = math.inf


@pytest.fixture(autouse=True)
def triton_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda _: True)
    monkeypatch.setattr(kernels, "_block_columns", lambda _: 64)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    yield
    torch.use_deterministic_algorithms(False)


def make_logits(
    T: int, V: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits up to about 30 in size, every third row certain of its target."""
    rng = torch.Generator().manual_seed(seed)
    logits_TV = (8 * torch.randn(T, V, generator=rng)).to(dtype)
    target_T = torch.randint(0, V, (T,), generator=rng)
    target_T[::3] = logits_TV.float().argmax(1)[::3] if T else target_T[::3]
    return logits_TV.to(device), target_T.to(device)


def run(op: Any, logits_TV: torch.Tensor, target_T: torch.Tensor, **options: Any) -> tuple[TokenLogprob, torch.Tensor]:
    """Result and gradient of a loss that weighs every row's log-prob and entropy differently."""
    logits_TV = logits_TV.detach().requires_grad_()
    out = op(logits_TV, target_T, **options)
    weight_T = torch.linspace(-1, 2, len(target_T), dtype=torch.float64, device=logits_TV.device)
    loss = (weight_T * out.logprob_T).sum()
    if out.entropy_T is not None:
        loss = loss + ((0.3 - weight_T) * out.entropy_T).sum()
    return out, torch.autograd.grad(loss, logits_TV)[0]


def assert_equals_reference(
    logits_TV: torch.Tensor, target_T: torch.Tensor, gradient_bound: float = 1e-5, **options: Any
) -> None:
    got, got_grad = run(token_logprob, logits_TV, target_T, **options)
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()}
    want, want_grad = run(token_logprob_reference, logits_TV.double(), target_T, **wide)
    finite_TV = torch.where(logits_TV.isfinite(), logits_TV, 0.0).double()
    size_T = finite_TV.abs().amax(1) / wide.get("temperature", 1.0) if target_T.numel() else finite_TV.sum(1)
    bound_T = 8 * U * size_T.clamp(min=1.0) + 8 * U * want.logprob_T.nan_to_num(neginf=0.0).abs()
    for name, factor in (("logprob_T", 1.0), ("lse_T", 1.0), ("entropy_T", 1.0 + math.log(logits_TV.shape[1]))):
        x, y = getattr(got, name), getattr(want, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == torch.float32
            assert bool(((x == y) | ((x - y).abs() <= factor * bound_T)).all()), name
    assert got_grad.dtype == logits_TV.dtype and bool(got_grad.isfinite().all())
    assert float((got_grad.double() - want_grad).norm()) <= gradient_bound * float(want_grad.norm())
    assert not got_grad[:, options.get("num_valid") or logits_TV.shape[1] :].any()
    if (is_active_T := options.get("is_active_T")) is not None:
        assert not got_grad[~is_active_T].any()
        assert not any(x[~is_active_T].any() for x in got if x is not None)


@pytest.mark.parametrize("V", [1, 127, 128, 129, 301])
@pytest.mark.parametrize("T", [0, 1, 37])
def test_odd_shapes(T: int, V: int, device: torch.device) -> None:
    assert_equals_reference(*make_logits(T, V, device, seed=T + V))


@pytest.mark.parametrize(
    "call", list(itertools.product(*[[False, True]] * 4)), ids=lambda call: "".join(map(str, map(int, call)))
)
def test_every_combination_of_options(call: tuple[bool, ...], device: torch.device) -> None:
    """Temperature of a number or per row, columns that exist, active rows, entropy."""
    has_row_temperature, has_num_valid, has_active, want_entropy = call
    logits_TV, target_T = make_logits(9, 301, device, seed=1)
    options: dict[str, Any] = {"want_entropy": want_entropy, "temperature": 0.7}
    if has_row_temperature:
        options["temperature"] = torch.linspace(0.5, 2.0, 9, device=device)
    if has_num_valid:
        options["num_valid"] = 290
    if has_active:
        options["is_active_T"] = torch.arange(9, device=device) % 3 != 1
    assert_equals_reference(logits_TV, target_T.clamp(max=289).int(), **options)


def test_one_wide_block(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The width that a GPU takes, with every column behind a mask; and with some in whole blocks."""
    monkeypatch.setattr(kernels, "_block_columns", lambda dtype: 8192 // dtype.itemsize)
    assert_equals_reference(*make_logits(5, 301, device, seed=4))
    assert_equals_reference(*make_logits(3, 5000, device, seed=4), temperature=0.6)


def test_bf16_logits_are_read_exactly(device: torch.device) -> None:
    """Values as from fp32; the gradient is rounded once to bf16: 2^-9 at most, and 2^-8 where it is cut off instead."""
    assert_equals_reference(*make_logits(37, 301, device, torch.bfloat16, seed=3), gradient_bound=2.0**-8)


def test_tail_is_no_logit_of_zero(device: torch.device) -> None:
    """verl 5349: columns past V count as logit 0."""
    logits_TV, target_T = make_logits(5, 130, device)
    assert_equals_reference(logits_TV - 60.0, target_T)
    wide_TV = torch.full((5, 200), 1e4, device=device)
    wide_TV[:, :130] = logits_TV - 60.0
    got = token_logprob(wide_TV, target_T, num_valid=130)
    assert torch.equal(got.logprob_T, token_logprob(logits_TV - 60.0, target_T).logprob_T)


@pytest.mark.parametrize(
    "row", [[0.0, -INF], [0.0, 0.0, -INF], [-INF, 1.0, -2.0], [-INF] * 150 + [3.0, 3.0] + [-INF] * 50]
)
@pytest.mark.parametrize("first", [True, False])
def test_columns_of_probability_zero(row: list[float], first: bool, device: torch.device) -> None:
    """trl 7221, SkyRL 2259: 0 x -inf in the entropy; here also whole blocks of -inf before and behind the maximum."""
    target_T = torch.tensor([row.index(max(row)) if first else row.index(-INF)], device=device)
    logits_TV = torch.tensor([row], device=device)
    if first:
        assert_equals_reference(logits_TV, target_T)
    out, grad = run(token_logprob, logits_TV, target_T)
    assert out.entropy_T is not None and bool(out.entropy_T.isfinite().all()) and bool(grad.isfinite().all())
    assert bool(out.logprob_T.isfinite().all()) == first
    if sum(x == max(row) for x in row) == 2:
        assert float(out.entropy_T.detach()) == pytest.approx(math.log(2), abs=1e-6)


def test_columns_masked_with_the_lowest_number(device: torch.device) -> None:
    """A first block of -3e38 is the running maximum until the second comes: no 0 x inf."""
    logits_TV, target_T = make_logits(6, 301, device)
    logits_TV[:, :130] = torch.finfo(torch.float32).min
    out, grad = run(token_logprob, logits_TV, target_T % 171 + 130)
    want, want_grad = run(token_logprob_reference, logits_TV[:, 130:].double(), target_T % 171)
    assert out.entropy_T is not None and want.entropy_T is not None
    torch.testing.assert_close(out.entropy_T.double(), want.entropy_T, rtol=0, atol=1e-5)
    assert float((grad[:, 130:].double() - want_grad).norm()) < 1e-5 * float(want_grad.norm())
    assert not grad[:, :130].any()


def test_certain_rows_keep_their_digits(device: torch.device) -> None:
    """1 - p_y from 0.5 down to 1e-9, relative 1e-3 in the gradient and in the log-prob itself."""
    gap_T = torch.linspace(0.1, 21.0, 40, device=device)
    logits_TV = torch.zeros(40, 70, device=device)
    logits_TV[:, 1:] = -gap_T[:, None] - 4.2
    logits_TV[:, 3] = -60.0
    target_T = torch.zeros(40, dtype=torch.int64, device=device)
    wide_TV = logits_TV.double().requires_grad_()
    logits_TV.requires_grad_()
    got_T, want_T = (
        op(x, target_T).logprob_T for op, x in ((token_logprob, logits_TV), (token_logprob_reference, wide_TV))
    )
    (got_TV,), (want_TV,) = torch.autograd.grad(got_T.sum(), logits_TV), torch.autograd.grad(want_T.sum(), wide_TV)
    rest_T = -torch.expm1(want_T.detach())
    assert float(rest_T.min()) < 1e-9
    assert float((got_T / want_T - 1).detach().abs().max()) < 1e-3
    assert float((got_TV[:, 0] / rest_T - 1).abs().max()) < 1e-3
    assert float((got_TV / want_TV - 1)[:, 4:].abs().max()) < 1e-3


@pytest.mark.parametrize("target", [-100, -1, 300, 303, 2**40])
def test_target_that_does_not_exist(target: int, device: torch.device) -> None:
    """NaN in that row and in no other, never a finite wrong number; nothing at all where the row is not active."""
    logits_TV, target_T = make_logits(5, 303, device)
    want, want_grad = run(token_logprob, logits_TV, target_T.clamp(max=299), num_valid=300)
    bad_T = target_T.clamp(max=299)
    bad_T[2] = target
    others = torch.arange(5, device=device) != 2
    got, grad = run(token_logprob, logits_TV, bad_T, num_valid=300)
    off, off_grad = run(token_logprob, logits_TV, bad_T, num_valid=300, is_active_T=others)
    assert torch.equal(grad[others], want_grad[others]) and torch.equal(off_grad[others], want_grad[others])
    assert bool(grad[2, :300].isnan().all()) and not grad[2, 300:].any() and not off_grad[2].any()
    for x, y, z in zip(got, want, off, strict=True):
        assert x is not None and y is not None and z is not None
        assert torch.equal(x[others], y[others]) and torch.equal(z[others], y[others])
        assert bool(x[2].isnan()) and float(z[2]) == 0.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_temperature_that_does_not_exist(bad: float, device: torch.device) -> None:
    logits_TV, target_T = make_logits(5, 128, device)  # no column is masked, which would make NaN of any sign
    temperature_T = torch.ones(5, device=device)
    temperature_T[1] = bad
    got, grad = run(token_logprob, logits_TV, target_T, temperature=temperature_T)
    want, want_grad = run(token_logprob, logits_TV, target_T)
    others = torch.arange(5, device=device) != 1
    assert torch.equal(got.logprob_T[others], want.logprob_T[others]) and torch.equal(grad[others], want_grad[others])
    assert bool(got.logprob_T[1].isnan()) and bool(grad[1].isnan().all())
    got, grad = run(token_logprob, logits_TV, target_T, temperature=temperature_T, is_active_T=others)
    assert torch.equal(grad[others], want_grad[others]) and not grad[1].any() and not got.logprob_T[1].any()


def test_rows_without_gradient_are_not_read(device: torch.device) -> None:
    logits_TV, target_T = make_logits(6, 130, device)
    logits_TV[1] = math.nan
    is_active_T = torch.arange(6, device=device) != 1
    _, grad = run(token_logprob, logits_TV, target_T, is_active_T=is_active_T)
    assert bool(grad.isfinite().all()) and not grad[1].any()
    x = logits_TV.requires_grad_()
    (grad,) = torch.autograd.grad(token_logprob(x, target_T).logprob_T[2:].sum(), x)
    assert not grad[:2].any() and bool((grad[2:].abs().amax(1) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, device: torch.device) -> None:
    logits_TV, target_T = make_logits(37, 301, device, dtype)

    def of(rows: torch.Tensor) -> list[torch.Tensor]:
        x = logits_TV[rows].detach().requires_grad_()
        out = token_logprob(x, target_T[rows], temperature=0.7)
        assert out.entropy_T is not None
        loss = out.logprob_T.sum() - 0.3 * out.entropy_T.sum()
        return [out.logprob_T, out.entropy_T, out.lse_T, *torch.autograd.grad(loss, x)]

    order = torch.randperm(37, generator=torch.Generator().manual_seed(0)).to(device)
    whole, shuffled = of(torch.arange(37, device=device)), of(order)
    assert all(torch.equal(x[order], y) for x, y in zip(whole, shuffled, strict=True))
    for row in (0, 5, 36):
        alone = of(torch.tensor([row], device=device))
        assert all(torch.equal(x[row : row + 1], y) for x, y in zip(whole, alone, strict=True))


def test_strides(device: torch.device) -> None:
    logits_TV, target_T = make_logits(7, 301, device)
    want, want_grad = run(token_logprob, logits_TV, target_T)
    wide = torch.full((7, 400), 1e4, device=device)
    wide[:, 21:322] = logits_TV
    spread = torch.full((7, 602), 1e4, device=device)
    spread[:, ::2] = logits_TV
    for view in (wide[:, 21:322], logits_TV.t().contiguous().t(), spread[:, ::2]):
        got, got_grad = run(token_logprob, view, target_T.repeat_interleave(2)[::2])
        assert torch.equal(got.logprob_T, want.logprob_T) and torch.equal(got_grad, want_grad)
    one_TV = logits_TV[:1].expand(3, -1)
    got, _ = run(token_logprob, one_TV, target_T[:1].expand(3))
    assert torch.equal(got.logprob_T, want.logprob_T[:1].expand(3))


def test_expanded_gradient(device: torch.device) -> None:
    """verl 6960: a strided or expanded grad_output read as dense."""
    logits_TV, target_T = make_logits(8, 50, device)
    logits_TV.requires_grad_()
    out = token_logprob(logits_TV, target_T)
    assert out.entropy_T is not None
    loss = out.logprob_T[::2].sum() + out.logprob_T.sum() + out.entropy_T.sum()
    (got_TV,) = torch.autograd.grad(loss, logits_TV, retain_graph=True)
    weight_T = 1.0 + (torch.arange(8, device=device) % 2 == 0)
    dense = (weight_T * out.logprob_T).sum() + (torch.ones_like(weight_T) * out.entropy_T).sum()
    (want_TV,) = torch.autograd.grad(dense, logits_TV)
    assert torch.equal(got_TV, want_TV)


@pytest.mark.parametrize("name", ["logprob_T", "entropy_T"])
def test_one_output_alone(name: str, device: torch.device) -> None:
    logits_TV, target_T = make_logits(9, 130, device)
    grads = []
    for op, dtype in ((token_logprob, torch.float32), (token_logprob_reference, torch.float64)):
        x = logits_TV.to(dtype).detach().requires_grad_()
        grads.append(torch.autograd.grad(getattr(op(x, target_T, temperature=0.6), name).sum(), x)[0])
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-5
    assert float(grads[0].sum(1).abs().max()) < 1e-5  # a softmax does not see a shift


def test_logits_are_left_alone(device: torch.device) -> None:
    """Liger 272, verl 2484: the logits are destroyed for their next user."""
    logits_TV, target_T = make_logits(5, 301, device)
    before_TV, version = logits_TV.clone(), logits_TV._version
    logits_TV.requires_grad_()
    one = token_logprob(logits_TV, target_T).logprob_T.sum()
    two = token_logprob(logits_TV, target_T, temperature=0.5).logprob_T.sum()
    (one + two).backward()
    assert torch.equal(logits_TV.detach(), before_TV) and logits_TV._version == version


INDEX_PROGRAM = """
import torch
from sparkgrpo.kernels.token_logprob_kernels import token_logprob_bwd, token_logprob_fwd
stride = (1 << 30) + 8
wide_TV = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 40), (stride, 1))
wide_TV.copy_(torch.randn(3, 40))
options = {"temperature": 1.0, "num_valid": 40, "is_active_T": None, "block_columns": 32}
target_T, g_T = torch.tensor([1, 2, 3]), torch.ones(3)
results = []
for logits_TV in (wide_TV, wide_TV.contiguous()):
    logprob_T, _, lse_T, stats_T4 = token_logprob_fwd(logits_TV, target_T, want_entropy=True, **options)
    results.append((logprob_T, lse_T, token_logprob_bwd(logits_TV, target_T, stats_T4, g_T, None, **options)))
assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
"""


def test_index_beyond_32_bits_does_not_wrap() -> None:
    """trl 7266: row x stride in int32. The memory between rows is never touched; a wrapped address may not exist."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INDEX_PROGRAM], check=True, env=environment, timeout=120)


@pytest.mark.parametrize("is_triton", [True, False])
@pytest.mark.parametrize("has_rows", [True, False])
def test_compiled_as_one_opaque_node(
    is_triton: bool, has_rows: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fullgraph: no break; values and gradients are those of eager mode, at lengths that differ."""
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda _: is_triton)

    def loss_of(logits_TV: torch.Tensor, target_T: torch.Tensor, row_T: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = (
            {"temperature": row_T + 1.0, "is_active_T": row_T != 1} if has_rows else {"temperature": 0.7}
        )
        out = token_logprob(2.0 * logits_TV, target_T, num_valid=99, **options)
        assert out.entropy_T is not None
        return (out.logprob_T * row_T).sum() - out.entropy_T.sum() + out.lse_T.sum()

    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (3, 6):
        logits_TV, target_T = make_logits(T, 100, device)
        row_T = torch.arange(T, device=device).float()
        target_T.clamp_(max=98)
        logits_TV.requires_grad_()
        results = [f(logits_TV, target_T, row_T) for f in (loss_of, compiled)]
        grads = [torch.autograd.grad(x, logits_TV)[0] for x in results]
        assert torch.equal(*results) and torch.equal(*grads) and bool(grads[0].any())


def test_registration_is_sound(device: torch.device) -> None:
    """torch's own checks: schema, shapes of the fake outputs, autograd under dynamic shapes."""
    logits_TV, target_T = make_logits(4, 70, device)
    args = (logits_TV.requires_grad_(), target_T, 0.7, None, 69, torch.arange(4, device=device) != 1, True)
    torch.library.opcheck(op_file._token_logprob_op, args)


def test_no_second_order(device: torch.device) -> None:
    logits_TV, target_T = make_logits(5, 30, device)
    logits_TV.requires_grad_()
    with pytest.raises(RuntimeError, match="token_logprob has no second derivative"):
        torch.autograd.grad(token_logprob(logits_TV, target_T).logprob_T.sum(), logits_TV, create_graph=True)
