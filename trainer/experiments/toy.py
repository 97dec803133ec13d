"""The lesson's toy: five prompts, five tokens, a table of logits, plain SGD. Ten seeds are computed at once.

The objective is the product's: `advantages`, `token_weights` and `linear_grpo` on unit vectors as hidden states, so
that row n of the head is the logits of (seed, prompt) n.

Letters: N pairs of seed and prompt, V tokens, S completions of all seeds.
"""

from collections.abc import Callable

import numpy as np
import torch

from sparkgrpo.kernels.linear_grpo import GrpoObjective, linear_grpo
from sparkgrpo.trainer.advantages import Estimator, advantages
from sparkgrpo.trainer.experiments.outcome import Bench, Outcome, expect, with_range
from sparkgrpo.trainer.experiments.plot import Line, line_plot
from sparkgrpo.trainer.objectives import token_weights

NUM_PROMPTS = NUM_TOKENS = 5
_SEEDS_AT_ONCE = 10
"""Unit vectors are as long as there are seeds and prompts: more seeds at once cost more than they save."""
GROUP_SIZE, NUM_STEPS, NUM_UPDATES, LR, EPS = 16, 80, 2, 0.3, 0.2


def toy(bench: Bench) -> Outcome:
    """Does the objective alone learn?"""
    num_seeds = max(20, bench.num_seeds)
    curves = toy_curves(num_seeds, "group", lambda right: right)
    last = curves[-1]
    crossing = [int(np.argmax(curve > 0.9)) if (curve > 0.9).any() else NUM_STEPS + 1 for curve in curves.T]
    outcome = Outcome(name="toy")
    outcome.checks = [
        expect(
            "mean P(right) starts at 0.2, which is chance",
            f"{curves[0].mean():.3f}",
            abs(curves[0].mean() - 0.2) < 1e-6,
        ),
        expect(
            f"mean P(right) above 0.9 after {NUM_STEPS} steps, on every seed",
            f"{with_range(last.tolist())} over {num_seeds} seeds",
            bool((last > 0.9).all()),
        ),
    ]
    outcome.remarks = [
        f"above 0.9 first at step {np.median(crossing):.0f} (median over seeds)",
        "an independent implementation: 200 seeds end between 0.938 and 0.952 (population spread), first above 0.9 at "
        "step 55 (median)",
    ]
    outcome.figures = {"p_right": [float(x) for x in last], "first_above_0.9": crossing}
    lines = [Line(label="a seed", points=list(enumerate(curve.tolist())), is_thin=True) for curve in curves.T[:20]]
    lines.append(Line(label="mean", points=list(enumerate(curves.mean(1).tolist()))))
    outcome.plots["toy.svg"] = line_plot(
        "The toy: mean P(right) over 5 prompts", lines, x_label="step", y_label="P(right)", y_range=(0.0, 1.0)
    )
    return outcome


def toy_curves(
    num_seeds: int, estimator: Estimator, pay: Callable[[torch.Tensor], torch.Tensor], *, key: int = 0
) -> np.ndarray:
    """Mean P(right) of every seed before each step and after the last: float64 [NUM_STEPS + 1, num_seeds].

    Args:
        pay: Rewards from whether an answer is right (float64, 0 or 1).
    """
    counts = [min(_SEEDS_AT_ONCE, num_seeds - begin) for begin in range(0, num_seeds, _SEEDS_AT_ONCE)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a table does not pay for a second thread, and on a busy machine it waits for it
    try:
        return np.concatenate([_curves(count, estimator, pay, key + i) for i, count in enumerate(counts)], axis=1)
    finally:
        torch.set_num_threads(num_threads)


def _curves(num_seeds: int, estimator: Estimator, pay: Callable[[torch.Tensor], torch.Tensor], key: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(key)
    N = num_seeds * NUM_PROMPTS
    right_N = torch.arange(N) % NUM_PROMPTS
    row_S = torch.arange(N).repeat_interleave(GROUP_SIZE)
    hidden_SN = torch.eye(N)[row_S]
    logits_NV = torch.zeros(N, NUM_TOKENS)
    curve = [_p_right(logits_NV, right_N, num_seeds)]
    for _ in range(NUM_STEPS):
        logp_NV = logits_NV.log_softmax(1)
        token_S = torch.multinomial(logp_NV.exp(), GROUP_SIZE, replacement=True, generator=generator).flatten()
        rewards = pay((token_S == right_N[row_S]).double())
        graded = advantages(rewards.tolist(), row_S.tolist(), estimator)
        # A seed is a batch of its own: its share of the sum over all of them times the number of seeds.
        weight_S = token_weights("sequence", torch.ones(len(row_S)), graded.is_scored_S, 1) * num_seeds
        old_S = logp_NV[row_S, token_S]
        for _ in range(NUM_UPDATES):
            logits_NV = logits_NV - LR * _gradient(logits_NV, hidden_SN, token_S, graded.advantage_S, weight_S, old_S)
        curve.append(_p_right(logits_NV, right_N, num_seeds))
    return np.array(curve)


def _p_right(logits_NV: torch.Tensor, right_N: torch.Tensor, num_seeds: int) -> list[float]:
    p_N = logits_NV.double().softmax(1).gather(1, right_N[:, None])[:, 0]
    return p_N.view(num_seeds, NUM_PROMPTS).mean(1).tolist()


def _gradient(
    logits_NV: torch.Tensor,
    hidden_SN: torch.Tensor,
    token_S: torch.Tensor,
    advantage_S: torch.Tensor,
    weight_S: torch.Tensor,
    old_logp_S: torch.Tensor,
) -> torch.Tensor:
    head_VN = logits_NV.T.contiguous().requires_grad_()
    loss = linear_grpo(
        hidden_SN,
        head_VN,
        token_S,
        advantage_S.float(),
        weight_S.float(),
        objective=GrpoObjective(eps_low=EPS, eps_high=EPS),
        old_logprob_T=old_logp_S,
    ).loss
    (gradient_VN,) = torch.autograd.grad(loss, head_VN)
    return gradient_VN.T
