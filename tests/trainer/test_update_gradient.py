"""The gradient of an update: what a second, independent implementation gives, and what must not change it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.weights import load_model, state_dict_hf
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.settings import preset_names

Make = Callable[..., Any]
NUM_VALID = 33  # of make_decoder


def assert_same_gradient(
    ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, relative: float = 1e-6
) -> None:
    """The difference has this share of the norm at most, whole and of each tensor (there ten times as much).

    fp32 sums of some hundred terms in another order differ by a few 1e-7 of their norm.
    """
    errors = {name: (ours[name].double() - gradient.double()).norm() for name, gradient in expected.items()}
    norms = {name: gradient.double().norm() for name, gradient in expected.items()}
    assert torch.stack([*errors.values()]).norm() <= relative * torch.stack([*norms.values()]).norm()
    for name, error in errors.items():
        assert error <= 10 * relative * norms[name], name


def padded_logprobs(model: torch.nn.Module, batch: TrainBatch, num_valid: int, temperature: float) -> torch.Tensor:
    """[S, longest completion], each sequence with its own copy of the prompt, padded on the right."""
    pieces = batch.token_R.long().split(list(batch.length_S))
    rows = [[*batch.prompts[n], *p.tolist()] for n, p in zip(batch.prompt_of_row_S, pieces, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits[..., :num_valid] / temperature
    logp = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    out = []
    for row, n, length in zip(logp, batch.prompt_of_row_S, batch.length_S, strict=True):
        start = len(batch.prompts[n]) - 1
        out.append(torch.nn.functional.pad(row[start : start + length], (0, max(batch.length_S) - length)))
    return torch.stack(out)


def lesson_loss(
    config: Config, batch: TrainBatch, logp: torch.Tensor, old: torch.Tensor, ref: torch.Tensor
) -> torch.Tensor:
    """The formulas of the papers, literally."""
    length = torch.tensor(batch.length_S)
    mask = (torch.arange(logp.shape[1]) < length[:, None]).double()
    advantage = batch.advantage_S[:, None]
    ratio = (logp - old).exp()
    if config.ratio == "sequence":
        ratio = (((logp - old) * mask).sum(1) / length).exp()[:, None].expand_as(logp)
    if config.surrogate == "cispo":
        gain = ratio.clamp(max=1 + config.eps_high).detach() * advantage * logp
    else:
        clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
    kl = (ref - logp).exp() - (ref - logp) - 1
    per_token = (-gain + config.beta * kl) * mask
    if config.normaliser == "sequence":
        return (per_token.sum(1) / length).mean()
    if config.normaliser == "token":
        return per_token.sum() / mask.sum()
    return per_token.sum() / (len(length) * config.max_new_tokens)


@pytest.mark.parametrize("name", preset_names())
def test_two_updates_equal_the_lesson_in_plain_pytorch(
    name: str, make_batch: Make, preset: Make, run_update: Make, move: Make, tiny_folder: Path
) -> None:
    """Loss and every gradient of two passes: on policy, and after the weights moved, where ratio and clip bind."""
    config = preset(name, inner_epochs=2, temperature=1.25)
    batch = make_batch((6, 4, 9, 5), 4, longest=10)
    loaded = load_model(str(tiny_folder), dtype=torch.float32, device="cpu")
    move(loaded.model, 0.05, seed=9)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    plain.model.embed_tokens.padding_idx = None  # transformers gives that row's input no gradient; it is a token here
    plain.load_state_dict(state_dict_hf(loaded.model), strict=False)
    reference = frozen_copy(loaded.model)
    move(reference, 0.01, seed=8)
    plain_reference = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    plain_reference.load_state_dict(state_dict_hf(reference), strict=False)
    num_valid = loaded.num_valid

    metrics, gradients = run_update(
        loaded.model, batch, config, limit=60, noise=0.02, reference=reference if config.beta else None,
        num_valid=num_valid,
    )  # fmt: skip
    assert len(gradients) == 2 and (metrics["ratio_max"] or 0) > 1.01

    with torch.no_grad():
        old = padded_logprobs(plain, batch, num_valid, config.temperature)
        ref = padded_logprobs(plain_reference, batch, num_valid, config.temperature)
    # The noise of the recorder is drawn for the fused weights, so take the moved weights from a second run.
    moved = load_model(str(tiny_folder), dtype=torch.float32, device="cpu").model
    move(moved, 0.05, seed=9)
    for update, ours in enumerate(gradients):
        plain.load_state_dict(state_dict_hf(moved), strict=False)
        plain.zero_grad()
        loss = lesson_loss(config, batch, padded_logprobs(plain, batch, num_valid, config.temperature), old, ref)
        loss.backward()
        if update == 0:
            assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        expected = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None and key in ours}
        assert len(expected) == len(ours)
        assert_same_gradient(ours, expected, relative=1e-5)  # fp32 through two blocks against fp64
        move(moved, 0.02, seed=update + 1)


@pytest.mark.parametrize("name", preset_names())
def test_micro_batches_do_not_change_the_gradient(
    name: str, make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    """1 x 16, 2 x 8 (about), 16 x 1: the normalisers are data, so only the order of the sums differs."""
    config, batch = preset(name), make_batch()
    whole = run_update(make_decoder(), batch, config)
    total = sum(map(len, batch.prompts)) + sum(batch.length_S)
    for limit in (total // 2 + 5, 1):
        metrics, gradients = run_update(make_decoder(), batch, config, limit=limit)
        assert_same_gradient(gradients[0], whole[1][0])
        assert metrics["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5, abs=1e-6)


def shuffled(batch: TrainBatch, order: Sequence[int], prompt_order: Sequence[int]) -> TrainBatch:
    pieces, logprobs = batch.token_R.split(list(batch.length_S)), batch.logprob_R.split(list(batch.length_S))
    return TrainBatch(
        prompts=[batch.prompts[n] for n in prompt_order],
        token_R=torch.cat([pieces[s] for s in order]),
        logprob_R=torch.cat([logprobs[s] for s in order]),
        length_S=tuple(batch.length_S[s] for s in order),
        prompt_of_row_S=tuple(list(prompt_order).index(batch.prompt_of_row_S[s]) for s in order),
        advantage_S=batch.advantage_S[torch.tensor(order)],
    )


def test_order_does_not_change_the_gradient(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    """Rows of a group need not be adjacent, and prompts come in any order."""
    config, batch = preset("grpo"), make_batch()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3)).tolist()
    (before,), (after,) = (
        run_update(make_decoder(), b, config, limit=50)[1] for b in (batch, shuffled(batch, order, (2, 0, 3, 1)))
    )
    assert_same_gradient(after, before)


def test_equal_prompts_give_the_gradient_of_one(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    """Two groups with one prompt's text: as trees of their own they are trained as one tree of both is."""
    batch = make_batch((5, 3), 4)
    twice = replace(batch, prompts=[batch.prompts[0], batch.prompts[0]])
    merged = replace(batch, prompts=[batch.prompts[0]], prompt_of_row_S=(0,) * 8)
    config = replace(preset("grpo"), prompts_per_step=2)
    (apart,), (together,) = (run_update(make_decoder(), b, config)[1] for b in (twice, merged))
    assert_same_gradient(apart, together)


