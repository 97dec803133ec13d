"""Ways to run the decoder that must not change what it computes: activation checkpointing, flash-attn's interface."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sparkgrpo.kernels.prefix_attention import prefix_attention, tree_layout
from sparkgrpo.trainer import score
from sparkgrpo.trainer.budget import activation_bytes_per_token
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.flash_attention import flash_plan, flash_prefix_attention, load_varlen
from sparkgrpo.trainer.update import Updater

Make = Callable[..., Any]


def varlen_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, longest_q: int,
    longest_k: int, *, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """What flash-attn documents: sequences apart, grouped heads, a causal mask aligned to the lower right."""
    assert causal and cu_q.dtype == cu_k.dtype == torch.int32 and q.is_contiguous()
    assert int(cu_q.diff().max()) == longest_q and int(cu_k.diff().max()) == longest_k
    out = []
    for (q0, q1), (k0, k1) in zip(pairs(cu_q), pairs(cu_k), strict=True):
        rows, columns = q1 - q0, k1 - k0
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        piece = F.scaled_dot_product_attention(
            q[q0:q1].transpose(0, 1), k[k0:k1].transpose(0, 1), v[k0:k1].transpose(0, 1), attn_mask=mask,
            enable_gqa=True,
        )  # fmt: skip
        out.append(piece.transpose(0, 1))
    return torch.cat(out)


def pairs(cu: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cu.tolist()))


@pytest.mark.parametrize(
    ("prompts", "completions", "trees"),
    [
        ((3,), (), ()),
        ((1,), (1,), (0,)),
        ((4, 2), (3, 1, 5), (0, 0, 1)),
        ((5, 1, 3, 2), (2, 9, 4, 4, 1), (0, 0, 0, 2, 3)),
    ],
)
def test_sequences_for_flash_attn_are_the_trees(
    prompts: tuple[int, ...], completions: tuple[int, ...], trees: tuple[int, ...]
) -> None:
    """Values and all gradients, in float64; trees without completions too."""
    layout = tree_layout(prompts, completions, trees)
    generator = torch.Generator().manual_seed(0)
    shapes = ((layout.num_tokens, heads, 8) for heads in (4, 2, 2))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    grad = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    expected = prefix_attention(q, k, v, layout)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)
    ours = flash_prefix_attention(q, k, v, flash_plan(layout, torch.device("cpu")), varlen_reference)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    for gradient, wanted in zip(torch.autograd.grad(ours, (q, k, v), grad), expected_grads, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_a_whole_update_through_it(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, (expected,) = run_update(make_decoder(), make_batch(), preset("grpo"), limit=60)
    options = score.ForwardOptions(varlen=varlen_reference)
    original = Updater.__init__

    def with_flash(self: Updater, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs, forward=options)

    monkeypatch.setattr(Updater, "__init__", with_flash)
    by_flash, (ours,) = run_update(make_decoder(), make_batch(), preset("grpo"), limit=60)
    assert by_flash["kl_max"] == 0.0 and by_flash["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-6)
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_flash_attn_is_refused_where_it_cannot_serve() -> None:
    config = Config(attention="flash")
    assert load_varlen(Config(), torch.device("cpu"), torch.float32) is None
    with pytest.raises(
        UserError, match=r"CUDA and bf16 alone, and this run is on cpu in float32: use --attention sdpa"
    ):
        load_varlen(config, torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match="on cuda in float32"):
        load_varlen(config, torch.device("cuda"), torch.float32)


def test_a_missing_flash_attn_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    with pytest.raises(UserError, match=r'pip install "sparkgrpo\[flash\]", or use --attention sdpa'):
        load_varlen(Config(attention="flash"), torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_activation_checkpointing_changes_no_bit(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make, name: str
) -> None:
    values = {"inner_epochs": 2}
    plain = run_update(make_decoder(), make_batch(), preset(name, **values), limit=60, noise=0.02)
    config = preset(name, activation_checkpointing=True, **values)
    again = run_update(make_decoder(), make_batch(), config, limit=60, noise=0.02)
    assert again[0] == plain[0]
    for ours, expected in zip(again[1], plain[1], strict=True):
        assert all(ours[key].equal(gradient) for key, gradient in expected.items())


def test_activation_checkpointing_keeps_less(
    make_decoder: Make, make_batch: Make, preset: Make, run_update: Make, op_watch: Any
) -> None:
    """Of a deep decoder a hidden state a block is kept; the head is not computed a second time."""
    peaks, heads = [], []
    for is_on in (False, True):
        model = make_decoder(num_layers=12)
        config = preset("rloo", activation_checkpointing=is_on)
        batch = make_batch((5, 3, 9, 4), 4, longest=60)
        watch = type(op_watch)()
        with watch:
            run_update(model, batch, config)
        peaks.append(watch.peak_bytes)
        heads.append(sum(any(33 in shape for shape in shapes) for _, shapes in watch.calls))
    assert peaks[1] < 0.5 * peaks[0], peaks
    assert heads[0] == heads[1] > 0


def test_the_memory_plan_knows(make_decoder: Make) -> None:
    config = make_decoder(num_layers=12).config
    assert activation_bytes_per_token(config, 4, recomputes=True) < 0.3 * activation_bytes_per_token(config, 4)
