"""Two experiments without a model: how many groups are dead, and what one right answer in sixteen is worth."""

import math

import numpy as np

from sparkgrpo.trainer.advantages import STD_FLOOR, advantages
from sparkgrpo.trainer.diagnosis.dead_groups import dead_share
from sparkgrpo.trainer.experiments.outcome import Bench, Outcome, expect
from sparkgrpo.trainer.experiments.plot import Line, line_plot
from sparkgrpo.trainer.metrics import is_dead

NUM_GROUPS = 200_000
GROUP_SIZES = (4, 8, 16, 32)
PASS_RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
_NUM_ASKED = 500
"""Groups of each cell that the product's own definition of dead is asked about."""


def dead_groups(bench: Bench) -> Outcome:
    """Does the share of dead groups follow p^G + (1-p)^G?"""
    rng = np.random.default_rng(0)
    rows, worst = [], 0.0
    is_same = True
    for G in GROUP_SIZES:
        for p in PASS_RATES:
            answers = rng.random((NUM_GROUPS, G), dtype=np.float32) < p
            right = answers.sum(1)
            dead = (right == 0) | (right == G)
            asked = [is_dead(list(map(float, group))) for group in answers[:_NUM_ASKED]]
            is_same &= asked == dead[:_NUM_ASKED].tolist()
            share, theory = float(dead.mean()), float(dead_share(p, G))
            se = math.sqrt(theory * (1 - theory) / NUM_GROUPS)
            worst = max(worst, abs(share - theory) / se)
            rows.append({"G": G, "p": p, "simulated": share, "theory": theory, "standard_error": se})
    outcome = Outcome(name="dead-groups", figures={"cells": rows, "largest_in_standard_errors": worst})
    largest = max(abs(row["simulated"] - row["theory"]) for row in rows)
    outcome.checks = [
        expect(
            f"p^G + (1-p)^G within 4 standard errors, {NUM_GROUPS:,} groups in each of {len(rows)} settings",
            f"largest difference {largest:.4f}, at most {worst:.1f} standard errors",
            worst <= 4,
        ),
        expect("the trainer calls the same groups dead", "the same" if is_same else "not the same", is_same),
    ]
    half = {G: float(dead_share(0.05, G)) for G in GROUP_SIZES}
    outcome.remarks = [
        "at a pass rate of 0.05: " + ", ".join(f"{100 * share:.0f} % dead with G {G}" for G, share in half.items()),
        "prompts of different difficulty make it more: with the mean pass rate the formula is a lower bound",
    ]
    lines = [
        Line(label=f"G {G}", points=[(float(p), float(dead_share(p, G))) for p in np.linspace(0, 1, 101)])
        for G in GROUP_SIZES
    ]
    outcome.plots["dead-groups.svg"] = line_plot(
        "Share of dead groups", lines, x_label="pass rate", y_label="dead", y_range=(0.0, 1.0)
    )
    return outcome


def advantage(bench: Bench) -> Outcome:
    """What is one right answer among sixteen worth?"""
    rewards = [1.0] + [0.0] * 15
    graded = advantages(rewards, [0] * 16, "group")
    std = float(graded.std_N[0])
    right, wrong = (float(graded.advantage_S[i]) * (std + STD_FLOOR) / std for i in (0, 1))
    sample = advantages(rewards, [0] * 16, "group", ddof=1)
    outcome = Outcome(name="advantage")
    outcome.checks = [
        expect("+3.873 for the right one, before the 1e-4", f"{right:+.4f}", abs(right - 3.8730) < 5e-4),
        expect("-0.258 for each wrong one", f"{wrong:+.4f}", abs(wrong + 0.2582) < 5e-4),
        expect(
            "they add up to 0 over the group",
            f"{float(graded.advantage_S.sum()):.1e}",
            abs(float(graded.advantage_S.sum())) < 1e-9,
        ),
    ]
    outcome.remarks = [
        f"with the 1e-4 added to the spread: {float(graded.advantage_S[0]):+.4f} and "
        f"{float(graded.advantage_S[1]):+.4f}",
        f"divided by the sample's spread (G - 1, as TRL does): {float(sample.advantage_S[0]):+.4f} and "
        f"{float(sample.advantage_S[1]):+.4f}",
    ]
    outcome.figures = {"right": right, "wrong": wrong}
    return outcome
