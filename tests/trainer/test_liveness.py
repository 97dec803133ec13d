"""Whether a run goes, ended, or died."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.commands.diagnose import diagnosis_lines
from sparkgrpo.trainer.diagnose import diagnose
from sparkgrpo.trainer.liveness import liveness
from sparkgrpo.trainer.report import report_html
from sparkgrpo.trainer.run_reader import read_record

STEP = {"v": 1, "step": 47, "t_step": 2.0}
CHECKPOINT = {"v": 1, "event": "checkpoint", "step": 40}


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_running_silent_and_dead(make_run_folder: Callable[..., Path]) -> None:
    now = time.time()
    run = {"status": "running", "pid": os.getpid(), "t_unix_s": now - 900}
    steps = [{**STEP, "t_unix_s": now - 30}]
    assert liveness(read_record(make_run_folder("a", run=run, metrics=steps)), now_unix_s=now).text == ""
    quiet = [{**STEP, "t_unix_s": now - 200}]
    alive = liveness(read_record(make_run_folder("b", run=run, metrics=quiet)), now_unix_s=now)
    assert not alive.is_over and alive.text == "no line for 3:20; its process is alive"
    gone = {**run, "pid": dead_pid()}
    record = read_record(make_run_folder("c", run=gone, metrics=quiet, events=[CHECKPOINT]))
    dead = liveness(record, now_unix_s=now)
    assert dead.is_over
    assert dead.text == f"ended without a stop event at step 47; resume with sparkgrpo train --resume {record.folder}"
    slow = [{**STEP, "t_step": 100.0, "t_unix_s": now - 200}]  # five of its steps have not passed yet
    assert not liveness(read_record(make_run_folder("d", run=gone, metrics=slow)), now_unix_s=now).is_over


def test_another_boot_of_the_machine(make_run_folder: Callable[..., Path]) -> None:
    run = {"status": "running", "pid": os.getpid(), "boot_id": "another", "t_unix_s": 1.0}
    found = liveness(read_record(make_run_folder(run=run)))
    assert found.is_over and found.text == "ended without a stop event at step 0; no checkpoint was saved"


def test_every_command_knows_a_dead_run(
    make_run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed, so that run.json says running for ever; one that goes is running, and a foreign status stays."""
    gone = {"status": "running", "pid": dead_pid(), "t_unix_s": 1.0}
    folder = make_run_folder("dead", run=gone, metrics=[STEP], events=[CHECKPOINT])
    assert main(["diagnose", str(folder)]) == 3
    head, way_on, *_ = capsys.readouterr().out.splitlines()
    assert head == "dead: ended without a stop event, 1 steps"
    assert way_on == f"ended without a stop event at step 47; resume with sparkgrpo train --resume {folder}"
    for name, run, expected in (
        ("a", gone, "ended without a stop event"),
        ("b", {"status": "running", "pid": os.getpid(), "t_unix_s": time.time()}, "running"),
        ("c", {"status": "elsewhere"}, "elsewhere"),
        ("d", {"status": "stopped"}, "stopped"),
    ):
        record = read_record(make_run_folder(name, run=run, metrics=[STEP]))
        assert f", {expected}</p>" in report_html(record)
        assert diagnosis_lines(record, diagnose(record))[0] == f"{name}: {expected}, 1 steps"


def test_ended_runs(make_run_folder: Callable[..., Path]) -> None:
    failed = {"status": "failed", "error": "UserError: no room"}
    assert liveness(read_record(make_run_folder("a", run=failed, metrics=[STEP]))).text == (
        "failed after step 47: UserError: no room"
    )
    stopped = read_record(make_run_folder("b", run={"status": "stopped"}, metrics=[STEP], events=[CHECKPOINT]))
    assert "stopped after step 47; go on with: sparkgrpo train --resume" in liveness(stopped).text
    assert json.loads((stopped.folder / "run.json").read_text())["status"] == "stopped"
