"""What the engine chooses and counts: graphs or the plain step, room for longer rows, bytes that a step moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.paged_cache import page_bytes
from sparkgrpo.trainer.rollout.pages import pages_needed
from sparkgrpo.trainer.rollout.result import Rollout, Sampling

pytestmark = pytest.mark.usefixtures("cache")

MakeExact = Callable[..., Decoder]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [7, 9], [3, 2, 3, 8]]
SAMPLING = Sampling(max_new_tokens=12)


def make_engine(model: Decoder, **options: Any) -> RolloutEngine:
    values = {"stop_ids": (0,), "num_valid": model.config.vocab_size, "max_rows": 64, "max_new_tokens": 12} | options
    return RolloutEngine(model, **values)


def assert_same(first: Rollout, second: Rollout) -> None:
    assert torch.equal(first.token_T, second.token_T) and torch.equal(first.logprob_T, second.logprob_T)


def test_self_test_keeps_graphs_that_agree_and_drops_those_that_do_not(exact_model: MakeExact, cache: str) -> None:
    reports: list[str] = []
    good = make_engine(exact_model(), report=reports.append)
    assert good.self_test() is None and reports == []
    coverage = good.generate(PROMPTS, 4, SAMPLING, 3).stats.graph_coverage
    assert coverage == (1.0 if cache.endswith("captured") else None)
    if not cache.endswith("captured"):
        return
    expected = good.generate(PROMPTS, 4, SAMPLING, 3)
    replays_nothing = make_engine(exact_model(), report=reports.append, capture=lambda run: lambda: None)
    line = replays_nothing.self_test()
    assert line == reports[-1] and "failed their self-test (tokens differ" in str(line)
    assert_same(replays_nothing.generate(PROMPTS, 4, SAMPLING, 3), expected)

    def refuse(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    refused = make_engine(exact_model(), report=reports.append, capture=refuse)
    assert "a capture failed" in str(refused.self_test())
    assert_same(refused.generate(PROMPTS, 4, SAMPLING, 3), expected)


def test_bytes_of_the_decode_steps(exact_model: MakeExact, cache: str) -> None:
    """By hand: one prompt of 20 tokens, two siblings that both run to the limit of 4, so 3 steps of 2 slots."""
    model = exact_model()
    stats = make_engine(model).generate([[3] * 20], 2, Sampling(max_new_tokens=4, ignore_eos=True), 1).stats
    shape = model.config
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_width
    num_weights = sum(p.numel() for p in model.parameters()) - (0 if shape.tie_embeddings else model.embed_VD.numel())
    prompts = 1 if cache in ("grouped", "shrinking") else 2
    assert stats.num_steps == 3
    context = 3 * 20 * prompts + 2 * (1 + 2 + 3)
    assert stats.num_decode_bytes == 3 * 4 * num_weights + 3 * 2 * 8 * shape.vocab_size + context * token_bytes
    assert stats.decode_gbps == pytest.approx(stats.num_decode_bytes / stats.t_decode_s / 1e9)


def test_longer_prompts_than_before_get_room(exact_model: MakeExact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a paged cache grow, graphs are made anew; shorter ones then use what there is."""
    monkeypatch.setattr("sparkgrpo.trainer.rollout.engine.ROW_TOKENS_STEP", 16)
    engine, model = make_engine(exact_model()), exact_model()
    for length in (3, 40, 3, 100):
        prompts = [[1 + i % 7 for i in range(length)], [9]]
        got = engine.generate(prompts, 4, SAMPLING, 3)
        assert got.rows() == make_engine(model).generate(prompts, 4, SAMPLING, 3).rows()


def test_a_weight_that_was_replaced_is_named(exact_model: MakeExact, cache: str) -> None:
    """vllm 48941, sglang 27140: a graph would go on reading the old storage. Plain steps read the model as it is."""
    engine = make_engine(model := exact_model())
    engine.generate(PROMPTS, 4, SAMPLING, 3)
    with torch.no_grad():
        model.final_norm_D *= 1.0  # in place: nothing moved
    engine.generate(PROMPTS, 4, SAMPLING, 3)
    model.layers[0].qkv_weight = torch.nn.Parameter(model.layers[0].qkv_weight.clone())
    if cache.endswith("captured"):
        with pytest.raises(RuntimeError, match=r"these have moved: layers\.0\.qkv_weight"):
            engine.generate(PROMPTS, 4, SAMPLING, 3)
    else:
        engine.generate(PROMPTS, 4, SAMPLING, 3)


def test_pages_within_a_budget(exact_model: MakeExact, cache: str) -> None:
    """A budget that forces waves changes no completion; one that holds no group is refused with what would help."""
    if not cache.startswith("paged"):
        pytest.skip("has no pages")
    model = exact_model()
    whole = make_engine(model).generate(PROMPTS, 4, SAMPLING, 3)
    one_page = page_bytes(model)
    budget = 1 + pages_needed([len(p) for p in PROMPTS[:2]], 4, 12)
    split = make_engine(model, kv_budget_bytes=budget * one_page).generate(PROMPTS, 4, SAMPLING, 3)
    assert split.stats.num_waves > 1 and split.rows() == whole.rows()
    with pytest.raises(ValueError, match=r"a group is never split; lower the group size or\s+max_new_tokens"):
        make_engine(model, kv_budget_bytes=3 * one_page).generate(PROMPTS, 4, SAMPLING, 3)
