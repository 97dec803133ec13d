"""torch.compile(fullgraph=True) around the head ops: one opaque node, the same values and gradients."""

from typing import Any

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.linear_grpo import linear_grpo
from sparkgrpo.kernels.linear_logprob import linear_logprob

T, V, D = 20, 61, 24
RNG = torch.Generator().manual_seed(0)
ROWS_T = torch.rand(5, T, generator=RNG)
TARGET_T = torch.randint(V, (T,), generator=RNG)
BOUNDS = torch.tensor([0, 7, 7, T], dtype=torch.int32)
OBJECTIVES = {
    "grpo": GrpoObjective(beta=0.1),
    "never clipped": GrpoObjective(eps_high=float("inf"), eps_low=1.0),
    "gspo + entropy": GrpoObjective(ratio="sequence", entropy_coef=0.1),
    "cispo + delta none": GrpoObjective(surrogate="cispo"),
}


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, D, generator=rng).requires_grad_() for n in (T, V))  # pyright: ignore[reportReturnType]


def grpo(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    out = linear_grpo(
        torch.tanh(hidden_TD) * 2, weight_VD, TARGET_T, ROWS_T[0] - 0.4, ROWS_T[1], old_logprob_T=-4 * ROWS_T[2],
        ref_logprob_T=-4 * ROWS_T[3], cu_seqlens_S1=BOUNDS, **options,
    )  # fmt: skip
    assert out.entropy_T is not None and out.kl_T is not None
    return 2 * out.loss, out.logprob_T, out.entropy_T, out.kl_T, out.ratio_T


def logprob(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    out = linear_logprob(torch.tanh(hidden_TD) * 2, weight_VD, TARGET_T, **options)
    entropy = 0.0 if out.entropy_T is None else out.entropy_T.sum()
    return (out.logprob_T * ROWS_T[0]).sum() + entropy, out.lse_T


def assert_same(op: Any, **options: Any) -> None:
    inputs = operands()
    want = op(*inputs, **options)
    want_grads = torch.autograd.grad(want[0], inputs)
    torch._dynamo.reset()
    got = torch.compile(op, fullgraph=True, backend="aot_eager")(*inputs, **options)
    grads = torch.autograd.grad(got[0], inputs)
    assert all(torch.equal(a, b) for a, b in zip((*want, *want_grads), (*got, *grads), strict=True))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_linear_grpo(objective: GrpoObjective) -> None:
    assert_same(grpo, objective=objective)


LOGPROB_OPTIONS = [
    {},
    {"temperature": 0.7, "num_valid": 61},
    {"temperature": ROWS_T[4] + 0.5, "want_entropy": False},
    {"is_active_T": ROWS_T[4] > 0.5},
]


@pytest.mark.parametrize("options", LOGPROB_OPTIONS)
def test_linear_logprob(options: dict[str, Any]) -> None:
    assert_same(logprob, **options)


def test_temperatures_that_change() -> None:
    """The second distinct number makes it symbolic, and its check with it."""
    torch._dynamo.reset()
    compiled = torch.compile(grpo, fullgraph=True, backend="aot_eager")
    for temperature in (0.7, 0.8, 1.0, 1.3):
        options = {"objective": OBJECTIVES["grpo"], "temperature": temperature}
        inputs = operands()
        assert torch.equal(compiled(*inputs, **options)[0], grpo(*inputs, **options)[0])


def test_gradient_added_to_a_buffer() -> None:
    hidden_TD, weight_VD = operands()
    want_VD, got_VD = torch.ones(V, D), torch.ones(V, D)
    options = {"objective": OBJECTIVES["grpo"]}
    grpo(hidden_TD, weight_VD, grad_weight_VD=want_VD, **options)
    torch._dynamo.reset()
    torch.compile(grpo, fullgraph=True, backend="aot_eager")(hidden_TD, weight_VD, grad_weight_VD=got_VD, **options)
    assert torch.equal(want_VD, got_VD) and not torch.equal(got_VD, torch.ones(V, D))


@pytest.mark.parametrize("op", [grpo, logprob])
def test_a_wrong_value_is_still_an_error(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"objective": OBJECTIVES["grpo"]} if op is grpo else {}
    monkeypatch.setitem(globals(), "TARGET_T", torch.full((T,), V))
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"must be in \[0, 61\), got 61"):
        torch.compile(op, fullgraph=True, backend="aot_eager")(*operands(), **options)
