"""Rates of real steps, and a run that ends in order when memory runs out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkgrpo.profiling.memory import MemoryLimits
from sparkgrpo.profiling.probe import Probe
from sparkgrpo.profiling.watchdog import MemoryFloorReached, MemoryWatchdog
from sparkgrpo.trainer import instruments
from sparkgrpo.trainer.batching import TrainBatch, micro_batches
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.instruments import MemoryGuard
from sparkgrpo.trainer.loop import GrpoLoop, StepResult
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.optim import MasterAdamW, OptimStats
from sparkgrpo.trainer.rates import RateMeter, micro_batch_flops, model_shape, probe_notes
from sparkgrpo.trainer.runlog import read_run

GIB = 1 << 30
PROBE = Probe(read_gbps=20.0, copy_gbps=15.0, product_tflops=0.1, cache_bytes=1 << 25)
SECONDS = {"t_train": 2.0}


def test_flops_of_what_ran(make_decoder: Callable[..., Decoder], make_batch: Callable[..., TrainBatch]) -> None:
    """Prompts once, however many completions share them; a split prompt runs again and counts again."""
    model, batch = make_decoder(), make_batch(prompt_lens=(5,), group_size=4)
    shape = model_shape(model, 33)
    weight = torch.ones(4, dtype=torch.float64)

    def flops(limit: int, rows: list[int]) -> int:
        return micro_batch_flops(shape, micro_batches(batch, weight, rows, tokens_per_micro_batch=limit, device="cpu"))

    num_tokens = sum(batch.length_S)
    pairs = 15 + sum(5 * n + n * (n + 1) // 2 for n in batch.length_S)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_width * pairs
    once = 2 * shape.layer_params * (5 + num_tokens) + 2 * 33 * shape.width * num_tokens + attention
    assert flops(10_000, [0, 1, 2, 3]) == 3 * once
    assert flops(1, [0, 1, 2, 3]) > flops(10_000, [0, 1, 2, 3])
    assert flops(10_000, [0]) < flops(10_000, [0, 1])


def test_rates_and_their_shares() -> None:
    found, faults = RateMeter("a CPU", PROBE).metrics({"decode_gbps": 5.0}, SECONDS, flops=10**11, step_bytes=10.0**9)
    assert found == {"train_tflops": 0.05, "frac_decode_roofline": 0.25, "frac_train_roofline": 0.5} and not faults


def test_without_a_count_or_a_probe_there_is_no_share() -> None:
    found, _ = RateMeter("a CPU", None).metrics({"decode_gbps": 5.0}, SECONDS, flops=0, step_bytes=1e9)
    assert set(found.values()) == {None}
    found, _ = RateMeter("a CPU", PROBE).metrics({"decode_gbps": None}, {"t_train": 0.0}, flops=0, step_bytes=None)
    assert set(found.values()) == {None}


def test_an_impossible_rate_is_told_once_and_not_reported() -> None:
    meter = RateMeter("NVIDIA GB10", replace(PROBE, read_gbps=230.0, product_tflops=92.0))
    for is_first in (True, False):
        found, faults = meter.metrics({"decode_gbps": 999.0}, SECONDS, flops=10**15, step_bytes=1e10)
        assert found["frac_decode_roofline"] is None and found["frac_train_roofline"] is None
        assert len(faults) == (2 if is_first else 0)
        assert found["train_tflops"] == 500.0


def test_notes_about_the_machine() -> None:
    assert probe_notes("a CPU", PROBE, PROBE) == []
    assert "not comparable" in probe_notes("a CPU", PROBE, replace(PROBE, read_gbps=5.0))[0]
    assert "this GB10 is slow right now" in probe_notes("NVIDIA GB10", PROBE, None)[0]


def test_a_step_is_dropped_before_its_first_update_and_finished_after_it() -> None:
    available = [50 * GIB]
    limits = MemoryLimits(available_bytes=0, reserve_bytes=0, floor_bytes=GIB, warning_bytes=2 * GIB)
    guard = MemoryGuard(torch.device("cpu"), MemoryWatchdog(limits, lambda: available[0]))
    guard.step_started()
    for phase in ("t_other", "t_gen", "t_train", "t_opt"):
        guard.entered(phase, None)
    available[0] = GIB // 2
    guard.entered("t_train", None)  # a second mini-batch: its weights have moved already
    guard.between_steps()
    guard.step_ended()
    assert guard.lowest_bytes == GIB // 2 and guard.num_warnings == 1
    guard.step_started()
    guard.entered("t_other", None)  # the line of the step before is being written
    with pytest.raises(MemoryFloorReached):
        guard.entered("t_gen", None)
    with pytest.raises(MemoryFloorReached):
        guard.between_steps()


def test_the_lowest_memory_is_that_of_the_step_and_not_of_its_end() -> None:
    available = [50 * GIB]
    limits = MemoryLimits(available_bytes=0, reserve_bytes=0, floor_bytes=GIB, warning_bytes=2 * GIB)
    guard = MemoryGuard(torch.device("cpu"), MemoryWatchdog(limits, lambda: available[0]))
    guard.step_started()
    for phase, now in (("t_gen", 40), ("t_train", 7), ("t_other", 45)):
        available[0] = now * GIB
        guard.entered(phase, None)
    guard.step_ended()
    guard.step_started()
    guard.entered("t_other", None)
    assert guard.lowest_of_last_step_bytes == 7 * GIB


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """MemAvailable of runs, as the test says."""
    found = {"available": 50 * GIB}

    class Watchdog(MemoryWatchdog):
        def __init__(self, limits: MemoryLimits) -> None:
            super().__init__(limits, lambda: found["available"])

    monkeypatch.setattr(instruments, "MemoryWatchdog", Watchdog)
    return found


def test_a_run_without_memory_saves_the_last_whole_step(
    configured: Callable[..., Config], tmp_path: Path, record: Callable[..., Any], meter: dict[str, int]
) -> None:
    """Memory falls while step 3 begins; what is resumed equals a run that was never stopped."""

    def at_step(step: int) -> None:
        meter["available"] = 0 if step == 2 else 50 * GIB

    stopped = record(tmp_path / "stopped", at_step).train(configured(tmp_path / "stopped", steps=4, eval_every=0))
    assert stopped.result.is_out_of_memory and stopped.result.is_stopped and stopped.result.steps == 2
    assert read_run(stopped.folder)["status"] == "stopped"
    texts = [str(row["text"]) for row in stopped.rows("events") if row["event"] == "warning"]
    assert any("memory fell below the floor of 0.5 GiB" in text and "was dropped" in text for text in texts)
    meter["available"] = 50 * GIB
    stopped.resume()
    whole = record(tmp_path / "whole").train(configured(tmp_path / "whole", steps=4, eval_every=0))
    assert not whole.result.is_out_of_memory
    assert stopped.hash_of(4) == whole.hash_of(4)


def test_memory_that_falls_in_an_update_ends_the_run_behind_that_step(
    configured: Callable[..., Config],
    tmp_path: Path,
    record: Callable[..., Any],
    meter: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is finished: its checkpoint and its line are both there."""
    plain, calls = MasterAdamW.step, []

    def falling(optim: MasterAdamW, lr: float) -> OptimStats:
        calls.append(lr)
        if len(calls) == 2:
            meter["available"] = 0
        return plain(optim, lr)

    monkeypatch.setattr(MasterAdamW, "step", falling)
    found = record(tmp_path / "fell").train(configured(tmp_path / "fell", steps=4, eval_every=0))
    assert found.result.is_out_of_memory and found.result.steps == 2
    assert [row["step"] for row in found.rows("metrics")] == [1, 2]
    assert (found.folder / "checkpoints" / "step_000002").is_dir()


