"""Peak memory of GRPO steps on SmolLM2-135M against TRL's GRPOTrainer: a process each, the same weights and batch.

    python -m benchmarks.memory_against_trl MODEL [--steps 2] [--only "ours fp32" "TRL fp32"]

MODEL as in `step_against_trl.py`. The batch is 4 prompts x 8 completions x 64 tokens, beta 0.04, fp32 on both sides,
ours also in bf16 and with activation checkpointing, TRL's without gradient checkpointing (faster here) and with it (its
default). Ours are whole steps; TRL is given completions of the same lengths, since its peak lies in the update and
generating them takes most of its time. What is reported is the operating system's largest resident size of the whole
process (ru_maxrss), libraries and loading included, and the same less what the process had before the model was loaded.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.record import write_result
from benchmarks.trl_peer import PeerOptions, trl_steps
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.model.weights import load_model, save_model
from sparkgrpo.trainer.run import DTYPES, build_loop
from sparkgrpo.trainer.tasks.registry import make_task, task_options

SIDES: dict[str, dict[str, object]] = {
    "ours fp32": {"precision": "fp32"},
    "ours fp32, activation checkpointing": {"precision": "fp32", "activation_checkpointing": True},
    "ours bf16": {"precision": "bf16"},
    "TRL fp32": {},
    "TRL fp32, gradient checkpointing (its default)": {"gradient_checkpointing": True},
}
SHAPE = {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 64, "eval_problems": 4}


def resident_bytes() -> int:
    """Largest resident size of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_side(name: str, folder: str, num_steps: int) -> None:
    """One side in this process; prints its result as the last line."""
    options = SIDES[name]
    if name.startswith("TRL"):
        import trl  # noqa: F401  libraries do not count as the model's

        before = resident_bytes()
        config = Config(**SHAPE)
        rows = config.prompts_per_step * config.group_size
        task, dialogue = make_task("countdown", task_options(config)), Dialogue(AutoTokenizer.from_pretrained(folder))
        prompts = [dialogue.prompt_ids(p) for p in task.problems(0, 0, config.prompts_per_step)]
        answers = [list(range(s + 100, s + 100 + config.max_new_tokens)) for s in range(rows)]
        given = ([prompts[s // config.group_size] for s in range(rows)], answers)
        has_checkpointing = bool(options.get("gradient_checkpointing"))
        peer = PeerOptions(num_steps=num_steps, given=given, gradient_checkpointing=has_checkpointing)
        for _ in trl_steps(folder, config, peer):
            pass
    else:
        before = resident_bytes()
        config = Config(**SHAPE, **options)
        loaded = load_model(folder, dtype=DTYPES[config.precision], device="cpu")
        loop = build_loop(config, loaded, make_task("countdown", task_options(config)))
        loop.engine.stop_ids = ()  # every completion has all its tokens
        for step in range(1, num_steps + 1):
            loop.clock.start_step()
            loop.step(step)
    peak = resident_bytes()
    print(json.dumps({"peak_bytes": peak, "peak_beyond_libraries_bytes": peak - before}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="SmolLM2-135M-Instruct: a folder or a GGUF file")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        run_side(options.side, options.model, options.steps)
        return
    results: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), load_model(options.model, dtype=torch.float32, device="cpu"))
        for name in options.only:
            command = [sys.executable, "-m", "benchmarks.memory_against_trl", folder, "--steps", str(options.steps)]
            done = subprocess.run([*command, "--side", name], stdout=subprocess.PIPE, text=True, check=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name}: {results[name]['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    ratio = {
        key: results["ours fp32"][key] / results["TRL fp32"][key]
        for key in ("peak_bytes", "peak_beyond_libraries_bytes")
    }
    content = {
        "conditions": {
            "model": "SmolLM2-135M-Instruct",
            "batch": "4 prompts x 8 completions x 64 tokens, beta 0.04, AdamW",
            "steps": options.steps,
            "threads": torch.get_num_threads(),
        },
        "sides": results,
        "ours_over_trl_fp32": ratio,
    }
    print(f"ours / TRL: {ratio}; written to {write_result('memory_against_trl', torch.device('cpu'), content)}")


if __name__ == "__main__":
    main()
