"""Going on with a run, bit for bit, and stopping it by a signal."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.trainer import cli
from sparkgrpo.trainer.checkpoint import checkpoints
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.loop import StepResult
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.runlog import RunLog, read_run

Make = Callable[..., Any]
TIMES = {"t_unix_s", "tok_per_s", "decode_gbps", "mem_peak_bytes", "t_step", "t_unaccounted", *PHASES}
TIMES |= {"t_gen_prefill", "t_gen_decode", "t_train_backward", "train_tflops", "frac_train_roofline"}
TIMES |= {"frac_decode_roofline", "mem_available_min_bytes"}


def results(steps: list[StepResult]) -> list[tuple[list[tuple[int, ...]], list[float | None], list[float]]]:
    return [([c.token_ids for c in s.completions], [x.reward for x in s.scores], list(s.advantages)) for s in steps]


def test_three_resume_three_is_six_bit_for_bit(six: Any, configured: Make, record: Make, tmp_path: Path) -> None:
    """Tokens, rewards, weights and every logged number but the times; counters go on."""
    split = record(tmp_path / "split").train(configured(tmp_path / "split", steps=3, checkpoint_every=2))
    split.resume(steps=6)
    assert results(split.steps) == results(six.steps)
    assert split.hash_of(6) == six.hash_of(6) != six.hash_of(4)
    rows, expected = (
        [{k: v for k, v in row.items() if k not in TIMES} for row in r.rows("metrics")] for r in (split, six)
    )
    assert rows == expected
    by_step = {row["step"]: row for row in split.rows("evals")}
    assert all(by_step[row["step"]] == row for row in six.rows("evals"))
    assert split.result is not None and six.result is not None
    assert (split.result.eval_before, split.result.steps) == (six.result.eval_before, 6)
    assert split.view.facts["first_step"] == 4
    assert [row["event"] for row in split.rows("events")].count("resume") == 1
    assert read_run(split.folder)["status"] == "finished"


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "bf16"},
        {"inner_epochs": 2, "mini_batches": 2, "lr_schedule": "cosine", "beta": 0.0},
        {"dynamic_sampling": True, "max_rounds": 2, "overlong_cache": 0.5},
        {"sync_every": 1, "sync_mix": 0.5, "beta": 0.5},
        {"max_prompt_tokens": 57, "long_prompts": "drop", "numbers": "2,3"},
        {"importance_cap": 2.0, "activation_checkpointing": True, "ddof": 1},
    ],
)
def test_one_resume_one_is_two(configured: Make, record: Make, tmp_path: Path, values: dict[str, object]) -> None:
    """With masters behind bf16 weights; with several updates a step and a rate that falls.

    With groups replaced, so that the stream of problems is ahead; with a moving reference; with prompts passed over.
    """
    whole = record(tmp_path / "whole").train(configured(tmp_path / "whole", steps=2, checkpoint_every=1, **values))
    split = record(tmp_path / "split").train(configured(tmp_path / "split", steps=2, checkpoint_every=1, **values))
    for name in ("metrics.jsonl", "checkpoints/step_000002"):  # as if it had been killed after step 1
        path = split.folder / name
        shutil.rmtree(path) if path.is_dir() else path.write_text(path.read_text().split("\n")[0] + "\n")
    split.steps.clear()
    split.resume()
    if "dynamic_sampling" in values or "long_prompts" in values:
        first = whole.rows("metrics")[0]
        assert first["num_rounds"] > 1 or first["num_prompts_dropped"] > 0, "else nothing was shown"
    assert results(split.steps) == results(whole.steps)[1:]
    assert split.hash_of(2) == whole.hash_of(2) != whole.hash_of(1)
    rows, expected = (
        [{k: v for k, v in row.items() if k not in TIMES} for row in r.rows("metrics")] for r in (split, whole)
    )
    assert rows == expected


def test_counters_go_on(configured: Make, record: Make, tmp_path: Path) -> None:
    """Skipped updates, and reasons that no step after the resume shows."""
    one = record(tmp_path / "one").train(configured(tmp_path / "one", steps=1))
    path = one.folder / "checkpoints" / "step_000001" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"skipped_steps": 5, "seen_reasons": ["rare"]}))
    one.resume(steps=2)
    assert [(row["skipped_steps"], row.get("reason/rare")) for row in one.rows("metrics")] == [(0, None), (5, 0.0)]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_with_no_step_left_is_refused_and_stays_as_it_is(
    configured: Make, record: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run, and one that was stopped and evaluated; they go on with more steps."""
    one = record(tmp_path / "one").train(configured(tmp_path / "one", steps=2, eval_every=0, beta=0.0))
    assert not (one.folder / "checkpoints" / "reference").exists()
    before = content_of(one.folder)
    for options in ({}, {"steps": 2}, {"steps": 1}):
        with pytest.raises(UserError, match=r"steps: .*one has done, got \d; it is at step 2 of 2: .* --steps 4$"):
            one.resume(**options)
    assert cli.main(["train", "--resume", str(one.folder), "--steps", "1"]) == 2
    assert "it is at step 2 of 2" in capsys.readouterr().err
    assert content_of(one.folder) == before
    stopped = record(tmp_path / "stopped", stop_at(2)).train(configured(tmp_path / "stopped", steps=4))
    before = content_of(stopped.folder)
    for steps in (1, 2):
        with pytest.raises(UserError, match="it is at step 2 of 4"):
            stopped.resume(steps=steps)
    assert content_of(stopped.folder) == before


