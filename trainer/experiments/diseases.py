"""Diseases made on purpose, and whether `diagnose` names them with no other verdict beside it."""

from collections.abc import Collection, Sequence
from statistics import fmean

import torch

from sparkgrpo.trainer.diagnose import diagnose
from sparkgrpo.trainer.diagnosis.dead_groups import recent_counts, subset_dead_share
from sparkgrpo.trainer.diagnosis.rules_policy import POLICY
from sparkgrpo.trainer.experiments.outcome import Bench, Check, Outcome, expect, expect_larger, with_range
from sparkgrpo.trainer.experiments.training_runs import (
    CONTROL,
    accuracy_error,
    accuracy_gain,
    accuracy_plot,
    final_accuracy,
    first_mean,
    folders,
    last_mean,
    metric_plot,
    seeds_of,
    training_run,
)
from sparkgrpo.trainer.objectives import token_weights
from sparkgrpo.trainer.run_reader import RunRecord

_BATCH = {"steps": 30, "prompts_per_step": 16, "lr": 1e-6}
"""A policy that hardly moves: what a group size does is then no matter of what was learnt meanwhile."""

POLICY_DISEASES = frozenset(rule.id for rule in POLICY) | {"nonfinite"}


def named(records: Sequence[RunRecord], severity: str, disease: Collection[str], what: str) -> Check:
    """Whether every run has a verdict of one of these ids at this severity or worse, and none beside it."""
    found = [[v.id for v in diagnose(record).counting(severity, is_active_only=False)] for record in records]
    holds = all(len(ids) == 1 and ids[0] in disease for ids in found)
    text = "; ".join(
        f"{record.name}: {', '.join(ids) or 'nothing'}" for record, ids in zip(records, found, strict=True)
    )
    return expect(f"diagnose names {what} and nothing else", text, holds)


def sloppy_verifier(bench: Bench) -> Outcome:
    """Does a reward that can be had without solving the task get solved or had?"""
    control = seeds_of(bench, "control", CONTROL)
    sloppy = seeds_of(bench, "sloppy-verifier", {"reward": "sloppy"})
    reward = [last_mean(record, "reward_mean") for record in sloppy]
    gain = [accuracy_gain(record) for record in sloppy]
    outcome = Outcome(name="sloppy-verifier", runs=folders(control, sloppy))
    outcome.checks = [
        expect("the reward is at least 0.9 at the end", with_range(reward), min(reward) >= 0.9),
        expect(
            "strict held-out accuracy gains less than a quarter of what the control gains",
            f"{with_range(gain)} against {with_range([accuracy_gain(record) for record in control])}",
            fmean(gain) < 0.25 * fmean(accuracy_gain(record) for record in control),
        ),
        named(sloppy, "warn", ("reward_hacking",), "reward_hacking"),
    ]
    first = fmean(first_mean(record, "reward_mean", 1) for record in sloppy)
    outcome.remarks = [
        f"the reward of the first batch is {first:.2f} already: the model was taught to repeat the target after each "
        "try, so nothing has to be learnt to be paid"
    ]
    outcome.figures = {"reward": reward, "accuracy_gain": gain}
    outcome.plots["sloppy-verifier.svg"] = accuracy_plot(
        "Held-out accuracy, strict check", {"strict reward": control, "sloppy reward": sloppy}
    )
    return outcome


def starved(bench: Bench) -> Outcome:
    """Are groups dead on either side: problems too hard, and problems too easy? And does a larger group help?"""
    hard_4 = seeds_of(bench, "starved-hard-4", {"numbers": "4", "group_size": 4, **_BATCH})
    hard_8 = seeds_of(bench, "starved-hard-8", {"numbers": "4", **_BATCH})
    hard_16 = seeds_of(bench, "starved-hard-16", {"numbers": "4", "group_size": 16, **_BATCH})
    easy = seeds_of(bench, "starved-easy", {"numbers": "2"})
    again = [
        training_run(
            bench,
            "starved-easy-again",
            seed,
            {
                "model": str(record.folder / "checkpoints" / "step_000040"),
                "numbers": "2",
                **{
                    key: record.config[key]
                    for key in ("steps", "prompts_per_step", "group_size", "max_new_tokens", "lr")
                },
            },
        )
        for seed, record in enumerate(easy)
    ]
    dead = [[last_mean(record, "frac_zero_std", 30) for record in records] for records in (hard_8, hard_16)]
    predicted = [_as_if_8(record) for record in hard_16]
    outcome = Outcome(name="starved", runs=folders(hard_4, hard_8, hard_16, easy, again))
    outcome.checks = [
        expect_larger("4 numbers: fewer dead groups with G 16 than with G 8", dead[0], dead[1]),
        expect(
            "the G 16 run counts what G 8 would have given, within 0.05",
            f"{with_range(predicted)} against {with_range(dead[0])}",
            abs(fmean(predicted) - fmean(dead[0])) < 0.05,
        ),
        named(hard_4, "warn", ("dead_groups",), "dead_groups (all wrong) with G 4"),
        _side(hard_4, "all wrong"),
        named(again, "warn", ("dead_groups",), "dead_groups (all right) when training goes on on solved problems"),
        _side(again, "all right"),
    ]
    outcome.remarks = [
        "2 numbers, from the start: the task is learnt "
        f"(held-out {with_range([final_accuracy(record) for record in easy])}), and groups that died of that are no "
        "disease"
    ]
    outcome.figures = {"dead_with_8": dead[0], "dead_with_16": dead[1], "8_predicted_by_16": predicted}
    outcome.plots["starved.svg"] = metric_plot(
        "Dead groups, 4 numbers (hard) and 2 numbers (easy)",
        "frac_zero_std",
        "share of groups",
        {
            "4 numbers, G 4": hard_4,
            "4 numbers, G 8": hard_8,
            "4 numbers, G 16": hard_16,
            "2 numbers": easy,
            "2 numbers, again": again,
        },
    )
    return outcome


