"""Held-out accuracy of two trainers over the same steps, and how long each takes to a given accuracy.

They take turns, a step each. A side's seconds are those of its steps; evaluations are not counted, and both sides are
judged by one evaluator: our engine on a copy of the weights, greedy, the same problems.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from benchmarks.trl_peer import PeerStep
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.loop import GrpoLoop
from sparkgrpo.trainer.model.weights import load_model, state_dict_hf
from sparkgrpo.trainer.run import build_loop
from sparkgrpo.trainer.tasks.registry import make_task, task_options


class LearningSide(Protocol):
    """What takes part."""

    def step(self) -> PeerStep:
        """One training step."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The present weights under Hugging Face's names."""
        ...


class Judge:
    """Evaluates weights that have Hugging Face names."""

    def __init__(self, folder: str, config: Config) -> None:
        loaded = load_model(folder, dtype=torch.float32, device=config.device)
        self.loop: GrpoLoop = build_loop(config, loaded, make_task("countdown", task_options(config)))
        self.views = state_dict_hf(loaded.model)

    def accuracy(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Share of right answers.

        Raises:
            KeyError: A weight is missing.
        """
        for name, view in self.views.items():
            view.copy_(weights[name].detach())
        accuracy = self.loop.evaluate().accuracy
        assert accuracy is not None, "Countdown judges every answer"
        return accuracy


def learning_curves(
    ours: LearningSide, peer: LearningSide, config: Config, folder: str, *, eval_every: int, target: float
) -> dict[str, object]:
    """Both curves: a point at every evaluation, with the tokens and seconds that led there."""
    judge, sides = Judge(folder, config), {"ours": ours, "trl": peer}
    curves: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    spent = {name: [0.0, 0.0] for name in sides}
    for number in range(config.steps + 1):
        for name, side in sides.items():
            if number:
                step = side.step()
                spent[name][0] += step.seconds["t_step"]
                spent[name][1] += step.num_tokens
            if number % eval_every == 0 or number == config.steps:
                seconds, tokens = spent[name]
                accuracy = judge.accuracy(side.weights())
                curves[name].append({"step": number, "seconds": seconds, "tokens": tokens, "accuracy": accuracy})
                print(f"{name} {json.dumps(curves[name][-1])}", flush=True)
    batch = f"{config.prompts_per_step} prompts x {config.group_size} completions"
    shape = f"at most {config.max_new_tokens} tokens, lr {config.lr:g}, beta {config.beta:g}, seed {config.seed}, fp32"
    return {
        "run": f"{batch}, {shape}; accuracy of {len(judge.loop.heldout)} held-out problems, greedy",
        "curves": curves,
        "summary": summary_of(curves, target),
    }


def reached(curve: Sequence[Mapping[str, float]], target: float) -> Mapping[str, float] | None:
    """The first evaluation at or above the target; what lies between two evaluations is not guessed."""
    return next((point for point in curve if point["accuracy"] >= target), None)


def summary_of(curves: Mapping[str, Sequence[Mapping[str, float]]], target: float) -> dict[str, object]:
    """Who reached the target when, and where both were at the end of the shorter budget of seconds and of tokens."""
    summary: dict[str, object] = {"target_accuracy": target}
    times: dict[str, float | None] = {}
    for name, curve in curves.items():
        point = reached(curve, target)
        times[name] = None if point is None else point["seconds"]
        summary[f"{name}_seconds_to_target"] = times[name]
        summary[f"{name}_tokens_to_target"] = None if point is None else point["tokens"]
    ours, peer = times["ours"], times["trl"]
    summary["seconds_ratio"] = peer / ours if ours and peer is not None else None
    for axis in ("seconds", "tokens"):
        budget = min(curve[-1][axis] for curve in curves.values())
        summary[f"at_equal_{axis}"] = {
            "budget": budget,
            **{name: [p["accuracy"] for p in curve if p[axis] <= budget][-1] for name, curve in curves.items()},
        }
    return summary
