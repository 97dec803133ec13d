"""benchmarks/gpu_check.py as it is started on a machine with a GPU, on tiny shapes and without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
    assert done.returncode == 1 and "0 checks" in done.stdout
    assert {finding["text"] for finding in findings(tmp_path)} == {"not started: out of time"}


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
