"""Sampler and trainer disagree: the importance weight, the sampler's log-probs in the ratio, and never both."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.model.decoder import Decoder

Make = Callable[..., Any]


@pytest.fixture
def own_batch(make_decoder: Make, make_batch: Make, naive_logits: Make) -> TrainBatch:
    """A batch whose sampler log-probs are the trainer's own at the starting weights."""
    batch, model = make_batch(), make_decoder()
    out = []
    for piece, n in zip(batch.token_R.long().split(list(batch.length_S)), batch.prompt_of_row_S, strict=True):
        row = torch.tensor([*batch.prompts[n], *piece.tolist()])
        logp = naive_logits(model, row)[:, :33].log_softmax(-1)
        out.append(logp[len(batch.prompts[n]) - 1 : -1].gather(1, piece[:, None])[:, 0])
    return replace(batch, logprob_R=torch.cat(out).detach())


def shifted(batch: TrainBatch, nats: torch.Tensor) -> TrainBatch:
    """As if the sampler had thought each token likelier by this."""
    return replace(batch, logprob_R=batch.logprob_R + nats)


def same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float = 1e-5) -> None:
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= relative * gradient.norm() + 1e-12, name


def test_no_mismatch_changes_nothing(own_batch: TrainBatch, make_decoder: Make, preset: Make, run_update: Make) -> None:
    _, (plain,) = run_update(make_decoder(), own_batch, preset("rloo"))
    metrics, (capped,) = run_update(make_decoder(), own_batch, preset("rloo", importance_cap=2.0))
    assert metrics["importance_mean"] == pytest.approx(1, abs=1e-5) and metrics["frac_importance_capped"] == 0
    assert metrics["ratio_max"] == 1.0, "the ratio itself stays that of trainer to trainer"
    same(capped, plain)
    _, (by_rollout,) = run_update(make_decoder(), own_batch, preset("rloo", old_logprobs="rollout"))
    same(by_rollout, plain)


@pytest.mark.parametrize("cap", [1.5, 10.0])
@pytest.mark.parametrize("limit", [1 << 30, 60])
def test_every_token_is_weighted_by_the_capped_ratio(
    own_batch: TrainBatch, make_decoder: Make, preset: Make, run_update: Make, cap: float, limit: int
) -> None:
    """Completion by completion a shift of its own: the gradient is that of advantages scaled by the factor."""
    length = torch.tensor(own_batch.length_S)
    nats_S = torch.linspace(-1.0, 1.0, len(length))
    batch = shifted(own_batch, nats_S.repeat_interleave(length))
    factor_S = (-nats_S).exp().clamp(max=cap)
    config = preset("rloo", importance_cap=cap)
    metrics, (ours,) = run_update(make_decoder(), batch, config, limit=limit)
    scaled = replace(own_batch, advantage_S=own_batch.advantage_S * factor_S.double())
    _, (expected,) = run_update(make_decoder(), scaled, preset("rloo"))
    same(ours, expected)
    factor_R = factor_S.repeat_interleave(length)
    assert metrics["importance_mean"] == pytest.approx(float(factor_R.mean()), rel=1e-4)
    is_capped = (-nats_S).exp() > cap
    assert metrics["frac_importance_capped"] == pytest.approx(float(is_capped.repeat_interleave(length).float().mean()))
    assert metrics["logprob_gap_signed"] == pytest.approx(float(nats_S.repeat_interleave(length).mean()), abs=1e-4)


def test_the_weight_stays_that_of_the_weights_that_sampled(
    own_batch: TrainBatch, make_decoder: Make, preset: Make, run_update: Make
) -> None:
    """Several updates: the factor does not follow the policy, which the ratio does."""
    batch = shifted(own_batch, torch.full_like(own_batch.logprob_R, 0.25))
    values = {"inner_epochs": 3, "mini_batches": 2}
    metrics, gradients = run_update(make_decoder(), batch, preset("rloo", importance_cap=5.0, **values), noise=0.02)
    _, plain = run_update(make_decoder(), own_batch, preset("rloo", **values), noise=0.02)
    for ours, expected in zip(gradients, plain, strict=True):
        same(ours, {name: gradient * math.exp(-0.25) for name, gradient in expected.items()})
    assert metrics["importance_mean"] == pytest.approx(math.exp(-0.25), rel=1e-4)


def test_the_rollouts_logprobs_as_old_apply_the_mismatch_once(
    own_batch: TrainBatch, make_decoder: Make, preset: Make, run_update: Make
) -> None:
    """The ratio is e^-0.1 inside the clip range: the gradient is scaled by it, once."""
    batch = shifted(own_batch, torch.full_like(own_batch.logprob_R, 0.1))
    config = preset("rloo", old_logprobs="rollout")
    metrics, (ours,) = run_update(make_decoder(), batch, config)
    _, (plain,) = run_update(make_decoder(), own_batch, preset("rloo"))
    same(ours, {name: gradient * math.exp(-0.1) for name, gradient in plain.items()})
    assert metrics["ratio_max"] == pytest.approx(math.exp(-0.1), rel=1e-4) and metrics["importance_mean"] is None
    assert metrics["logprob_gap_signed"] == pytest.approx(0.1, abs=1e-4)


def test_the_gap_is_that_of_the_weights_that_sampled(
    own_batch: TrainBatch, make_decoder: Make, preset: Make, run_update: Make
) -> None:
    """With the sampler's log-probs as old nobody scores the second mini-batch before the weights have moved."""
    config = preset("rloo", old_logprobs="rollout", mini_batches=2)
    metrics, _ = run_update(make_decoder(), own_batch, config, noise=0.2)
    assert metrics["logprob_gap_max"] < 1e-4 and metrics["frac_tokens_trained"] == 1.0


def test_a_token_that_the_sampler_called_impossible(
    own_batch: TrainBatch, make_decoder: Make, preset: Make, run_update: Make
) -> None:
    """An infinite ratio ends at the cap; nothing becomes NaN."""
    impossible = own_batch.logprob_R.clone()
    impossible[3] = -math.inf
    metrics, (gradient,) = run_update(
        make_decoder(), replace(own_batch, logprob_R=impossible), preset("grpo", importance_cap=3.0)
    )
    assert all(value.isfinite().all() for value in gradient.values())
    assert (metrics["frac_importance_capped"] or 0) > 0 and math.isfinite(metrics["loss"] or math.nan)


def test_beta_without_reference_is_refused(make_decoder: Callable[..., Decoder], preset: Make) -> None:
    from sparkgrpo.trainer.update import Updater

    with pytest.raises(ValueError, match=r"expected a reference for beta 0\.04, got none"):
        Updater(make_decoder(), None, None, preset("grpo"), num_valid=33, tokens_per_micro_batch=1, clock=None)
