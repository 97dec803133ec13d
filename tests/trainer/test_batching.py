"""Packing against a naive construction, token by token."""

from collections.abc import Callable, Sequence

import pytest
import torch

from sparkgrpo.kernels.prefix_attention import prefix_attention_reference
from sparkgrpo.trainer.batching import MicroBatch, TrainBatch, micro_batches, rows_with_gradient
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.score import score

HUGE = 1 << 30


def pack(
    batch: TrainBatch, rows: Sequence[int] | None = None, limit: int = HUGE, weight_S: torch.Tensor | None = None
) -> list[MicroBatch]:
    num_rows = len(batch.length_S)
    weight_S = torch.arange(1, num_rows + 1, dtype=torch.float64) if weight_S is None else weight_S
    rows = range(num_rows) if rows is None else rows
    return micro_batches(batch, weight_S, rows, tokens_per_micro_batch=limit, device="cpu")


def row_of_source(batch: TrainBatch) -> list[int]:
    return [s for s, length in enumerate(batch.length_S) for _ in range(length)]


def check(batch: TrainBatch, micro: MicroBatch) -> list[int]:
    """Rebuild every head row's history by walking its tree, and compare; returns the rows that are packed."""
    layout, weight_S = micro.layout, torch.arange(1, len(batch.length_S) + 1)
    tokens, positions = micro.token_T.tolist(), micro.position_T.tolist()
    start_of_source = torch.tensor((0, *batch.length_S)).cumsum(0).tolist()
    row_of = row_of_source(batch)
    bounds = micro.cu_seqlens_S1.tolist()
    cursor, row_idx, packed_rows = 0, 0, []
    for tree, prompt_len in enumerate(layout.prompt_len_N):
        prompt_at = cursor
        cursor += prompt_len
        members = [i for i, t in enumerate(layout.tree_of_completion_S) if t == tree]
        assert members, "a tree without completions is wasted work"
        for i in members:
            length = layout.completion_len_S[i]
            own = list(range(cursor, cursor + length))
            cursor += length
            head = slice(bounds[row_idx], bounds[row_idx + 1])
            row_idx += 1
            sources = micro.source_R[head].tolist()
            s = row_of[sources[0]]
            packed_rows.append(s)
            assert sources == list(range(start_of_source[s], start_of_source[s + 1]))
            prompt = list(batch.prompts[batch.prompt_of_row_S[s]])
            completion = batch.token_R[sources].tolist()
            assert [tokens[t] for t in (*range(prompt_at, prompt_at + prompt_len), *own)] == prompt + completion
            assert [positions[t] for t in range(prompt_at, prompt_at + prompt_len)] == list(range(prompt_len))
            assert [positions[t] for t in own] == list(range(prompt_len, prompt_len + length))
            assert micro.head_row_R[head].tolist() == [prompt_at + prompt_len - 1, *own[:-1]]
            assert micro.target_R[head].tolist() == completion
            assert micro.rollout_logprob_R[head].equal(batch.logprob_R[sources])
            assert micro.advantage_R[head].tolist() == [float(batch.advantage_S[s].float())] * length
            assert micro.weight_R[head].tolist() == [float(weight_S[s])] * length
    assert cursor == layout.num_tokens == len(tokens)
    return packed_rows


@pytest.mark.parametrize("limit", [HUGE, 60, 33, 14, 1])
def test_packing_equals_the_naive_construction(make_batch: Callable[..., TrainBatch], limit: int) -> None:
    batch = make_batch()
    micros = pack(batch, limit=limit)
    rows = [s for micro in micros for s in check(batch, micro)]
    assert sorted(rows) == list(range(16)), "every completion is packed once"
    for micro in micros:
        is_least = len(micro.layout.completion_len_S) == 1
        assert micro.layout.num_tokens <= limit or is_least
        assert micro.token_T.dtype == micro.position_T.dtype == micro.head_row_R.dtype == torch.int64
        assert micro.weight_R.dtype == micro.advantage_R.dtype == torch.float32
        assert micro.cu_seqlens_S1.dtype == torch.int32


