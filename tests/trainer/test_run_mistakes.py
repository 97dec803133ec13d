"""What a person may do wrong, and what may go wrong on the way: one message, and nothing lost."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkgrpo.trainer import budget, instruments, run
from sparkgrpo.trainer.checkpoint import checkpoints
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.optim import MasterAdamW, OptimStats
from sparkgrpo.trainer.runlog import RunLog, read_run
from sparkgrpo.trainer.tasks import registry

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "cuontdown"}, "unknown task 'cuontdown': did you mean 'countdown'"),
        ({"task": "echo", "reward": "auto"}, "echo:0 is made of token ids .* expected a task with text"),
        ({"max_new_tokens": 500}, "countdown:.*: expected prompt and completion within the model's 512 positions"),
        ({"group_size": 65536, "max_new_tokens": 200}, "the run needs .* GiB can be used.* largest.* --group-size"),
        ({"tokens_per_micro_batch": 1 << 40}, "the run needs .* largest terms: activations of a micro-batch"),
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
    task = registry.make_task("countdown", registry.task_options(configured(tmp_path)))
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
    monkeypatch.setattr(instruments, "clock_error", lambda seconds: "the clock is at fault")
    recorded = record(tmp_path / "run").train(configured(tmp_path / "run", steps=1, beta=0.0))
    assert [row["text"] for row in recorded.rows("events") if row["event"] == "warning"] == ["the clock is at fault"]


def test_a_reward_that_breaks_later_is_counted_named_and_ends_the_run(
    configured: Make, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad step goes by; three in a row stop the run with a checkpoint, from which it goes on once mended."""
    config = configured(tmp_path / "run", eval_every=0)
    task_type = type(registry.make_task("countdown", registry.task_options(config)))
    original, calls = task_type.reward, []

    def reward(self: object, problems: list, completions: list) -> list:
        calls.append(len(completions))
        if len(calls) in (2, 4, 5, 6):
            raise RuntimeError(f"call {len(calls)} lost its way")
        return original(self, problems, completions)  # pyright: ignore[reportArgumentType]

    recorded = record(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(task_type, "reward", reward)
        message = r"after step 6: no completion could be scored 3 steps in a row; .*call 6 lost its way.* --resume"
        with pytest.raises(UserError, match=message):
            recorded.train(dataclasses.replace(config, steps=9))
    rows = recorded.rows("metrics")
    assert [row["frac_reward_error"] for row in rows] == [0, 1, 0, 1, 1, 1]
    assert [row["reward_mean"] is None for row in rows] == [False, True, False, True, True, True]
    assert rows[1]["num_updates"] == 0, "nobody takes part"
    warnings = [str(row["text"]) for row in recorded.rows("events") if row["event"] == "warning"]
    assert len(warnings) == 4 and "task countdown: no reward for 16 completions: RuntimeError('call 2" in warnings[0]
    assert [path.name for path in checkpoints(recorded.folder / "checkpoints")] == ["step_000006"]
    recorded.resume(steps=7)
    assert recorded.rows("metrics")[-1]["frac_reward_error"] == 0


def test_a_strict_check_that_breaks_at_the_last_evaluation_is_an_event(
    configured: Make, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path / "run", steps=1, beta=0.0)
    task_type = type(registry.make_task("countdown", registry.task_options(config)))
    original, calls = task_type.verify, []

    def verify(self: object, problem: object, completion: object) -> object:
        calls.append(problem)
        if len(calls) > config.eval_problems:
            raise RuntimeError("the check lost its way")
        return original(self, problem, completion)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(task_type, "verify", verify)
    recorded = record(tmp_path / "run").train(config)
    assert [row["accuracy"] for row in recorded.rows("evals")][-1] is None
    texts = sorted(str(row["text"]) for row in recorded.rows("events") if row["event"] == "warning")
    assert len(texts) == 2 and "no verdict for 16 of 16" in texts[0], "the step's own"
    assert "no verdict for 6 of 6 completions" in texts[1]


def test_a_reward_of_none_alone_is_named_where_it_ends_the_run(configured: Make, record: Make, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def nothing(completions):\n    return [None] * len(completions)\n")
    config = configured(tmp_path / "run", steps=4, beta=0.0, reward=f"{tmp_path}/mine.py:nothing")
    message = "no completion could be scored 3 steps in a row; the rewards were all None; mend the reward and go on"
    with pytest.raises(UserError, match=message):
        record(tmp_path / "run").train(config)


@pytest.mark.parametrize("bad_step", [1, 2])
def test_a_users_exception_is_a_sentence_and_its_traceback_is_an_event(
    configured: Make, record: Make, tmp_path: Path, bad_step: int
) -> None:
    (tmp_path / "mine.py").write_text(
        "def boom(completions, trainer_state):\n"
        f"    if trainer_state.global_step == {bad_step - 1}:\n"
        "        raise ValueError('my\\nbug')\n"
        "    return [0.5] * len(completions)\n"
    )
    recorded, said = record(tmp_path / "run"), "raised ValueError: my bug (mine.py line 3)"
    config = configured(tmp_path / "run", steps=2, beta=0.0, reward=f"{tmp_path}/mine.py:boom")
    if bad_step == 1:
        with pytest.raises(UserError) as caught:
            recorded.train(config)
        assert str(caught.value) == f"reward: boom {said} in step 1; mend it and start again"
    else:
        recorded.train(config)
        texts = [str(row["text"]) for row in recorded.rows("events") if row["event"] == "warning"]
        assert f"reward boom: no value for 16 of 16 completions; it {said}" in texts
    kept = [str(row["text"]) for row in recorded.rows("events") if row["event"] == "traceback"]
    assert len(kept) == 1 and kept[0].startswith("Traceback (most recent call last):\n  File ")


def test_a_reward_that_never_worked_keeps_its_traceback(
    configured: Make, record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path / "run")
    task_type = type(registry.make_task("countdown", registry.task_options(config)))
    monkeypatch.setattr(task_type, "reward", lambda self, problems, completions: completions[0].no_such_thing)
    with pytest.raises(AttributeError, match="no_such_thing"):
        record(tmp_path / "run").train(config)


def test_long_heldout_prompts_are_left_out_and_said_to_be(configured: Make, record: Make, tmp_path: Path) -> None:
    values = {"numbers": "2,3", "max_prompt_tokens": 57, "steps": 1, "beta": 0.0}
    with pytest.raises(UserError, match=r"countdown:\S+: held-out prompt \d+: expected at most max_prompt_tokens 57"):
        record(tmp_path / "a").train(configured(tmp_path / "a", **values))
    dropped = record(tmp_path / "b").train(configured(tmp_path / "b", long_prompts="drop", **values))
    (row, *_) = dropped.rows("evals")
    missing = 6 - row["num_problems"]
    assert 0 < missing < 6
    note = f"{missing} held-out problems are left out: their prompts are too long"
    assert note in dropped.view.notes
    found = run.evaluate_command(configured("", long_prompts="drop", **values))
    assert found["notes"] == [note] and found["num_problems"] == row["num_problems"]


def test_a_damaged_checkpoint_is_named_when_the_run_goes_on(configured: Make, record: Make, tmp_path: Path) -> None:
    one = record(tmp_path / "run").train(configured(tmp_path / "run", steps=4, checkpoint_every=2))
    (one.folder / "checkpoints" / "step_000004" / "model.safetensors").unlink()
    one.resume(steps=4)
    assert one.view.notes[1] == "step_000004 is damaged: model.safetensors is missing; going on from step_000002"
    assert one.view.steps == [3, 4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": "flash"}, "attention: flash-attn serves CUDA and bf16 alone"),
        ({"max_prompt_tokens": 3, "long_prompts": "drop"}, "all 6 held-out prompts are too long"),
    ],
)
def test_what_cannot_serve_is_refused_before_a_folder_is_made(
    configured: Make, record: Make, tmp_path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        record(tmp_path / "run").train(configured(tmp_path / "run", **values))
    assert not (tmp_path / "run").exists()
