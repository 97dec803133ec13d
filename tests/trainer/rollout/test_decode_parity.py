"""The ladder: transformers == the packed forward of training == prefill and decoding; and the log-probs GRPO needs.

S completions, L completion tokens, V vocabulary, R completion tokens of a batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sparkgrpo.kernels.prefix_attention import prefix_attention, tree_layout
from sparkgrpo.kernels.sampling import sample_update
from sparkgrpo.trainer.batching import TrainBatch, micro_batches
from sparkgrpo.trainer.model.decoder import Decoder, decoder_hidden, rotated
from sparkgrpo.trainer.rollout import graphs, grouped_cache, step
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Rollout, Sampling
from sparkgrpo.trainer.score import score

pytestmark = pytest.mark.usefixtures("cache")

MakeModels = Callable[[torch.dtype], tuple[PreTrainedModel, Decoder]]
NUM_VALID = 33  # of 37 rows of the head
STOP = 30
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [9]]
"""Ragged, one token alone, and one twice."""
COMPLETIONS = [[7, 9, STOP], [3, STOP], [STOP], [11, 12, 13, 14, 15, 16], [1, 2, 3, STOP], [4, 4, 4, 4, 4, STOP]]
COMPLETIONS += [[8] * 6, [5, STOP]]
"""Two a prompt, ending at once, early, in the last place, and by length: rows and a whole group drop out on the way."""


def force(monkeypatch: pytest.MonkeyPatch, wanted_S: list[list[int]]) -> list[list[torch.Tensor]]:
    """Make every rollout say these completions; returns where the logits of each of their tokens will be."""
    logits_SLV: list[list[torch.Tensor]] = [[] for _ in wanted_S]

    def forcing(logits_BV: torch.Tensor, **state: Any) -> None:
        forced_BV = torch.zeros_like(logits_BV)
        rows = zip(state["row_id_B"].tolist(), state["context_len_B"].tolist(), strict=True)
        for slot, (row, context_len) in enumerate(rows):
            if context_len > 0:
                forced_BV[slot, wanted_S[row][len(logits_SLV[row])]] = 1e4
                logits_SLV[row].append(logits_BV[slot, : state["num_valid"]].clone())
        sample_update(forced_BV, **state)

    monkeypatch.setattr(step, "sample_update", forcing)
    return logits_SLV


def packed_logits(model: Decoder) -> list[torch.Tensor]:
    """The logits of every completion token from one packed forward, as training computes them."""
    prompt_len, length = [len(p) for p in PROMPTS], [len(c) for c in COMPLETIONS]
    layout = tree_layout(prompt_len, length, [s // 2 for s in range(len(COMPLETIONS))])
    pieces, positions, head_rows, cursor = [], [], [], 0
    for n, prompt in enumerate(PROMPTS):
        pieces += prompt
        positions += range(len(prompt))
        cursor += len(prompt)
        last = cursor - 1
        for completion in COMPLETIONS[2 * n : 2 * n + 2]:
            pieces += completion
            positions += range(len(prompt), len(prompt) + len(completion))
            head_rows.append(torch.tensor([last, *range(cursor, cursor + len(completion) - 1)]))
            cursor += len(completion)
    H = model.config.num_heads
    hidden_TD = decoder_hidden(
        model,
        torch.tensor(pieces),
        torch.tensor(positions),
        lambda _, qk, v, rope: prefix_attention(*rotated(qk, rope, H), v, layout),
    )
    return [F.linear(hidden_TD[rows], model.head_VD[:NUM_VALID]) for rows in head_rows]


@torch.no_grad()
def test_transformers_packed_forward_and_decoding_agree(
    make_models: MakeModels, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "BUCKETS", (2, 4, 6))
    monkeypatch.setattr(grouped_cache, "FIRST_CAPACITY", 2)  # the layout of the cache grows twice
    hf_model, model = make_models(torch.float64)
    logits_SLV = force(monkeypatch, COMPLETIONS)
    engine = RolloutEngine(model, stop_ids=(STOP,), num_valid=NUM_VALID, max_rows=8, max_new_tokens=6)
    rollout = engine.generate(PROMPTS, 2, Sampling(max_new_tokens=6), 0)
    assert rollout.rows() == [tuple(c) for c in COMPLETIONS]
    assert rollout.stats.num_compactions > (0 if cache.startswith("paged") else 1)
    packed_SLV = packed_logits(model)
    for s, completion in enumerate(COMPLETIONS):
        prompt = PROMPTS[s // 2]
        hf_LV = hf_model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1, :NUM_VALID]
        # transformers computes norms in fp32 and the engine the head: 2^-24 of logits of up to 8, some roundings in a
        # row
        torch.testing.assert_close(packed_SLV[s], hf_LV, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.stack(logits_SLV[s]).double(), packed_SLV[s], rtol=0, atol=1e-5)


def trainer_logprobs(model: Decoder, prompts: list[list[int]], rollout: Rollout) -> torch.Tensor:
    """What the trainer scores, in the order of the rollout's tokens."""
    S = len(rollout.length_S)
    batch = TrainBatch(
        prompts=prompts,
        token_R=rollout.token_T,
        logprob_R=rollout.logprob_T,
        length_S=tuple(rollout.length_S.tolist()),
        prompt_of_row_S=tuple(rollout.prompt_of_row_S.tolist()),
        advantage_S=torch.ones(S, dtype=torch.float64),
    )
    result_T = torch.full((len(rollout.token_T),), torch.nan)
    temperature = rollout.sampling.temperature
    weight_S = torch.ones(S, dtype=torch.float64)
    micros = micro_batches(batch, weight_S, range(S), tokens_per_micro_batch=60, device="cpu")
    assert len(micros) > 1
    for micro in micros:
        result_T[micro.source_R] = score(model, micro, temperature=temperature, num_valid=NUM_VALID)
    return result_T


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_rollout_logprobs_equal_the_trainers(
    make_models: MakeModels, temperature: float, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_cache, "FIRST_CAPACITY", 4)
    _, model = make_models(torch.float32)
    engine = RolloutEngine(model, stop_ids=(STOP, 7, 10, 21), num_valid=NUM_VALID, max_rows=12, max_new_tokens=16)
    rollout = engine.generate(PROMPTS, 6, Sampling(temperature=temperature, max_new_tokens=16), 3)
    assert rollout.stats.num_waves == 2 and rollout.stats.num_compactions > (1 if cache.startswith("paged") else 2)
    assert len(set(rollout.rows())) > 12
    # fp32 sums of up to 44 terms through two layers; a log-prob at another temperature or position is off by 0.1
    torch.testing.assert_close(trainer_logprobs(model, PROMPTS, rollout), rollout.logprob_T, rtol=0, atol=1e-4)


