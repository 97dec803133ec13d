"""Attention over packed trees: values and all gradients against the specification, and what must not meet.

T packed tokens, N trees, S completions, H query heads, K key heads, E head width.
"""

import pytest
import torch

from sparkgrpo.kernels.prefix_attention import (
    TreeLayout,
    packed_starts,
    prefix_attention,
    prefix_attention_reference,
    prompt_rectangle,
    tree_layout,
)

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

LAYOUTS = {
    "ragged": ((5, 1, 9), (4, 1, 7, 3, 12, 1), (0, 0, 1, 2, 2, 2)),
    "one token everywhere": ((1, 1), (1, 1, 1), (0, 1, 1)),
    "a prompt alone": ((6,), (), ()),
    "prompts only": ((3, 8, 1, 8), (), ()),
    "trees without completions": ((2, 5, 4, 3), (6, 2), (1, 1)),
    "equal lengths": ((4, 4), (3, 3, 3, 3), (0, 0, 1, 1)),
    "many buckets": ((7, 3), tuple(range(1, 41, 3)), (0,) * 6 + (1,) * 8),
    "long prompts, short completions": ((33, 20), (1, 2, 1), (0, 0, 1)),
}
HEADS = [(4, 2), (3, 1), (2, 2)]


def make_qkv(
    layout: TreeLayout, heads: tuple[int, int] = (4, 2), E: int = 6, dtype: torch.dtype = torch.float64
) -> QKV:
    generator = torch.Generator().manual_seed(layout.num_tokens)
    q, k, v = (
        torch.randn(layout.num_tokens, count, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    return q, k, v


def value_and_gradients(attention, qkv: QKV, layout: TreeLayout) -> list[torch.Tensor]:  # noqa: ANN001
    out = attention(*qkv, layout)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * cotangent.to(out.dtype)).sum(), qkv)]


def tokens_of_trees(layout: TreeLayout) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Packed tokens of each prompt and of each of its completions."""
    starts = packed_starts(layout.prompt_len_N, layout.completion_len_S, layout.tree_of_completion_S)
    trees = [(torch.arange(start, start + n), []) for start, n in zip(starts[0], layout.prompt_len_N, strict=True)]
    rows = zip(starts[1], layout.completion_len_S, layout.tree_of_completion_S, strict=True)
    for start, length, tree in rows:
        trees[tree][1].append(torch.arange(start, start + length))
    return trees


def masked_attention(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    """Another way to say it: one softmax over all packed tokens, with a mask of who sees whom."""
    T = layout.num_tokens
    sees = torch.zeros(T, T, dtype=torch.bool)
    for prompt, completions in tokens_of_trees(layout):
        for own in (prompt, *completions):
            sees[own[:, None], own] = torch.ones(len(own), len(own), dtype=torch.bool).tril()
        for own in completions:
            sees[own[:, None], prompt] = True
    repeats = q_THE.shape[1] // k_TKE.shape[1]
    k_THE, v_THE = (torch.cat([x[:, h // repeats, None] for h in range(q_THE.shape[1])], 1) for x in (k_TKE, v_TKE))
    score = torch.einsum("qhe,khe->hqk", q_THE, k_THE) / q_THE.shape[-1] ** 0.5
    return torch.einsum("hqk,khe->qhe", score.masked_fill(~sees, -torch.inf).softmax(-1), v_THE)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> TreeLayout:
    return tree_layout(*LAYOUTS[request.param])


@pytest.mark.parametrize("heads", HEADS)
def test_value_and_gradients_equal_the_reference_in_fp64(layout: TreeLayout, heads: tuple[int, int]) -> None:
    qkv = make_qkv(layout, heads)
    results = value_and_gradients(prefix_attention, qkv, layout)
    for got, expected in zip(results, value_and_gradients(prefix_attention_reference, qkv, layout), strict=True):
        # sums of at most 53 terms of order 1 in fp64: 1e-14; a missing key or sibling is off by 1e-2
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_the_reference_is_attention_under_a_mask(layout: TreeLayout) -> None:
    qkv = make_qkv(layout)
    results = value_and_gradients(prefix_attention_reference, qkv, layout)
    for got, expected in zip(results, value_and_gradients(masked_attention, qkv, layout), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    # Rounding of sums of 53 terms: a few units of 2^-24 of values of order 1 to 10. In bf16 q, k, v are exact and the
    # output and the gradients are rounded, in the gradient of a prompt's keys once a completion: units of 2^-8.
    ("dtype", "tolerance"),
    [(torch.float32, 5e-6), (torch.bfloat16, 6e-2)],
)
def test_lower_precision_stays_within_its_rounding(layout: TreeLayout, dtype: torch.dtype, tolerance: float) -> None:
    qkv = make_qkv(layout, dtype=dtype)
    exact: QKV = tuple(x.detach().double().requires_grad_() for x in qkv)  # pyright: ignore[reportAssignmentType]
    results = value_and_gradients(prefix_attention, qkv, layout)
    for got, expected in zip(results, value_and_gradients(prefix_attention_reference, exact, layout), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def run_with_nan(layout: TreeLayout, is_kept: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of the kept tokens, clean, and with NaN in every other packed token of q, k and v.

    Only the kept tokens enter the loss.
    """
    results = []
    for others in (None, torch.nan):
        qkv = [x.detach().clone() for x in make_qkv(layout)]
        for x in qkv:
            if others is not None:
                x[~is_kept] = others
            x.requires_grad_()
        out = prefix_attention(*qkv, layout)
        gradients = torch.autograd.grad(out[is_kept].square().sum(), qkv)
        results.append([x[is_kept] for x in (out.detach(), *gradients)])
    return results[0], results[1]


