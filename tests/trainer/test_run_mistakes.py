"""What a person may do wrong, and what may go wrong on the way: one message, and nothing lost."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkgrpo.trainer import budget, run
from sparkgrpo.trainer.checkpoint import checkpoints
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.optim import MasterAdamW, OptimStats
from sparkgrpo.trainer.runlog import RunLog, read_run

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "cuontdown"}, "unknown task 'cuontdown': did you mean 'countdown'"),
        ({"task": "echo"}, "echo:0 is made of token ids .* expected a task with text"),
        ({"max_new_tokens": 500}, "countdown:.*: expected prompt and completion within the model's 512 positions"),
        ({"group_size": 65536, "max_new_tokens": 200}, "the run needs .* GiB can be used; largest: .* --group-size"),
        ({"tokens_per_micro_batch": 1 << 40}, "the run needs .* largest: activations of a micro-batch"),
        ({"eval_problems": 1000}, "eval_problems: 1000 held-out puzzles were asked for, but only"),
        ({"model": "no/such-folder"}, "no such folder"),
    ],
)
def test_a_persons_mistake_is_told_and_leaves_nothing(
    configured: Make,
    record: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, object],
    message: str,
) -> None:
    monkeypatch.setattr(budget, "usable_bytes", lambda device: 2 << 30)
    with pytest.raises(UserError, match=message):
        record(tmp_path / "run").train(configured(tmp_path / "run", **values))
    assert not (tmp_path / "run").exists()


def test_nothing_to_go_on_with(configured: Make, record: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: holds no complete checkpoint"):
        record(tmp_path).train(configured("", resume=str(tmp_path / "nowhere")))


def test_a_long_prompt_that_comes_later_is_named(
    configured: Make, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first prompts are looked at before the start."""
    monkeypatch.setattr(run, "PROMPTS_LOOKED_AT", 1)
    task = run.make_task("countdown", run.task_options(configured(tmp_path)))
    original = type(task).problems

    def problems(self: object, seed: int, start: int, count: int) -> list:
        found = original(self, seed, start, count)  # pyright: ignore[reportArgumentType]
        long = ({"role": "user", "content": "7 " * 600},)
        return [dataclasses.replace(p, prompt=long) if start + i == 5 else p for i, p in enumerate(found)]

    monkeypatch.setattr(type(task), "problems", problems)
    with pytest.raises(
        UserError, match=r"^countdown:\S+: training prompt 5: expected prompt and completion within the model's 512"
    ):
        record(tmp_path / "run").train(configured(tmp_path / "run"))
    assert read_run(tmp_path / "run")["status"] == "failed"


def test_one_writer(configured: Make, record: Make, tmp_path: Path) -> None:
    one = record(tmp_path / "run").train(configured(tmp_path / "run", steps=1))
    config = configured("", resume=str(tmp_path / "run"))
    message = "another process writes into this run"
    with RunLog.reopen(config, step=1, environment={}), pytest.raises(UserError, match=message):
        one.resume()


def test_a_run_whose_gradient_is_lost_stops_with_a_checkpoint(
    configured: Make, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates in a row; the weights saved are those of the last good update."""
    original = MasterAdamW.step

    def poisoned(optim: MasterAdamW, lr: float) -> OptimStats:
        if optim.adam.state:
            gradient = optim.masters["final_norm_D"].grad
            assert gradient is not None
            gradient.fill_(float("nan"))
        return original(optim, lr)

    monkeypatch.setattr(MasterAdamW, "step", poisoned)
    recorded = record(tmp_path / "run")
    message = r"after step 4: the gradient was not finite 3 times in a row; .* checkpoint is that of step 4"
    with pytest.raises(UserError, match=message):
        recorded.train(configured(tmp_path / "run"))
    rows = recorded.rows("metrics")
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 3]
    assert [row["grad_norm"] is None for row in rows] == [False, True, True, True]
    assert [path.name for path in checkpoints(recorded.folder / "checkpoints")] == ["step_000004"]
    assert read_run(recorded.folder)["status"] == "failed"


def test_weights_that_diverged_are_told(
    configured: Make, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MasterAdamW.step

    def ruined(optim: MasterAdamW, lr: float) -> OptimStats:
        stats = original(optim, lr)
        with torch.no_grad():
            optim.params["final_norm_D"].fill_(float("nan"))
        return stats

    monkeypatch.setattr(MasterAdamW, "step", ruined)
    with pytest.raises(UserError, match=r"after step 1: the logits .* not finite.* lower --lr"):
        record(tmp_path / "run").train(configured(tmp_path / "run", eval_every=0))


def test_a_clock_at_fault_is_an_event(
    configured: Make, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "clock_error", lambda seconds: "the clock is at fault")
    recorded = record(tmp_path / "run").train(configured(tmp_path / "run", steps=1, beta=0.0))
    assert [row["text"] for row in recorded.rows("events") if row["event"] == "warning"] == ["the clock is at fault"]
