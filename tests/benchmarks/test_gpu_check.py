"""benchmarks/gpu_check.py as it is started on a machine with a GPU, on tiny shapes and without one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_check_items
from benchmarks.comparison import Comparison
from benchmarks.gpu_check_finding import CheckContext
from benchmarks.record import device_name
from benchmarks.small_ops import small_comparison

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--device", "cpu", "--quick")


def run_script(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """From another folder and without PYTHONPATH: the script finds the checkout by itself."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *options]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def findings(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("gpu_check.json")
    return json.loads(path.read_text())["findings"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run_script("--results", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and "no CUDA device" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_misspelt_group_is_refused(tmp_path: Path) -> None:
    done = run_script(*QUICK, "--groups", "corectness", cwd=tmp_path)
    assert done.returncode == 2 and "there are environment, correctness" in done.stderr


def test_correctness_group(tmp_path: Path) -> None:
    done = run_script(*QUICK, "--groups", "correctness", "--results", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu_check: 20 checks, all right" in done.stdout
    assert all(finding["ok"] for finding in findings(tmp_path))


def test_whole_steps(tmp_path: Path) -> None:
    done = run_script(*QUICK, "--groups", "step", "--results", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = findings(tmp_path)
    figures = found["figures"]
    phases = ("t_gen", "t_reward", "t_old", "t_ref", "t_train", "t_opt", "t_eval", "t_other")
    assert found["ok"] and all(figures[key] > 0 for key in ("t_gen", "t_ref", "t_train", "t_opt", "update_tflops"))
    # Medians of two steps, each of which adds up: so does their mean.
    assert abs(sum(figures[key] for key in phases) - figures["t_step"]) < 0.05 * figures["t_step"]


def test_a_spent_budget_ends_the_run(tmp_path: Path) -> None:
    done = run_script(*QUICK, "--budget", "1", "--results", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1 and "0 checks, incomplete: groups environment, correctness" in done.stdout
    assert {finding["text"] for finding in findings(tmp_path)} == {"not started: out of time"}


def verdict(*options: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The script in this process, which lets a test replace its parts."""
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *QUICK, *options])
    return gpu_check.main()


def replace_groups(monkeypatch: pytest.MonkeyPatch, end: Callable[[str], int]) -> None:
    """Each group's process makes one good finding, then ends with the code that `end` returns for it."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        group, lines = (command[command.index(name) + 1] for name in ("--group", "--lines"))
        Path(lines).write_text(json.dumps({"group": group, "item": "one", "ok": True, "text": "good"}) + "\n")
        return subprocess.CompletedProcess(command, end(group), "", "stderr of it")

    # The module's name alone: others start processes too.
    replaced = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu_check, "subprocess", replaced)


def test_quick_leaves_measured_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed, chosen = tmp_path / "committed", tmp_path / "chosen"
    monkeypatch.setattr(gpu_check, "RESULTS", committed)
    replace_groups(monkeypatch, lambda group: 0)
    assert verdict("--groups", "head", monkeypatch=monkeypatch) == 0
    assert not committed.exists() and "result files: dropped" in capsys.readouterr().out
    assert verdict("--groups", "head", "--results", str(chosen), monkeypatch=monkeypatch) == 0
    assert len(findings(chosen)) == 1 and f"result files: {chosen}" in capsys.readouterr().out


@pytest.mark.parametrize("is_late", [True, False])
def test_a_group_that_does_not_end_is_wrong(
    is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(group: str) -> int:
        if group == "correctness" and is_late:
            raise subprocess.TimeoutExpired("gpu_check", 60)
        return -9 if group == "correctness" else 0

    replace_groups(monkeypatch, end)
    code = verdict("--groups", "correctness,head", "--results", str(tmp_path), monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert code == 1 and "all right" not in out
    assert "3 checks, unfinished: groups correctness" in out and "UNFINISHED correctness/process" in out
    assert [finding["ok"] for finding in findings(tmp_path)] == [True, False, True]


def test_groups_that_were_not_started_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]

    def end(_: str) -> int:
        now_s[0] += 455
        return 0

    replace_groups(monkeypatch, end)
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    options = ("--groups", "correctness,head,decode", "--results", str(tmp_path))
    assert verdict(*options, monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "1 checks, incomplete: groups head, decode not run\n" in out and "all right" not in out


def quick_context(folder: Path, deadline_s: float) -> CheckContext:
    device = torch.device("cpu")
    return CheckContext(device=device, is_quick=True, results=folder, lines=folder / "lines", deadline_s=deadline_s)


def test_a_file_is_written_once_all_cases_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases of linear_grpo, then one of linear_logprob; a small op stands for each."""

    def one_case(*_: object, **__: object) -> Comparison:
        sizes, device = {"T": 4, "D": 8}, torch.device("cpu")
        return small_comparison("rms_norm", sizes, torch.float32, device, 10.0, has_compile=False)

    monkeypatch.setattr(gpu_check_items, "head_comparison", one_case)
    folder = tmp_path / device_name(torch.device("cpu"))
    folder.mkdir()
    (folder / "linear_grpo.json").write_text("complete")
    now_s = iter((0.0, 100.0))
    monkeypatch.setattr(gpu_check_items, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    *_, (_, ok, text, _) = gpu_check_items.head_cases(quick_context(tmp_path, deadline_s=50))
    assert ok is None and text == "left out: out of time; no file of linear_grpo, linear_logprob"
    assert (folder / "linear_grpo.json").read_text() == "complete"
    now_s = iter((0.0, 0.0, 100.0))
    assert len(list(gpu_check_items.head_cases(quick_context(tmp_path, deadline_s=50)))) == 3
    assert len(json.loads((folder / "linear_grpo.json").read_text())["cases"]) == 2
    assert not (folder / "linear_logprob.json").exists()


def test_cases_left_out_are_not_all_right(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"good": True, "left out: out of time; no file of adamw": None}
    lines = [gpu_check.Finding(group="small", item="case", ok=ok, text=text) for text, ok in found.items()]
    assert gpu_check.report(lines) == 0
    assert capsys.readouterr().out == "gpu_check: 1 checks, incomplete: cases of small left out\n"


@pytest.mark.slow
def test_every_group(tmp_path: Path) -> None:
    done = run_script(*QUICK, "--results", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {finding["group"] for finding in findings(tmp_path)} == {
        "environment",
        "correctness",
        "head",
        "small",
        "decode",
        "step",
        "cases",
    }
    ops = {path.stem for path in tmp_path.rglob("*.json")}
    assert {"linear_grpo", "linear_logprob", "token_logprob", "rms_norm", "swiglu", "rotary", "adamw"} <= ops
