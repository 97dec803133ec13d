"""What an update says of itself, and when there is none."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.update import Updater

Make = Callable[..., Any]
NUM_VALID = 33  # of make_decoder
HUGE = 1 << 30


@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.parametrize("limit", [HUGE, 100, 1])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_kl_is_exactly_zero_and_the_ratio_exactly_one_before_any_update(
    group_size: int, limit: int, ratio: str, make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    """Reference and policy run on the same micro-batches through the same products, whatever their shape."""
    batch = make_batch((5, 3, 9, 4), group_size, longest=70)
    metrics, _ = run_update(make_decoder(), batch, preset("grpo", ratio=ratio), limit=limit)
    assert metrics["kl_mean"] == metrics["kl_max"] == 0.0
    assert metrics["ratio_max"] == 1.0
    assert metrics["clip_frac"] == metrics["clip_frac_low"] == metrics["clip_frac_high"] == 0.0


def test_kl_of_a_large_vocabulary_is_exactly_zero(make_decoder: Make, preset: Make, run_update: Make) -> None:
    """More rows than one chunk of the head holds."""
    model = make_decoder(vocab_size=30000, num_layers=1)
    num_rows = 1200
    batch = TrainBatch(
        prompts=[[1, 2, 3]],
        token_R=torch.arange(num_rows, dtype=torch.int32),
        logprob_R=torch.full((num_rows,), -9.0),
        length_S=(600, 600),
        prompt_of_row_S=(0, 0),
        advantage_S=torch.tensor([1.0, -1.0], dtype=torch.float64),
    )
    config = preset("grpo", prompts_per_step=1)
    metrics, _ = run_update(model, batch, config, num_valid=30000)
    assert metrics["kl_max"] == 0.0 and metrics["ratio_max"] == 1.0


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_kl_is_reported_as_k3_whatever_the_loss_has(
    kl: str, make_decoder: Make, make_batch: Make, preset: Make, run_update: Make, move: Make
) -> None:
    reference = frozen_copy(make_decoder())
    move(reference, 0.05, seed=4)
    metrics, _ = run_update(make_decoder(), make_batch(), preset("grpo", kl=kl), reference=reference)
    expected, _ = run_update(make_decoder(), make_batch(), preset("grpo"), reference=reference)
    assert metrics["kl_mean"] == expected["kl_mean"] and (expected["kl_mean"] or 0) > 0
    assert (expected["kl_max"] or 0) > (expected["kl_mean"] or 0)


def test_gap_is_between_rollout_and_trainer(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make, naive_logits: Make
) -> None:
    """At the weights that sampled, though the second mini-batch is trained on moved ones.

    With the trainer's own log-probs shifted by a tenth, and one token by half a nat.
    """
    batch, config = make_batch(), preset("rloo", mini_batches=2)
    zero = replace(batch, logprob_R=torch.zeros_like(batch.logprob_R))
    signed = run_update(make_decoder(), zero, config)[0]["logprob_gap_signed"]  # mean of -logp
    assert isinstance(signed, float) and signed > 0
    shift = torch.full_like(batch.logprob_R, 0.1)
    shift[7] = -0.5
    own = trainer_logprobs(naive_logits, make_decoder(), batch)
    metrics, _ = run_update(make_decoder(), replace(batch, logprob_R=own + shift), config, noise=0.1)
    num_tokens = len(shift)
    assert metrics["logprob_gap_mean"] == pytest.approx((0.1 * (num_tokens - 1) + 0.5) / num_tokens, rel=1e-4)
    assert metrics["logprob_gap_signed"] == pytest.approx((0.1 * (num_tokens - 1) - 0.5) / num_tokens, rel=1e-4)
    assert metrics["logprob_gap_max"] == pytest.approx(0.5, rel=1e-4)
    assert signed == pytest.approx(-float(own.mean()), rel=1e-5)


def trainer_logprobs(logits_of: Make, model: Decoder, batch: TrainBatch) -> torch.Tensor:
    """Completion by completion, each with its own forward through torch's plain attention."""
    out = []
    for piece, n in zip(batch.token_R.long().split(list(batch.length_S)), batch.prompt_of_row_S, strict=True):
        row = torch.tensor([*batch.prompts[n], *piece.tolist()])
        logp = logits_of(model, row)[:, :NUM_VALID].log_softmax(-1)
        start = len(batch.prompts[n]) - 1
        out.append(logp[start:-1].gather(1, piece[:, None])[:, 0])
    return torch.cat(out)


