"""The objective on single rows: hand-computed values, every branch's derivative, and options that contradict.

C rows.
"""

import math
import re
from typing import Any

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective, RowInputs, RowLoss, grpo_row_loss, grpo_row_loss_reference


def one_row(
    objective: GrpoObjective,
    *,
    advantage: float,
    log_ratio: float = 0.0,
    ref: float | None = None,
    logprob: float = -1.0,
) -> RowLoss:
    """The loss of one row of weight 2."""

    def row(value: float | None) -> torch.Tensor | None:
        return None if value is None else torch.tensor([value])

    inputs = RowInputs(torch.tensor([advantage]), torch.tensor([2.0]), row(logprob - log_ratio), row(ref))
    return grpo_row_loss(objective, torch.tensor([logprob]), None, inputs)


RATIOS = {"inside": 0.1, "low": -0.5, "high": 0.5, "above delta": 1.0, "infinite": math.inf, "zero": -math.inf}
# Per unit of weight, with eps 0.2, 0.2 and delta 2: (P, P', side) for A = 1 and for A = -1.
CLIP = {
    "inside": ((-math.exp(0.1), -math.exp(0.1), 0), (math.exp(0.1), math.exp(0.1), 0)),
    "low": ((-math.exp(-0.5), -math.exp(-0.5), 0), (0.8, 0.0, -1)),
    "high": ((-1.2, 0.0, 1), (math.exp(0.5), math.exp(0.5), 0)),
    "above delta": ((-1.2, 0.0, 1), (2.0, 0.0, 2)),
    "infinite": ((-1.2, 0.0, 1), (2.0, 0.0, 2)),
    "zero": ((0.0, 0.0, 0), (0.8, 0.0, -1)),
}


@pytest.mark.parametrize("name", RATIOS)
def test_clip_branches(name: str) -> None:
    objective = GrpoObjective(delta=2.0)
    for advantage, (value, slope, side) in zip((1.0, -1.0), CLIP[name], strict=True):
        got = one_row(objective, advantage=advantage, log_ratio=RATIOS[name])
        assert float(got.loss_C) == pytest.approx(2 * value, rel=1e-6)
        assert float(got.g_C) == pytest.approx(2 * slope, rel=1e-6) and int(got.clip_side_C) == side
    got = one_row(objective, advantage=0.0, log_ratio=RATIOS[name])
    assert float(got.loss_C) == float(got.g_C) == int(got.clip_side_C) == 0


@pytest.mark.parametrize("name", RATIOS)
def test_cispo_branches(name: str) -> None:
    """The weight min(rho, 1.2) is a constant of the gradient: a clipped row keeps one."""
    weight = min(math.exp(min(RATIOS[name], 20)), 1.2)
    for advantage in (1.0, -1.0, 0.0):
        got = one_row(GrpoObjective(surrogate="cispo"), advantage=advantage, log_ratio=RATIOS[name], logprob=-3.0)
        assert float(got.loss_C) == pytest.approx(2 * weight * advantage * 3.0, rel=1e-6)
        assert float(got.g_C) == pytest.approx(-2 * weight * advantage, rel=1e-6)
        assert int(got.clip_side_C) == (weight == 1.2 and advantage != 0)


def test_bounds_themselves_are_inside() -> None:
    """rho = hi and rho = lo carry a gradient; with eps 0 a first update (rho exactly 1) does."""
    for advantage in (1.0, -1.0):
        assert float(one_row(GrpoObjective(eps_low=0.0, eps_high=0.0), advantage=advantage).g_C) == -2 * advantage
    assert float(one_row(GrpoObjective(eps_high=math.inf), advantage=1.0, log_ratio=19.0).g_C) < -3e8


@pytest.mark.parametrize(
    ("kl", "q", "value", "slope"),
    [
        ("k3", 0.0, 0.0, 0.0),
        ("k3", -0.5, math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),
        ("k3", 1e-4, 5.0001667e-09, -1.0000500e-4),
        ("k3", 100.0, math.expm1(20) - 20 + 80 * math.expm1(20), -math.expm1(20)),
        ("k3", -100.0, 99.0, 1.0),
        ("k1", 0.7, -0.7, 1.0),
        ("k2", 0.7, 0.245, -0.7),
        ("k2", -100.0, 5000.0, 100.0),
    ],
)
def test_kl_estimators(kl: Any, q: float, value: float, slope: float) -> None:
    got = one_row(GrpoObjective(beta=0.5, kl=kl), advantage=0.0, ref=-1.0 + q)
    tolerance = 1e-3 if q == 1e-4 else 1e-6  # ref - logp has an error of 2^-24 there
    assert got.kl_C is not None and float(got.kl_C) == pytest.approx(value, rel=tolerance)
    assert float(got.loss_C) == pytest.approx(value, rel=tolerance)  # weight 2, beta 0.5
    assert float(got.g_C) == pytest.approx(slope, rel=tolerance)


