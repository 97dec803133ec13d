"""Loggers: the guard, the names, and the real packages offline where they are installed."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.sinks import Sinks, check_sinks, make_sinks

RUN = {"run_id": "a run/0", "config": {"lr": 1e-3, "delta": None, "eps_high": "inf"}}
LINE = {
    "v": 1,
    "step": 2,
    "reward_mean": 0.5,
    "kl_mean": None,
    "num_right": [1],
    "loss": float("nan"),
    "reason/ok": 0.25,
}
EVALUATION = {"v": 1, "step": 2, "accuracy": 0.75, "right_bits": "ff"}


class Recorder:
    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.calls: list[tuple[object, ...]] = []

    def _call(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        if name == self.fails_in:
            raise ConnectionError("gone\x1b[2J")

    def open(self, run: Mapping[str, object]) -> None:
        self._call("open", run["run_id"])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("write", step, dict(metrics))

    def close(self) -> None:
        self._call("close")


def drive(sinks: Sinks) -> None:
    sinks.open(RUN)
    sinks.step(LINE)
    sinks.evaluation(EVALUATION)
    sinks.close()
    sinks.close()


def test_numbers_alone_are_passed_on() -> None:
    recorder = Recorder()
    drive(Sinks({"x": recorder}, warn=pytest.fail))
    assert recorder.calls == [
        ("open", "a run/0"),
        ("write", 2, {"reward_mean": 0.5, "reason/ok": 0.25}),
        ("write", 2, {"eval/accuracy": 0.75}),
        ("close",),
    ]


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_one_that_raises_is_switched_off_with_one_warning(where: str) -> None:
    broken, healthy, said = Recorder(where), Recorder(), []
    drive(Sinks({"broken": broken, "healthy": healthy}, warn=said.append))
    assert said == [
        "broken is switched off (ConnectionError: gone\\x1b[2J); the run goes on, its metrics.jsonl has everything"
    ]
    assert [call[0] for call in healthy.calls] == ["open", "write", "write", "close"]
    assert broken.calls[-1][0] == where and sum(call[0] == where for call in broken.calls) == 1


def test_names() -> None:
    assert check_sinks("") == []
    with pytest.raises(UserError, match="did you mean 'wandb'"):
        check_sinks("wandbb")


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"trackio is not installed; pip install 'sparkgrpo\[trackio\]'"):
        check_sinks("trackio")


def installed(name: str) -> None:
    pytest.importorskip(name, reason=f"the extra {name} is not installed")


def test_tensorboard(tmp_path: Path) -> None:
    installed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    said: list[str] = []
    drive(make_sinks("tensorboard", tmp_path, said.append))
    assert said == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"reward_mean", "reason/ok", "eval/accuracy"}
    (scalar,) = events.Scalars("eval/accuracy")
    assert (scalar.step, scalar.value) == (2, 0.75)


@pytest.mark.slow
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    installed("trackio")
    said: list[str] = []
    drive(make_sinks("trackio", tmp_path, said.append))
    assert said == []
    assert list((tmp_path / "trackio").glob("*sparkgrpo*")), sorted(tmp_path.rglob("*"))


@pytest.mark.slow
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    drive(make_sinks("wandb", tmp_path, said.append))
    assert said == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