def _as_if_8(record: RunRecord) -> float:
    """What the groups of 16 would have been as groups of 8, exactly."""
    found = recent_counts(record.steps, 30)
    assert found is not None
    counts, group_size = found
    return subset_dead_share(counts, group_size, 8)


def _side(records: Sequence[RunRecord], side: str) -> Check:
    keys = ("frac_all_wrong", "frac_all_right") if side == "all wrong" else ("frac_all_right", "frac_all_wrong")
    shares = [[last_mean(record, key) for record in records] for key in keys]
    found = f"{side} {with_range(shares[0])}, the other side {with_range(shares[1])}"
    return expect(f"the dead groups are {side}", found, all(a > b for a, b in zip(*shares, strict=True)))


def wild(bench: Bench) -> Outcome:
    """No leash and ten or twenty times the learning rate: what breaks?"""
    control = seeds_of(bench, "control", CONTROL)
    lr = float(str(control[0].config["lr"]))
    ten = seeds_of(bench, "wild-10", {"beta": 0.0, "lr": 10 * lr})
    twenty = seeds_of(bench, "wild-20", {"beta": 0.0, "lr": 20 * lr})
    error = accuracy_error(control[0])
    outcome = Outcome(name="wild", runs=folders(control, ten, twenty))
    for factor, records in ((10, ten), (20, twenty)):
        outcome.checks.append(named(records, "error", POLICY_DISEASES, f"a disease of the policy at {factor} times lr"))
        outcome.checks.append(
            expect_larger(
                f"held-out accuracy ends below the control at {factor} times lr",
                [final_accuracy(record) for record in control],
                [final_accuracy(record) for record in records],
                least_se=error,
            )
        )
    outcome.plots["wild.svg"] = accuracy_plot(
        "Held-out accuracy without a leash", {"control": control, "10 x lr, beta 0": ten, "20 x lr, beta 0": twenty}
    )
    outcome.plots["wild-entropy.svg"] = metric_plot(
        "Entropy without a leash",
        "entropy_mean",
        "nats a token",
        {"control": control, "10 x lr, beta 0": ten, "20 x lr, beta 0": twenty},
    )
    return outcome


def length_normaliser(bench: Bench) -> Outcome:
    """Does dividing by an answer's own length let wrong answers grow?"""
    control = seeds_of(bench, "control", CONTROL)
    constant = seeds_of(bench, "constant-normaliser", {"normaliser": "constant"})
    growth = [[_wrong_over_right(record) for record in records] for records in (control, constant)]
    push = {}
    for normaliser in ("sequence", "constant"):
        short_answer, long_answer = token_weights(
            normaliser, torch.tensor([20.0, 200.0]), torch.tensor([True, True]), 256
        ).tolist()
        push[normaliser] = long_answer / short_answer
    outcome = Outcome(name="length-normaliser", runs=folders(control, constant))
    outcome.checks = [
        expect(
            "arithmetic: with `sequence` a token of a wrong answer of 200 is pushed a tenth as hard as one of 20",
            f"{push['sequence']:.2f} times as hard; with `constant` {push['constant']:.2f} times",
            abs(push["sequence"] - 0.1) < 1e-9 and push["constant"] == 1.0,
        ),
        expect_larger("len_wrong / len_right grows more with `sequence` than with `constant`", growth[0], growth[1]),
    ]
    outcome.remarks = [
        "the bias needs wrong answers that are longer than right ones to begin with, so no difference may be seen",
        f"held-out accuracy: sequence {with_range([final_accuracy(r) for r in control])}, "
        f"constant {with_range([final_accuracy(r) for r in constant])}",
    ]
    outcome.figures = {"growth_sequence": growth[0], "growth_constant": growth[1]}
    outcome.plots["length-normaliser.svg"] = metric_plot(
        "Length of wrong answers", "len_wrong_mean", "tokens", {"sequence": control, "constant": constant}
    )
    return outcome


def _wrong_over_right(record: RunRecord) -> float:
    """len_wrong / len_right at the end over that at the beginning."""
    return (last_mean(record, "len_wrong_mean") / last_mean(record, "len_right_mean")) / (
        first_mean(record, "len_wrong_mean", 3) / first_mean(record, "len_right_mean", 3)
    )
