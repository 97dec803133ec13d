"""Recorded steps: which ones, their ranges, and that a trace of them reads back; nsys by a stand-in."""

import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkgrpo.profiling.nsys_command import find_nsys, record_command, run_pass
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.profiling.recorder import StepRecorder
from sparkgrpo.profiling.summarise import summarise
from sparkgrpo.profiling.trace_file import read_trace

CPU = torch.device("cpu")
NAMES = ("t_gen", "t_train")


def work(clock: PhaseClock, num_steps: int) -> None:
    x = torch.randn(64, 64)
    for _ in range(num_steps):
        clock.start_step()
        with clock.phase("t_gen"):
            torch.mm(x, x)
            time.sleep(0.01)
        with clock.phase("t_train"):
            x.exp()
            with clock.span("t_train_backward"):
                x.tanh()
        clock.end_step()


def test_a_trace_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    clock = PhaseClock(CPU, NAMES)
    recorder = StepRecorder(CPU, tool="torch", path=path, warm_up=2, steps=3)
    clock.observers = [recorder]
    work(clock, 7)
    assert recorder.num_done == 7 and recorder.is_done
    summary: Any = summarise(read_trace(path)[0])
    assert summary.num_steps == 3 and 0 <= summary.frac_unaccounted < 0.5
    found = {phase.name: phase for phase in summary.phases}
    assert set(found) == {"t_gen", "t_train", "t_other"}
    called = {name: {op.name for op in phase.operations} for name, phase in found.items()}
    assert "aten::mm" in called["t_gen"] and {"aten::exp", "aten::tanh"} <= called["t_train"]
    assert "aten::tanh" not in called["t_gen"]
    assert [op.num_calls for op in found["t_train"].operations if op.name == "aten::tanh"] == [3]
    assert (recorder.memory["t_gen"]["resident_bytes"] or 0) > 1 << 26 and recorder.memory["t_gen"][
        "allocated_bytes"
    ] is None


def test_the_span_is_a_range_inside_its_phase(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    clock = PhaseClock(CPU, NAMES)
    clock.observers = [StepRecorder(CPU, tool="torch", path=path, warm_up=0, steps=1)]
    work(clock, 1)
    timeline: Any = read_trace(path)[0]
    ranges = [
        (timeline.names[n], a, b)
        for n, a, b in zip(timeline.ranges.name_N, timeline.ranges.start_N, timeline.ranges.end_N, strict=True)
    ]
    outer = next(r for r in ranges if r[0] == "grpo.t_train")
    inner = next(r for r in ranges if r[0] == "grpo.t_train/backward")
    assert outer[1] <= inner[1] and inner[2] <= outer[2]


def test_an_exception_leaves_no_profiler_running(tmp_path: Path) -> None:
    clock = PhaseClock(CPU, NAMES)
    recorder = StepRecorder(CPU, tool="torch", path=tmp_path / "t.json", warm_up=0, steps=2)
    clock.observers = [recorder]
    clock.start_step()
    recorder.close()
    assert not (tmp_path / "t.json").exists()
    again = StepRecorder(CPU, tool="torch", path=tmp_path / "t.json", warm_up=0, steps=1)
    clock.observers = [again]
    work(clock, 1)
    assert (tmp_path / "t.json").exists()


def stand_in(folder: Path, body: str) -> Path:
    """An nsys that is a Python program: `options` holds the command line."""
    path = folder / "nsys"
    path.write_text(f"#!{sys.executable}\nimport sys, time, pathlib\noptions = sys.argv[1:]\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_command_of_a_pass(tmp_path: Path) -> None:
    command = record_command("nsys", "node", tmp_path / "x", ["python", "-m", "a"])
    assert command[:2] == ["nsys", "profile"] and command[-3:] == ["python", "-m", "a"]
    assert {"--cuda-graph-trace=node", "--capture-range=cudaProfilerApi", "--trace=cuda,nvtx"} <= set(command)


def test_a_pass_gives_its_export(tmp_path: Path) -> None:
    output = tmp_path / "graph"
    nsys = stand_in(
        tmp_path, "pathlib.Path([o for o in options if o.startswith('--output=')][0][9:] + '.sqlite').touch()"
    )
    result = run_pass(record_command(nsys, "graph", output, ["x"]), output, 60)
    assert result.export == tmp_path / "graph.sqlite" and result.problem is None


def test_a_pass_that_fails_or_hangs(tmp_path: Path) -> None:
    output = tmp_path / "graph"
    result = run_pass([str(stand_in(tmp_path, "sys.exit(3)"))], output, 60)
    assert result.export is None and "ended with code 3" in (result.problem or "")
    start = time.monotonic()
    result = run_pass([str(stand_in(tmp_path, "time.sleep(60)"))], output, 1)
    assert time.monotonic() - start < 30 and "without a result (--deadline)" in (result.problem or "")


def test_nsys_of_path_first_then_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2024.9.1", "2025.10.2", "2025.3.1"):
        (tmp_path / version).mkdir()
        stand_in(tmp_path / version, "")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_nsys([f"{tmp_path}/*/nsys"]) == tmp_path / "2025.10.2" / "nsys"
    assert find_nsys([f"{tmp_path}/none/*"]) is None
    monkeypatch.setenv("PATH", f"{tmp_path / '2024.9.1'}{os.pathsep}")
    assert find_nsys([f"{tmp_path}/*/nsys"]) == tmp_path / "2024.9.1" / "nsys"