@pytest.mark.parametrize("name", ["ragged", "prompts only", "trees without completions", "many buckets"])
def test_no_tree_meets_another(name: str) -> None:
    """Neither do the fillers of the rectangles: bit for bit, with NaN all around."""
    layout = tree_layout(*LAYOUTS[name])
    for prompt, completions in tokens_of_trees(layout):
        is_kept = torch.zeros(layout.num_tokens, dtype=torch.bool)
        is_kept[torch.cat([prompt, *completions])] = True
        for clean, poisoned in zip(*run_with_nan(layout, is_kept), strict=True):
            assert clean.isfinite().all()
            assert torch.equal(poisoned, clean)


def test_no_completion_meets_a_sibling() -> None:
    layout = tree_layout(*LAYOUTS["ragged"])
    for prompt, completions in tokens_of_trees(layout):
        for own in completions:
            is_kept = torch.zeros(layout.num_tokens, dtype=torch.bool)
            is_kept[torch.cat([prompt, own])] = True
            clean, poisoned = run_with_nan(layout, is_kept)
            assert torch.equal(poisoned[0], clean[0])
            # the prompt's k and v get 0 * NaN from the siblings' queries, which did meet it; no q gets anything
            assert torch.equal(poisoned[1], clean[1])


def test_a_prompt_computed_once_equals_the_prompt_repeated() -> None:
    """Splitting a tree repeats its prompt: the outputs are the same and the gradients of the copies add up."""
    P, lengths = 5, (4, 1, 7)
    joined = tree_layout((P,), lengths, (0, 0, 0))
    split = tree_layout((P, P, P), lengths, (0, 1, 2))
    qkv = make_qkv(joined)
    place = torch.cat([torch.cat([prompt, *own]) for prompt, own in tokens_of_trees(split)])
    assert torch.equal(place, torch.arange(split.num_tokens))
    (prompt, completions), source = tokens_of_trees(joined)[0], []
    for own in completions:
        source += [prompt, own]
    copied: QKV = tuple(x.detach()[torch.cat(source)].requires_grad_() for x in qkv)  # pyright: ignore[reportAssignmentType]
    out, out_copied = prefix_attention(*qkv, joined), prefix_attention(*copied, split)
    torch.testing.assert_close(out_copied, out[torch.cat(source)], rtol=0, atol=1e-12)
    is_completion = torch.ones(joined.num_tokens, dtype=torch.bool)
    is_completion[prompt] = False
    gradients = torch.autograd.grad(out[is_completion].square().sum(), qkv)
    gradients_copied = torch.autograd.grad(out_copied[is_completion[torch.cat(source)]].square().sum(), copied)
    for gradient, parts in zip(gradients, gradients_copied, strict=True):
        summed = torch.zeros_like(gradient).index_add_(0, torch.cat(source), parts)
        torch.testing.assert_close(summed, gradient, rtol=0, atol=1e-12)


