"""The optimiser against torch's, and what it adds: masters, skipped updates, schedules."""

import math
from collections.abc import Callable

import pytest
import torch

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.optim import MasterAdamW, learning_rate

CONFIG = Config(lr=1e-2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, max_grad_norm=0.5)


def give_gradients(model: torch.nn.Module, seed: int, size: float = 1.0) -> None:
    """Through autograd, so that hooks fire."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for parameter in model.parameters():
        direction = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        loss = loss + size * (parameter * direction).float().sum()
    loss.backward()


def test_equals_torch(make_decoder: Callable[..., Decoder]) -> None:
    """torch's AdamW after torch's clip, over steps whose norm is above and below the bound, at changing rates."""
    ours, theirs = make_decoder(), make_decoder()
    optim = MasterAdamW(ours, CONFIG)
    adam = torch.optim.AdamW(theirs.parameters(), betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False)
    for step, (size, lr) in enumerate([(1.0, 1e-2), (1e-3, 1e-3), (10.0, 1e-2), (1e-4, 5e-2)]):
        give_gradients(ours, step, size)
        give_gradients(theirs, step, size)
        stats = optim.step(lr)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adam.param_groups[0]["lr"] = lr
        adam.step()
        adam.zero_grad()
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-6) and not stats.is_skipped
        assert stats.frac_params_changed > 0.99
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
            assert a.grad is None


def test_an_infinite_bound_does_not_clip(make_decoder: Callable[..., Decoder]) -> None:
    model = make_decoder()
    optim = MasterAdamW(model, Config(max_grad_norm=math.inf))
    give_gradients(model, 0, 100.0)
    stats = optim.step(1e-3)
    total = math.sqrt(sum(float(state["exp_avg"].norm()) ** 2 for state in optim.adam.state.values()))
    assert total == pytest.approx(0.1 * stats.grad_norm, rel=1e-5)


def test_bf16_weights_follow_fp32_masters(make_decoder: Callable[..., Decoder]) -> None:
    """At a tiny rate plain bf16 weights would stand still; the masters add up what the weights cannot show yet."""
    model = make_decoder(dtype=torch.bfloat16)
    optim = MasterAdamW(model, Config(lr=1e-6))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        give_gradients(model, 0)
        stats = optim.step(1e-6)
    assert stats.frac_params_changed < 0.1
    for name, parameter in model.named_parameters():
        master = optim.masters[name]
        assert master.dtype == torch.float32 and parameter.dtype == torch.bfloat16
        assert parameter.equal(master.bfloat16())
        # Adam moves each weight by about the rate a step, whatever the gradient's size.
        torch.testing.assert_close(
            (master - start[name].float()).abs(), torch.full_like(master, 3e-6), rtol=0.5, atol=2e-7
        )
    give_gradients(model, 0)
    assert optim.step(1e-2).frac_params_changed > 0.9


def test_bf16_gradients_are_accumulated_in_fp32(make_decoder: Callable[..., Decoder]) -> None:
    """256 + 1 + 1 is 258 in fp32 and 256 in bf16."""
    model = make_decoder(dtype=torch.bfloat16)
    optim = MasterAdamW(model, Config(max_grad_norm=math.inf))
    for value in (256.0, 1.0, 1.0):
        (value * model.final_norm_D.float().sum()).backward()
        assert model.final_norm_D.grad is None
    gradient = optim.masters["final_norm_D"].grad
    assert gradient is not None and gradient.dtype == torch.float32 and gradient.unique().tolist() == [258.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_written_in_place(make_decoder: Callable[..., Decoder], dtype: torch.dtype) -> None:
    model = make_decoder(dtype=dtype)
    optim = MasterAdamW(model, CONFIG)
    pointers = [p.data_ptr() for p in model.parameters()]
    before = [p.clone() for p in model.parameters()]
    give_gradients(model, 0)
    optim.step(1e-2)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not any(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(
    make_decoder: Callable[..., Decoder], dtype: torch.dtype, bad: float
) -> None:
    model = make_decoder(dtype=dtype)
    optim = MasterAdamW(model, CONFIG)
    give_gradients(model, 0)
    optim.step(1e-2)
    before = [p.detach().clone() for p in (*model.parameters(), *optim.masters.values())]
    moments = [value.clone() for state in optim.adam.state.values() for value in state.values()]
    for expected in (1, 2):
        give_gradients(model, 1)
        (bad * model.final_norm_D.float().sum()).backward()
        stats = optim.step(1e-2)
        assert stats.is_skipped and not math.isfinite(stats.grad_norm) and stats.frac_params_changed == 0.0
        assert optim.skipped_steps == optim.skipped_in_a_row == expected
    after = [*model.parameters(), *optim.masters.values()]
    assert all(p.equal(old) for p, old in zip(after, before, strict=True))
    moments_now = [value for state in optim.adam.state.values() for value in state.values()]
    assert all(value.equal(old) for value, old in zip(moments_now, moments, strict=True))
    give_gradients(model, 1)  # the bad gradient is gone
    assert not optim.step(1e-2).is_skipped
    assert (optim.skipped_steps, optim.skipped_in_a_row) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_changed_weight_is_counted(make_decoder: Callable[..., Decoder], dtype: torch.dtype) -> None:
    """Every third row of an embedding moves; the other tensor stands still for want of a gradient."""
    model = make_decoder(vocab_size=1 << 13, width=32, num_layers=0, dtype=dtype)
    optim = MasterAdamW(model, Config(max_grad_norm=math.inf))
    mask = torch.arange(1 << 13) % 3 == 0
    (model.embed_VD.float() * mask[:, None]).sum().backward()
    num_weights = sum(p.numel() for p in model.parameters())
    assert optim.step(1e-1).frac_params_changed == int(mask.sum()) * 32 / num_weights


def test_a_master_that_missed_a_step_keeps_its_own_count(make_decoder: Callable[..., Decoder]) -> None:
    """As torch does: the bias corrections of a tensor are of its own updates."""
    ours, theirs = make_decoder(), make_decoder()
    optim = MasterAdamW(ours, Config(max_grad_norm=math.inf))
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    for model in (ours, theirs):
        model.final_norm_D.sum().backward()
    optim.step(1e-2)
    adam.step()
    for model in (ours, theirs):
        model.zero_grad()
        give_gradients(model, 0)
    optim.step(1e-2)
    adam.step()
    assert {int(state["step"]) for state in optim.adam.state.values()} == {1, 2}
    assert all(a.equal(b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_torch_on_the_cpu(make_decoder: Callable[..., Decoder], dtype: torch.dtype) -> None:
    """clip_grad_norm_ and the fused AdamW of torch: a run goes on bit for bit from what either has written."""
    ours, theirs = make_decoder(dtype=dtype), make_decoder(dtype=dtype)
    optim = MasterAdamW(ours, CONFIG)
    masters = [torch.nn.Parameter(p.detach().float()) for p in theirs.parameters()]
    adam = torch.optim.AdamW(masters, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=True)
    for step, (size, lr) in enumerate([(1.0, 1e-2), (1e-3, 1e-3), (10.0, 1e-2)]):
        give_gradients(ours, step, size)
        give_gradients(theirs, step, size)
        for master, p in zip(masters, theirs.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        stats = optim.step(lr)
        assert stats.grad_norm == float(torch.nn.utils.clip_grad_norm_(masters, 0.5))
        adam.param_groups[0]["lr"] = lr
        adam.step()
        with torch.no_grad():
            for p, master in zip(theirs.parameters(), masters, strict=True):
                p.copy_(master)
        assert all(a.equal(b) for a, b in zip(optim.masters.values(), masters, strict=True))
        assert all(a.equal(b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        for ours_state, theirs_state in zip(optim.adam.state.values(), adam.state.values(), strict=True):
            assert all(ours_state[key].equal(theirs_state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_the_kernel(
    make_decoder: Callable[..., Decoder], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the CPU to a few roundings; a gradient that is not finite is refused before the host knows of it."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    models = [make_decoder(dtype=dtype) for _ in range(2)]
    optims = [MasterAdamW(model, CONFIG) for model in models]
    for step, bad in enumerate((1.0, math.inf, 1.0)):
        stats = []
        for is_triton, model, optim in zip((False, True), models, optims, strict=True):
            monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda _, is_triton=is_triton: is_triton)
            give_gradients(model, step)
            (bad * model.final_norm_D.float().sum()).backward()
            stats.append(optim.step(1e-2))
        assert stats[0].grad_norm == stats[1].grad_norm and stats[0].is_skipped == stats[1].is_skipped == (step == 1)
        # Each side cuts or rounds bf16 its own way in the interpreter, which shifts what counts as changed a little.
        assert stats[0].frac_params_changed == pytest.approx(stats[1].frac_params_changed, abs=0.02)
    for a, b in zip(*(optim.masters.values() for optim in optims), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def rates(**values: object) -> list[float]:
    config = Config(**values)  # pyright: ignore[reportArgumentType]
    return [learning_rate(config, step) for step in range(1, config.steps + 1)]


def test_schedules() -> None:
    assert rates(lr=0.5, steps=3) == [0.5] * 3
    assert rates(lr=1.0, steps=4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(lr=1.0, steps=6, warmup_steps=2, lr_schedule="linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    cosine = rates(lr=1.0, steps=6, warmup_steps=2, lr_schedule="cosine")
    assert cosine == pytest.approx([0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert rates(lr=1.0, steps=2, warmup_steps=4) == [0.25, 0.5]  # constant, and never warm: allowed
