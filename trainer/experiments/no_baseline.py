"""No baseline: the raw reward as advantage, with rewards 0/1 and 5/6; on the toy, in theory, and in the real loop."""

from math import comb

import numpy as np

from sparkgrpo.trainer.experiments.diseases import POLICY_DISEASES, named
from sparkgrpo.trainer.experiments.outcome import Bench, Outcome, expect, expect_larger, with_range
from sparkgrpo.trainer.experiments.plot import Line, line_plot
from sparkgrpo.trainer.experiments.toy import toy_curves
from sparkgrpo.trainer.experiments.training_runs import (
    CONTROL,
    accuracy_error,
    accuracy_plot,
    final_accuracy,
    folders,
    seeds_of,
)

NUM_TOY_SEEDS = 50
NO_BASELINE = {"advantage": "none"}
NO_BASELINE_5_6 = {"advantage": "none", "reward_shift": 5.0}


def no_baseline(bench: Bench) -> Outcome:
    """What does the group's mean buy?"""
    outcome = Outcome(name="no-baseline")
    _toy(outcome)
    _noise(outcome)
    _real_loop(outcome, bench)
    return outcome


def _toy(outcome: Outcome) -> None:
    last = {
        "group mean, undivided": toy_curves(NUM_TOY_SEEDS, "mean", lambda right: right)[-1],
        "raw 0/1": toy_curves(NUM_TOY_SEEDS, "none", lambda right: right)[-1],
        "raw 5/6": toy_curves(NUM_TOY_SEEDS, "none", lambda right: right + 5)[-1],
        "group mean, divided, 5/6": toy_curves(NUM_TOY_SEEDS, "group", lambda right: right + 5)[-1],
        "group mean, divided, 0/1": toy_curves(NUM_TOY_SEEDS, "group", lambda right: right)[-1],
    }
    spread = {name: float(np.std(values, ddof=1)) for name, values in last.items()}
    same = np.abs(last["group mean, divided, 5/6"] - last["group mean, divided, 0/1"]).max()
    outcome.checks += [
        expect(
            "toy: the spread over seeds shows a missing baseline: raw 5/6 at least five times that of the mean",
            f"{spread['raw 5/6']:.3f} against {spread['group mean, undivided']:.4f}",
            spread["raw 5/6"] > 5 * spread["group mean, undivided"],
        ),
        expect(
            "toy: raw 5/6 ends below the group mean",
            f"{with_range(last['raw 5/6'].tolist())} against {with_range(last['group mean, undivided'].tolist())}",
            last["raw 5/6"].mean() < last["group mean, undivided"].mean(),
        ),
        expect(
            "toy: with the group's baseline rewards 5/6 train as 0/1 do", f"largest difference {same:.1e}", same < 1e-3
        ),
    ]
    outcome.remarks.append(
        f"toy, {NUM_TOY_SEEDS} seeds: "
        + "; ".join(f"{name} {with_range(values.tolist())}" for name, values in last.items())
        + ". On the toy raw 0/1 is not behind the undivided mean."
    )
    outcome.figures["toy"] = {name: [float(x) for x in values] for name, values in last.items()}


def noise_ratios(p: float, group_size: int) -> tuple[float, float]:
    """Variance of the gradient by raw rewards 0/1 and 5/6 over that by centred ones, at equal mean; exact.

    Two outcomes with probability p of the right one; the gradient is that of the right one's logit, summed over all
    k right answers of G. The centred estimate is scaled by G / (G - 1), which gives it the same mean.
    """
    k = np.arange(group_size + 1)
    weight = np.array([comb(group_size, i) * p**i * (1 - p) ** (group_size - i) for i in k])
    share = k / group_size

    def variance(values: np.ndarray) -> float:
        return float((weight * values**2).sum() - (weight * values).sum() ** 2)

    centred = variance(share * (1 - share) * group_size / (group_size - 1))
    raw = variance(share * (1 - p))
    shifted = variance(6 * share * (1 - p) - 5 * (1 - share) * p)
    return raw / centred, shifted / centred


def _noise(outcome: Outcome) -> None:
    at = {p: noise_ratios(p, 16) for p in (0.05, 0.2, 0.5)}
    outcome.checks.append(
        expect(
            "theory: without a baseline the gradient is noisier at pass rates up to a half, and far more with 5/6",
            "; ".join(f"p {p}: 0/1 {a:.1f} times, 5/6 {b:.0f} times" for p, (a, b) in at.items()),
            all(1 < a < b for a, b in at.values()),
        )
    )
    raw, shifted = noise_ratios(0.9, 16)
    outcome.remarks.append(
        f"above a pass rate of about 0.6 raw 0/1 is quieter than the centred estimate (at 0.9: {raw:.2f} times its "
        f"variance), raw 5/6 never (at 0.9: {shifted:.0f} times)"
    )
    outcome.figures["noise"] = {str(p): list(pair) for p, pair in at.items()}
    rates = np.linspace(0.02, 0.98, 97)
    lines = [
        Line(label=label, points=[(float(p), float(np.log10(noise_ratios(float(p), 16)[i]))) for p in rates])
        for i, label in enumerate(("raw 0/1", "raw 5/6"))
    ]
    outcome.plots["no-baseline-noise.svg"] = line_plot(
        "Noise of the gradient without a baseline, G 16", lines, x_label="pass rate", y_label="log10 of variance ratio"
    )


def _real_loop(outcome: Outcome, bench: Bench) -> None:
    control = seeds_of(bench, "control", CONTROL)
    raw = seeds_of(bench, "no-baseline", NO_BASELINE)
    shifted = seeds_of(bench, "no-baseline-5-6", NO_BASELINE_5_6)
    accuracy = [[final_accuracy(record) for record in records] for records in (control, raw, shifted)]
    error = accuracy_error(control[0])
    outcome.checks += [
        expect_larger("real loop: the group's baseline ends above raw 0/1", accuracy[0], accuracy[1], least_se=error),
        expect_larger("real loop: raw 0/1 ends above raw 5/6", accuracy[1], accuracy[2], least_se=error),
        named(shifted, "error", POLICY_DISEASES, "a disease of the policy with raw 5/6"),
    ]
    outcome.figures["accuracy"] = dict(zip(("group", "raw 0/1", "raw 5/6"), accuracy, strict=True))
    outcome.plots["no-baseline.svg"] = accuracy_plot(
        "Held-out accuracy without a baseline", {"group baseline": control, "raw 0/1": raw, "raw 5/6": shifted}
    )
    outcome.runs = folders(control, raw, shifted)