def test_dead_groups_and_masked_rows_cost_nothing_and_count_as_told(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    """A dead group counts in S; a row that takes no part is as if it were not there."""
    config = preset("dr_grpo")
    batch = make_batch((5, 3, 4, 6), 2, advantages=[1.0, -1.0, 0.0, 0.0, 2.0, -2.0, 0.5, -0.5])
    takes_part = [True] * 6 + [False] * 2
    metrics, (masked,) = run_update(make_decoder(), batch, config, takes_part=takes_part)
    trained = sum(batch.length_S[s] for s in (0, 1, 4, 5))
    assert metrics["frac_tokens_trained"] == trained / sum(batch.length_S)
    num_tokens = sum(batch.length_S[:6])
    short = replace(
        batch,
        prompts=batch.prompts[:3],
        token_R=batch.token_R[:num_tokens],
        logprob_R=batch.logprob_R[:num_tokens],
        length_S=batch.length_S[:6],
        prompt_of_row_S=batch.prompt_of_row_S[:6],
        advantage_S=batch.advantage_S[:6],
    )
    (alone,) = run_update(make_decoder(), short, replace(config, prompts_per_step=3))[1]
    assert_same_gradient(masked, alone)
    penalised = replace(config, beta=0.04)
    assert (
        run_update(make_decoder(), batch, penalised)[0]["frac_tokens_trained"] == 1.0
    )  # KL needs the dead group's rows


def test_padding_rows_of_the_head_get_no_gradient(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make
) -> None:
    model = make_decoder(tie_embeddings=False)
    _, (gradient,) = run_update(model, make_batch(), preset("grpo", entropy_coef=0.1))
    assert gradient["lm_head.weight"][NUM_VALID:].count_nonzero() == 0
    assert gradient["lm_head.weight"][:NUM_VALID].abs().amax(1).min() > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_gpu_kernels_give_the_same_gradient(
    family: str, name: str, make_decoder: Make, make_batch: Make, preset: Make, run_update: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Norms, rotation, gated MLP, head and loss by the Triton kernels, in their interpreter; and KL exactly 0 there."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    from sparkgrpo.kernels.triton_launch import is_interpreted

    if not is_interpreted():
        pytest.skip("Triton's interpreter is off where a GPU is: the tests marked gpu run there")
    config, shape = preset(name, beta=0.1), {"family": family, "qk_norm": family == "qwen3"}
    metrics, gradients = run_update(make_decoder(**shape), make_batch(), config)
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda device: True)
    by_triton, triton_gradients = run_update(make_decoder(**shape), make_batch(), config)
    assert by_triton["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-6)
    assert by_triton["entropy_mean"] == pytest.approx(metrics["entropy_mean"], rel=1e-5)
    assert by_triton["kl_mean"] == 0.0 and by_triton["ratio_max"] == 1.0
    assert_same_gradient(triton_gradients[0], gradients[0], relative=1e-5)
