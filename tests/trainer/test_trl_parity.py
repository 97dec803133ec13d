"""The same tokens, log-probs and rewards through TRL's own code: the same advantages, loss and gradient.

TRL's `GRPOTrainer` computes the peer's numbers: `_generate_and_score_completions` with its generation replaced by given
completions, and `_compute_loss`. What differs by design is set equal here, and is listed in `docs/objectives.md`: TRL's
sample standard deviation (our ddof 1), its KL times the ratio (`use_bias_correction_kl`), cispo's bound (its
epsilon_high is our 1 + eps_high).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import RowInputs, grpo_row_loss
from sparkgrpo.kernels.linear_grpo import linear_grpo_reference
from sparkgrpo.kernels.linear_logprob import linear_logprob_reference
from sparkgrpo.trainer import score, update
from sparkgrpo.trainer.advantages import advantages
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.weights import load_model, state_dict_hf
from sparkgrpo.trainer.objectives import objective_of, token_weights
from sparkgrpo.trainer.reference import frozen_copy

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]
Make = Callable[..., Any]
MAX_NEW = 12
REWARDS = [1.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.25, 1.0, 0.75, 0.5]
"""Four groups of four; the second is dead."""

GSPO = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
LOSSES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "grpo": ({}, {"loss_type": "grpo"}),
    "grpo_kl": ({"beta": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "delta": ({"eps_high": 0.28, "delta": 1.5}, {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 1.5}),
    "dapo": ({"normaliser": "token", "eps_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": ({"normaliser": "token"}, {"loss_type": "bnpo"}),
    "dr_grpo": ({"normaliser": "constant", "beta": 0.1}, {"loss_type": "dr_grpo", "beta": 0.1}),
    "cispo": (
        {"surrogate": "cispo", "normaliser": "token", "eps_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "gspo": (
        {"ratio": "sequence", "eps_low": 3e-4, "eps_high": 4e-4, "beta": 0.01},
        {"loss_type": "grpo", "beta": 0.01, **GSPO},
    ),
    "entropy_bonus": ({"normaliser": "token", "entropy_coef": 0.05}, {"loss_type": "bnpo", "entropy_coef": 0.05}),
}
"""Our settings, and TRL's for the same loss."""


@pytest.fixture(scope="module")
def trl_trainer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One trainer on the tiny model in float64; its settings are set test by test."""
    trl = pytest.importorskip("trl", reason="the extra trl is not installed")
    datasets = pytest.importorskip("datasets", reason="the extra trl is not installed")
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to="none", num_generations=4,
        per_device_train_batch_size=16, max_completion_length=MAX_NEW, gradient_checkpointing=False, beta=0.1,
        model_init_kwargs={"dtype": "float32"}, use_bias_correction_kl=False,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": "1 2"}] * 4)
    trainer = trl.GRPOTrainer(
        model=str(tiny_folder), reward_funcs=lambda completions, **_: REWARDS, args=arguments, train_dataset=rows
    )
    for model in (trainer.model, trainer.ref_model):
        model.double().train(model is trainer.model)
        # transformers gives the input of the padding token no gradient; in a random prompt it is a token like others
        model.get_input_embeddings().padding_idx = None
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def set_up(trainer: Any, settings: dict[str, object]) -> None:
    chosen = {
        "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "entropy_coef": 0.0,
    } | settings  # fmt: skip
    trainer.args.delta = chosen.pop("delta", None)
    trainer._entropy_bonus_enabled = chosen["entropy_coef"] != 0
    for name, value in chosen.items():
        assert hasattr(trainer, name), f"this TRL has no {name}"
        setattr(trainer, name, value)


def through_trl(trainer: Any, batch: TrainBatch) -> dict[str, Any]:
    """The batch as TRL prepares it: padded, masked, rewarded, with its own advantages."""
    pieces = [piece.tolist() for piece in batch.token_R.split(list(batch.length_S))]
    prompts = [list(batch.prompts[n]) for n in batch.prompt_of_row_S]
    texts = ["x"] * len(pieces)
    trainer._generate = lambda _: (prompts, pieces, None, texts, None, {}, None, None)
    return trainer._generate_and_score_completions([{"prompt": "1 2"} for _ in pieces])


def padded(values_R: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values_R.split(list(batch.length_S))), batch_first=True)


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_advantages(trl_trainer: Any, make_batch: Make, monkeypatch: pytest.MonkeyPatch, scale: str) -> None:
    """Ours with ddof 1 are TRL's; the dead group is exactly 0 in both."""
    set_up(trl_trainer, {"loss_type": "grpo"})
    monkeypatch.setattr(trl_trainer, "scale_rewards", scale)
    theirs = through_trl(trl_trainer, make_batch())["advantages"]
    estimator = {"group": "group", "none": "mean", "batch": "batch"}[scale]
    groups = [n for n in range(4) for _ in range(4)]
    ours = advantages(REWARDS, groups, estimator, ddof=1).advantage_S
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-7)
    assert ours[4:8].tolist() == [0.0] * 4


