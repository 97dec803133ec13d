"""A rollout with its advantages -> packed micro-batches in which every prompt is computed once.

A micro-batch is a list of trees on one token axis: a prompt, then its completions. Completion tokens get their true
positions (the first stands at the prompt's length). The head runs on the rows that predict a completion token and no
others: the prompt's last row predicts the first token of all siblings.

Rows whose gradient is exactly zero are not packed at all. The weights are data and are settled before, so dropping a
row changes no other row's loss.

Letters: T packed tokens, N prompts, S completions, R head rows = completion tokens of the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkgrpo.kernels.prefix_attention import TreeLayout, packed_starts, tree_layout
from sparkgrpo.trainer.rollout.result import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """One optimiser batch on the host; completions are packed in row order, as the rollout gave them."""

    prompts: Sequence[Sequence[int]]
    token_R: torch.Tensor
    """i32, all completion tokens."""
    logprob_R: torch.Tensor
    """f32, the sampler's."""
    length_S: tuple[int, ...]
    prompt_of_row_S: tuple[int, ...]
    advantage_S: torch.Tensor
    """float64."""

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], rollout: Rollout, advantage_S: torch.Tensor) -> "TrainBatch":
        """The completions of a rollout with their advantages; one copy to the host.

        Raises:
            ValueError: The rollout drew from a part of the vocabulary.
        """
        if rollout.sampling.is_filtered:
            raise ValueError(
                f"expected completions drawn from the full softmax, got {rollout.sampling}: the trainer scores under"
                " all tokens, so a filter would bias every ratio; use top_k, top_p and min_p in evaluations alone"
            )
        return cls(
            prompts=prompts,
            token_R=rollout.token_T.cpu(),
            logprob_R=rollout.logprob_T.cpu(),
            length_S=tuple(rollout.length_S.tolist()),
            prompt_of_row_S=tuple(rollout.prompt_of_row_S.tolist()),
            advantage_S=advantage_S,
        )

    def of_prompts(self, is_kept_N: Sequence[bool]) -> "TrainBatch":
        """The batch of some of the prompts, in their order; the whole batch as it is."""
        if all(is_kept_N):
            return self
        rows = [s for s, n in enumerate(self.prompt_of_row_S) if is_kept_N[n]]
        new_index = {n: i for i, n in enumerate(n for n, is_kept in enumerate(is_kept_N) if is_kept)}
        is_kept_S = torch.tensor([is_kept_N[n] for n in self.prompt_of_row_S])
        is_kept_R = is_kept_S.repeat_interleave(torch.tensor(self.length_S))
        return TrainBatch(
            prompts=[self.prompts[n] for n in new_index],
            token_R=self.token_R[is_kept_R],
            logprob_R=self.logprob_R[is_kept_R],
            length_S=tuple(self.length_S[s] for s in rows),
            prompt_of_row_S=tuple(new_index[self.prompt_of_row_S[s]] for s in rows),
            advantage_S=self.advantage_S[is_kept_S],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward and backward works on; all tensors on the model's device."""

    token_T: torch.Tensor
    """i64."""
    position_T: torch.Tensor
    """i64."""
    layout: TreeLayout
    head_row_R: torch.Tensor
    """i64: the packed token whose hidden state predicts each completion token."""
    target_R: torch.Tensor
    """i64."""
    advantage_R: torch.Tensor
    """f32."""
    weight_R: torch.Tensor
    """f32."""
    rollout_logprob_R: torch.Tensor
    """f32."""
    source_R: torch.Tensor
    """i64, on the host: place of each head row among the batch's completion tokens."""
    cu_seqlens_S1: torch.Tensor
    """i32, on the host: bounds of the completions among the head rows."""


def rows_with_gradient(batch: TrainBatch, weight_S: torch.Tensor, *, has_penalty: bool) -> list[int]:
    """Completions whose gradient is not exactly zero.

    Args:
        weight_S: Weight of each token of each completion.
        has_penalty: A KL or entropy term gives a gradient even where the advantage is 0.
    """
    has_weight = weight_S != 0
    return (has_weight if has_penalty else has_weight & (batch.advantage_S != 0)).nonzero()[:, 0].tolist()


def micro_batches(
    batch: TrainBatch,
    weight_S: torch.Tensor,
    rows: Sequence[int],
    *,
    tokens_per_micro_batch: int,
    device: torch.device | str,
) -> list[MicroBatch]:
    """Pack these completions into micro-batches of at most so many tokens, largest trees first.

    The peak of memory then comes at once. The completions of one prompt may be split; the prompt is computed again,
    which is correct and costs its tokens. A single prompt and completion above the limit is a micro-batch of its own.

    Args:
        weight_S: float64, weight of each token of each completion.
        rows: Completion indices, in any order; none gives no micro-batch.
    """
    rows_of_prompt: dict[int, list[int]] = {}
    for s in sorted(rows):
        rows_of_prompt.setdefault(batch.prompt_of_row_S[s], []).append(s)
    trees = [
        tree
        for n, group in sorted(rows_of_prompt.items())
        for tree in _split_tree(batch, n, group, tokens_per_micro_batch)
    ]
    trees.sort(key=lambda tree: -tree.num_tokens)
    packs: list[list[_Tree]] = []
    for tree in trees:  # first fit
        room = tokens_per_micro_batch - tree.num_tokens
        pack = next((pack for pack in packs if sum(other.num_tokens for other in pack) <= room), None)
        if pack is None:
            packs.append([tree])
        else:
            pack.append(tree)
    return [_pack(batch, weight_S, pack, device) for pack in packs]


@dataclass(slots=True)
class _Tree:
    """A prompt and those of its completions that share a micro-batch."""

    prompt: int
    rows: list[int]
    num_tokens: int


def _split_tree(batch: TrainBatch, n: int, rows: Sequence[int], limit: int) -> list[_Tree]:
    """One prompt's completions, in order, in as few trees as the limit allows."""
    trees: list[_Tree] = []
    for s in rows:
        if not trees or trees[-1].num_tokens + batch.length_S[s] > limit:
            trees.append(_Tree(prompt=n, rows=[], num_tokens=len(batch.prompts[n])))
        trees[-1].rows.append(s)
        trees[-1].num_tokens += batch.length_S[s]
    return trees


def _pack(batch: TrainBatch, weight_S: torch.Tensor, trees: Sequence[_Tree], device: torch.device | str) -> MicroBatch:
    prompt_len_N = [len(batch.prompts[tree.prompt]) for tree in trees]
    rows = [s for tree in trees for s in tree.rows]
    tree_of_row = [tree_idx for tree_idx, tree in enumerate(trees) for _ in tree.rows]
    length = [batch.length_S[s] for s in rows]
    prompt_start_N, start_S, num_tokens = packed_starts(prompt_len_N, length, tree_of_row)
    row_start = torch.tensor((0, *batch.length_S)).cumsum(0)

    token_T = torch.empty(num_tokens, dtype=torch.int64)
    position_T = torch.empty(num_tokens, dtype=torch.int64)
    head_rows, sources = [], []
    for tree, start, prompt_len in zip(trees, prompt_start_N, prompt_len_N, strict=True):
        token_T[start : start + prompt_len] = torch.tensor(batch.prompts[tree.prompt])
        position_T[start : start + prompt_len] = torch.arange(prompt_len)
    for s, tree, start in zip(rows, tree_of_row, start_S, strict=True):
        source = torch.arange(int(row_start[s]), int(row_start[s + 1]))
        own = torch.arange(start, start + len(source))
        token_T[own] = batch.token_R[source].long()
        position_T[own] = prompt_len_N[tree] + torch.arange(len(source))
        last_prompt_token = prompt_start_N[tree] + prompt_len_N[tree] - 1
        head_rows.append(torch.cat((torch.tensor([last_prompt_token]), own[:-1])))
        sources.append(source)
    source_R = torch.cat(sources)
    repeats, row_S = torch.tensor(length), torch.tensor(rows)
    return MicroBatch(
        token_T=token_T.to(device),
        position_T=position_T.to(device),
        layout=tree_layout(prompt_len_N, length, tree_of_row, device=device),
        head_row_R=torch.cat(head_rows).to(device),
        target_R=batch.token_R[source_R].long().to(device),
        advantage_R=batch.advantage_S[row_S].float().repeat_interleave(repeats).to(device),
        weight_R=weight_S[row_S].float().repeat_interleave(repeats).to(device),
        rollout_logprob_R=batch.logprob_R[source_R].to(device),
        source_R=source_R,
        cu_seqlens_S1=torch.tensor((0, *length), dtype=torch.int32).cumsum(0, dtype=torch.int32),
    )
