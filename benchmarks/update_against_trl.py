"""Reference, update and peak memory on SmolLM2-135M against TRL's GRPOTrainer, and what our update skips.

    python -m benchmarks.update_against_trl MODEL [--rounds 2] [--only "ours" "TRL"]
    python -m benchmarks.update_against_trl MODEL --per-token

MODEL as in `versus_trl.py`. Both sides train on the same 4 prompts x 8 completions x 64 tokens, given and not
generated, in fp32 with beta 0.04 and one AdamW update. A process each, one after the other, so that the operating
system's largest resident size (ru_maxrss) is that side's: with libraries and loading, and less what the process had
before it loaded the model. Ours has made a whole step with generation before; TRL's is spared that, since its peak lies
in the update. TRL runs without gradient checkpointing, which is faster here, and with it, which is its default.

Beside that ours alone: half of the groups dead and beta 0; activation checkpointing; and with --per-token the time per
trained token with 1, 2, 4, 8 and 16 groups of 8 x 64 tokens, beta 0. Wall time and the process's CPU time are both
kept: on a machine that others load the latter still compares.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.record import RESULTS, write_result
from benchmarks.trl_peer import PeerOptions, TrlPeer
from sparkgrpo.profiling.memory import peak_bytes
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.budget import plan_training
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, save_model
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.run import build_loop
from sparkgrpo.trainer.tasks.registry import make_task, task_options
from sparkgrpo.trainer.update import Updater

GROUP_SIZE, NUM_TOKENS = 8, 64
GROUPS = (1, 2, 4, 8, 16)
SIDES: dict[str, dict[str, object]] = {
    "ours": {},
    "ours, half of the groups dead and beta 0": {"beta": 0.0, "num_dead": 2},
    "ours, activation checkpointing": {"activation_checkpointing": True},
    "TRL": {},
    "TRL, gradient checkpointing": {"gradient_checkpointing": True},
}


def batch_of(
    tokenizer: PreTrainedTokenizerFast | None, config: Config, *, num_valid: int, num_dead: int = 0
) -> TrainBatch:
    """Countdown prompts with random completions; rewards 0 and 1 by turns, equal in the dead groups."""
    task, num_groups = make_task("countdown", task_options(config)), config.prompts_per_step
    prompts = [Dialogue(tokenizer).prompt_ids(p) for p in task.problems(0, 0, num_groups)]
    generator = torch.Generator().manual_seed(0)
    num_rows = num_groups * GROUP_SIZE
    token_R = torch.randint(100, num_valid, (num_rows * NUM_TOKENS,), generator=generator, dtype=torch.int32)
    advantage_S = torch.tensor([1.0 if s % 2 else -1.0 for s in range(num_rows)], dtype=torch.float64)
    advantage_S[: num_dead * GROUP_SIZE] = 0.0
    return TrainBatch(
        prompts=prompts,
        token_R=token_R,
        logprob_R=torch.full(token_R.shape, -10.0),
        length_S=(NUM_TOKENS,) * num_rows,
        prompt_of_row_S=tuple(n for n in range(num_groups) for _ in range(GROUP_SIZE)),
        advantage_S=advantage_S,
    )


def config_of(num_groups: int, **values: Any) -> Config:  # noqa: ANN401
    shape: dict[str, Any] = {"prompts_per_step": num_groups, "group_size": GROUP_SIZE, "max_new_tokens": NUM_TOKENS}
    return Config(**shape, eval_problems=4, **values)


def update_once(updater: Updater, batch: TrainBatch) -> None:
    """One whole update, reference included."""
    everyone = torch.ones(len(batch.length_S), dtype=torch.bool)
    updater.clock.start_step()
    updater.update(batch, everyone, 1e-6)
    updater.clock.end_step()


def run_side(name: str, folder: str, rounds: int) -> None:
    """One side in this process; prints its result as the last line."""
    values = dict(SIDES[name])
    if name.startswith("TRL"):
        import trl  # noqa: F401  libraries do not count as the model's
    before = peak_bytes(torch.device("cpu"))
    if name.startswith("TRL"):
        config, tokenizer = config_of(4), AutoTokenizer.from_pretrained(folder)
        batch = batch_of(tokenizer, config, num_valid=len(tokenizer))
        pieces = [piece.tolist() for piece in batch.token_R.split(list(batch.length_S))]
        given = ([batch.prompts[n] for n in batch.prompt_of_row_S], pieces)
        has_checkpointing = bool(values.get("gradient_checkpointing"))
        peer = PeerOptions(num_steps=rounds + 1, given=given, gradient_checkpointing=has_checkpointing)
        run: Callable[[], object] = TrlPeer(folder, config, peer).step
    else:
        num_dead = int(str(values.pop("num_dead", 0)))
        config = config_of(4, **values)
        loaded = load_model(folder, dtype=torch.float32, device="cpu")
        loop = build_loop(config, loaded, make_task("countdown", task_options(config)))
        loop.engine.stop_ids = ()  # every completion has all its tokens
        loop.clock.start_step()
        loop.step(1)
        batch = batch_of(loaded.tokenizer, config, num_valid=loaded.num_valid, num_dead=num_dead)
        run = lambda: update_once(loop.updater, batch)  # noqa: E731
    run()
    wall_s, cpu_s = [], []
    for _ in range(rounds):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        run()
        wall_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.process_time() - start_cpu_s)
    peak = peak_bytes(torch.device("cpu"))
    result = {"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": peak, "peak_beyond_libraries_bytes": peak - before}
    print(json.dumps(result), flush=True)


def against_trl(model: str, rounds: int, names: Sequence[str]) -> dict[str, object]:
    """Every side in a process of its own."""
    sides: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), load_model(model, dtype=torch.float32, device="cpu"))
        for name in names:
            command = [sys.executable, "-m", "benchmarks.update_against_trl", folder, "--rounds", str(rounds)]
            done = subprocess.run([*command, "--side", name], stdout=subprocess.PIPE, text=True, check=True)
            # TRL's trainer prints a summary of its own, on our line too where its progress bar has not ended it.
            text = done.stdout[done.stdout.index('{"wall_s"') :]
            sides[name], _ = json.JSONDecoder().raw_decode(text)
            print(name, sides[name], flush=True)
    result: dict[str, object] = {"sides": sides}
    if "ours" in sides:
        for name in sides:
            result[f"{name} / ours"] = {
                key: median(sides[name][key]) / median(sides["ours"][key]) for key in ("wall_s", "cpu_s")
            } | {key: sides[name][key] / sides["ours"][key] for key in ("peak_bytes", "peak_beyond_libraries_bytes")}
    return result


def updater_of(loaded: LoadedModel, config: Config) -> Updater:
    plan = plan_training(config, loaded.model, num_valid=loaded.num_valid, longest_prompt=100)
    return Updater(
        loaded.model,
        frozen_copy(loaded.model) if config.beta else None,
        MasterAdamW(loaded.model, config),
        config,
        num_valid=loaded.num_valid,
        tokens_per_micro_batch=plan.tokens_per_micro_batch,
        clock=PhaseClock(torch.device("cpu"), PHASES),
    )


def per_token(model: str, rounds: int) -> dict[str, object]:
    """Milliseconds of an update per trained token, by the number of groups; the sizes take turns."""
    loaded = load_model(model, dtype=torch.float32, device="cpu")
    configs = {num_groups: config_of(num_groups, beta=0.0) for num_groups in GROUPS}
    updater = updater_of(loaded, configs[GROUPS[-1]])
    batches = {n: batch_of(loaded.tokenizer, config, num_valid=loaded.num_valid) for n, config in configs.items()}
    update_once(updater, batches[GROUPS[0]])  # warm-up
    times: dict[int, list[tuple[float, float]]] = {num_groups: [] for num_groups in GROUPS}
    for _ in range(rounds):
        for num_groups, batch in batches.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            update_once(updater, batch)
            times[num_groups].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    milliseconds = {
        clock: {
            str(n): 1e3 * median(pair[index] for pair in pairs) / (n * GROUP_SIZE * NUM_TOKENS)
            for n, pairs in times.items()
        }
        for index, clock in enumerate(("wall", "cpu"))
    }
    print(f"ms a trained token: {milliseconds}", flush=True)
    return {"ms_per_trained_token": milliseconds, "wall_and_cpu_s": {str(n): pairs for n, pairs in times.items()}}


def short_name(model: str) -> str:
    """The stem of a file, and of a folder its name; "embedded" for the model that ships."""
    path = Path(model).resolve()
    return path.parent.name if path.name == "model" else path.stem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="SmolLM2-135M-Instruct: a folder or a GGUF file")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds, after one of warm-up")
    parser.add_argument("--per-token", action="store_true", help="the cost per token in place of the comparison")
    parser.add_argument("--only", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    if options.side is not None:
        run_side(options.side, options.model, options.rounds)
        return
    conditions = {
        "model": f"{short_name(options.model)}, fp32",
        "batch": f"groups of {GROUP_SIZE} completions x {NUM_TOKENS} tokens",
        "threads": torch.get_num_threads(),
    }
    if options.per_token:
        name = f"update_per_token_{short_name(options.model).lower()}"
        result = per_token(options.model, options.rounds)
    else:
        name, result = "update_against_trl", against_trl(options.model, options.rounds, options.only)
    path = write_result(name, torch.device("cpu"), {"conditions": conditions} | result, folder=options.results)
    print(f"{ {key: value for key, value in result.items() if key.endswith('ours')} } written to {path}")


if __name__ == "__main__":
    main()