def test_a_run_that_died_before_its_end_is_ended(configured: Make, record: Make, tmp_path: Path) -> None:
    """Its last step is saved and evaluated, run.json says running: only the end is left. Then nothing is."""
    one = record(tmp_path / "one").train(configured(tmp_path / "one", steps=1, beta=0.0))
    path = one.folder / "run.json"
    path.write_text(json.dumps(read_run(one.folder) | {"status": "running"}))
    one.resume()
    assert one.view.steps == one.view.evaluations == [] and read_run(one.folder)["status"] == "finished"
    with pytest.raises(UserError, match="it is at step 1 of 1"):
        one.resume()


def test_seconds_add_up_over_sessions(configured: Make, record: Make, tmp_path: Path) -> None:
    """Also over one that was killed: up to its last checkpoint."""
    seen: list[object] = []
    folder = tmp_path / "one"
    one = record(folder, lambda step: seen.append(read_run(folder).get("wall_s")))
    one.train(configured(folder, steps=2, checkpoint_every=1, beta=0.0))
    first, ended = one.result.wall_s, read_run(folder)
    assert isinstance(seen[-1], float) and 0 < seen[-1] < first == ended["wall_s"]
    (folder / "run.json").write_text(json.dumps(ended | {"wall_s": 1000.0}))
    one.resume(steps=3)
    assert 1000 < one.result.wall_s < 1100 and read_run(folder)["wall_s"] == one.result.wall_s


def test_other_heldout_problems_are_refused_before_anything_is_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed data file would put the accuracy on some problems beside that on others."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"question": f"What is {n} and {n}?", "answer": f"{2 * n}"}) for n in range(12)]
    Path("train.jsonl").write_text("\n".join(rows[:8]))
    Path("test.jsonl").write_text("\n".join(rows[8:]))
    options = (
        "--device cpu --run-dir r --steps 1 --task rows --data train.jsonl --prompt-column question --answer-column "
        "answer --prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-problems 3"
    )
    assert cli.main(["train", "--model", str(tiny_folder), *options.split()]) == 0
    before = content_of(Path("r"))
    Path("test.jsonl").write_text("\n".join(rows[8:]).replace("What is", "How much is"))
    assert cli.main(["train", "--resume", "r", "--steps", "2"]) == 2
    message = "task: expected the held-out problems that r was evaluated on, got others; put the data of that time back"
    assert message in capsys.readouterr().err and content_of(Path("r")) == before
    Path("test.jsonl").write_text("\n".join(rows[8:]))
    assert cli.main(["train", "--resume", "r", "--steps", "2"]) == 0


