"""Diseases of the plumbing, which no reward curve shows. Limits: see `trainer/diagnose.py` for their sources."""

import numpy as np

from sparkgrpo.trainer.diagnosis.curves import Curves, run_length
from sparkgrpo.trainer.diagnosis.rule import Finding, Rule, at_once, graded, never, numbers_at

_GAP_LIMITS = {"bf16": (0.05, 0.1, 0.3, 0.6), "fp32": (1e-4, 1e-3, np.inf, np.inf)}
"""By precision: warn and error for the mean gap in nats, warn and error for its 99th percentile."""


def _nonfinite(curves: Curves) -> Finding | str:
    skipped_T = np.nan_to_num(curves.raw("skipped_steps"))
    is_skipped_T = np.diff(skipped_T, prepend=0.0) > 0
    seen_T = (np.nan_to_num(curves.raw("num_nonfinite")) > 0) | is_skipped_T

    def say(t: int) -> str:
        names = curves.rows[t].get("nonfinite")
        what = ", ".join(str(name)[:40] for name in names[:5]) if isinstance(names, list) and names else "the gradient"
        return f"{what} was not finite at step {curves.step_T[t]:.0f}; {int(seen_T[: t + 1].sum())} such steps so far"

    return Finding(
        severity_T=never(curves),
        at_once_T=at_once(curves, warn=seen_T, error=run_length(seen_T) >= 3),
        say=say,
        evidence=lambda t: numbers_at(curves, t, ("num_nonfinite", "skipped_steps", "kl_max", "ratio_max", "lr")),
    )


def _verifier_errors(curves: Curves) -> Finding | str:
    if not curves.has("frac_reward_error"):
        return "the run does not log frac_reward_error"
    now_T, raw_T = curves.med10("frac_reward_error"), curves.raw("frac_reward_error")
    return Finding(
        severity_T=never(curves),
        at_once_T=at_once(curves, warn=now_T > 0.01, error=run_length(raw_T > 0.05) >= 3),
        say=lambda t: (
            f"{100 * raw_T[t]:.1f} % of the answers could not be scored: the reward raised, was too slow or "
            "was not finite"
        ),
        evidence=lambda t: numbers_at(curves, t, ("med10(frac_reward_error)", "frac_reward_error")),
    )


def _identity_broken(curves: Curves) -> Finding | str:
    if "source" in curves.run:
        return "the run is another trainer's"
    is_first_T = curves.step_T == 1
    kl_T, ratio_T, clip_T = (curves.raw(key) for key in ("kl_mean", "ratio_max", "clip_frac"))
    broken_T = is_first_T & (np.nan_to_num(kl_T) != 0)
    if curves.is_one_update:
        broken_T = broken_T | (np.nan_to_num(ratio_T, nan=1.0) != 1) | (np.nan_to_num(clip_T) > 0)

    def say(t: int) -> str:
        if is_first_T[t] and np.nan_to_num(kl_T[t]) != 0:
            return f"the KL before the first update is {kl_T[t]:.3g} and must be exactly 0"
        return f"with one update a batch the ratio must be exactly 1 and nothing clipped; ratio_max is {ratio_T[t]:.6g}"

    return Finding(
        severity_T=never(curves),
        at_once_T=at_once(curves, error=broken_T),
        say=say,
        evidence=lambda t: numbers_at(curves, t, ("kl_mean", "ratio_max", "clip_frac")),
    )


def _identical_siblings(curves: Curves) -> Finding | str:
    if curves.setting("temperature", 1.0) <= 0:
        return "the sampling temperature is 0"
    if not curves.has("entropy_mean"):
        return "the run does not log the entropy"
    G_T = curves.raw("group_size")
    same_T = (G_T > 1) & (np.abs(curves.raw("frac_unique") - 1 / G_T) < 1e-9)
    random_T = curves.raw("entropy_mean") * curves.raw("len_mean") > 3
    return Finding(
        severity_T=never(curves),
        at_once_T=at_once(curves, error=run_length(same_T & random_T) >= 3),
        say=lambda t: (
            f"all siblings of all groups are the same text for three steps, though the policy is worth "
            f"{curves.raw('entropy_mean')[t] * curves.raw('len_mean')[t]:.0f} nats an answer"
        ),
        evidence=lambda t: numbers_at(curves, t, ("frac_unique", "group_size", "entropy_mean", "len_mean")),
    )


