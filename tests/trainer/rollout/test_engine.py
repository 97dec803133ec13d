"""The rollout engine: what a completion may depend on, how rows end, what stays in place, and what is refused.

N prompts, G siblings, S = N G rows.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from sparkgrpo.kernels.sampling import LENGTH, STOP
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.rollout import decode_loop, graphs, grouped_cache, prefill
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Rollout, Sampling
from sparkgrpo.trainer.rollout.state import DecodeState

pytestmark = pytest.mark.usefixtures("cache")

MakeExact = Callable[..., Decoder]
MakeModels = Callable[[torch.dtype], tuple[PreTrainedModel, Decoder]]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [7, 9], [3, 2, 3, 8]]
STREAMS = [40, 7, 1 << 40, 0, 12]
SAMPLING = Sampling(max_new_tokens=12)


def make_engine(model: Decoder, **options: int | tuple[int, ...]) -> RolloutEngine:
    values = {"stop_ids": (0,), "num_valid": model.config.vocab_size, "max_rows": 64, "max_new_tokens": 12} | options
    return RolloutEngine(model, **values)  # pyright: ignore[reportArgumentType]


def completions(rollout: Rollout, streams: Sequence[int], G: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """Token ids by (stream, sibling)."""
    names = [(stream, g) for stream in streams for g in range(G)]
    return dict(zip(names, rollout.rows(), strict=True))


def assert_same(first: Rollout, second: Rollout) -> None:
    for name in ("token_T", "logprob_T", "length_S", "finish_S", "prompt_of_row_S"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


# What a completion may depend on: the weights, its prompt, key, stream, sibling and temperature.


@pytest.mark.parametrize("max_rows", [64, 40, 24, 8])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 2, 1), (2, 4), (1,)])
def test_company_order_and_waves_do_not_change_a_completion(
    exact_model: MakeExact, order: tuple[int, ...], max_rows: int, cache: str
) -> None:
    model = exact_model()
    whole = make_engine(model).generate(PROMPTS, 8, SAMPLING, 5, streams=STREAMS)
    assert whole.stats.num_compactions > (0 if cache.startswith("paged") else 2) and 2 < whole.stats.num_steps < 12
    assert len(set(whole.rows())) > 30
    expected = completions(whole, STREAMS, 8)
    streams = [STREAMS[n] for n in order]
    part = make_engine(model, max_rows=max_rows).generate([PROMPTS[n] for n in order], 8, SAMPLING, 5, streams=streams)
    assert part.stats.num_waves == -(-len(order) // (max_rows // 8))
    for name, tokens in completions(part, streams, 8).items():
        assert tokens == expected[name]


def test_fewer_siblings_are_the_first_of_more(exact_model: MakeExact) -> None:
    engine = make_engine(exact_model())
    eight = completions(engine.generate(PROMPTS, 8, SAMPLING, 5, streams=STREAMS), STREAMS, 8)
    four = completions(engine.generate(PROMPTS, 4, SAMPLING, 5, streams=STREAMS), STREAMS, 4)
    assert four == {name: tokens for name, tokens in eight.items() if name[1] < 4}


@pytest.mark.parametrize("frac", [0.0, 0.5, 1.0])
def test_dropping_finished_rows_changes_nothing(
    make_models: MakeModels, frac: float, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share at which a CPU drops rows; on pages the buckets of a GPU, all of them or one."""
    _, model = make_models(torch.float32)
    stop_ids = (0, 5, 10, 15, 20, 25, 30, 35)
    default = make_engine(model, stop_ids=stop_ids).generate(PROMPTS, 8, SAMPLING, 5)
    monkeypatch.setattr(decode_loop, "FRAC_ALIVE_TO_COMPACT", frac)
    monkeypatch.setattr(graphs, "BUCKETS", tuple(range(1, 64)) if frac else ())
    other = make_engine(model, stop_ids=stop_ids).generate(PROMPTS, 8, SAMPLING, 5)
    assert other.rows() == default.rows()
    torch.testing.assert_close(other.logprob_T, default.logprob_T, rtol=0, atol=1e-5)
    num_compactions = other.stats.num_compactions
    assert num_compactions == 0 if frac == 0 else num_compactions > 1
    assert default.stats.num_compactions > (0 if cache.startswith("paged") else 2)
    if frac == 1 and not cache.startswith("paged"):
        assert other.stats.frac_slots_alive == 1


