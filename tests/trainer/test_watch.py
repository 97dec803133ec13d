"""Watching: piped, finished, growing, crashed, hostile; on a terminal; and that it is cheap."""

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.run_reader import RunFollower
from sparkgrpo.trainer.watch import newest_training_group

MakeRunFolder = Callable[..., Path]
CONFIG = {"steps": 6, "eval_every": 2, "device": "cpu", "precision": "fp32", "model": "embedded"}
HOSTILE = "\x1b[2J[bold red]\u202e" + "x" * 1_000_000


def step(number: int, **more: object) -> dict[str, object]:
    return {"v": 1, "step": number, "reward_mean": 0.25, "t_step": 2.0, "t_gen": 1.0, "frac_right": 0.2, **more}


def samples(at: int) -> list[dict[str, object]]:
    return [
        {"v": 1, "sample_id": f"{at}-train-{i}", "step": at, "split": "train", "problem": HOSTILE,
         "completion": HOSTILE, "reward": float(i), "reason": HOSTILE}
        for i in range(2)
    ]  # fmt: skip


def test_a_finished_run_is_printed_once_in_a_pipe(
    make_run_folder: MakeRunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    evals = [{"v": 1, "step": s, "accuracy": 0.5, "accuracy_se": 0.1, "num_problems": 10} for s in (0, 2)]
    folder = make_run_folder(
        run={"config": CONFIG}, metrics=[step(1), step(2), step(3)], evals=evals, samples=samples(2)
    )
    assert main(["watch", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("eval after step 0") and lines[2].startswith("step 1/6")
    assert (
        lines[3].startswith("eval after step 2")
        and lines[4].startswith("step 2/6")
        and lines[-1] == "finished after step 3"
    )
    assert "\n".join(lines).replace("\n", "").isprintable()


def test_an_empty_and_a_crashed_run(make_run_folder: MakeRunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {"config": CONFIG, "status": "running", "pid": 2**22 + 1, "t_unix_s": 1.0}
    assert main(["watch", str(make_run_folder("a", run=gone))]) == 0
    assert "ended without a stop event at step 0" in capsys.readouterr().out
    assert main(["watch", str(make_run_folder("b", run=gone, metrics=[step(1), '{"v":1,"st']))]) == 0
    assert "ended without a stop event at step 1; no checkpoint was saved" in capsys.readouterr().out


def test_a_growing_run_is_followed_to_its_end(
    make_run_folder: MakeRunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"v": 1, "run_id": "run", "config": CONFIG, "status": "running", "pid": os.getpid(), "t_unix_s": time.time()}
    folder = make_run_folder(run=run)

    def write() -> None:
        with open(folder / "metrics.jsonl", "a", buffering=1) as file:
            for number in (1, 2):
                time.sleep(0.2)
                file.write(json.dumps(step(number, t_unix_s=time.time())) + "\n")
        (folder / "run.json.tmp").write_text(json.dumps({**run, "status": "finished"}))
        os.replace(folder / "run.json.tmp", folder / "run.json")

    writer = threading.Thread(target=write)
    writer.start()
    assert main(["watch", str(folder)]) == 0
    writer.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines[1:3]] == ["step 1/6", "step 2/6"] and lines[-1] == "finished after step 2"


def on_terminal(folder: Path, keys: bytes = b"") -> tuple[int, str]:
    leader, follower = pty.openpty()
    clean = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "sparkgrpo.trainer", "watch", str(folder)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**clean, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        start_new_session=True,
    )
    os.close(follower)
    output, is_sent = b"", False
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        output += part
        if keys and not is_sent and b"right" in output:
            os.write(leader, keys)
            is_sent = True
    os.close(leader)
    return process.wait(timeout=60), output.decode()


def test_on_a_terminal_text_is_inert_and_the_frame_stays(make_run_folder: MakeRunFolder) -> None:
    folder = make_run_folder(run={"config": CONFIG, "run_id": HOSTILE}, metrics=[step(1), step(2)], samples=samples(2))
    code, output = on_terminal(folder)
    assert code == 0 and "finished after step 2" in output and output.count("\x1b[?25h") >= 1
    assert "\x1b[2J" not in output and "\u202e" not in output and "\\x1b[2J[bold red]\\u202e" in output


def test_q_ends_the_watching(make_run_folder: MakeRunFolder) -> None:
    run = {"config": CONFIG, "status": "running", "pid": os.getpid(), "t_unix_s": time.time()}
    code, output = on_terminal(make_run_folder(run=run, metrics=[step(1), step(2)]), b"q")
    assert code == 0 and "\x1b[?25h" in output


def test_polling_reads_only_what_is_new(make_run_folder: MakeRunFolder) -> None:
    folder = make_run_folder(run={"config": CONFIG}, metrics=[step(i) for i in range(1, 1001)], samples=samples(2))
    follower = RunFollower(folder)
    follower.poll()
    before = follower.num_bytes_read
    line = json.dumps(step(1001)) + "\n"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line)
    assert follower.poll() and follower.num_bytes_read - before == len(line)
    assert not follower.poll()
    assert [row["reward"] for row in newest_training_group(follower.record)] == [0.0, 1.0]