def test_a_mistake_in_a_later_step_leaves_the_steps_before_it(
    configured: Callable[..., Config], tmp_path: Path, record: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GrpoLoop.step

    def mistaken(loop: GrpoLoop, step: int) -> StepResult:
        if step == 3:
            raise UserError("reward: mine gave 3 values for 4 completions")
        return plain(loop, step)

    monkeypatch.setattr(GrpoLoop, "step", mistaken)
    run = record(tmp_path / "mistaken")
    with pytest.raises(UserError, match=r"3 values for 4 completions; step 2 is saved: go on with --resume"):
        run.train(configured(tmp_path / "mistaken", steps=4, eval_every=0))
    assert (tmp_path / "mistaken" / "checkpoints" / "step_000002").is_dir()


def test_a_machine_too_full_for_the_probe_trains_all_the_same(
    configured: Callable[..., Config], tmp_path: Path, record: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(device: torch.device) -> Probe:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(instruments, "take_probe", full)
    found = record(tmp_path / "full").train(configured(tmp_path / "full", steps=1, eval_every=0))
    facts = read_run(found.folder)
    assert facts["status"] == "finished" and facts["probe_before"] is None and facts["probe_after"] is None
    assert found.rows("metrics")[0]["frac_train_roofline"] is None


def test_low_memory_is_an_event_and_a_metric(
    configured: Callable[..., Config], tmp_path: Path, record: Callable[..., Any], meter: dict[str, int]
) -> None:
    meter["available"] = 600 << 20  # above the floor of 512 MiB, below the warning of 640
    found = record(tmp_path / "low").train(configured(tmp_path / "low", steps=2, eval_every=0))
    assert not found.result.is_out_of_memory
    assert {row["mem_available_min_bytes"] for row in found.rows("metrics")} == {600 << 20}
    texts = [str(row["text"]) for row in found.rows("events") if row["event"] == "warning"]
    assert len([text for text in texts if "memory is short: 0.59 GiB were left" in text]) == 1


def test_metrics_of_a_real_run(six: Any) -> None:
    for row in six.rows("metrics"):
        assert row["train_tflops"] is None or 0 < row["train_tflops"] < 10
        assert row["frac_decode_roofline"] is None  # 50,000 parameters lie in any cache
        assert row["mem_available_min_bytes"] > 1 << 28 and row["sm_clock_mhz"] is None
        assert 0 <= row["t_train_backward"] <= row["t_train"]