def test_the_order_of_siblings_and_trees_does_not_matter() -> None:
    layout, other = tree_layout((5, 9), (4, 7, 1), (0, 0, 1)), tree_layout((9, 5), (1, 7, 4), (0, 1, 1))
    qkv = make_qkv(layout)
    (p0, (a, b)), (p1, (c,)) = tokens_of_trees(layout)
    order = torch.cat([p1, c, p0, b, a])
    out = prefix_attention(*(x[order] for x in qkv), other)
    torch.testing.assert_close(out, prefix_attention(*qkv, layout)[order], rtol=0, atol=1e-12)


def test_every_packed_token_has_one_place(layout: TreeLayout) -> None:
    assert torch.equal(layout.source_R[layout.place_T], torch.arange(layout.num_tokens))
    is_filler = torch.ones(len(layout.source_R), dtype=torch.bool)
    is_filler[layout.place_T] = False
    assert (layout.source_R[is_filler] == layout.num_tokens).all()


def test_at_most_a_third_of_a_bucket_is_filler() -> None:
    lengths = [int(x) for x in torch.randint(1, 500, (200,), generator=torch.Generator().manual_seed(0))]
    layout = tree_layout((3,), lengths, (0,) * 200)
    num_rows = sum(bucket.count * bucket.longest for bucket in layout.buckets)
    assert num_rows <= 1.5 * sum(lengths)
    assert len(layout.buckets) < 20
    assert sum(bucket.count for bucket in layout.buckets) == 200


def test_prompt_rectangle_is_zero_behind_each_prompt() -> None:
    layout = tree_layout((3, 1, 4), (), ())
    k_TKE = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0))
    rectangle = prompt_rectangle(k_TKE, layout)
    assert rectangle.shape == (3, 4, 2, 6)
    for row, prompt in zip(rectangle, k_TKE.split((3, 1, 4)), strict=True):
        assert torch.equal(row[: len(prompt)], prompt)
        assert not row[len(prompt) :].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3, 0), (), ()), r"every prompt to have a token, got prompt lengths \[3, 0\]"),
        (((3,), (2, 0), (0, 0)), r"every completion to have a token, got completion lengths \[2, 0\]"),
        (((), (), ()), "at least one tree, got none"),
        (((3, 3), (2, 2), (1, 0)), "in the order of their trees"),
        (((3, 3), (2, 2), (0, 2)), "trees 0 to 1, got tree 2"),
        (((3, 3), (2, 2), (-1, 0)), "trees 0 to 1, got tree -1"),
        (((3, 3), (2, 2), (0,)), "one tree a completion, got 1 trees for 2 completions"),
        (((3, 3), (2,), (0, 0)), "one tree a completion, got 2 trees for 1 completions"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(arguments: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_layout(*arguments)


def test_shapes_that_do_not_fit_are_refused() -> None:
    layout = tree_layout((3,), (2,), (0,))
    q, k, v = make_qkv(layout, (4, 2))
    for wrong in ((q[:4], k, v), (q, k[:4], v), (q, k, v[:4]), (q[:, :3], k, v)):
        with pytest.raises(ValueError, match="5 tokens and query heads in multiples of key heads, got q"):
            prefix_attention(*wrong, layout)
