"""No signal to learn from: answers cut off, groups without a difference, a standstill."""

import numpy as np

from sparkgrpo.trainer.diagnosis.curves import Curves, run_length
from sparkgrpo.trainer.diagnosis.rule import Finding, Rule, at_once, graded, never, numbers_at

_MIN_GROUPS_ALL_DEAD, _MIN_STEPS_ALL_DEAD, _FIRST_STEPS = 24, 3, 20


def _truncation(curves: Curves) -> Finding | str:
    now_T = curves.med10("frac_truncated")
    better_T = curves.falling("frac_truncated")
    late_T = curves.step_T > 40
    return Finding(
        severity_T=graded(
            curves,
            info=(now_T > 0.05) & ~better_T,
            warn=(now_T > 0.15) & late_T & ~better_T,
            error=(now_T > 0.5) & ~better_T,
        ),
        at_once_T=at_once(curves, error=run_length(curves.raw("frac_truncated") >= 0.95) >= 3),
        say=lambda t: (
            f"{100 * curves.raw('frac_truncated')[t]:.0f} % of the answers end at max_new_tokens "
            f"({curves.setting('max_new_tokens', np.nan):.0f}) and not at a stop token"
        ),
        evidence=lambda t: numbers_at(
            curves, t, ("frac_truncated", "med10(frac_truncated)", "len_mean", "frac_truncated_right")
        ),
    )


def _side(curves: Curves, t: int) -> str:
    window = slice(max(0, t - 9), t + 1)
    right = float(np.nanmean(np.append(curves.raw("frac_all_right")[window], 0.0)))
    wrong = float(np.nanmean(np.append(curves.raw("frac_all_wrong")[window], 0.0)))
    return "both" if abs(right - wrong) <= 0.15 else "all_right" if right > wrong else "all_wrong"


def _dead_groups(curves: Curves) -> Finding | str:
    if curves.setting("group_size", 2) < 2:
        return "groups have one member"
    if curves.config.get("advantage") == "none":
        return "the advantage compares with no sibling"
    now_T, raw_T = curves.med10("frac_zero_std"), curves.raw("frac_zero_std")
    # Solved by training is no disease; problems that were easy from the start teach nothing.
    earned_T = curves.solved & ~(curves.early("frac_right") >= 0.85)
    waits_T = ~(curves.learning | earned_T)
    right_T = curves.med10("frac_all_right") >= 0.95
    dead_T = raw_T == 1
    streak_T = run_length(dead_T)
    groups_T = np.nan_to_num(curves.raw("num_prompts"))
    sum_T = np.cumsum(groups_T)
    num_T = sum_T - np.concatenate([[0.0], sum_T])[np.arange(curves.T) - streak_T + 1]
    all_dead_T = (streak_T >= _MIN_STEPS_ALL_DEAD) & (num_T >= _MIN_GROUPS_ALL_DEAD) & (curves.step_T <= _FIRST_STEPS)
    all_right_now_T = curves.raw("frac_all_right") == 1

    def say(t: int) -> str:
        side = _side(curves, t)
        words = {
            "all_wrong": "nearly all with every answer wrong: too hard, or the format is missed",
            "all_right": "nearly all with every answer right: too easy",
            "both": "some with all answers right and some with all wrong",
        }[side]
        return (
            f"{100 * np.nan_to_num(raw_T[t] if np.isnan(now_T[t]) else now_T[t]):.0f} % of the groups are dead, {words}"
        )

    return Finding(
        severity_T=graded(
            curves,
            info=(now_T >= 0.5) & waits_T,
            warn=(now_T >= 0.75) & waits_T,
            error=(now_T >= 0.95) & ~right_T & waits_T,
        ),
        at_once_T=at_once(curves, warn=all_dead_T & all_right_now_T, error=all_dead_T & ~all_right_now_T),
        say=say,
        evidence=lambda t: numbers_at(
            curves,
            t,
            (
                "frac_zero_std",
                "med10(frac_zero_std)",
                "med10(frac_all_wrong)",
                "med10(frac_all_right)",
                "group_size",
                "med10(frac_zero_std_floor)",
                "med10(frac_dead_identical)",
                "med10(frac_unique)",
            ),
        ),
        cures=lambda t: _dead_cures(curves, t),
    )