def _not_moving(curves: Curves) -> Finding | str:
    mixed_T = curves.med10("frac_zero_std") < 1
    still_T = curves.med10("frac_params_changed") < 0.05
    zero_T = run_length(curves.raw("grad_norm") == 0) >= 10
    return Finding(
        severity_T=graded(curves, error=mixed_T & (still_T | zero_T)),
        at_once_T=never(curves),
        say=lambda t: (
            f"there are mixed groups to learn from, but {100 * curves.med10('frac_params_changed')[t]:.1f} % "
            f"of the weights change in a step and the gradient norm is {curves.raw('grad_norm')[t]:.3g}"
        ),
        evidence=lambda t: numbers_at(
            curves, t, ("med10(frac_params_changed)", "grad_norm", "med10(frac_zero_std)", "lr")
        ),
    )


def _engine_gap(curves: Curves) -> Finding | str:
    if not curves.has("logprob_gap_mean"):
        return "the run does not log logprob_gap_mean"
    precision = "fp32" if curves.config.get("precision") == "fp32" else "bf16"
    warn_mean, error_mean, warn_p99, error_p99 = _GAP_LIMITS[precision]
    mean_T, p99_T = curves.med10("logprob_gap_mean"), curves.med10("logprob_gap_p99")
    grew_T = (mean_T >= 3 * curves.early("logprob_gap_mean")) & (mean_T > warn_mean / 4)
    return Finding(
        severity_T=graded(
            curves,
            warn=(mean_T > warn_mean) | (p99_T > warn_p99) | grew_T,
            error=(mean_T > error_mean) | (p99_T > error_p99),
        ),
        at_once_T=never(curves),
        say=lambda t: (
            f"sampler and trainer differ by {mean_T[t]:.2g} nats a token (limit {warn_mean:g} in "
            f"{precision}), {mean_T[t] / max(curves.early('logprob_gap_mean')[t], 1e-12):.1f} times as much as early on"
        ),
        evidence=lambda t: (
            numbers_at(curves, t, ("med10(logprob_gap_mean)", "early(logprob_gap_mean)", "med10(logprob_gap_p99)"))
            | {"warn_above": warn_mean, "error_above": error_mean}
        ),
    )


def _greedy_is_broken(curves: Curves) -> Finding | str:
    if not len(curves.accuracy_E):
        return "no evaluation"
    # A sloppy reward calls answers right that are not: compare with the strict check where the run has one.
    key = "frac_right_strict" if curves.has("frac_right_strict") else "frac_right"
    sampled_T = curves.early(key)
    first = curves.accuracy_E[:2].max()
    se = curves.accuracy_se_E[:2].max()
    broken_T = (curves.num_evals_T >= 2) & (sampled_T > 0.1) & (first + 2 * se < sampled_T / 2)
    return Finding(
        severity_T=graded(curves, warn=broken_T),
        at_once_T=never(curves),
        say=lambda t: (
            f"held-out accuracy began at {100 * first:.0f} % where {100 * sampled_T[t]:.0f} % of the sampled "
            "training answers were right"
        ),
        evidence=lambda t: numbers_at(curves, t, (f"early({key})",)) | {"first_accuracies": float(first)},
    )


PLUMBING = (
    Rule(
        id="nonfinite",
        sample_kind="none",
        title="numbers that are not finite",
        judge=_nonfinite,
        cures=(
            "lower --lr",
            "read kl_max and ratio_max of the steps before: one token may do it",
            "go on from the last checkpoint",
        ),
    ),
    Rule(
        id="verifier_errors",
        title="answers that could not be scored",
        judge=_verifier_errors,
        cures=("read the exception in events.jsonl", "give the reward more time, or make it faster"),
    ),
    Rule(
        id="identity_broken",
        sample_kind="none",
        title="a number that must be exactly 0 or 1 is not",
        judge=_identity_broken,
        cures=(
            "look for dropout left on",
            "see that the reference is the model that the run began with",
            "otherwise it is a bug of sparkgrpo: report it with run.json",
        ),
    ),
    Rule(
        id="identical_siblings",
        title="all answers of a group are one text",
        judge=_identical_siblings,
        cures=("a bug of the sampler: report it with run.json",),
    ),
    Rule(
        id="not_moving",
        sample_kind="none",
        title="the weights do not move",
        judge=_not_moving,
        cures=("keep fp32 master weights: bf16 absorbs small updates", "raise --lr"),
    ),
    Rule(
        id="engine_gap",
        sample_kind="none",
        title="sampler and trainer disagree",
        judge=_engine_gap,
        cures=(
            "run the graph self-test, then decode without graphs",
            "a gap that grows is a stale copy of the weights",
        ),
    ),
    Rule(
        id="greedy_is_broken",
        title="evaluation is worse than sampling",
        judge=_greedy_is_broken,
        cures=("compare the chat template of evaluation and training", "see that the stop ids hold in evaluation too"),
    ),
)
