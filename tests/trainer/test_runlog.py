"""The run folder: whole lines, one writer, nothing private, nothing non-finite."""

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.runlog import RunLog, read_jsonl, read_run

ENVIRONMENT = {"git": None, "versions": {"python": "3"}, "hardware": {}, "boot_id": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def create(folder: Path, **settings: object) -> RunLog:
    config = Config(run_dir=str(folder), **settings)  # type: ignore[arg-type]
    return RunLog.create(config, user_set={"lr": 0.5}, environment=ENVIRONMENT)


def test_run_json_says_what_ran_and_how_it_ended(folder: Path) -> None:
    with create(folder, seed=3, eps_high=math.inf) as log:
        assert read_run(folder)["status"] == "running"
        log.update({"model": {"name": "embedded"}})
        log.finish("finished", {"eval_after": 0.5})
    run = read_run(folder)
    assert (run["v"], run["run_id"], run["status"], run["seed"], run["task"]) == (1, "a", "finished", 3, "countdown")
    assert (run["model"], run["eval_after"], run["user_set"]) == ({"name": "embedded"}, 0.5, {"lr": 0.5})
    assert run["config"]["eps_high"] == "inf"  # type: ignore[index]
    assert run["pid"] == os.getpid() and len(str(run["config_sha256"])) == 64
    assert [row["event"] for row in read_jsonl(folder / "events.jsonl")] == ["start", "stop"]
    assert not (folder / "run.json.tmp").exists()


def test_a_full_disk_leaves_no_half_run_json(
    folder: Path, small_files: Callable[[int], AbstractContextManager[None]]
) -> None:
    with create(folder) as log:
        before = (folder / "run.json").read_bytes()
        with small_files(10), pytest.raises(UserError, match="cannot write"):
            log.update({"model": {"name": "embedded"}})
        assert (folder / "run.json").read_bytes() == before and not (folder / "run.json.tmp").exists()


def test_home_folder_is_not_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sparkgrpo", "train", "--model", f"{tmp_path}/models/a"])
    with create(folder, model=f"{tmp_path}/models/a") as log:
        log.event("warning", {"path": f"{tmp_path}/x"})
        log.finish("finished", {})
    for name in ("run.json", "events.jsonl"):
        assert str(tmp_path) not in (folder / name).read_text()
    assert read_run(folder)["command"] == ["sparkgrpo", "train", "--model", "~/models/a"]


def test_lines_are_written_at_once(folder: Path) -> None:
    with create(folder) as log:
        log.metrics({"step": 1, "reward_mean": 0.25})
        assert read_jsonl(folder / "metrics.jsonl") == [{"v": 1, "num_nonfinite": 0, "step": 1, "reward_mean": 0.25}]


def test_non_finite_becomes_null_and_is_counted(folder: Path) -> None:
    with create(folder) as log:
        log.metrics({"step": 1, "kl_mean": math.nan, "kl_max": math.inf, "num_right": [1, 2], "x": {"y": [-math.inf]}})
    line = (folder / "metrics.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    row = json.loads(line)
    assert (row["kl_mean"], row["kl_max"], row["num_right"], row["x"]) == (None, None, [1, 2], {"y": [None]})
    assert (row["num_nonfinite"], row["nonfinite"]) == (3, ["kl_mean", "kl_max", "x.y[0]"])


def test_hostile_text_is_inert_in_the_file(folder: Path) -> None:
    text = "\x1b[2J \u202e \x9b \ud800 \u2028 ok"
    with create(folder) as log:
        log.sample({"step": 1, "completion": text})
    raw = (folder / "samples.jsonl").read_bytes()
    assert raw.isascii() and not any(byte < 32 for byte in raw[:-1])
    assert read_jsonl(folder / "samples.jsonl")[0]["completion"] == text


def test_long_completions_keep_head_and_tail(folder: Path) -> None:
    with create(folder) as log:
        log.sample({"completion": "a" * 5000 + "z" * 5000})
        log.sample({"completion": "b" * 4000})
    long, exact = (str(row["completion"]) for row in read_jsonl(folder / "samples.jsonl"))
    assert long == "a" * 2000 + " [... 6000 characters ...] " + "z" * 2000
    assert exact == "b" * 4000


def test_half_last_line_is_left_alone_and_cut_on_resume(folder: Path) -> None:
    with create(folder) as log:
        log.metrics({"step": 1})
        log.finish("stopped", {})
    path = folder / "metrics.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"v":1,"step":2,"rew')
    assert [row["step"] for row in read_jsonl(path)] == [1]
    with RunLog.reopen(Config(resume=str(folder), steps=9), step=1, environment=ENVIRONMENT) as log:
        log.metrics({"step": 2})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
    assert read_run(folder)["config"]["steps"] == 9  # type: ignore[index]
    assert [row["event"] for row in read_jsonl(folder / "events.jsonl")] == ["start", "stop", "resume"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json\n", "log.jsonl:1: not JSON"),
        (b'{"v":1}\n\xff\n', "log.jsonl:2: not JSON"),
        (b'{"v":2}\n', "written by a newer sparkgrpo"),
        (b"[1]\n", 'expected JSON objects with a version "v"'),
    ],
)
def test_broken_logs_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "log.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_jsonl(tmp_path / "log.jsonl")
    with pytest.raises(UserError, match="cannot read it"):
        read_jsonl(tmp_path / "missing.jsonl")


def test_a_new_run_needs_a_new_folder(folder: Path) -> None:
    create(folder).close()
    with pytest.raises(UserError, match=r"is not empty; choose another --run-dir, or .* --resume"):
        create(folder)
    file = folder.parent / "file"
    file.write_text("")
    with pytest.raises(UserError, match="is a file"):
        create(file)
    with pytest.raises(UserError, match="is a file"):
        create(file / "below" / "it")
    empty = folder.parent / "empty"
    empty.mkdir()
    create(empty).close()


def test_a_folder_without_permission_is_named_before_anything_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"cannot write \(Permission denied\); choose another --run-dir"):
        create(folder)
    assert not folder.exists()


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        RunLog.reopen(Config(resume=str(tmp_path)), step=0, environment=ENVIRONMENT)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_run(tmp_path)


def test_one_writer(folder: Path) -> None:
    config = Config(resume=str(folder))
    with create(folder) as log:
        with pytest.raises(UserError, match="another process writes into this run"):
            RunLog.reopen(config, step=0, environment=ENVIRONMENT)
        log.metrics({"step": 1})  # the refused one has not taken the lock away
        log.finish("stopped", {})
    RunLog.reopen(config, step=1, environment=ENVIRONMENT).close()


def test_a_killed_writer_leaves_no_lock(folder: Path) -> None:
    program = f"""
import os
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.runlog import RunLog
log = RunLog.create(Config(run_dir={str(folder)!r}), user_set={{}}, environment={{}})
log.metrics({{"step": 1}})
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert read_run(folder)["status"] == "running"
    with RunLog.reopen(Config(resume=str(folder)), step=1, environment=ENVIRONMENT) as log:
        log.metrics({"step": 2})
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("no luck"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_an_exception_is_recorded_and_goes_on(folder: Path, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)), create(folder):
        raise error
    assert read_run(folder)["status"] == status
    assert type(error).__name__ in str(read_run(folder)["error"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_in_one_sentence(folder: Path) -> None:
    log = create(folder)
    log._file_of.pop("evals").close()
    log._file_of["evals"] = io.FileIO("/dev/full", "ab")
    with pytest.raises(UserError, match=r"evals.jsonl: cannot write \(No space left on device\)"):
        log.evaluation({"step": 1})
    log.close()
