"""The fused head and GRPO loss against eager PyTorch: forward and both gradients, fp32.

    pytest --benchmark

The eager peer does the same work: logits, log-softmax, the chosen token's log-prob, the entropy, clip and k3, backward
into hidden states and head. Both are checked against each other before either is timed. `bare products` is the floor:
the three matrix products alone. With half of the rows dead (weight 0) ours computes half; eager has to compute them
all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.linear_grpo import linear_grpo

T, V, D = 512, 49_152, 576
OBJECTIVE = GrpoObjective(beta=0.04)
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """Operands of one comparison."""

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    target_T: torch.Tensor
    advantage_T: torch.Tensor
    token_weight_T: torch.Tensor
    ref_T: torch.Tensor


def make_case(frac_active: float) -> Case:
    g = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(T, D, generator=g)
    weight_VD = torch.randn(V, D, generator=g) * 0.1
    target_T = torch.randint(V, (T,), generator=g)
    logprob_T = (hidden_TD @ weight_VD.T).log_softmax(1).gather(1, target_T[:, None])[:, 0]
    return Case(
        hidden_TD=hidden_TD.requires_grad_(),
        weight_VD=weight_VD.requires_grad_(),
        target_T=target_T,
        advantage_T=torch.randn(T, generator=g),
        token_weight_T=torch.where(torch.rand(T, generator=g) < frac_active, 1 / T, 0.0),
        ref_T=logprob_T + 0.1 * torch.randn(T, generator=g),  # a reference close to the policy, as in training
    )


def ours(case: Case) -> torch.Tensor:
    loss = linear_grpo(
        case.hidden_TD,
        case.weight_VD,
        case.target_T,
        case.advantage_T,
        case.token_weight_T,
        objective=OBJECTIVE,
        ref_logprob_T=case.ref_T,
    ).loss
    loss.backward()
    return loss.detach()


def eager(case: Case) -> torch.Tensor:
    logprob_TV = (case.hidden_TD @ case.weight_VD.T).log_softmax(1)
    logprob_T = logprob_TV.gather(1, case.target_T[:, None])[:, 0]
    with torch.no_grad():
        _entropy_T = -(logprob_TV.exp() * logprob_TV).sum(1)  # ours reports it too
    ratio_T = (logprob_T - logprob_T.detach()).exp()
    gain_T = torch.minimum(ratio_T * case.advantage_T, ratio_T.clamp(0.8, 1.2) * case.advantage_T)
    log_ratio_T = case.ref_T - logprob_T
    kl_T = log_ratio_T.exp() - log_ratio_T - 1
    loss = (case.token_weight_T * (OBJECTIVE.beta * kl_T - gain_T)).sum()
    loss.backward()
    return loss.detach()


def bare_products(case: Case) -> torch.Tensor:
    with torch.no_grad():
        logits_TV = case.hidden_TD @ case.weight_VD.T
        dhidden_TD = logits_TV @ case.weight_VD
        return dhidden_TD.sum() + (logits_TV.T @ case.hidden_TD).sum()


def gradients(step: Callable[[Case], torch.Tensor], case: Case) -> tuple[torch.Tensor, ...]:
    case.hidden_TD.grad = case.weight_VD.grad = None
    loss = step(case)
    assert case.hidden_TD.grad is not None and case.weight_VD.grad is not None
    return loss, case.hidden_TD.grad, case.weight_VD.grad


@pytest.mark.parametrize("frac_active", [1.0, 0.5])
@pytest.mark.parametrize("step", [ours, eager, bare_products], ids=lambda step: step.__name__)
def bench_linear_grpo(benchmark, step: Callable[[Case], torch.Tensor], frac_active: float) -> None:  # noqa: ANN001
    benchmark.group = f"linear_grpo fp32 T {T} V {V} D {D} active {frac_active}"
    case = make_case(frac_active)
    for mine, theirs in zip(gradients(ours, case), gradients(eager, case), strict=True):
        # Two fp32 sums of up to V terms in different order: 1e-4 of the largest element.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))

    def fresh() -> None:
        case.hidden_TD.grad = case.weight_VD.grad = None

    benchmark.pedantic(lambda: step(case), setup=fresh, rounds=ROUNDS, warmup_rounds=1)
