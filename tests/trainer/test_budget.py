"""The memory plan on machines of any size: what is chosen, what is refused, and that the terms bound the truth."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparkgrpo.kernels.prefix_attention import prefix_attention, tree_layout
from sparkgrpo.profiling import memory
from sparkgrpo.trainer import budget
from sparkgrpo.trainer.budget import MemoryPlan, activation_bytes_per_token, plan_evaluation, plan_training
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.model.decoder import Decoder, decoder_hidden, rotated

GIB = 1 << 30
CONFIG = Config(prompts_per_step=4, group_size=8, max_new_tokens=100, eval_problems=20)


def plan(model: Decoder, usable: int | None, **values: object) -> MemoryPlan:
    return plan_training(replace(CONFIG, **values), model, num_valid=33, longest_prompt=60, usable=usable)  # pyright: ignore


def test_all_rows_decode_together_where_there_is_room(make_decoder: Callable[..., Decoder]) -> None:
    model = make_decoder()
    num_params = sum(p.numel() for p in model.parameters())
    found = plan(model, 8 * GIB)
    assert found.max_rows == 32 and plan(model, 8 * GIB, eval_problems=77).max_rows == 77
    assert found.terms["gradients, moments and masters"] == 12 * num_params
    assert found.terms["reference (beta above 0)"] == 4 * num_params
    assert plan(model, 8 * GIB, beta=0.0).terms["reference (beta above 0)"] == 0
    assert found.terms["keys and values while decoding"] == 32 * (2 * 2 * 2 * 8 * 4 * 160 + 16 * 33)
    bf16 = plan(make_decoder(dtype=torch.bfloat16), 8 * GIB)
    assert bf16.terms["gradients, moments and masters"] == 16 * num_params
    assert bf16.terms["reference (beta above 0)"] == 2 * num_params


def test_micro_batch_from_the_memory_there_is(make_decoder: Callable[..., Decoder]) -> None:
    """A quarter of what is left, within the constants of the module; or what was asked for."""
    model = make_decoder(num_layers=24, width=256, num_heads=8, head_width=32, ffn_width=1024)
    token_bytes = activation_bytes_per_token(model.config, 4)
    fixed = 16 * sum(p.numel() for p in model.parameters()) + plan(model, 64 * GIB).terms["head"]
    assert plan(model, 64 * GIB).tokens_per_micro_batch == budget.MAX_ACTIVATION_BYTES // token_bytes
    assert plan(model, 2 * GIB).tokens_per_micro_batch == (2 * GIB - fixed) // 4 // token_bytes
    assert plan(make_decoder(), 64 * GIB).tokens_per_micro_batch == budget.MAX_MICRO_BATCH_TOKENS
    assert plan(model, fixed + 1024 * token_bytes).tokens_per_micro_batch == budget.MIN_MICRO_BATCH_TOKENS
    assert plan(model, 64 * GIB, tokens_per_micro_batch=12).tokens_per_micro_batch == 12
    assert plan(model, 64 * GIB, tokens_per_micro_batch=12).terms["activations of a micro-batch"] == 160 * token_bytes


def test_fewer_rows_where_memory_is_short(make_decoder: Callable[..., Decoder]) -> None:
    """Waves of whole groups: at least one group of 8 must fit."""
    model = make_decoder()
    row = plan(model, 8 * GIB).terms["keys and values while decoding"] // 32
    fixed = sum(plan(model, 8 * GIB, tokens_per_micro_batch=256).terms.values()) - 32 * row
    assert plan(model, fixed + 13 * row + 5, tokens_per_micro_batch=256).max_rows == 13
    assert plan(model, fixed + 8 * row, tokens_per_micro_batch=256).max_rows == 8
    with pytest.raises(UserError):
        plan(model, fixed + 8 * row - 1, tokens_per_micro_batch=256)


def test_what_cannot_fit_is_refused_with_numbers_and_options(make_decoder: Callable[..., Decoder]) -> None:
    with pytest.raises(UserError) as caught:
        plan(make_decoder(), GIB // 2, max_new_tokens=10_000_000)
    message = str(caught.value)
    rows = 8 * (2 * 2 * 2 * 8 * 4 * 10_000_060 + 16 * 33) / GIB
    assert "GiB and 0.50 GiB can be used; largest: activations of a micro-batch" in message
    assert f"GiB, keys and values while decoding {rows:.2f} GiB, completions of a batch" in message
    for option in ("--max-new-tokens", "--group-size", "--tokens-per-micro-batch", "--beta 0"):
        assert option in message


def test_a_micro_batch_that_was_asked_for_and_cannot_fit(make_decoder: Callable[..., Decoder]) -> None:
    with pytest.raises(UserError, match="largest: activations of a micro-batch"):
        plan(make_decoder(), 4 * GIB, tokens_per_micro_batch=10_000_000)


def test_a_machine_that_does_not_say_refuses_nothing(
    make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "usable_bytes", lambda device: None)
    found = plan(make_decoder(), None)
    assert found.max_rows == 32 and found.tokens_per_micro_batch == budget.MAX_MICRO_BATCH_TOKENS


def test_the_machine_is_asked(make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 0)
    with pytest.raises(UserError, match=r"0\.00 GiB can be used"):
        plan(make_decoder(), None)


def test_evaluation_needs_rows_alone(make_decoder: Callable[..., Decoder]) -> None:
    """A model too large to be trained here may still be evaluated."""
    model = make_decoder()
    row = 2 * 2 * 2 * 8 * 4 * 160 + 16 * 33
    plan_of = {
        rows: plan_evaluation(CONFIG, model, num_valid=33, longest_prompt=60, usable=rows * row) for rows in (3, 99)
    }
    assert plan_of[3].max_rows == 3 and plan_of[99].max_rows == 20
    with pytest.raises(UserError, match="lower --max-new-tokens, or take a smaller model"):
        plan_evaluation(CONFIG, model, num_valid=33, longest_prompt=60, usable=row - 1)


@pytest.mark.parametrize("shape", [{}, {"num_layers": 3, "width": 64, "num_kv_heads": 4, "ffn_width": 200}])
def test_activations_are_an_upper_bound_and_no_tale(
    make_decoder: Callable[..., Decoder], shape: dict[str, int]
) -> None:
    """What autograd really saves of the decoder, parameters aside, is at most the reckoning, and more than a half."""
    model = make_decoder(**shape)
    layout = tree_layout([50, 40], [30] * 8, [0] * 4 + [1] * 4)
    saved: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        hidden = decoder_hidden(
            model,
            torch.zeros(layout.num_tokens, dtype=torch.int64),
            torch.arange(layout.num_tokens),
            lambda _, qk, v, rope: prefix_attention(*rotated(qk, rope, model.config.num_heads), v, layout),
        )
    assert hidden.requires_grad
    measured = sum(saved.values()) / layout.num_tokens
    reckoned = activation_bytes_per_token(model.config, 4)
    assert 0.5 * reckoned < measured <= reckoned


def test_a_batch_that_no_number_of_waves_makes_possible(make_decoder: Callable[..., Decoder]) -> None:
    """10^8 completions of 300 tokens would decode wave by wave, for days, and then not fit on the host."""
    with pytest.raises(UserError, match=r"largest: completions of a batch 1788\.14 GiB, .*lower --prompts-per-step"):
        plan(make_decoder(), 64 * GIB, prompts_per_step=100_000, group_size=1000, max_new_tokens=300)
