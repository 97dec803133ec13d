"""Attention over packed trees: every prompt once, followed by its completions.

    out_i = softmax(q_i . K_i / sqrt(E)) V_i     K_i: the keys of i's prompt up to i, and of i's own completion up to i

A completion token sees its prompt and its own past, never a sibling. The packed axis holds tree after tree, in each the
prompt and then its completions, with no padding. The gradient into a prompt's keys sums over its completions.

Letters: T packed tokens, N trees, S completions, H query heads, K key heads, E head width, P longest prompt of the
batch, C longest completion of a bucket. Work: 4 H E (P + C) flops a token; bytes: K and V of a prompt are gathered once
a completion (2 K E (P + C) values a completion), scores never leave the fused attention of torch.

Inside the op rows are laid out in rectangles, completions of like length together, so that a few fused calls serve any
raggedness. Each packed token has one place there, so both directions are gathers, and so are their gradients: no
scatter-add. The other places are zero, because a masked key still meets its value with probability 0, and 0 * NaN is
NaN: places that repeated some packed token would carry one tree's fault into all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BUCKET_SLACK = 1.5
"""A bucket holds completions down to longest / 1.5: at most a third of its rectangle is filler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Completions of like length: rows [start, start + count * longest) of the filled rectangles."""

    start: int
    count: int
    longest: int
    tree_S: torch.Tensor
    """int64, the tree of each completion of the bucket."""
    is_visible_SCK: torch.Tensor
    """bool [count, 1, longest, P + longest]: which of [prompt keys; own keys] each query sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """Where the trees lie on a packed axis, and how to reach them; built once a micro-batch by `tree_layout`."""

    prompt_len_N: tuple[int, ...]
    completion_len_S: tuple[int, ...]
    tree_of_completion_S: tuple[int, ...]
    num_tokens: int
    longest_prompt: int
    source_R: torch.Tensor
    """int64: the packed token of every row of the rectangles, that of the prompts first; T for filler."""
    place_T: torch.Tensor
    """int64 [T]: the rectangle row of each packed token."""
    buckets: tuple[Bucket, ...]


def packed_starts(
    prompt_len_N: Sequence[int], completion_len_S: Sequence[int], tree_of_completion_S: Sequence[int]
) -> tuple[list[int], list[int], int]:
    """First packed token of every prompt and of every completion, and the number of tokens.

    Raises:
        ValueError: Counts that differ, a tree that is not there, or completions out of order.
    """
    if len(completion_len_S) != len(tree_of_completion_S):
        raise ValueError(
            f"expected one tree a completion, got {len(tree_of_completion_S)} trees for "
            f"{len(completion_len_S)} completions"
        )
    if list(tree_of_completion_S) != sorted(tree_of_completion_S):
        raise ValueError("expected completions in the order of their trees; sort them by tree_of_completion_S")
    prompt_start_N, completion_start_S, cursor, row = [], [], 0, 0
    for tree, prompt_len in enumerate(prompt_len_N):
        prompt_start_N.append(cursor)
        cursor += prompt_len
        while row < len(completion_len_S) and tree_of_completion_S[row] == tree:
            completion_start_S.append(cursor)
            cursor += completion_len_S[row]
            row += 1
    if row != len(completion_len_S):
        raise ValueError(f"expected trees 0 to {len(prompt_len_N) - 1}, got tree {tree_of_completion_S[row]}")
    return prompt_start_N, completion_start_S, cursor


def _rectangle(start: Sequence[int], length: Sequence[int], longest: int, filler: int) -> torch.Tensor:
    """Packed token of every row of a [len(start), longest] rectangle, int64, flat."""
    offset = torch.arange(longest)
    is_real = offset < torch.tensor(length)[:, None]
    return torch.where(is_real, torch.tensor(start)[:, None] + offset, filler).flatten()


def _length_buckets(length_S: Sequence[int]) -> list[list[int]]:
    """Completions, longest first, cut where the length has fallen by the slack."""
    buckets: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(length_S)), key=lambda s: -length_S[s]):
        if not buckets or length_S[row] * BUCKET_SLACK < longest:
            buckets.append([])
            longest = length_S[row]
        buckets[-1].append(row)
    return buckets


