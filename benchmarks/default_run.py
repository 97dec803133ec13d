"""The main job, timed: the default run on the embedded model, over several seeds.

    python -m benchmarks.default_run [--seeds 0 1 2 3 4] [--keep FOLDER]

Each seed is a process of its own, started as a user would start it. Reported: held-out greedy accuracy before and after
(200 puzzles), its gain in points, and the wall time of the whole command, evaluations included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.record import RESULTS, write_result


def run_seed(seed: int, folder: Path) -> dict[str, float]:
    """Train with one seed; the last line that the command prints, and its wall time as seen from outside."""
    start = time.monotonic()
    command = [sys.executable, "-m", "sparkgrpo.trainer", "train", "--model", "embedded", "--device", "cpu", "--plain"]
    finished = subprocess.run(
        [*command, "--seed", str(seed), "--run-dir", str(folder / f"seed_{seed}")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    wall_s = time.monotonic() - start
    result = json.loads(finished.stdout.splitlines()[-1])
    gain = 100 * (result["eval_after"] - result["eval_before"])
    row = {"seed": seed, "eval_before": result["eval_before"], "eval_after": result["eval_after"]}
    row |= {"gain_points": round(gain, 1), "steps": result["steps"], "wall_s": round(wall_s, 1)}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--keep", type=Path, help="folder for the run folders, seed_N each; dropped otherwise")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run_seed(seed, options.keep or Path(scratch)) for seed in options.seeds]
    content = {"conditions": {"command": "sparkgrpo train", "threads": torch.get_num_threads()}, "runs": rows}
    path = write_result("default_run", torch.device("cpu"), content, folder=options.results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
