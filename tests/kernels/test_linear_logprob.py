"""linear_logprob against float64 autograd through real logits: values, all gradients, batch invariance, memory.

T rows, V vocabulary, D width. Bounds: u = 2^-24. A logit is a sum of D products whose rounding errors walk at random:
0.5 u sqrt(D) B with B = max_j sum_k |hidden_k weight_jk| / tau; log and lse add 4 u each; entropy the same times 1 + H.
Gradients: relative L2 1e-5 in fp32.
"""

import itertools
import math
import re
from typing import Any

import pytest
import torch

from sparkgrpo.kernels.linear_logprob import linear_logprob, linear_logprob_reference
from sparkgrpo.kernels.token_logprob import TokenLogprob

U = 2.0**-24


def make_head(
    T: int, V: int, D: int = 48, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, target; logits reach about 30, every third row is certain of its target."""
    rng = torch.Generator().manual_seed(seed)
    hidden_TD = (2 * torch.randn(T, D, generator=rng)).to(dtype)
    weight_VD = (0.5 * torch.randn(V, D, generator=rng)).to(dtype)
    target_T = torch.randint(0, V, (T,), generator=rng)
    if T:
        target_T[::3] = (hidden_TD.double() @ weight_VD.double().T).argmax(1)[::3]
    return hidden_TD, weight_VD, target_T


def run(
    op: Any, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, **options: Any
) -> tuple[TokenLogprob, tuple[torch.Tensor, ...]]:
    """Result and gradients of a loss that weighs every row's log-prob and entropy differently."""
    operands = hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_()
    out = op(*operands, target_T, **options)
    weight_T = torch.linspace(-1, 2, len(target_T), dtype=torch.float64)
    loss = (weight_T * out.logprob_T).sum()
    if out.entropy_T is not None:
        loss = loss + ((0.3 - weight_T) * out.entropy_T).sum()
    return out, torch.autograd.grad(loss, operands)


def same_bits(got: tuple[TokenLogprob, tuple[torch.Tensor, ...]], want: tuple[Any, tuple[torch.Tensor, ...]]) -> bool:
    """Whether two results of `run` are equal in values and gradients."""
    pairs = zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True)
    return all(a is not None and torch.equal(a, b) for a, b in pairs)


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm()) / max(float(want.norm()), 1e-300) if want.any() else float(got.norm())


def assert_equals_reference(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    gradient_bound: float = 1e-5,
    **options: Any,
) -> None:
    got, got_grads = run(linear_logprob, hidden_TD, weight_VD, target_T, **options)
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()}
    want, want_grads = run(linear_logprob_reference, hidden_TD.double(), weight_VD.double(), target_T, **wide)
    size_T = (hidden_TD.double().abs() @ weight_VD.double().abs().T).amax(1) / wide.get("temperature", 1.0)
    bound_T = 0.5 * U * math.sqrt(hidden_TD.shape[1]) * size_T
    bound_T += 4 * U * torch.maximum(want.logprob_T.abs(), want.lse_T.abs()).clamp(min=1.0)
    assert bool(((got.logprob_T - want.logprob_T).abs() <= bound_T).all())
    assert bool(((got.lse_T - want.lse_T).abs() <= bound_T).all()) and not got.lse_T.requires_grad
    assert (got.entropy_T is None) == (want.entropy_T is None)
    if got.entropy_T is not None and want.entropy_T is not None:
        assert bool(((got.entropy_T - want.entropy_T).abs() <= bound_T * (1 + want.entropy_T)).all())
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        assert got_grad.dtype == hidden_TD.dtype and rel_l2(got_grad, want_grad) <= gradient_bound
    if (is_active_T := options.get("is_active_T")) is not None:
        assert not got_grads[0][~is_active_T].any()
        assert not any(x[~is_active_T].any() for x in got if x is not None)


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize(("T", "V"), list(itertools.product((0, 1, 37), (1, 127, 128, 129, 301))))
def test_odd_shapes(T: int, V: int) -> None:
    assert_equals_reference(*make_head(T, V, seed=T + V))