def stop_at(step: int, signum: int = signal.SIGINT) -> Callable[[int], None]:
    return lambda now: os.kill(os.getpid(), signum) if now == step else None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(
    six: Any, configured: Make, record: Make, tmp_path: Path, signum: int
) -> None:
    """While step 2 is shown, when nothing would have been saved by itself; the run then goes on as if never stopped."""
    config = configured(tmp_path / "run")
    handler = signal.getsignal(signum)
    stopped = record(tmp_path / "run", stop_at(2, signum)).train(config)
    assert signal.getsignal(signum) == handler
    result = stopped.result
    assert result is not None and result.is_stopped and result.steps == 2 and stopped.view.steps == [1, 2]
    assert result.eval_after == six.rows("evals")[1]["accuracy"]  # that of step 2, which was due
    assert read_run(stopped.folder)["status"] == "stopped"
    stopped.resume(steps=4)
    assert results(stopped.steps) == results(six.steps)[:4] and stopped.hash_of(4) == six.hash_of(4)


def test_a_stop_does_not_wait_for_an_evaluation(configured: Make, record: Make, tmp_path: Path) -> None:
    stopped = record(tmp_path / "run", stop_at(1)).train(configured(tmp_path / "run"))
    assert stopped.result is not None and stopped.result.eval_after is None and stopped.view.evaluations == [0]
    assert [path.name for path in checkpoints(stopped.folder / "checkpoints")] == ["step_000001"]
    stopped.resume(steps=1)  # nothing is left to train, but the accuracy is still to be known
    assert stopped.view.evaluations == [1] and stopped.result.eval_after is not None
    with pytest.raises(UserError, match="it is at step 1 of 1"):  # once is enough
        stopped.resume()


def test_a_signal_before_the_first_step(six: Any, configured: Make, record: Make, tmp_path: Path) -> None:
    stopped = record(tmp_path / "run", stop_at(0)).train(configured(tmp_path / "run", steps=1))
    assert stopped.result is not None and stopped.result.steps == 0 and stopped.steps == []
    stopped.resume()
    assert results(stopped.steps) == results(six.steps)[:1] and stopped.view.evaluations == [1]


def test_a_second_signal_interrupts_at_once(configured: Make, record: Make, tmp_path: Path) -> None:
    def twice(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "run", twice).train(configured(tmp_path / "run"))
    assert read_run(tmp_path / "run")["status"] == "stopped"


def test_command_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line is one JSON object; Ctrl-C says how to go on, and that command works."""
    monkeypatch.chdir(tmp_path)
    original = RunLog.metrics

    def interrupted(log: RunLog, line: Mapping[str, object]) -> None:
        original(log, line)
        os.kill(os.getpid(), signal.SIGINT)

    options = (
        "--device cpu --run-dir r --steps 2 --numbers 2 --reward sloppy --prompts-per-step 2 --group-size 2 "
        "--max-new-tokens 4 --eval-problems 3"
    )
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "metrics", interrupted)
        assert cli.main(["train", "--model", str(tiny_folder), *options.split()]) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert lines[-2] == "stopped after step 1, saved; go on with: sparkgrpo train --resume r"
    summary = json.loads(lines[-1])
    assert summary.keys() == {"run_dir", "steps", "eval_before", "eval_after", "wall_s"}
    assert (summary["run_dir"], summary["steps"]) == ("r", 1)
    assert cli.main(lines[-2].split("sparkgrpo ")[1].split()) == 0
    summary = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    assert summary["steps"] == 2 and isinstance(summary["eval_after"], float) and summary["wall_s"] > 0