def test_prompts_are_packed_once_when_there_is_room(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch()
    (micro,) = pack(batch)
    assert micro.layout.num_tokens == sum(map(len, batch.prompts)) + sum(batch.length_S)
    assert sorted(micro.layout.prompt_len_N) == sorted(map(len, batch.prompts))


def test_a_tree_is_split_and_its_prompt_repeated(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch((6,), 5, longest=4)
    limit = 6 + max(batch.length_S) + 1
    micros = pack(batch, limit=limit)
    assert len(micros) > 1
    assert all(micro.layout.prompt_len_N == (6,) for micro in micros)
    assert all(micro.layout.num_tokens <= limit for micro in micros)


def test_largest_trees_come_first(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch((3, 20, 7, 12), 2, longest=6)
    first = pack(batch, limit=40)[0]
    assert first.layout.prompt_len_N[0] == 20
    sizes = [micro.layout.num_tokens for micro in pack(batch, limit=1)]
    assert sizes == sorted(sizes, reverse=True)


def test_small_trees_fill_the_gaps() -> None:
    """Trees of 8, 6, 4 and 2 tokens in micro-batches of 10: 8 + 2 and 6 + 4."""
    batch = TrainBatch(
        prompts=[[0] * n for n in (7, 5, 3, 1)],
        token_R=torch.zeros(4, dtype=torch.int32),
        logprob_R=torch.zeros(4),
        length_S=(1, 1, 1, 1),
        prompt_of_row_S=(0, 1, 2, 3),
        advantage_S=torch.ones(4, dtype=torch.float64),
    )
    assert [micro.layout.prompt_len_N for micro in pack(batch, limit=10)] == [(7, 1), (5, 3)]


def test_order_of_the_rows_does_not_matter(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch()
    rows = [11, 3, 0, 15, 7]
    (micro,), (same,) = pack(batch, rows), pack(batch, sorted(rows))
    assert sorted(check(batch, micro)) == sorted(rows)
    assert micro.source_R.equal(same.source_R) and micro.token_T.equal(same.token_T)


def test_no_rows_no_micro_batch(make_batch: Callable[..., TrainBatch]) -> None:
    assert pack(make_batch(), []) == []


def test_one_token_prompts_and_completions() -> None:
    batch = TrainBatch(
        prompts=[[7], [8]],
        token_R=torch.tensor([1, 2], dtype=torch.int32),
        logprob_R=torch.zeros(2),
        length_S=(1, 1),
        prompt_of_row_S=(0, 1),
        advantage_S=torch.ones(2, dtype=torch.float64),
    )
    (micro,) = pack(batch)
    assert micro.token_T.tolist() == [7, 1, 8, 2] and micro.head_row_R.tolist() == [0, 2]
    assert micro.position_T.tolist() == [0, 1, 0, 1] and micro.target_R.tolist() == [1, 2]


def test_dropping_rows_changes_no_other_row(
    make_batch: Callable[..., TrainBatch], make_decoder: Callable[..., Decoder]
) -> None:
    """Log-probs of the rows that stay differ by rounding alone; their weights not at all."""
    batch, model = make_batch(), make_decoder()
    (whole,), (part,) = pack(batch), pack(batch, [0, 2, 3, 9])
    place = {source: place for place, source in enumerate(whole.source_R.tolist())}
    kept = torch.tensor([place[source] for source in part.source_R.tolist()])
    assert part.weight_R.equal(whole.weight_R[kept])
    before = score(model, whole, temperature=1.0, num_valid=33)[kept]
    after = score(model, part, temperature=1.0, num_valid=33)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_layout_is_the_one_attention_knows(make_batch: Callable[..., TrainBatch]) -> None:
    """A sibling is never seen: changing one completion leaves the others' attention as it was."""
    (micro,) = pack(make_batch((5,), 3))
    layout = micro.layout
    q, k, v = (torch.randn(layout.num_tokens, 2, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    before = prefix_attention_reference(q, k, v, layout)
    start = 5 + layout.completion_len_S[0]
    second = slice(start, start + layout.completion_len_S[1])
    k[second] += 1.0
    after = prefix_attention_reference(q, k, v, layout)
    is_changed = (before != after).flatten(1).any(1)
    assert is_changed[second].any() and not is_changed[: second.start].any() and not is_changed[second.stop :].any()


def test_rows_without_gradient_are_found(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch((3, 4), 2, advantages=[1.0, 0.0, 0.0, -1.0])
    weight_S = torch.tensor([0.5, 0.5, 0.5, 0.0], dtype=torch.float64)
    assert rows_with_gradient(batch, weight_S, has_penalty=False) == [0]
    assert rows_with_gradient(batch, weight_S, has_penalty=True) == [0, 1, 2]
