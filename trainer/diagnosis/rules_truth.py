"""Whether the reward tells the truth, and whether the machine keeps up."""

import numpy as np

from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.diagnosis.curves import Array, Curves
from sparkgrpo.trainer.diagnosis.rule import Finding, Rule, graded, never, numbers_at

GIB = float(1 << 30)


def _reward_hacking(curves: Curves) -> Finding | str:
    has_gap, has_evals = curves.has("hack_gap"), len(curves.accuracy_E) >= 1
    if not has_gap and not has_evals:
        return "no evaluation, and the task has no strict check"
    gap_T = curves.med10("hack_gap")
    grew_T, gained_T, se_T, followed_T = _growth_of_distance(curves)
    # The strict check on the very same answers says more than another set of problems ever can.
    moved_T = (gained_T >= 0.15) & (grew_T >= 3 * se_T) & ~followed_T & (not has_gap)

    def say(t: int) -> str:
        if has_gap and gap_T[t] > 0.05:
            return f"{100 * gap_T[t]:.0f} points more answers are paid as right than the strict check finds right"
        return (
            f"the share of paid answers grew by {100 * gained_T[t]:.0f} points, and its distance to held-out "
            f"accuracy by {100 * grew_T[t]:.0f}"
        )

    return Finding(
        severity_T=graded(
            curves,
            warn=(gap_T > 0.05) | (moved_T & (grew_T >= 0.15)),
            error=(gap_T > 0.15) | (moved_T & (grew_T >= 0.30)),
        ),
        at_once_T=never(curves),
        say=say,
        evidence=lambda t: (
            numbers_at(curves, t, ("med10(hack_gap)", "med10(frac_right)", "frac_right_strict"))
            | {"growth of frac_right - accuracy": float(np.nan_to_num(grew_T[t]))}
        ),
    )


def _growth_of_distance(curves: Curves) -> tuple[Array, Array, Array, Array]:
    """How far training and held-out parted since the first two evaluations.

    Against those two, so that the constant distance between sampling and greedy decoding drops out.

    Returns:
        Growth of frac_right - accuracy; gain of frac_right; standard error of the growth; bool: whether accuracy
        gained a quarter or more of it; each [T], NaN (False) before a third evaluation.
    """
    right_T = curves.med10("frac_right")
    nowhere = np.full(curves.T, np.nan)
    if len(curves.accuracy_E) < 3 or not curves.T:
        return nowhere, nowhere, nowhere, np.zeros(curves.T, dtype=bool)
    raw_T = curves.raw("frac_right")
    first = [_around(raw_T, curves.step_T, step) for step in curves.eval_step_E[:2]]
    base_right, base_accuracy = float(np.mean(first)), float(curves.accuracy_E[:2].mean())
    base_se = float(np.sqrt((curves.accuracy_se_E[:2] ** 2).sum()) / 2)
    # The better of the last two: one unlucky evaluation accuses nobody; where there is but one, by 1.5 times as much.
    later, later_se = curves.accuracy_E[2:], curves.accuracy_se_E[2:]
    best = [later[max(0, e - 1) : e + 1].max() for e in range(len(later))]
    last = np.array([np.nan] * 3 + best)[curves.num_evals_T]
    last_se = np.array([np.nan] * 3 + list(later_se))[curves.num_evals_T]
    # Noise of the batches: of a median of 10 now (1.57 / 10) and of two means of 5 before (1 / 10).
    noise = 1.4826 * float(np.nanmedian(np.abs(np.diff(raw_T)))) / np.sqrt(2) if curves.T > 1 else 0.0
    gained_T, accuracy_gain_T = right_T - base_right, last - base_accuracy
    return (
        gained_T - accuracy_gain_T,
        gained_T,
        np.sqrt(base_se**2 + last_se**2 + 0.257 * np.nan_to_num(noise) ** 2)
        * np.where(curves.num_evals_T < 4, 1.5, 1.0),
        accuracy_gain_T >= 0.25 * gained_T,
    )


