"""The experiments by name, with the question that each asks."""

import importlib
from collections.abc import Callable, Mapping

from sparkgrpo.trainer.experiments.outcome import Bench, Outcome


def _of(module: str, function: str) -> Callable[[Bench], Outcome]:
    """The experiment, imported when it is run: `--help` needs no PyTorch."""

    def run(bench: Bench) -> Outcome:
        return getattr(importlib.import_module(f"sparkgrpo.trainer.experiments.{module}"), function)(bench)

    return run


EXPERIMENTS: Mapping[str, tuple[str, Callable[[Bench], Outcome]]] = {
    "toy": ("5 prompts, 5 tokens: does the objective alone learn?", _of("toy", "toy")),
    "dead-groups": ("200,000 groups a setting against p^G + (1-p)^G", _of("theory", "dead_groups")),
    "advantage": ("one right answer in sixteen: +3.873 and -0.258", _of("theory", "advantage")),
    "no-baseline": ("the raw reward as advantage, 0/1 and 5/6", _of("no_baseline", "no_baseline")),
    "sloppy-verifier": ("a reward that is paid for the target's digits anywhere", _of("diseases", "sloppy_verifier")),
    "starved": ("problems too hard and too easy, and a larger group", _of("diseases", "starved")),
    "wild": ("no leash and 10 and 20 times the learning rate", _of("diseases", "wild")),
    "length-normaliser": ("dividing by the length, or by a constant", _of("diseases", "length_normaliser")),
}
