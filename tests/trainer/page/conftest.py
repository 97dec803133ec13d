"""A run folder whose every text is hostile, and one of a thousand steps."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sparkgrpo.trainer.diagnosis.simulated_runs import simulated_run

HOSTILE = (
    "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>\"'&\u2028\u202e\x1b[31m\x00\ud800{{x}}"
)


@pytest.fixture
def hostile_run(make_run_folder: Callable[..., Path]) -> Path:
    """Every name, text and key that a run can carry is an attack; one completion has a million characters."""
    run = simulated_run(2, "cut off")
    steps = [
        {**row, f"reason/{HOSTILE}": 0.3, f"part/{HOSTILE}": 1.0, HOSTILE: 2.0, "t_step": 1.0} for row in run.steps
    ]
    samples = [
        {
            "v": 1, "sample_id": f"20-{split}-{i}{HOSTILE}", "step": 20, "split": split,
            "problem": HOSTILE + str(i // 4),
            "prompt": HOSTILE, "completion": HOSTILE + "y" * (1_000_000 if i == 0 else 10), "reward": i % 2,
            "reason": "ok" if i % 2 else HOSTILE, "finish": HOSTILE, "num_tokens": HOSTILE, "advantage": i % 2 - 0.5,
        }
        for split in ("train", "heldout")
        for i in range(8)
    ]  # fmt: skip
    config = {**run.config, "model": HOSTILE, "task": HOSTILE, HOSTILE: HOSTILE}
    facts = {
        "run_id": HOSTILE,
        "config": config,
        "user_set": {HOSTILE: 1},
        "git": {HOSTILE: HOSTILE},
        "command": [HOSTILE],
    }
    return make_run_folder(run=facts, metrics=steps, evals=run.evals, samples=samples)


@pytest.fixture
def long_run(make_run_folder: Callable[..., Path]) -> Path:
    """A thousand steps of about 40 metrics, with samples of several megabytes."""
    run = simulated_run(1)
    steps: list[dict[str, object]] = []
    while len(steps) < 1000:
        more = {
            f"t_{name}": 0.1234567 + len(steps) % 7 for name in ("step", "reward", "old", "ref", "train", "opt", "eval")
        }
        steps.append({**run.steps[len(steps) % len(run.steps)], **more, "step": len(steps) + 1})
    samples = [
        {"v": 1, "sample_id": f"{s}-train-{i}", "step": s, "split": "train", "problem": f"p{s}", "prompt": "q " * 200,
         "completion": "because " * 400, "reward": float(i % 2), "reason": "ok" if i % 2 else "wrong_value"}
        for s in range(10, 1000, 10)
        for i in range(8)
    ]  # fmt: skip
    return make_run_folder(run={"config": run.config}, metrics=steps, evals=run.evals, samples=samples)