def test_all_groups_dead_without_penalty(make_decoder: Make, make_batch: Make, preset: Make) -> None:
    config, model = preset("dr_grpo"), make_decoder()
    before = [p.clone() for p in model.parameters()]
    clock = PhaseClock(torch.device("cpu"), PHASES)
    optim = MasterAdamW(model, config)
    updater = Updater(model, None, optim, config, num_valid=NUM_VALID, tokens_per_micro_batch=HUGE, clock=clock)
    clock.start_step()
    metrics = updater.update(make_batch(advantages=[0.0] * 16), torch.ones(16, dtype=torch.bool), 1.0)
    seconds = clock.end_step()
    assert all(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
    assert not optim.adam.state, "Adam's moments and step count stay as they are"
    assert metrics["num_updates"] == metrics["frac_params_changed"] == metrics["frac_tokens_trained"] == 0
    for key in ("loss", "grad_norm", "kl_mean", "entropy_mean", "clip_frac", "ratio_max", "logprob_gap_mean"):
        assert metrics.get(key) is None
    assert [seconds[key] for key in ("t_train", "t_opt", "t_ref", "t_old")] == [0.0] * 4


def test_one_update_without_reference_takes_no_time_for_either(
    make_decoder: Make, make_batch: Make, preset: Make
) -> None:
    config, model = preset("rloo", lr=1e-2), make_decoder()
    clock = PhaseClock(torch.device("cpu"), PHASES)
    optim = MasterAdamW(model, config)
    updater = Updater(model, None, optim, config, num_valid=NUM_VALID, tokens_per_micro_batch=HUGE, clock=clock)
    clock.start_step()
    metrics = updater.update(make_batch(), torch.ones(16, dtype=torch.bool), 1e-2)
    seconds = clock.end_step()
    assert seconds["t_ref"] == seconds["t_old"] == 0.0 < min(seconds["t_train"], seconds["t_opt"])
    assert metrics["num_updates"] == 1 and metrics["lr"] == 1e-2 and (metrics["grad_norm"] or 0) > 0
    assert (metrics["frac_params_changed"] or 0) > 0.9 and metrics["kl_mean"] is None
    entropy = metrics["entropy_mean"]
    assert entropy is not None and 0 < entropy < math.log(NUM_VALID)


def test_several_updates(make_decoder: Make, make_batch: Make, preset: Make, run_update: Make) -> None:
    """Two mini-batches, three passes: six updates, and each mini-batch has the normalisers of its own prompts."""
    config = preset("grpo", mini_batches=2, inner_epochs=3)
    batch = make_batch()
    metrics, gradients = run_update(make_decoder(), batch, config, noise=0.05)
    assert len(gradients) == metrics["num_updates"] == 6
    assert (metrics["ratio_max"] or 0) > 1 and (metrics["clip_frac"] or 0) > 0
    assert metrics["clip_frac"] == pytest.approx((metrics["clip_frac_low"] or 0) + (metrics["clip_frac_high"] or 0))
    num_tokens = sum(batch.length_S[:8])
    half = replace(
        batch,
        prompts=batch.prompts[:2],
        token_R=batch.token_R[:num_tokens],
        logprob_R=batch.logprob_R[:num_tokens],
        length_S=batch.length_S[:8],
        prompt_of_row_S=batch.prompt_of_row_S[:8],
        advantage_S=batch.advantage_S[:8],
    )
    _, (first,) = run_update(make_decoder(), half, preset("grpo", prompts_per_step=2))
    for name, gradient in first.items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-6)


def test_loss_is_the_mean_over_mini_batches(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    """All advantages 1, ratio 1: every optimiser batch has the loss -1."""
    metrics, _ = run_update(make_decoder(), make_batch(advantages=[1.0] * 16), preset("rloo", mini_batches=4))
    assert metrics["loss"] == pytest.approx(-1.0, rel=1e-6)


def test_a_mini_batch_of_dead_groups_is_no_update(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    advantages = [0.0] * 8 + [1.0, -1.0] * 4
    metrics, gradients = run_update(
        make_decoder(), make_batch(advantages=advantages), preset("rloo", mini_batches=2, inner_epochs=2)
    )
    assert len(gradients) == metrics["num_updates"] == 2


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    make_decoder: Make, make_batch: Make, preset: Make
) -> None:
    config, model = preset("rloo", inner_epochs=2), make_decoder()
    optim = MasterAdamW(model, config)
    clock = PhaseClock(torch.device("cpu"), PHASES)
    updater = Updater(model, None, optim, config, num_valid=NUM_VALID, tokens_per_micro_batch=HUGE, clock=clock)
    batch = make_batch()
    batch.advantage_S[3] = 1e39  # infinite in fp32
    metrics = updater.update(batch, torch.ones(16, dtype=torch.bool), 1e-2)
    assert metrics["num_updates"] == 0 and metrics["skipped_steps"] == 2 and metrics["grad_norm"] is None
    assert optim.skipped_in_a_row == 2
    metrics = updater.update(make_batch(), torch.ones(16, dtype=torch.bool), 1e-2)
    assert metrics["num_updates"] == 2 and metrics["skipped_steps"] == 2 and optim.skipped_in_a_row == 0
