"""Reference and update on SmolLM2-135M against TRL's GRPOTrainer on the same tokens, and what our update skips.

    python -m benchmarks.update_against_trl MODEL [--rounds 2] [--no-trl]

MODEL as in `step_against_trl.py`. Both sides train on the same 4 prompts x 8 completions x 64 tokens, given and not
generated, in fp32 with beta 0.04 and one AdamW update; the two take turns. Beside that, ours alone: half of the groups
dead and beta 0; and the time per trained token with 1, 2, 4, 8 and 16 groups of 8 x 64 tokens, beta 0.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.record import write_result
from benchmarks.trl_peer import PeerOptions, trl_steps
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.budget import plan_training
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, save_model
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.tasks.registry import make_task, task_options
from sparkgrpo.trainer.update import Updater

GROUP_SIZE, NUM_TOKENS = 8, 64
GROUPS = (1, 2, 4, 8, 16)


def batch_of(loaded: LoadedModel, config: Config, *, num_groups: int, num_dead: int = 0) -> TrainBatch:
    """Countdown prompts with random completions; rewards 0 and 1 by turns, equal in the dead groups."""
    task = make_task("countdown", task_options(config))
    prompts = [Dialogue(loaded.tokenizer).prompt_ids(p) for p in task.problems(0, 0, num_groups)]
    generator = torch.Generator().manual_seed(0)
    num_rows = num_groups * GROUP_SIZE
    token_R = torch.randint(100, loaded.num_valid, (num_rows * NUM_TOKENS,), generator=generator, dtype=torch.int32)
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


def timed(updater: Updater, batch: TrainBatch) -> float:
    """Seconds of one whole update, reference included."""
    everyone = torch.ones(len(batch.length_S), dtype=torch.bool)
    start = time.perf_counter()
    updater.clock.start_step()
    updater.update(batch, everyone, 1e-6)
    updater.clock.end_step()
    return time.perf_counter() - start


def config_of(num_groups: int, beta: float) -> Config:
    return Config(prompts_per_step=num_groups, group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS, beta=beta)


def against_trl(loaded: LoadedModel, folder: str, rounds: int) -> dict[str, object]:
    """Both sides by turns, after one round of warm-up; and ours with half of the groups dead and beta 0."""
    config = config_of(4, 0.04)
    batch = batch_of(loaded, config, num_groups=4)
    pieces = [piece.tolist() for piece in batch.token_R.split(list(batch.length_S))]
    given = ([batch.prompts[n] for n in batch.prompt_of_row_S], pieces)
    theirs = trl_steps(folder, config, PeerOptions(num_steps=rounds + 1, given=given))
    ours = updater_of(loaded, config)
    our_s, half_s, trl_s = [], [], []
    half = updater_of(loaded, config_of(4, 0.0))
    half_batch = batch_of(loaded, config, num_groups=4, num_dead=2)
    for number in range(rounds + 1):
        our_s.append(timed(ours, batch))
        half_s.append(timed(half, half_batch))
        trl_s.append(next(theirs))
        print(f"{number}: ours {our_s[-1]:.2f} s, half dead {half_s[-1]:.2f} s, TRL {trl_s[-1]:.2f} s", flush=True)
    ratios = [b / a for a, b in zip(our_s[1:], trl_s[1:], strict=True)]
    gains = [a / b for a, b in zip(our_s[1:], half_s[1:], strict=True)]
    return {
        "ours_s": our_s[1:],
        "trl_s": trl_s[1:],
        "trl_over_ours": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "half_of_the_groups_dead_and_beta_0_s": half_s[1:],
        "full_over_half_dead": {"median": median(gains), "min": min(gains), "max": max(gains)},
    }


def per_token(loaded: LoadedModel, rounds: int, groups: Sequence[int] = GROUPS) -> dict[str, object]:
    """Milliseconds of an update per trained token, by the number of groups; the sizes take turns."""
    runs: dict[int, Callable[[], float]] = {}
    for num_groups in groups:
        config = config_of(num_groups, 0.0)
        updater, batch = updater_of(loaded, config), batch_of(loaded, config, num_groups=num_groups)
        runs[num_groups] = lambda updater=updater, batch=batch: timed(updater, batch)
    seconds: dict[int, list[float]] = {num_groups: [] for num_groups in groups}
    for number in range(rounds + 1):
        for num_groups, run in runs.items():
            if number == 0 and num_groups > 1:
                continue  # the first one warms up for all
            seconds[num_groups].append(run())
    trained = {n: n * GROUP_SIZE * NUM_TOKENS for n in groups}
    milliseconds = {str(n): 1e3 * median(seconds[n][-rounds:]) / trained[n] for n in groups}
    print(f"ms a trained token: {milliseconds}", flush=True)
    return {"ms_per_trained_token": milliseconds, "seconds": {str(n): seconds[n][-rounds:] for n in groups}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="SmolLM2-135M-Instruct: a folder or a GGUF file")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds, after one of warm-up")
    parser.add_argument("--no-trl", action="store_true", help="the cost per token alone")
    options = parser.parse_args()
    loaded = load_model(options.model, dtype=torch.float32, device="cpu")
    conditions = {
        "model": "SmolLM2-135M-Instruct, fp32 on both sides",
        "batch": f"groups of {GROUP_SIZE} completions x {NUM_TOKENS} tokens",
        "threads": torch.get_num_threads(),
    }
    if not options.no_trl:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), loaded)
            result = against_trl(loaded, folder, options.rounds)
        path = write_result("update_against_trl", torch.device("cpu"), {"conditions": conditions} | result)
        print(f"TRL / ours {result['trl_over_ours']}, full / half {result['full_over_half_dead']}; written to {path}")
    else:
        result = per_token(loaded, options.rounds)
        print(
            f"written to {write_result('update_per_token', torch.device('cpu'), {'conditions': conditions} | result)}"
        )


if __name__ == "__main__":
    main()