def tree_layout(
    prompt_len_N: Sequence[int],
    completion_len_S: Sequence[int],
    tree_of_completion_S: Sequence[int],
    *,
    device: torch.device | str = "cpu",
) -> TreeLayout:
    """Plan the attention of one micro-batch.

    Args:
        prompt_len_N: Tokens of each prompt, 1 or more.
        completion_len_S: Tokens of each completion, 1 or more. May be empty: prompts alone (prefill).
        tree_of_completion_S: The prompt of each completion, ascending.

    Raises:
        ValueError: An empty prompt or completion, or completions out of order.
    """
    for name, lengths in (("prompt", prompt_len_N), ("completion", completion_len_S)):
        if any(length < 1 for length in lengths):
            raise ValueError(f"expected every {name} to have a token, got {name} lengths {list(lengths)}")
    if not prompt_len_N:
        raise ValueError("expected at least one tree, got none; skip the call when there is nothing to compute")
    prompt_start_N, completion_start_S, num_tokens = packed_starts(prompt_len_N, completion_len_S, tree_of_completion_S)
    longest_prompt = max(prompt_len_N)
    sources = [_rectangle(prompt_start_N, prompt_len_N, longest_prompt, num_tokens)]
    buckets, num_rows = [], len(sources[0])
    for rows in _length_buckets(completion_len_S):
        length = [completion_len_S[s] for s in rows]
        sources.append(_rectangle([completion_start_S[s] for s in rows], length, length[0], num_tokens))
        tree_S = torch.tensor([tree_of_completion_S[s] for s in rows])
        sees_prompt = torch.arange(longest_prompt) < torch.tensor(prompt_len_N)[tree_S][:, None, None]
        sees_own = torch.ones(length[0], length[0], dtype=torch.bool).tril()
        is_visible = torch.cat(
            (sees_prompt.expand(-1, length[0], -1), sees_own.expand(len(rows), -1, -1)), dim=2
        ).unsqueeze(1)
        buckets.append(
            Bucket(
                start=num_rows,
                count=len(rows),
                longest=length[0],
                tree_S=tree_S.to(device),
                is_visible_SCK=is_visible.to(device),
            )
        )
        num_rows += len(sources[-1])
    source_R = torch.cat(sources)
    is_real_R = source_R < num_tokens
    place_T = torch.empty(num_tokens, dtype=torch.int64)
    place_T[source_R[is_real_R]] = is_real_R.nonzero()[:, 0]
    return TreeLayout(
        prompt_len_N=tuple(prompt_len_N),
        completion_len_S=tuple(completion_len_S),
        tree_of_completion_S=tuple(tree_of_completion_S),
        num_tokens=num_tokens,
        longest_prompt=longest_prompt,
        source_R=source_R.to(device),
        place_T=place_T.to(device),
        buckets=tuple(buckets),
    )


def prefix_attention_reference(
    q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout
) -> torch.Tensor:
    """The specification: every prompt and completion alone, each completion with its own copy of the prompt."""
    prompt_start_N, completion_start_S, _ = packed_starts(
        layout.prompt_len_N, layout.completion_len_S, layout.tree_of_completion_S
    )
    repeats = q_THE.shape[1] // k_TKE.shape[1]
    k_THE, v_THE = k_TKE.repeat_interleave(repeats, 1), v_TKE.repeat_interleave(repeats, 1)
    pieces: dict[int, torch.Tensor] = {}

    def attend(query: slice, *keys: slice) -> torch.Tensor:
        q = q_THE[query]
        k, v = (torch.cat([x[part] for part in keys]) for x in (k_THE, v_THE))
        score = torch.einsum("qhe,khe->hqk", q, k) * q.shape[-1] ** -0.5
        is_future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        return torch.einsum("hqk,khe->qhe", score.masked_fill(is_future, -torch.inf).softmax(-1), v)

    for start, length in zip(prompt_start_N, layout.prompt_len_N, strict=True):
        pieces[start] = attend(slice(start, start + length), slice(start, start + length))
    for start, length, tree in zip(
        completion_start_S, layout.completion_len_S, layout.tree_of_completion_S, strict=True
    ):
        prompt = slice(prompt_start_N[tree], prompt_start_N[tree] + layout.prompt_len_N[tree])
        own = slice(start, start + length)
        pieces[start] = attend(own, prompt, own)
    return torch.cat([pieces[start] for start in sorted(pieces)])


