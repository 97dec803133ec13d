"""token_logprob against float64 autograd: values and gradient; -inf, tails, strides, aliases.

T rows, V vocabulary. Bounds: u = 2^-24. Logits are given, so that only scaling, exponentials, their sum and the log
round: 8 u max(1, |value|) with |value| the largest of logit, log-prob and lse; the gradient has relative L2 1e-5.
"""

import math
import re
from typing import Any

import pytest
import torch

from sparkgrpo.kernels.token_logprob import TokenLogprob, token_logprob, token_logprob_reference

U = 2.0**-24
INF = math.inf


def make_logits(T: int, V: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits up to about 30 in size, every third row certain of its target."""
    rng = torch.Generator().manual_seed(seed)
    logits_TV = (8 * torch.randn(T, V, generator=rng)).to(dtype)
    target_T = torch.randint(0, V, (T,), generator=rng)
    target_T[::3] = logits_TV.float().argmax(1)[::3] if T else target_T[::3]
    return logits_TV, target_T


def run(op: Any, logits_TV: torch.Tensor, target_T: torch.Tensor, **options: Any) -> tuple[TokenLogprob, torch.Tensor]:
    """Result and gradient of a loss that weighs every row's log-prob and entropy differently."""
    logits_TV = logits_TV.clone().requires_grad_()
    out = op(logits_TV, target_T, **options)
    weight_T = torch.linspace(-1, 2, len(target_T), dtype=torch.float64)
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
    size_T = finite_TV.abs().amax(1) / wide.get("temperature", 1.0) if target_T.numel() else torch.zeros(0)
    bound_T = 8 * U * size_T.clamp(min=1.0) + 8 * U * want.logprob_T.nan_to_num(neginf=0.0).abs()
    for name, factor in (("logprob_T", 1.0), ("lse_T", 1.0), ("entropy_T", 1.0 + math.log(logits_TV.shape[1]))):
        x, y = getattr(got, name), getattr(want, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == torch.float32
            assert bool(((x == y) | ((x - y).abs() <= factor * bound_T)).all()), name
    assert got_grad.dtype == logits_TV.dtype
    assert float((got_grad.double() - want_grad).norm()) <= gradient_bound * float(want_grad.norm())
    if (is_active_T := options.get("is_active_T")) is not None:
        assert not got_grad[~is_active_T].any()
        assert not any(x[~is_active_T].any() for x in got if x is not None)


@pytest.mark.parametrize("V", [1, 127, 128, 129, 301, 5000])
@pytest.mark.parametrize("T", [0, 1, 37])
def test_odd_shapes(T: int, V: int) -> None:
    assert_equals_reference(*make_logits(T, V, seed=T + V))


CALLS = {
    "temperature": {"temperature": 0.6},
    "row temperature": {"temperature": torch.linspace(0.5, 2.0, 37)},
    "num_valid": {"num_valid": 290},
    "active rows": {"is_active_T": torch.arange(37) % 3 != 1},
    "no entropy": {"want_entropy": False},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_argument(call: dict[str, Any]) -> None:
    logits_TV, target_T = make_logits(37, 301, seed=1)
    assert_equals_reference(logits_TV, target_T.clamp(max=289), **call)


def test_many_blocks_of_rows() -> None:
    assert_equals_reference(*make_logits(70, 33_000, seed=2), temperature=0.9)


def test_bf16_logits_are_read_exactly() -> None:
    """Values as from fp32; the gradient is rounded once to bf16, 2^-9 at most."""
    assert_equals_reference(*make_logits(37, 301, torch.bfloat16, seed=3), gradient_bound=2.0**-8)


@pytest.mark.parametrize("row", [[0.0, -INF], [0.0, 0.0, -INF], [-INF, 1.0, -2.0], [-INF, -INF, -INF, 3.0]])
@pytest.mark.parametrize("first", [True, False])
def test_columns_of_probability_zero(row: list[float], first: bool) -> None:
    """trl 7221, SkyRL 2259: 0 x -inf in the entropy."""
    target = row.index(max(row)) if first else row.index(-INF)
    logits_TV = torch.tensor([row])
    if first:
        assert_equals_reference(logits_TV, torch.tensor([target]))
    out, grad = run(token_logprob, logits_TV, torch.tensor([target]))
    number = sum(x == max(row) for x in row)
    assert out.entropy_T is not None and bool(out.entropy_T.isfinite().all()) and bool(grad.isfinite().all())
    assert bool(out.logprob_T.isfinite().all()) == first
    if number == 2:
        assert float(out.entropy_T[0].detach()) == pytest.approx(math.log(2), abs=1e-6)


def test_logits_are_left_alone() -> None:
    """Liger 272, verl 2484: the logits are destroyed for their next user."""
    logits_TV, target_T = make_logits(37, 301)
    logits_TV.requires_grad_()
    before_TV, version = logits_TV.detach().clone(), logits_TV._version
    one = token_logprob(logits_TV, target_T).logprob_T.sum()
    two = token_logprob(logits_TV, target_T, temperature=0.5).logprob_T.sum()
    (one + two).backward()
    assert torch.equal(logits_TV.detach(), before_TV) and logits_TV._version == version
    wide_TV = before_TV.double().requires_grad_()
    twins = [token_logprob_reference(wide_TV, target_T, temperature=tau).logprob_T.sum() for tau in (1.0, 0.5)]
    (want_TV,) = torch.autograd.grad(twins[0] + twins[1], wide_TV)
    assert logits_TV.grad is not None and float((logits_TV.grad - want_TV).norm()) < 1e-5 * float(want_TV.norm())


def test_expanded_gradient() -> None:
    """verl 6960: a strided or expanded grad_output read as dense."""
    logits_TV, target_T = make_logits(38, 50)
    logits_TV.requires_grad_()
    logprob_T = token_logprob(logits_TV, target_T).logprob_T
    (got_TV,) = torch.autograd.grad(logprob_T[::2].sum() + logprob_T.sum(), logits_TV, retain_graph=True)
    weight_T = 1.0 + (torch.arange(38) % 2 == 0)
    (want_TV,) = torch.autograd.grad((weight_T * logprob_T).sum(), logits_TV)
    assert torch.equal(got_TV, want_TV)


@pytest.mark.parametrize("name", ["logprob_T", "entropy_T"])
def test_one_output_alone(name: str) -> None:
    logits_TV, target_T = make_logits(9, 50)
    grads = []
    for op, dtype in ((token_logprob, torch.float32), (token_logprob_reference, torch.float64)):
        x = logits_TV.to(dtype).requires_grad_()
        grads.append(torch.autograd.grad(getattr(op(x, target_T), name).sum(), x)[0])
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-5
    assert float(grads[0].sum(1).abs().max()) < 1e-5  # a softmax does not see a shift


def test_strides() -> None:
    logits_TV, target_T = make_logits(37, 301)
    want, want_grad = run(token_logprob, logits_TV, target_T)
    wide = torch.full((37, 400), 1e4)
    wide[:, 20:321] = logits_TV
    for view in (wide[:, 20:321], logits_TV.t().contiguous().t()):
        got, got_grad = run(token_logprob, view, target_T)
        assert torch.equal(got.logprob_T, want.logprob_T) and torch.equal(got_grad, want_grad)


def test_index_beyond_32_bits_does_not_wrap() -> None:
    """trl 7266: row x stride in int32. The memory between the rows is never touched, so that it costs nothing."""
    stride = (1 << 30) + 8
    logits_TV = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 40), (stride, 1))
    logits_TV.copy_(make_logits(3, 40)[0])
    target_T = torch.tensor([1, 2, 3])
    got, want = token_logprob(logits_TV, target_T), token_logprob(logits_TV.contiguous(), target_T)
    assert torch.equal(got.logprob_T, want.logprob_T) and torch.equal(got.lse_T, want.lse_T)


@pytest.mark.parametrize("target", [-100, 303])
def test_target_that_does_not_exist(target: int) -> None:
    logits_TV, target_T = make_logits(5, 300)
    target_T[2] = target
    with pytest.raises(ValueError, match=rf"must be in \[0, 300\), got {target}; there is no ignore index"):
        token_logprob(logits_TV, target_T)
    out = token_logprob(logits_TV, target_T, is_active_T=torch.arange(5) != 2)
    assert float(out.logprob_T[2]) == 0.0 and bool((out.logprob_T[[0, 1, 3, 4]] < 0).all())


def test_no_second_order() -> None:
    logits_TV, target_T = make_logits(5, 30)
    logits_TV.requires_grad_()
    with pytest.raises(RuntimeError, match="token_logprob has no second derivative"):
        torch.autograd.grad(token_logprob(logits_TV, target_T).logprob_T.sum(), logits_TV, create_graph=True)


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "logits_TV must be a 2-D tensor, got (2, 3, 4)": {"logits_TV": torch.zeros(2, 3, 4)},
        "logits_TV must be bfloat16 or float32, got torch.float64": {"logits_TV": torch.zeros(5, 30).double()},
        "logits_TV must have at least one column": {"logits_TV": torch.zeros(5, 0)},
        "target_id_T must have shape [5]": {"target_id_T": torch.zeros(5, 1, dtype=torch.int64)},
        "is_active_T must be bool, got torch.float32": {"is_active_T": torch.ones(5)},
        "temperature must be finite and above 0, got nan": {"temperature": math.nan},
        "num_valid must be an int in [1, 30]": {"num_valid": 0},
    }.items(),
)
def test_bad_input(message: str, call: dict[str, Any]) -> None:
    logits_TV, target_T = make_logits(5, 30)
    given: dict[str, Any] = {"logits_TV": logits_TV, "target_id_T": target_T} | call
    with pytest.raises(ValueError, match=re.escape(message)):
        token_logprob(**given)