CALLS = {
    "chunk of 1": {"chunk_tokens": 1},
    "chunk of 16": {"chunk_tokens": 16},
    "temperature": {"temperature": 0.7, "chunk_tokens": 20},
    "row temperature": {"temperature": torch.linspace(0.6, 2.0, 37), "chunk_tokens": 20},
    "num_valid": {"num_valid": 290},
    "active rows": {"is_active_T": torch.arange(37) % 3 != 1, "chunk_tokens": 16},
    "no row active": {"is_active_T": torch.zeros(37, dtype=torch.bool)},
    "no entropy": {"want_entropy": False},
    "anchor": {"anchor_logprob_T": torch.full((37,), -1.0)},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_argument(call: dict[str, Any], is_triton: bool) -> None:
    if is_triton and "chunk_tokens" in call:
        call = call | {"chunk_tokens": max(9, call["chunk_tokens"])}  # the interpreter takes its time
    hidden_TD, weight_VD, target_T = make_head(37, 301, seed=1)
    assert_equals_reference(hidden_TD, weight_VD, target_T.clamp(max=289), **call)


@pytest.mark.usefixtures("producer")
def test_all_arguments_at_once() -> None:
    hidden_TD, weight_VD, target_T = make_head(37, 301, seed=2)
    call: dict[str, Any] = CALLS["row temperature"] | CALLS["active rows"] | CALLS["num_valid"]
    target_T = torch.where(call["is_active_T"], target_T.clamp(max=289), -100)
    assert_equals_reference(hidden_TD, weight_VD, target_T.int(), **call)


def test_bf16_operands(is_triton: bool) -> None:
    """Exact inputs, fp32 products: values as in fp32; on a CPU gradients are rounded once to bf16 (2^-9 at most), on a
    GPU E too (4e-3, and 8e-3 where the interpreter truncates it)."""
    V, bound = (601, 8e-3) if is_triton else (9001, 2.0**-8)
    assert_equals_reference(*make_head(37, V, dtype=torch.bfloat16, seed=3), gradient_bound=bound, temperature=0.8)


def test_forward_does_not_depend_on_the_batch(is_triton: bool) -> None:
    """A row's numbers are the same bits alone, among others, and at any chunk (on the CPU by padding to 16 rows). The
    interpreter's products are NumPy's, whose sums depend on a row's place: there operands are such that sums are exact.
    """
    hidden_TD, weight_VD, target_T = make_head(150, 1203, D=64, seed=4)
    if is_triton:
        hidden_TD, weight_VD = hidden_TD.mul(8).round() / 8, weight_VD.mul(32).round() / 32
    whole = linear_logprob(hidden_TD, weight_VD, target_T)
    for rows, chunk_tokens in ((slice(0, 1), None), (slice(40, 43), None), (slice(0, 150), 16), (slice(7, 120), 50)):
        part = linear_logprob(hidden_TD[rows], weight_VD, target_T[rows], chunk_tokens=chunk_tokens)
        assert all(torch.equal(a[rows], b) for a, b in zip(whole, part, strict=True) if a is not None and b is not None)


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_frozen_operands(needs: tuple[bool, bool]) -> None:
    hidden_TD, weight_VD, target_T = make_head(37, 301, seed=5)
    want = run(linear_logprob, hidden_TD, weight_VD, target_T, want_entropy=False)[1]
    for x, is_needed in zip((hidden_TD, weight_VD), needs, strict=True):
        x.requires_grad_(is_needed)
    out = linear_logprob(hidden_TD, weight_VD, target_T)
    assert out.logprob_T.requires_grad == any(needs)
    if any(needs):
        (torch.linspace(-1, 2, 37, dtype=torch.float64) * out.logprob_T).sum().backward()
    for x, is_needed, grad in zip((hidden_TD, weight_VD), needs, want, strict=True):
        assert (x.grad is not None) == is_needed
        assert x.grad is None or torch.equal(x.grad, grad)


@pytest.mark.usefixtures("producer")
def test_no_tensor_of_rows_times_vocabulary(op_watch: Any) -> None:
    hidden_TD, weight_VD, target_T = make_head(400, 211, D=16)
    weight_VD.requires_grad_()
    with op_watch:
        out = linear_logprob(hidden_TD.requires_grad_(), weight_VD, target_T, chunk_tokens=20)
        assert out.entropy_T is not None
        (out.logprob_T + out.entropy_T).sum().backward()
    assert op_watch.largest == 400 * 16


@pytest.mark.usefixtures("producer")
def test_inactive_rows_are_not_read() -> None:
    hidden_TD, weight_VD, target_T = make_head(37, 301, seed=6)
    is_active_T = torch.arange(37) % 2 == 0
    want = run(linear_logprob, hidden_TD, weight_VD, target_T, is_active_T=is_active_T)
    hidden_TD[~is_active_T], target_T[~is_active_T] = float("nan"), 1 << 20
    got = run(linear_logprob, hidden_TD, weight_VD, target_T, is_active_T=is_active_T)
    assert same_bits(got, want)


@pytest.mark.usefixtures("producer")
def test_strided_gradient_and_hidden() -> None:
    hidden_TD, weight_VD, target_T = make_head(38, 50)
    big = torch.zeros(38, 60)
    big[:, 5:53] = hidden_TD
    big.requires_grad_()
    logprob_T = linear_logprob(big[:, 5:53], weight_VD, target_T).logprob_T
    (got,) = torch.autograd.grad(logprob_T[::2].sum() + logprob_T.sum(), big, retain_graph=True)
    weight_T = 1.0 + (torch.arange(38) % 2 == 0)
    (want,) = torch.autograd.grad((weight_T * logprob_T).sum(), big)
    assert torch.equal(got, want) and not got[:, :5].any() and not got[:, 53:].any() and got[:, 5:53].any()


@pytest.mark.usefixtures("producer")
def test_autocast_changes_nothing() -> None:
    head = make_head(37, 301, seed=7)
    want = run(linear_logprob, *head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_logprob, *head)
        twin = linear_logprob_reference(*head)
    assert same_bits(got, want)
    torch.testing.assert_close(twin.logprob_T, want[0].logprob_T, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("producer")
def test_backward_repeats_and_refuses_second_order() -> None:
    hidden_TD, weight_VD, target_T = make_head(37, 301, seed=8)
    total = linear_logprob(hidden_TD.requires_grad_(), weight_VD, target_T).logprob_T.sum()
    first = torch.autograd.grad(total, hidden_TD, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(3 * total, hidden_TD, retain_graph=True)[0], 3 * first) or rel_l2(
        torch.autograd.grad(3 * total, hidden_TD, retain_graph=True)[0], 3 * first.double()
    ) < 1e-6  # fmt: skip
    with pytest.raises(RuntimeError, match="linear_logprob has no second derivative"):
        torch.autograd.grad(total, hidden_TD, create_graph=True)


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "hidden_TD must be a 2-D tensor, got list": {"hidden_TD": [1.0]},
        "weight_VD must have contiguous rows": {"weight_VD": torch.zeros(8, 30).t()},
        "the weight is [V, D], not [D, V]": {"weight_VD": torch.zeros(8, 30)},
        "the head takes 1 to 1,048,576 words": {"weight_VD": torch.zeros(0, 8)},
        "must be in [0, 20), got 29; there is no ignore index": {"num_valid": 20},
        "is_active_T must have shape [5]": {"is_active_T": torch.ones(6, dtype=torch.bool)},
        "anchor_logprob_T must be float32, got torch.bfloat16": {"anchor_logprob_T": torch.zeros(5).bfloat16()},
        "chunk_tokens must be None or a positive number": {"chunk_tokens": 2.0},
        "temperature must be finite and above 0, got inf": {"temperature": math.inf},
    }.items(),
)
def test_bad_input(message: str, call: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "hidden_TD": torch.zeros(5, 8),
        "weight_VD": torch.zeros(30, 8),
        "target_id_T": torch.arange(25, 30),
    } | call
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_logprob(**given)