def _dead_cures(curves: Curves, t: int) -> tuple[str, ...]:
    side = _side(curves, t)
    harder = ("take harder problems", "turn on dynamic sampling, which refills dead groups")
    easier = (
        _by_reason(curves, t),
        "take easier problems, or train on easy ones first",
        "raise --group-size: a larger group finds a right answer more often",
    )
    wide = ("raise --group-size", "turn on dynamic sampling, which refills dead groups")
    return {"all_wrong": easier, "all_right": harder, "both": wide}[side]


def _by_reason(curves: Curves, t: int) -> str:
    """Read three samples first: a missed format and problems that are too hard have different cures."""
    row = curves.rows[t]
    shares = {key: value for key in row if key.startswith("reason/") and (value := curves.raw(key)[t]) > 0}
    shares.pop("reason/ok", None)
    if not shares:
        return "read three samples"
    worst = max(shares, key=lambda key: shares[key])
    meaning = {"reason/no_answer": "the format is not met", "reason/wrong_value": "the problems are too hard"}
    return f"read three samples: most answers are {worst.removeprefix('reason/')[:40]}" + (
        f", {meaning[worst]}" if worst in meaning else ""
    )


def _plateau(curves: Curves) -> Finding | str:
    if not len(curves.accuracy_E):
        return "no evaluation"
    flat = np.zeros(len(curves.accuracy_E) + 1, dtype=bool)
    for n in range(5, len(flat)):
        last = curves.accuracy_E[n - 5 : n]
        flat[n] = last.max() - last.min() <= 2 * max(curves.accuracy_se_E[n - 5 : n].max(), 1e-9)
    flat_T = flat[curves.num_evals_T]

    def waste(t: int) -> str:
        shares = {
            "dead groups": curves.med10("frac_zero_std")[t],
            "answers cut off": curves.med10("frac_truncated")[t],
            "tokens without a gradient": 1 - curves.med10("frac_tokens_trained")[t],
        }
        known = {name: share for name, share in shares.items() if np.isfinite(share)}
        name = max(known, key=lambda key: known[key], default="")
        return f"; the largest waste is {name}, {100 * known[name]:.0f} %" if name else ""

    return Finding(
        severity_T=graded(curves, info=flat_T & ~curves.learning & ~curves.solved),
        at_once_T=never(curves),
        say=lambda t: f"the last five accuracies lie within two standard errors{waste(t)}",
        evidence=lambda t: numbers_at(
            curves, t, ("med10(frac_right)", "med10(frac_zero_std)", "med10(frac_truncated)")
        ),
    )


SIGNAL = (
    Rule(
        id="truncation",
        title="answers are cut off",
        judge=_truncation,
        because_of=("length_racing", "entropy_blowup", "accuracy_collapse"),
        sample_kind="truncated",
        cures=(
            "raise --max-new-tokens",
            "see that the model has a stop token and knows it",
            "only then a soft penalty on length",
        ),
    ),
    Rule(
        id="dead_groups",
        title="groups without a difference",
        judge=_dead_groups,
        because_of=(
            "truncation",
            "verifier_errors",
            "identical_siblings",
            "entropy_collapse",
            "entropy_blowup",
            "kl_runaway",
            "reward_hacking",
            "accuracy_collapse",
        ),
        sample_kind="wrong",
    ),
    Rule(
        id="plateau",
        title="accuracy stands still",
        judge=_plateau,
        because_of=("dead_groups", "truncation", "kl_strangled", "not_moving", "reward_hacking", "accuracy_collapse"),
        cures=("mend the largest waste first", "take harder problems if most are solved", "raise --lr a little"),
    ),
)
