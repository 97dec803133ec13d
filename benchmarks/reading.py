"""What reading a run costs: the report, the live view, logging, diagnosis.

    python -m benchmarks.reading

Budgets: a report of 1,000 steps x 40 metrics under 1 s and 1 MB; a redraw of `watch` under 20 ms, and only what was
appended is read; logging under 1 ms a step.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.record import write_result
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.diagnose import diagnose
from sparkgrpo.trainer.diagnosis.simulated_runs import simulated_run
from sparkgrpo.trainer.live_view import ViewState, draw
from sparkgrpo.trainer.report import write_report
from sparkgrpo.trainer.run_reader import RunFollower, read_record
from sparkgrpo.trainer.runlog import RunLog
from sparkgrpo.trainer.settings import config_json
from sparkgrpo.trainer.watch import eta_of, facts_of

NUM_STEPS = 1000


def steps_of_forty() -> list[dict[str, object]]:
    """A thousand lines of 40 numbers, as a real run has them."""
    source = simulated_run(1).steps
    phases = (
        "t_step",
        "t_reward",
        "t_old",
        "t_ref",
        "t_train",
        "t_opt",
        "t_eval",
        "t_other",
        "t_unaccounted",
        "tok_per_s",
    )
    rows = []
    for s in range(1, NUM_STEPS + 1):
        row = {**source[s % len(source)], **{name: 0.1234567 * (1 + s % 7) for name in phases}, "step": s}
        rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def samples() -> list[dict[str, object]]:
    return [
        {
            "sample_id": f"{s}-train-{i}", "step": s, "split": "train", "problem": f"problem {s}", "prompt": "p " * 150,
            "completion": "because " * 200, "reward": float(i % 2), "reason": "ok" if i % 2 else "wrong_value",
        }
        for s in range(20, NUM_STEPS + 1, 20)
        for i in range(8)
    ]  # fmt: skip


def times_ms(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Wall times in ms: median and extremes."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - begin))
    return {"median_ms": statistics.median(found), "min_ms": min(found), "max_ms": max(found), "repeats": repeats}


def write_run(folder: Path) -> dict[str, float]:
    """Write the run through the product's log; the time of each line of metrics.jsonl."""
    config = Config(run_dir=str(folder), steps=NUM_STEPS)
    taken = []
    with RunLog.create(config, user_set={}, environment={}) as log:
        for row in steps_of_forty():
            begin = time.perf_counter()
            log.metrics(row)
            taken.append(1e3 * (time.perf_counter() - begin))
        for s in range(0, NUM_STEPS + 1, 20):
            log.evaluation(
                {"step": s, "num_problems": 200, "accuracy": 0.3, "accuracy_se": 0.03, "right_bits": "f" * 50}
            )
        for row in samples():
            log.sample(row)
        log.finish("finished", {})
    return {"median_ms": statistics.median(taken), "max_ms": max(taken), "repeats": len(taken)}


def redraw(folder: Path) -> tuple[dict[str, float], int, int]:
    """Redraws of a 24 x 120 frame; and the bytes read for one appended line, and the bytes of that line."""
    follower = RunFollower(folder)
    follower.poll()
    record = follower.record
    state = ViewState(facts=facts_of(record), evaluations=list(record.evals), eta=eta_of(record))
    state.steps.extend(record.steps[-60:])
    state.group = list(record.samples[-8:])
    state.diagnosis = diagnose(record)

    def frame() -> None:
        console = Console(file=io.StringIO(), width=120, height=24, force_terminal=True)
        console.print(draw(state, width=120, height=23))

    drawn = times_ms(frame, 50)
    before = follower.num_bytes_read
    line = json.dumps({"v": 1, "step": NUM_STEPS + 1}) + "\n"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line)
    follower.poll()
    return drawn, follower.num_bytes_read - before, len(line)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        results: dict[str, Mapping[str, object]] = {"logging, one step": write_run(folder)}
        record = read_record(folder)
        results["diagnosis, 1,000 steps"] = times_ms(lambda: diagnose(record), 20)
        page = Path(scratch) / "report.html"
        report = times_ms(lambda: write_report(folder, page), 10)
        keys = len({key for row in record.steps for key in row})
        results["report, 1,000 steps, from the folder"] = {**report, "bytes": page.stat().st_size, "num_keys": keys}
        drawn, read, appended = redraw(folder)
        results["redraw of watch, 24 x 120"] = {**drawn, "bytes_read_for_a_line": read, "bytes_of_the_line": appended}
    for name, figures in results.items():
        print(name, json.dumps(figures))
    steps = config_json(Config())["steps"]
    content = {"conditions": {"command": "python -m benchmarks.reading", "default_steps": steps}, "results": results}
    print(f"written to {write_result('reading', torch.device('cpu'), content)}")


if __name__ == "__main__":
    main()