def _around(raw_T: Array, step_T: Array, step: float) -> float:
    """Mean of the five steps around an evaluation, or of the nearest five."""
    nearest = np.argsort(np.abs(step_T - step), kind="stable")[:5]
    known = raw_T[nearest][np.isfinite(raw_T[nearest])]
    return float(known.mean()) if len(known) else np.nan


def _format_only(curves: Curves) -> Finding | str:
    gained_T = curves.med10("reward_mean") - curves.early("reward_mean")
    right_T = curves.med10("frac_right") - curves.early("frac_right")
    late_T = curves.step_T >= 60
    return Finding(
        severity_T=graded(curves, warn=late_T & (gained_T >= 0.15) & (right_T < 0.3 * gained_T) & ~curves.learning),
        at_once_T=never(curves),
        say=lambda t: (
            f"the reward gained {gained_T[t]:.2f}, the share of right answers {right_T[t]:.2f}: "
            "what is learnt is the form"
        ),
        evidence=lambda t: numbers_at(
            curves, t, ("med10(reward_mean)", "early(reward_mean)", "med10(frac_right)", "early(frac_right)")
        ),
    )


def _slow_machine(curves: Curves) -> Finding | str:
    tokens, t_gen = curves.raw("num_tokens"), curves.raw("t_gen")
    if not (np.isfinite(tokens) & np.isfinite(t_gen)).any():
        return "the run does not log its times"
    rows = [{"s": g / n if n > 0 else None} for g, n in zip(t_gen, tokens, strict=True)]
    per_token = Curves(rows, (), {})
    now_T, early_T = per_token.med10("s"), per_token.early("s")
    length_T, first_T = curves.med10("len_mean"), curves.early("len_mean")
    same_T = np.abs(length_T - first_T) <= 0.2 * first_T
    return Finding(
        severity_T=graded(curves, warn=(now_T >= 1.5 * early_T) & same_T),
        at_once_T=never(curves),
        say=lambda t: (
            f"a token takes {1e3 * now_T[t]:.3g} ms to sample and took {1e3 * early_T[t]:.3g} at first, at equal length"
        ),
        evidence=lambda t: numbers_at(curves, t, ("tok_per_s", "med10(len_mean)", "sm_clock_mhz", "temp_c")),
    )


def _memory_low(curves: Curves) -> Finding | str:
    if not curves.has("mem_available_min_bytes"):
        return "the run does not log mem_available_min_bytes"
    floor = number(curves.run.get("memory_floor_bytes"))
    if floor is None:
        hardware = curves.run.get("hardware")
        is_integrated = isinstance(hardware, dict) and hardware.get("is_integrated") is True
        if not is_integrated:
            return "run.json names no floor for the memory"
        floor = 16 * GIB
    left_T = curves.raw("mem_available_min_bytes") - floor
    return Finding(
        severity_T=graded(curves, warn=left_T < 4 * GIB),
        at_once_T=never(curves),
        say=lambda t: (
            f"{left_T[t] / GIB:.1f} GiB above the floor of {floor / GIB:.0f} GiB, where the run is saved and stopped"
        ),
        evidence=lambda t: numbers_at(curves, t, ("mem_available_min_bytes", "mem_peak_bytes")),
    )


TRUTH_AND_MACHINE = (
    Rule(
        id="reward_hacking",
        title="the reward is earned and the task is not solved",
        judge=_reward_hacking,
        because_of=("entropy_blowup",),
        sample_kind="best",
        cures=("open the 20 best samples", "tighten the check", "go on from a checkpoint before it began"),
    ),
    Rule(
        id="format_only",
        title="only the form is learnt",
        judge=_format_only,
        because_of=("reward_hacking",),
        cures=("pay less for the form",),
    ),
    Rule(
        id="slow_machine",
        sample_kind="none",
        title="the machine has become slower",
        judge=_slow_machine,
        cures=("see what else runs on it", "look at clock, temperature and power (sparkgrpo doctor)"),
    ),
    Rule(
        id="memory_low",
        sample_kind="none",
        title="memory is nearly used up",
        judge=_memory_low,
        cures=("close other programs", "lower --tokens-per-micro-batch or --max-new-tokens"),
    ),
)
