"""How the cost of a step grows: seconds of generation and of the update against one size at a time.

    python -m benchmarks.scaling [--device cpu] [--axes completions prompt ...] [--rounds 3]

A random Qwen2 of the embedded model's width is the base; every other size stays at its base while one goes through its
range. As in a run, no micro-batch is larger than `MAX_MICRO_BATCH_TOKENS`: in one piece 18,432 tokens took 2.8 times as
long as half of them, for activations that no longer fit the caches. The exponent is the slope of log(seconds) over
log(size) in the upper half of the range, where fixed costs weigh least: 1 is linear, below 1 fixed costs are still
shared out. Sizes take turns within a round; medians count. What is expected, and why an exponent may pass 1, stands in
`AXES` and beside each figure in the result.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.record import RESULTS, write_result
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.budget import MAX_MICRO_BATCH_TOKENS
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.decoder import DecoderConfig
from sparkgrpo.trainer.model.weights import random_model
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Rollout, Sampling
from sparkgrpo.trainer.update import Updater

HEAD_WIDTH = 32
GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is varied, and what it stands at."""

    completions: int = 64
    prompt: int = 64
    completion: int = 64
    vocabulary: int = 1024
    width: int = 128
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One size and its range."""

    values: tuple[int, ...]
    tiny: tuple[int, ...]
    """In their place where the script itself is tested."""
    expected: dict[str, float]
    """Largest exponent of each phase that needs no explanation beyond `why`."""
    why: str
    base: Sizes = field(default_factory=Sizes)


LINEAR = {"t_gen": 1.1, "t_update": 1.1}
AXES = {
    "completions": Axis(
        values=(8, 16, 32, 64, 128, 256),
        tiny=(8, 16),
        expected=LINEAR,
        why="a decode step's fixed cost is shared; the update is linear in its tokens",
    ),
    "prompt": Axis(
        values=(32, 64, 128, 256, 512, 1024),
        tiny=(16, 32),
        expected=LINEAR,
        why="a prompt is computed once for its siblings; its own attention is quadratic and small at these lengths",
    ),
    "completion": Axis(
        values=(16, 32, 64, 128, 256, 512),
        tiny=(4, 8),
        expected={"t_gen": 1.5, "t_update": 1.5},
        why="a token attends to all before it: work a token is a + b length, so linear grows to quadratic",
    ),
    "vocabulary": Axis(
        values=(1024, 4096, 16_384, 65_536, 131_072),
        tiny=(256, 512),
        expected=LINEAR,
        why="head and sampling are linear in it, all else does not see it",
        base=Sizes(completions=32, completion=32),
    ),
    "width": Axis(
        values=(64, 128, 256, 512, 1024),
        tiny=(32, 64),
        expected={"t_gen": 2.1, "t_update": 2.1},
        why="weights grow with its square: an exponent of 2 is linear in the weights",
        base=Sizes(completions=32, completion=32),
    ),
    "micro_batches": Axis(
        values=(1, 2, 4, 8),
        tiny=(1, 2),
        expected={"t_update": 0.3},
        why="the same work in more pieces: prompts, small calls and the sum of the head's gradient are repeated",
    ),
}


def decoder_config(sizes: Sizes) -> DecoderConfig:
    """The embedded model's proportions at this width."""
    num_heads = max(1, sizes.width // HEAD_WIDTH)
    return DecoderConfig(
        family="qwen2",
        vocab_size=sizes.vocabulary,
        width=sizes.width,
        num_layers=4,
        num_heads=num_heads,
        num_kv_heads=max(1, num_heads // 2),
        head_width=HEAD_WIDTH,
        ffn_width=4 * sizes.width,
        rms_eps=1e-6,
        rope_theta=1e6,
        tie_embeddings=True,
        qkv_bias=True,
    )


class Workload:
    """A model, its engine and its updater at some sizes; every completion runs to the limit, every group is live."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        group_size = min(GROUP_SIZE, sizes.completions)
        self.num_prompts, self.group_size = sizes.completions // group_size, group_size
        model = random_model(decoder_config(sizes), seed=0, device=device)
        config = Config(
            prompts_per_step=self.num_prompts, group_size=group_size, max_new_tokens=sizes.completion, precision="fp32"
        )
        packed = self.num_prompts * (sizes.prompt + group_size * sizes.completion)
        self.clock = PhaseClock(device, PHASES)
        self.updater = Updater(
            model,
            frozen_copy(model),
            MasterAdamW(model, config),
            config,
            num_valid=sizes.vocabulary,
            tokens_per_micro_batch=min(MAX_MICRO_BATCH_TOKENS, -(-packed // sizes.micro_batches)),
            clock=self.clock,
        )
        self.engine = RolloutEngine(
            model,
            stop_ids=(),
            num_valid=sizes.vocabulary,
            max_rows=sizes.completions,
            max_new_tokens=sizes.completion,
        )
        generator = torch.Generator().manual_seed(0)
        self.prompts: list[list[int]] = torch.randint(
            sizes.vocabulary, (self.num_prompts, sizes.prompt), generator=generator
        ).tolist()

    def _rollout(self, key: int) -> Rollout:
        sampling = Sampling(max_new_tokens=self.sizes.completion, ignore_eos=True)
        return self.engine.generate(self.prompts, self.group_size, sampling, key)

    def step(self, key: int) -> dict[str, float]:
        """Seconds of one rollout (`t_gen`) and of reference, update and optimiser together (`t_update`)."""
        self.clock.start_step()
        with self.clock.phase("t_gen"):
            rollout = self._rollout(key)
        advantage_S = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(self.sizes.completions)
        batch = TrainBatch.of(self.prompts, rollout, advantage_S[: self.sizes.completions])
        self.updater.update(batch, torch.ones(self.sizes.completions, dtype=torch.bool), 1e-6)
        seconds = self.clock.end_step()
        return {"t_gen": seconds["t_gen"], "t_update": seconds["t_ref"] + seconds["t_train"] + seconds["t_opt"]}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Least-squares slope of log seconds over log size, in the upper half of the sizes (two of them at least)."""
    count = max(2, math.ceil(len(sizes) / 2))
    x, y = ([math.log(value) for value in values[-count:]] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / count, sum(y) / count
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def measure(
    name: str, device: torch.device, *, rounds: int, is_tiny: bool = False, clock: Callable[[], float] = time.monotonic
) -> dict[str, object]:
    """One axis: medians of each phase at every size, and their exponents."""
    axis = AXES[name]
    values, start = (axis.tiny if is_tiny else axis.values), clock()
    taken: dict[int, list[dict[str, float]]] = {value: [] for value in values}
    workloads = {value: Workload(replace(axis.base, **{name: value}), device) for value in values}
    for number in range(rounds + 1):
        for value, workload in workloads.items():
            seconds = workload.step(number)
            if number:
                taken[value].append(seconds)
    found: dict[str, object] = {"sizes": list(values), "base": vars(axis.base), "why": axis.why, "phases": {}}
    phases: dict[str, object] = {}
    for phase, most in axis.expected.items():
        medians = [median(step[phase] for step in taken[value]) for value in values]
        slope = exponent(values, medians)
        phases[phase] = {"median_s": medians, "exponent": slope, "expected_at_most": most, "is_within": slope <= most}
        text = "  ".join(f"{value}: {1e3 * s:.1f}" for value, s in zip(values, medians, strict=True))
        print(f"{name:14} {phase:9} exponent {slope:5.2f} (at most {most:.1f})  ms {text}", flush=True)
    print(f"{name:14} {clock() - start:.0f} s; {axis.why}", flush=True)
    return {**found, "phases": phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=list(AXES))
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one of warm-up")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: tests the script, not the machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    device = torch.device(options.device)
    axes = {name: measure(name, device, rounds=options.rounds, is_tiny=options.tiny) for name in options.axes}
    conditions = {
        "model": f"Qwen2, 4 layers, heads of {HEAD_WIDTH}, feed-forward 4 x width, random weights, fp32",
        "batch": f"groups of {GROUP_SIZE}, full-length completions, beta 0.04, one AdamW update",
        "threads": torch.get_num_threads(),
    }
    path = write_result("scaling", device, {"conditions": conditions, "axes": axes}, folder=options.results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