def test_the_test_above_can_fail(make_models: MakeModels) -> None:
    _, model = make_models(torch.float32)
    engine = RolloutEngine(model, stop_ids=(STOP,), num_valid=NUM_VALID, max_rows=24, max_new_tokens=16)
    rollout = engine.generate(PROMPTS, 6, Sampling(max_new_tokens=16), 3)
    with torch.no_grad():
        model.layers[1].down_weight[0] *= 1.01
    gap = (trainer_logprobs(model, PROMPTS, rollout) - rollout.logprob_T).abs()
    assert gap.max() > 1e-3


@pytest.mark.parametrize("family", ["qwen2"])
def test_bf16_weights_give_logits_that_are_not_rounded_to_bf16(make_models: MakeModels) -> None:
    _, model = make_models(torch.bfloat16)
    engine = RolloutEngine(model, stop_ids=(STOP,), num_valid=NUM_VALID, max_rows=24, max_new_tokens=16)
    state, _ = engine._ready(32)
    hidden_BD = torch.randn(24, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    step.finish_step(hidden_BD, state, engine.head_VD)
    exact_BV = hidden_BD.double() @ model.head_VD[:NUM_VALID].double().T
    logits_BV = state.logits_BV[:, :NUM_VALID]
    torch.testing.assert_close(logits_BV.double(), exact_BV, rtol=0, atol=5e-5)
    assert (logits_BV != logits_BV.bfloat16()).float().mean() > 0.9

    rollout = engine.generate(PROMPTS, 6, Sampling(max_new_tokens=16), 3)
    gap = (trainer_logprobs(model, PROMPTS, rollout) - rollout.logprob_T).abs()
    # the body rounds to 8 bits in another order in training; the logits of both are fp32
    assert gap.mean() < 0.03
