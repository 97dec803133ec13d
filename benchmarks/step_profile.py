"""Where our own step spends what is no matrix product: torch.profiler over whole steps, by operation.

    python -m benchmarks.step_profile [MODEL ...] [--steps 3]

The embedded model runs its own recipe (32 prompts x 8 completions, at most 144 tokens), any other model 4 x 8 x 64.
Reported: share of self CPU time of products, and every other operation with its share and calls, largest first. The
profiler makes small operations look more costly than they are, so shares of tiny ones are upper bounds.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import RESULTS, write_result
from benchmarks.versus_trl import OurSide
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.machine import EMBEDDED, model_recipe, model_source
from sparkgrpo.trainer.model.weights import load_model, save_model

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")
FUSED = ("_linear_pointwise", "_scaled_dot_product", "_flash_attention")
"""Beginnings of names: oneDNN's linear layer, fused attention."""
NUM_SHOWN = 15


def is_product(name: str) -> bool:
    """Whether an operation's own time is that of matrix products: fused attention counts as such."""
    bare = name.rpartition("::")[2]
    return bare in PRODUCTS or bare.startswith(FUSED)


def profile_steps(side: OurSide, num_steps: int) -> dict[str, object]:
    """Self CPU time by operation over steps of a warm side, and the steps' wall time with and without the profiler."""
    side.step()
    start = time.perf_counter()
    bare = side.step().seconds
    bare_s = time.perf_counter() - start
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        start = time.perf_counter()
        for _ in range(num_steps):
            side.step()
        wall_s = (time.perf_counter() - start) / num_steps
    times = [(e.key, e.self_cpu_time_total * 1e-6 / num_steps, e.count // num_steps) for e in recorded.key_averages()]
    total_s = sum(seconds for _, seconds, _ in times)
    products_s = sum(seconds for name, seconds, _ in times if is_product(name))
    others = sorted((t for t in times if not is_product(t[0])), key=lambda t: -t[1])[:NUM_SHOWN]
    return {
        "step_s": bare_s,
        "split_s": bare,
        "step_s_under_profiler": wall_s,
        "cpu_s": total_s,
        "frac_products": products_s / total_s,
        "others": [{"name": n, "self_s": s, "frac": s / total_s, "calls": c} for n, s, c in others],
    }


def config_of(model: str, small: Sequence[int] | None) -> Config:
    recipe: dict[str, Any] = {key: value for key, value in model_recipe(model).items() if key != "steps"}
    if not recipe:
        recipe = {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 64}
    if small is not None:
        recipe |= dict(zip(("prompts_per_step", "group_size", "max_new_tokens"), small, strict=True))
    return Config(**recipe, device="cpu", precision="fp32", eval_problems=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=[EMBEDDED], help="folders, hub names or GGUF files")
    parser.add_argument("--steps", type=int, default=3, help="profiled steps, after two without the profiler")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("PROMPTS", "G", "TOKENS"), help="another batch")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    runs = []
    for model in options.models:
        config = config_of(model, options.shape)
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), load_model(model_source(model), dtype=torch.float32, device="cpu"))
            side = OurSide(folder, config, is_full_length=model != EMBEDDED)
        batch = f"{config.prompts_per_step} x {config.group_size} x {config.max_new_tokens}"
        runs.append({"model": Path(model).stem, "batch": batch, **profile_steps(side, options.steps)})
        print(f"{model}: {runs[-1]['step_s']:.2f} s a step, products {100 * runs[-1]['frac_products']:.0f} %")
        for op in runs[-1]["others"]:
            print(f"  {100 * op['frac']:5.1f} %  {op['calls']:7,} calls  {op['name']}")
    content = {"conditions": {"threads": torch.get_num_threads(), "precision": "fp32"}, "runs": runs}
    print(f"written to {write_result('step_profile', torch.device('cpu'), content, folder=options.results)}")


if __name__ == "__main__":
    main()