def test_small_chunks_of_prefill_change_nothing(make_models: MakeModels, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = make_models(torch.float32)
    default = make_engine(model).generate(PROMPTS, 8, SAMPLING, 5)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK_TOKENS", 8)
    other = make_engine(model).generate(PROMPTS, 8, SAMPLING, 5)
    assert other.rows() == default.rows()
    torch.testing.assert_close(other.logprob_T, default.logprob_T, rtol=0, atol=1e-5)


def test_the_room_that_a_row_has_at_first_changes_nothing(
    make_models: MakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = make_models(torch.float32)
    default = make_engine(model).generate(PROMPTS, 8, SAMPLING, 5)
    for capacity in (1, 5):
        monkeypatch.setattr(grouped_cache, "FIRST_CAPACITY", capacity)
        assert_same(make_engine(model).generate(PROMPTS, 8, SAMPLING, 5), default)


def test_ragged_prompts_say_greedily_what_they_say_alone(make_models: MakeModels) -> None:
    _, model = make_models(torch.float32)
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    engine = make_engine(model, stop_ids=(5,))
    together = engine.generate(PROMPTS, 1, greedy, 0)
    alone = [engine.generate([prompt], 1, greedy, 99).rows()[0] for prompt in PROMPTS]
    assert together.rows() == alone
    assert len(set(alone)) > 2


def test_key_and_stream_decide(exact_model: MakeExact) -> None:
    engine = make_engine(exact_model())
    first = engine.generate(PROMPTS, 8, SAMPLING, 5)
    assert_same(engine.generate(PROMPTS, 8, SAMPLING, 5), first)
    assert_same(engine.generate(PROMPTS, 8, SAMPLING, 5, streams=range(5)), first)
    for key in (6, 5 + (1 << 32), 5 + (1 << 63), (1 << 64) - 1):
        other = engine.generate(PROMPTS, 8, SAMPLING, key)
        same = [a == b and len(a) > 1 for a, b in zip(first.rows(), other.rows(), strict=True)]
        assert sum(same) < 4  # of 40; short completions may agree by chance
    assert first.rows()[:8] != engine.generate(PROMPTS, 8, SAMPLING, 5, streams=range(1, 6)).rows()[:8]


def test_equal_prompts_and_siblings_draw_differently(exact_model: MakeExact) -> None:
    long = Sampling(max_new_tokens=12, ignore_eos=True)
    rows = make_engine(exact_model()).generate([[4, 2]] * 4, 8, long, 5).rows()
    assert len(set(rows)) == 32


# How rows end. Token t is followed by t + 1.


def chain(exact_model: MakeExact, prompts: list[list[int]], sampling: Sampling) -> Rollout:
    engine = make_engine(exact_model(is_chain=True), stop_ids=(6, 9))
    rollout = engine.generate(prompts, 2, sampling, 1)
    assert rollout.logprob_T.abs().max() < 1e-3
    return rollout


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_stop_id_ends_a_row_and_counts_as_its_last_token(exact_model: MakeExact, temperature: float) -> None:
    rollout = chain(exact_model, [[3], [1, 7], [5], [10]], Sampling(temperature=temperature, max_new_tokens=6))
    four, two, one = (4, 5, 6), (8, 9), (6,)
    assert rollout.rows() == [four, four, two, two, one, one, *[(11, 12, 13, 14, 15, 16)] * 2]
    assert rollout.finish_S.tolist() == [STOP] * 6 + [LENGTH] * 2
    assert rollout.is_truncated() == [False] * 6 + [True] * 2
    assert rollout.length_S.tolist() == [3, 3, 2, 2, 1, 1, 6, 6]
    assert rollout.prompt_of_row_S.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rollout.token_T.dtype == rollout.length_S.dtype == rollout.prompt_of_row_S.dtype == torch.int32
    assert rollout.logprob_T.dtype == torch.float32 and rollout.finish_S.dtype == torch.int8


def test_a_stop_id_in_the_last_place_is_a_stop(exact_model: MakeExact) -> None:
    rollout = chain(exact_model, [[3], [2]], Sampling(max_new_tokens=3))
    assert rollout.rows()[::2] == [(4, 5, 6), (3, 4, 5)]
    assert rollout.finish_S.tolist()[::2] == [STOP, LENGTH]


def test_one_new_token(exact_model: MakeExact) -> None:
    rollout = chain(exact_model, [[5], [1]], Sampling(max_new_tokens=1))
    assert rollout.rows()[::2] == [(6,), (2,)]
    assert rollout.finish_S.tolist()[::2] == [STOP, LENGTH]
    assert rollout.stats.num_steps == 0 and rollout.stats.frac_slots_alive == 1


def test_ignore_eos_goes_on_and_the_next_rollout_stops_again(exact_model: MakeExact) -> None:
    engine = make_engine(exact_model(is_chain=True), stop_ids=(6, 9))
    stopping, forced = Sampling(max_new_tokens=7), Sampling(max_new_tokens=7, ignore_eos=True)
    for _ in range(2):
        rollout = engine.generate([[4], [21]], 1, forced, 1)
        assert rollout.rows() == [(5, 6, 7, 8, 9, 10, 11), (22, 23, 0, 1, 2, 3, 4)]
        assert rollout.finish_S.tolist() == [LENGTH, LENGTH]
        assert engine.generate([[4]], 1, stopping, 1).rows() == [(5, 6)]


def test_head_rows_beyond_the_tokenizer_are_never_sampled(exact_model: MakeExact) -> None:
    model = exact_model()
    valid = make_engine(model, num_valid=20).generate(PROMPTS, 8, SAMPLING, 5)
    assert int(valid.token_T.max()) < 20
    with torch.no_grad():
        model.head_VD[20:] = 100.0
    assert_same(make_engine(model, num_valid=20).generate(PROMPTS, 8, SAMPLING, 5), valid)


def test_stats_count_what_was_done(exact_model: MakeExact, cache: str) -> None:
    stats = chain(exact_model, [[3], [1, 7], [5], [10]], Sampling(max_new_tokens=6)).stats
    assert (stats.num_prompt_tokens, stats.num_new_tokens, stats.num_waves) == (5, 24, 1)
    # After the prefill 6 of 8 rows live, then 4, 2, 2, 2. The grouped cache drops the finished at once; buckets of 8,
    # 8, 4, 2 and 2 follow what is known, one step late: 8, 6, 4, 2 and 2.
    assert stats.num_steps == 5
    assert (stats.num_compactions, stats.frac_slots_alive) == ((2, 22 / 24) if cache.startswith("paged") else (3, 1.0))
    assert stats.t_prefill_s > 0 and stats.t_decode_s > 0


def test_times_are_read_where_the_work_runs(exact_model: MakeExact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three instants a wave on the device's clock, which a GPU passes long after the host has set them."""
    seen: list[int] = []

    def instant(device: torch.device) -> int:
        assert device.type == "cpu"
        seen.append(len(seen))
        return seen[-1] ** 2

    monkeypatch.setattr("sparkgrpo.trainer.rollout.engine.now", instant)
    monkeypatch.setattr("sparkgrpo.trainer.rollout.engine.seconds_between", lambda begin, end: float(end - begin))
    stats = make_engine(exact_model(), max_rows=16).generate(PROMPTS[:4], 8, SAMPLING, 5).stats
    assert stats.num_waves == 2 and len(seen) == 6
    assert (stats.t_prefill_s, stats.t_decode_s) == (1 - 0 + 16 - 9, 4 - 1 + 25 - 16)


# What stays in place, and what must not linger.


def state_of(engine: RolloutEngine) -> DecodeState:
    assert engine._state is not None
    return engine._state


def test_buffers_never_move(make_models: MakeModels, cache: str) -> None:
    _, model = make_models(torch.float32)
    engine = make_engine(model)
    engine.generate(PROMPTS[:1], 2, SAMPLING, 0)
    pointers = {name: x.data_ptr() for name, x in state_of(engine).tensors().items()}
    assert len(pointers) == 18 + {"grouped": 4, "shrinking": 4, "rows": 0}.get(cache, 6)
    for G, count, waves in ((8, 5, 1), (1, 5, 1), (40, 3, 3)):
        with torch.no_grad():
            model.embed_VD *= 1.01
        assert engine.generate(PROMPTS[:count], G, SAMPLING, 0).stats.num_waves == waves
        assert {name: x.data_ptr() for name, x in state_of(engine).tensors().items()} == pointers


def test_weights_changed_in_place_are_the_ones_used(make_models: MakeModels) -> None:
    _, model = make_models(torch.float32)
    engine = make_engine(model)
    before = engine.generate(PROMPTS, 8, SAMPLING, 5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    after = engine.generate(PROMPTS, 8, SAMPLING, 5)
    assert_same(after, make_engine(model).generate(PROMPTS, 8, SAMPLING, 5))
    assert after.rows() != before.rows()


def test_what_earlier_rollouts_left_is_not_read(make_models: MakeModels) -> None:
    """NaN in the cache and in the logits, nonsense in all other buffers; between the prompts too."""
    _, model = make_models(torch.float32)
    engine = make_engine(model)
    expected = engine.generate(PROMPTS, 8, SAMPLING, 5)
    for x in state_of(engine).tensors().values():
        x.fill_(torch.nan if x.is_floating_point() else 101)
    assert_same(engine.generate(PROMPTS, 8, SAMPLING, 5), expected)


def test_results_can_enter_a_loss_and_outlive_the_next_rollout(exact_model: MakeExact) -> None:
    engine = make_engine(exact_model())
    rollout = engine.generate(PROMPTS, 8, SAMPLING, 5)
    kept = [x.clone() for x in (rollout.token_T, rollout.logprob_T, rollout.length_S, rollout.finish_S)]
    engine.generate(PROMPTS, 8, SAMPLING, 6)
    assert all(torch.equal(x, y) for x, y in zip(kept, (rollout.token_T, rollout.logprob_T), strict=False))
    assert torch.equal(kept[2], rollout.length_S) and torch.equal(kept[3], rollout.finish_S)
    assert not rollout.logprob_T.requires_grad
    weight = torch.ones_like(rollout.logprob_T, requires_grad=True)
    (weight * rollout.logprob_T).sum().backward()  # inference tensors could not be saved for backward


def test_logits_that_are_not_finite_are_reported_by_row(make_models: MakeModels) -> None:
    """A fault in one prompt is that prompt's: its neighbours in the prefill and in the batch are not named."""
    _, model = make_models(torch.float32)
    engine = make_engine(model, num_valid=36)  # so that 36 is in the prompts alone
    expected = engine.generate([[1, 2], [3, 6]], 2, SAMPLING, 5)
    kept = model.embed_VD.detach().clone()
    with torch.no_grad():
        model.embed_VD[36] = torch.nan
    for prompts, rows in (([[1, 2], [36], [3, 6, 7]], "2, 3"), ([[36, 1], [4, 4, 4]], "0, 1")):
        with pytest.raises(FloatingPointError, match=rf"logits of rows \[{rows}\] were not finite"):
            engine.generate(prompts, 2, SAMPLING, 5)
    with torch.no_grad():
        model.embed_VD.copy_(kept)
    assert_same(engine.generate([[1, 2], [3, 6]], 2, SAMPLING, 5), expected)


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "at least one prompt, got none"),
        ({"prompts": [[1], []]}, "every prompt to have a token, got an empty prompt at index 1"),
        (
            {"prompts": [[1], [2] * 117]},
            r"within the model's 128 tokens, got 117 \+ 12 at index 1; lower max_new_tokens",
        ),
        ({"prompts": [[1], [2, 24]]}, "token ids of 0 to 23, got 24 in the prompt at index 1"),
        ({"prompts": [[-1, 2]]}, "token ids of 0 to 23, got -1 in the prompt at index 0"),
        ({"G": 0}, "1 to 65536 completions a prompt, got 0"),
        ({"G": 65}, "max_rows of at least one group of 65 completions, got 64"),
        ({"key": -1}, r"a key of 64 bits, 0 to 2\^64 - 1, got -1"),
        ({"key": 1 << 64}, "a key of 64 bits"),
        ({"streams": [1, 2]}, "one stream a prompt, got 2 for 1 prompts"),
        ({"streams": [1 << 47]}, r"streams from 0 to 2\^47 - 1"),
        ({"streams": [-1]}, r"streams from 0 to 2\^47 - 1"),
        ({"sampling": Sampling(max_new_tokens=13)}, "at most the 12 new tokens this engine was built for, got .* 13"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused(exact_model: MakeExact, options: dict, message: str) -> None:
    engine = make_engine(exact_model())
    arguments = {"prompts": [[1]], "G": 2, "sampling": SAMPLING, "key": 0} | options
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)
    assert engine._state is None, "refused before anything is allocated"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_ids": tuple(range(9))}, "at most 8 stop ids, got 9"),
        ({"num_valid": 25}, "num_valid of 1 to 24, the rows of the head, got 25"),
        ({"num_valid": 0}, "num_valid of 1 to 24"),
        ({"max_rows": 0}, "max_rows and max_new_tokens of 1 or more, got 0 and 12"),
        ({"max_new_tokens": 0}, "max_rows and max_new_tokens of 1 or more, got 64 and 0"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(exact_model: MakeExact, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(exact_model(), **options)


@pytest.mark.parametrize("temperature", [-1.0, 0.01, float("inf"), float("nan")])
def test_temperatures_without_meaning_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature 0 \(greedy\) or at least 0.05"):
        Sampling(temperature=temperature)


def test_options_that_do_not_exist_or_make_no_sense() -> None:
    with pytest.raises(ValueError, match="max_new_tokens of 1 or more, got 0"):
        Sampling(max_new_tokens=0)
    for name in ("min_new_tokens", "repetition_penalty"):
        with pytest.raises(TypeError, match=name):
            Sampling(**{name: 1})
    for name, value in (("top_k", -1), ("top_p", 0.0), ("min_p", 1.5)):
        with pytest.raises(ValueError, match=name):
            Sampling(**{name: value})


def test_filters_draw_from_what_they_keep_and_cannot_be_trained_on(exact_model: MakeExact) -> None:
    """trl 6789: a nucleus' log-probs are not the policy's. The next rollout draws from all tokens again."""
    engine, wide = make_engine(exact_model()), Sampling(max_new_tokens=12)
    plain = engine.generate(PROMPTS, 8, wide, 5)
    greedy = engine.generate(PROMPTS, 1, Sampling(max_new_tokens=12, temperature=0.0), 5)
    one = engine.generate(PROMPTS, 8, Sampling(max_new_tokens=12, top_k=1), 5)
    # Of equal logits top_k keeps all, so that a row may leave the greedy one where two are equally likely.
    assert float(one.logprob_T.exp().min()) > 0.2 and len(set(one.rows())) < len(set(plain.rows()))
    assert greedy.length_S.numel() == 5
    for options in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        filtered = engine.generate(PROMPTS, 8, Sampling(max_new_tokens=12, **options), 5)
        assert filtered.rows() != plain.rows() and bool((filtered.logprob_T <= 0).all())
        with pytest.raises(ValueError, match="expected completions drawn from the full softmax"):
            TrainBatch.of(PROMPTS, filtered, torch.zeros(40, dtype=torch.float64))
    assert_same(engine.generate(PROMPTS, 8, wide, 5), plain)


@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        ([3, 3, 2, 3], [[0, 1, 2], [3]]),  # 3 * 3 fits in 9, a fourth does not
        ([1, 1, 8, 1, 1], [[0, 1], [2], [3, 4]]),  # a long prompt is not put beside short ones that it would pad
        ([20, 1], [[0], [1]]),  # longer than the limit: alone
    ],
)
def test_prefill_chunks_are_bounded_with_their_filler(
    lengths: list[int], chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK_TOKENS", 9)
    assert [list(chunk) for chunk in prefill.chunks_of_prompts([[0] * length for length in lengths])] == chunks