def _to_rectangles(x_T: torch.Tensor, source_R: torch.Tensor) -> torch.Tensor:
    return torch.cat((x_T, x_T.new_zeros(1, *x_T.shape[1:]))).index_select(0, source_R)


class _ToRectangles(torch.autograd.Function):
    """Packed tokens to their places among zeros; backward takes each token's gradient from its one place."""

    @staticmethod
    def forward(ctx, x_T: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
        ctx.layout = layout
        return _to_rectangles(x_T, layout.source_R)

    @staticmethod
    def backward(ctx, grad_R: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_R.index_select(0, ctx.layout.place_T), None


class _FromRectangles(torch.autograd.Function):
    """The way back; its gradient leaves the filler at zero."""

    @staticmethod
    def forward(ctx, x_R: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
        ctx.layout = layout
        return x_R.index_select(0, layout.place_T)

    @staticmethod
    def backward(ctx, grad_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_rectangles(grad_T, ctx.layout.source_R), None


def prompt_rectangle(x_TKE: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    """[N, longest_prompt, K, E] of a layout without completions: each prompt at the front of its row, zeros behind
    it."""
    return _to_rectangles(x_TKE, layout.source_R).unflatten(0, (-1, layout.longest_prompt))


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_visible: torch.Tensor | None) -> torch.Tensor:
    """torch's fused attention on [rows, tokens, heads, E]; causal without a mask; returns [rows * tokens, H, E]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    has_groups = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=is_visible, is_causal=is_visible is None, enable_gqa=has_groups
    )
    return out.transpose(1, 2).flatten(0, 1)


def prefix_attention(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    """Attention of packed trees, differentiable in q, k and v.

    Args:
        q_THE: [T, H, E] rotated queries. k_TKE, v_TKE: [T, K, E] rotated keys, and values; H is a multiple of K. One
        dtype. layout: From `tree_layout`, on the same device.

    Returns:
        out_THE in q's dtype; softmax and sums in float32 or wider.

    Raises:
        ValueError: Shapes that do not belong to the layout or to each other.
    """
    H, K = q_THE.shape[1], k_TKE.shape[1]
    if not len(q_THE) == len(k_TKE) == len(v_TKE) == layout.num_tokens or H % K:
        raise ValueError(
            f"expected {layout.num_tokens} tokens and query heads in multiples of key heads, got "
            f"q {tuple(q_THE.shape)}, k {tuple(k_TKE.shape)}, v {tuple(v_TKE.shape)}"
        )
    q, k, v = (_ToRectangles.apply(x, layout) for x in (q_THE, k_TKE, v_TKE))
    num_prompts, longest = len(layout.prompt_len_N), layout.longest_prompt

    def rows(x: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
        return x[start : start + count * length].unflatten(0, (count, length))

    # Filler stands behind the prompt, so causality alone keeps it from every real query.
    q_prompt, k_prompt, v_prompt = (rows(x, 0, num_prompts, longest) for x in (q, k, v))
    pieces = [_fused(q_prompt, k_prompt, v_prompt, None)]
    for bucket in layout.buckets:
        q_own, k_own, v_own = (rows(x, bucket.start, bucket.count, bucket.longest) for x in (q, k, v))
        k_seen = torch.cat((k_prompt.index_select(0, bucket.tree_S), k_own), dim=1)
        v_seen = torch.cat((v_prompt.index_select(0, bucket.tree_S), v_own), dim=1)
        pieces.append(_fused(q_own, k_seen, v_seen, bucket.is_visible_SCK))
    return _FromRectangles.apply(torch.cat(pieces), layout)