def test_k3_of_the_lesson() -> None:
    assert float(one_row(GrpoObjective(beta=1.0), advantage=0.0, ref=-1.0).loss_C) == 0.0
    assert float(one_row(GrpoObjective(beta=1.0), advantage=0.0, ref=-1.5).loss_C) / 2 == pytest.approx(
        0.1065, abs=5e-5
    )


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_derivatives_equal_autograd_in_float64(surrogate: Any, ratio: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    logprob_C, entropy_C = -4 * torch.rand(2, 40, generator=rng, dtype=torch.float64)
    logprob_C, entropy_C = logprob_C.requires_grad_(), (-entropy_C).requires_grad_()
    old_C = logprob_C.detach() + 0.3 * torch.randn(40, generator=rng)
    ref_C = logprob_C.detach() + torch.linspace(-30, 30, 40)
    weight_C = torch.rand(40, generator=rng, dtype=torch.float64)
    weight_C[::5], old_C[::5], ref_C[::5] = 0.0, math.nan, -math.inf
    lengths_S = torch.tensor([1, 0, 17, 22]) if ratio == "sequence" else None
    inputs = RowInputs(torch.randn(40, generator=rng, dtype=torch.float64), weight_C, old_C, ref_C, lengths_S)
    objective = GrpoObjective(surrogate=surrogate, ratio=ratio, beta=0.1, entropy_coef=0.2, eps_low=0.05, eps_high=0.05)
    got = grpo_row_loss(objective, logprob_C.detach(), entropy_C.detach(), inputs)
    finite = inputs._replace(old_C=old_C.nan_to_num(), ref_C=ref_C.nan_to_num(neginf=0.0))
    want_C = grpo_row_loss_reference(objective, logprob_C, entropy_C, finite)
    g_C, h_C = torch.autograd.grad(want_C.sum(), (logprob_C, entropy_C))
    torch.testing.assert_close(got.loss_C, want_C.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.g_C, g_C, rtol=1e-10, atol=1e-12)
    assert got.h_C is not None
    torch.testing.assert_close(got.h_C, h_C)
    assert not any(bool(x[::5].any()) for x in got if x is not None)


def test_sequence_ratio_is_the_geometric_mean() -> None:
    logprob_C = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    old_C = torch.tensor([-1.3, -2.0, -2.4, -9.0])
    inputs = RowInputs(torch.ones(4), torch.tensor([1.0, 1.0, 2.0, 0.0]), old_C, None, torch.tensor([4]))
    got = grpo_row_loss(GrpoObjective(ratio="sequence"), logprob_C, None, inputs)
    rho = math.exp((0.3 + 0.0 - 0.6) / 3)
    torch.testing.assert_close(got.ratio_C, torch.tensor([rho, rho, rho, 0.0]))
    torch.testing.assert_close(got.g_C, torch.tensor([1.0, 1.0, 1.0, 0.0]) * -rho * (1 + 1 + 2) / 3)


@pytest.mark.parametrize(
    ("message", "options"),
    {
        "surrogate must be one of 'clip', 'cispo', got 'clipped'; did you mean 'clip'?": {"surrogate": "clipped"},
        "ratio must be one of 'token', 'sequence', got 'seq'; did you mean 'sequence'?": {"ratio": "seq"},
        "kl must be one of 'k1', 'k2', 'k3', got 'k4'": {"kl": "k4"},
        "eps_low must be in [0, 1], got 1.2": {"eps_low": 1.2},
        "eps_high must be in [0, inf], got nan": {"eps_high": math.nan},
        "delta must be above 1 + eps_high = 1.2, got 1.1": {"delta": 1.1},
        "delta belongs to surrogate 'clip', got 'cispo'": {"delta": 2.0, "surrogate": "cispo"},
        "beta must be finite and not negative, got -0.1": {"beta": -0.1},
        "entropy_coef must be finite, got inf": {"entropy_coef": math.inf},
    }.items(),
)
def test_options_that_do_not_fit(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GrpoObjective(**options)