def our_rows(config: Config, batch: TrainBatch) -> torch.Tensor:
    """Token weights [R] over the whole batch."""
    length = torch.tensor(batch.length_S)
    everyone = torch.ones(len(length), dtype=torch.bool)
    return token_weights(config.normaliser, length, everyone, config.max_new_tokens).repeat_interleave(length)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"entropy_bonus"}))
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_loss_and_its_gradient_in_the_logprobs(
    trl_trainer: Any, make_batch: Make, monkeypatch: pytest.MonkeyPatch, name: str, spread: float
) -> None:
    """Given log-probs, so that nothing but the objective is compared; spread: how far they lie from the old ones."""
    ours, theirs = LOSSES[name]
    config = Config(**({"beta": 0.0, "max_new_tokens": MAX_NEW} | ours))
    set_up(trl_trainer, theirs)
    batch = make_batch(seed=4)
    num_tokens = sum(batch.length_S)
    generator = torch.Generator().manual_seed(1)
    old_R, noise_R, ref_R = (torch.randn(num_tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    logp_R = old_R + spread * noise_R
    leaf = padded(logp_R, batch).requires_grad_()
    given = SimpleNamespace(leaf=leaf)
    monkeypatch.setattr(
        trl_trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (given.leaf, torch.zeros_like(leaf), None)
    )
    inputs = through_trl(trl_trainer, batch)
    inputs |= {
        "advantages": batch.advantage_S,
        "old_per_token_logps": padded(old_R, batch),
        "ref_per_token_logps": padded(ref_R, batch),
    }
    loss = trl_trainer._compute_loss(trl_trainer.model, inputs)
    loss.backward()
    length = torch.tensor(batch.length_S)
    mask = torch.arange(leaf.shape[1]) < length[:, None]
    rows = grpo_row_loss(
        objective_of(config),
        logp_R,
        None,
        RowInputs(
            advantage_C=batch.advantage_S.repeat_interleave(length),
            weight_C=our_rows(config, batch),
            old_C=old_R,
            ref_C=ref_R if config.beta else None,
            seq_len_S=length if config.ratio == "sequence" else None,
        ),
    )
    assert float(rows.loss_C.sum()) == pytest.approx(loss.item(), rel=1e-6, abs=1e-9)
    gradient = leaf.grad
    assert gradient is not None
    torch.testing.assert_close(rows.g_C, gradient[mask], rtol=1e-6, atol=1e-9)
    assert rows.g_C.abs().max() > 1e-4 and gradient[~mask].count_nonzero() == 0


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_its_gradient_in_the_weights(
    trl_trainer: Any, make_batch: Make, move: Make, run_update: Make, tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch, name: str, moved: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """From tokens to the gradient of every weight; on policy, and after the weights moved.

    In float64 on both sides to 1e-6; as it is trained, in float32, to what two blocks of it allow.
    """
    relative = 1e-6 if dtype == torch.float64 else 1e-5
    ours, theirs = LOSSES[name]
    set_up(trl_trainer, theirs)
    loaded = load_model(str(tiny_folder), dtype=dtype, device="cpu")
    move(loaded.model, 0.05, seed=9)
    reference = frozen_copy(loaded.model)
    move(reference, 0.01, seed=8)
    trl_trainer.ref_model.load_state_dict(state_dict_hf(reference), strict=False)
    trl_trainer.model.load_state_dict(state_dict_hf(loaded.model), strict=False)
    batch = make_batch((6, 4, 9, 5), 4, longest=MAX_NEW)
    inputs = through_trl(trl_trainer, batch)
    batch = replace(batch, advantage_S=inputs["advantages"].double())
    config = Config(
        **({"beta": 0.0, "max_new_tokens": MAX_NEW, "prompts_per_step": 4, "inner_epochs": 2 if moved else 1} | ours)
    )
    if dtype == torch.float64:  # the kernels' twins, which take float64
        monkeypatch.setattr(update, "linear_grpo", linear_grpo_reference)
        monkeypatch.setattr(score, "linear_logprob", linear_logprob_reference)
    vocab_size = loaded.model.config.vocab_size
    metrics, gradients = run_update(
        loaded.model, batch, config, limit=60, noise=0.02, reference=reference, num_valid=vocab_size
    )
    if moved:
        with torch.no_grad():
            inputs["old_per_token_logps"], _, _ = trl_logprobs(trl_trainer, inputs)
        again = load_model(str(tiny_folder), dtype=dtype, device="cpu").model
        for noise, seed in ((0.05, 9), (0.02, 1)):
            move(again, noise, seed=seed)
        trl_trainer.model.load_state_dict(state_dict_hf(again), strict=False)
    trl_trainer.model.zero_grad()
    loss = trl_trainer._compute_loss(trl_trainer.model, inputs)
    loss.backward()
    if not moved:
        assert metrics["loss"] == pytest.approx(loss.item(), rel=relative, abs=1e-6)
    expected = {key: p.grad for key, p in trl_trainer.model.named_parameters() if p.grad is not None}
    assert_equal_gradients(gradients[-1], expected, relative=relative)


@pytest.mark.parametrize("cap", [0.9, 2.0])
def test_the_weight_of_the_mismatch(
    trl_trainer: Any, make_batch: Make, monkeypatch: pytest.MonkeyPatch, cap: float
) -> None:
    """`importance_cap` is TRL's token_truncate: the capped ratio of trainer to sampler on the policy term."""
    set_up(trl_trainer, {"loss_type": "dapo"})
    config = Config(beta=0.0, normaliser="token", max_new_tokens=MAX_NEW)
    batch = make_batch(seed=5)
    length = torch.tensor(batch.length_S)
    old_R = batch.logprob_R.double() + 0.3 * torch.randn(len(batch.logprob_R), dtype=torch.float64)
    leaf = padded(old_R + 0.2, batch).requires_grad_()
    monkeypatch.setattr(
        trl_trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    )
    monkeypatch.setattr(trl_trainer, "vllm_importance_sampling_correction", True)
    inputs = through_trl(trl_trainer, batch)
    monkeypatch.setattr(trl_trainer, "use_vllm", True)
    factor_R = (old_R - batch.logprob_R.double()).exp().clamp(max=cap)
    inputs |= {
        "advantages": batch.advantage_S,
        "old_per_token_logps": padded(old_R, batch),
        "importance_sampling_ratio": padded(factor_R, batch),
    }
    trl_trainer._metrics["train"].clear()
    trl_trainer._compute_loss(trl_trainer.model, inputs).backward()
    rows = grpo_row_loss(
        objective_of(config),
        old_R + 0.2,
        None,
        RowInputs(
            advantage_C=batch.advantage_S.repeat_interleave(length),
            weight_C=our_rows(config, batch) * factor_R,
            old_C=old_R,
            ref_C=None,
        ),
    )
    mask = torch.arange(leaf.shape[1]) < length[:, None]
    assert leaf.grad is not None
    torch.testing.assert_close(rows.g_C, leaf.grad[mask], rtol=1e-6, atol=1e-9)
    assert (factor_R == cap).any() and (factor_R < cap).any()


def trl_logprobs(trainer: Any, inputs: dict[str, Any]) -> Any:
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].shape[1])


def assert_equal_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, relative: float) -> None:
    assert len(ours) > 10 and ours.keys() <= theirs.keys()
    error = math.sqrt(sum(float((ours[name].double() - theirs[name]).square().sum()) for name in ours))
    norm = math.sqrt(sum(float(theirs[name].square().sum()) for name in ours))
    assert norm > 1e-3 and error <= relative * norm, (error, norm)
    for name in ours:
        gap = float((ours[name].double() - theirs[name]).norm())
        assert gap <= 10 * relative * max(float(theirs[name].norm()), 1e-3 * norm), name


def test_what_differs_differs(trl_trainer: Any, make_batch: Make) -> None:
    """TRL's default standard deviation is the sample's: with ours the advantages are larger by sqrt(4/3) at G = 4."""
    set_up(trl_trainer, {"loss_type": "grpo"})
    theirs = through_trl(trl_trainer, make_batch())["advantages"].double()
    ours = advantages(REWARDS, [n for n in range(4) for _ in range(4)], "group").advantage_S
    live = theirs != 0
    torch.testing.assert_close(
        ours[live] / theirs[live], torch.full((12,), math.sqrt(4 / 3), dtype=torch.float64), rtol=1e-3, atol=0
    )
