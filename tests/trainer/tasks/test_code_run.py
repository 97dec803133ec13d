"""A whole run on the code task, from the command line, with the model that ships and without a network."""

import json
import socket
from pathlib import Path

import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.tasks.sandbox import self_test

pytestmark = pytest.mark.walls

TEXT = (
    "--task code --device cpu --model embedded --plain --num-threads 1 "
    "--prompts-per-step 2 --group-size 4 --max-new-tokens 64 --eval-problems 4"
)
OPTIONS = TEXT.split()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_three_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the run asked for a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    run = tmp_path / "run"
    assert main(["train", *OPTIONS, "--steps", "3", "--run-dir", str(run)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["steps"] == 3
    assert "sandbox strict: Landlock ABI" in captured.out + captured.err
    header = json.loads((run / "run.json").read_text())
    assert header["sandbox"]["level"] == "strict" and header["sandbox"]["landlock_abi"] >= 1
    assert {"landlock", "seccomp", "rlimits"} <= set(header["sandbox"]["layers"])
    steps = lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert sum(value for key, value in step.items() if key.startswith("reason/")) == pytest.approx(1.0)
        assert step["part/pass_gap"] == pytest.approx(step["part/pass_visible"] - step["part/pass_hidden"])
    assert all(sample["reason"] and "|" in sample["detail"] for sample in lines(run / "samples.jsonl"))


def test_without_walls_the_run_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(self_test.PROBES, "do what is allowed", ("landlock", "os.getpid()"))
    run = tmp_path / "run"
    assert main(["train", *OPTIONS, "--steps", "1", "--run-dir", str(run)]) == 2
    message = capsys.readouterr().err
    assert "layer landlock does not hold" in message and "--unsafe-sandbox" in message
    assert not run.exists()


def test_no_walls_without_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *OPTIONS, "--sandbox", "basic"]) == 2
    assert "--unsafe-sandbox" in capsys.readouterr().err
