"""Diseases of the policy: it narrows, dissolves, grows long, leaves the reference behind, or is torn by spikes."""

import numpy as np

from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.diagnosis.curves import Array, Curves, rolling_median
from sparkgrpo.trainer.diagnosis.rule import Finding, Rule, at_once, graded, never, numbers_at


def _before(values_T: Array, steps: int) -> Array:
    """The curve as it was so many steps ago [T]."""
    return np.concatenate([np.full(min(steps, len(values_T)), np.nan), values_T[: max(len(values_T) - steps, 0)]])


def _entropy_collapse(curves: Curves) -> Finding | str:
    if not curves.has("entropy_mean"):
        return "the run does not log the entropy"
    now_T, early_T = curves.med10("entropy_mean"), curves.early("entropy_mean")
    narrow_T = curves.med10("frac_unique") <= 0.5 * curves.early("frac_unique")
    dead_T = curves.med10("frac_zero_std")
    waits_T = ~(curves.learning | curves.solved)
    return Finding(
        severity_T=graded(
            curves,
            warn=(now_T <= 0.25 * early_T) & narrow_T & (dead_T >= 0.5) & waits_T,
            error=(now_T <= 0.1 * early_T) & narrow_T & (dead_T >= 0.75) & waits_T,
        ),
        at_once_T=never(curves),
        say=lambda t: (
            f"entropy fell from {early_T[t]:.3g} to {now_T[t]:.3g} nats a token and the share of distinct "
            f"answers from {100 * curves.early('frac_unique')[t]:.0f} to {100 * curves.med10('frac_unique')[t]:.0f} %"
        ),
        evidence=lambda t: numbers_at(
            curves,
            t,
            (
                "med10(entropy_mean)",
                "early(entropy_mean)",
                "med10(frac_unique)",
                "early(frac_unique)",
                "med10(frac_zero_std)",
            ),
        ),
    )


def _entropy_blowup(curves: Curves) -> Finding | str:
    if not curves.has("entropy_mean"):
        return "the run does not log the entropy"
    now_T, early_T = curves.med10("entropy_mean"), curves.early("entropy_mean")
    grown_T = (now_T >= early_T + 0.5) & (now_T >= 1.5 * early_T)
    return Finding(
        severity_T=graded(curves, warn=grown_T & ~curves.learning, error=grown_T & (curves.fall_from_best >= 0.1)),
        at_once_T=never(curves),
        say=lambda t: f"entropy rose from {early_T[t]:.3g} to {now_T[t]:.3g} nats a token: the policy turns to noise",
        evidence=lambda t: (
            numbers_at(curves, t, ("med10(entropy_mean)", "early(entropy_mean)", "med10(frac_right)"))
            | {"fall of frac_right from its best": float(np.nan_to_num(curves.fall_from_best[t]))}
        ),
    )


def _accuracy_collapse(curves: Curves) -> Finding | str:
    """A policy that breaks within its first steps leaves no healthy stretch for the other rules to compare with."""
    if len(curves.accuracy_E) < 2:
        return "fewer than two evaluations" if len(curves.accuracy_E) else "no evaluation"
    best = np.maximum.accumulate(curves.accuracy_E)
    least_se = np.array([0.5 / max(number(row.get("num_problems")) or 1.0, 1.0) for row in curves.eval_rows])
    broken = curves.accuracy_E + 2 * np.maximum(curves.accuracy_se_E, least_se) < best / 2
    # In training too, against its best or its very first batch: one evaluation alone can be unlucky.
    right_T, first = curves.med10("frac_right"), np.nan_to_num(curves.raw("frac_right")[:1])
    best_right_T = np.fmax.accumulate(np.concatenate([first, right_T]))[1:] if curves.T else right_T
    broken_T = np.concatenate([[False], broken])[curves.num_evals_T] & ~(right_T > 0.5 * best_right_T)
    last_T = curves.at_evals(lambda accuracy: accuracy[-1], 1)
    best_T = curves.at_evals(lambda accuracy: accuracy.max(), 1)
    return Finding(
        severity_T=graded(curves, error=broken_T),
        at_once_T=never(curves),
        say=lambda t: (
            f"held-out accuracy fell to {100 * last_T[t]:.0f} % and was {100 * best_T[t]:.0f} %: "
            "the policy is broken, and what else is wrong follows from that"
        ),
        evidence=lambda t: (
            numbers_at(curves, t, ("med10(frac_right)", "med10(len_mean)", "entropy_mean", "lr"))
            | {"accuracy": float(last_T[t]), "best accuracy": float(best_T[t])}
        ),
    )


def _length_racing(curves: Curves) -> Finding | str:
    now_T, early_T = curves.med10("len_mean"), curves.early("len_mean")
    cut_T = curves.med10("frac_truncated")
    cap = curves.setting("max_new_tokens", np.inf)
    wrong_T = curves.med10("len_wrong_mean") / curves.early("len_wrong_mean")
    right_T = curves.med10("len_right_mean") / curves.early("len_right_mean")
    gain_T = curves.at_evals(lambda accuracy: accuracy[-2:].max() - accuracy[0], 3)
    best_T = curves.at_evals(lambda accuracy: accuracy.max() - accuracy[0], 3)
    noise = 1.5 * np.sqrt(2) * float(np.median(curves.accuracy_se_E)) if len(curves.accuracy_se_E) else 0.0
    is_better_T = (gain_T >= max(0.05, noise)) & (gain_T >= 0.5 * best_T)
    follows_T = np.where(np.isnan(gain_T), curves.learning, is_better_T)
    long_T = (now_T >= 1.5 * early_T) & ~follows_T & ~curves.solved
    bad_T = (cut_T >= 0.1) | (wrong_T >= 1.25 * right_T) | (now_T >= 2 * early_T)
    return Finding(
        severity_T=graded(curves, warn=long_T & bad_T, error=long_T & (cut_T >= 0.3) & (now_T >= 0.8 * cap)),
        at_once_T=never(curves),
        say=lambda t: (
            f"answers grew from {early_T[t]:.0f} to {now_T[t]:.0f} tokens and accuracy did not follow; "
            f"{100 * cut_T[t]:.0f} % are cut off"
        ),
        evidence=lambda t: numbers_at(
            curves,
            t,
            (
                "med10(len_mean)",
                "early(len_mean)",
                "med10(len_wrong_mean)",
                "med10(len_right_mean)",
                "med10(frac_truncated)",
            ),
        ),
    )


def _kl_runaway(curves: Curves) -> Finding | str:
    if not curves.has("kl_mean"):
        return "no KL is measured (beta 0)"
    now_T = curves.med10("kl_mean")
    then_T = _before(now_T, 10)
    waits_T = ~(curves.learning | curves.thriving | curves.solved)  # learning moves the policy: that is its point
    far_T = (now_T > 0.5) & waits_T
    return Finding(
        severity_T=graded(
            curves,
            warn=far_T & (now_T >= 1.3 * then_T) & curves.rising("kl_mean"),
            error=far_T & ((now_T >= 2 * then_T) | curves.hurt),
        ),
        at_once_T=never(curves),
        say=lambda t: f"the KL to the reference is {now_T[t]:.2g} nats a token, {then_T[t]:.2g} ten steps before",
        evidence=lambda t: (
            numbers_at(curves, t, ("med10(kl_mean)", "kl_max", "med10(frac_right)", "lr"))
            | {"med10(kl_mean) ten steps before": float(np.nan_to_num(then_T[t]))}
        ),
    )


def _kl_strangled(curves: Curves) -> Finding | str:
    if not curves.has("kl_mean"):
        return "no KL is measured (beta 0)"
    now_T = curves.med10("kl_mean")
    tight_T = (now_T < 1e-4) & (curves.step_T >= 100) & ~curves.learning & ~curves.solved
    return Finding(
        severity_T=graded(curves, info=tight_T),
        at_once_T=never(curves),
        say=lambda t: f"after {curves.step_T[t]:.0f} steps the policy is {now_T[t]:.1g} nats a token from its start",
        evidence=lambda t: numbers_at(curves, t, ("med10(kl_mean)", "lr", "med10(grad_norm)")),
    )


def _why_no_clipping(curves: Curves) -> str | None:
    if curves.is_one_update:
        return "one update a batch: the ratio is exactly 1"
    if curves.config.get("ratio") == "sequence":
        return "one ratio a sequence: its clip fraction is about a hundred times larger"
    return None


def _clipping(curves: Curves) -> Finding | str:
    if why := _why_no_clipping(curves):
        return why
    now_T = curves.med10("clip_frac")
    return Finding(
        severity_T=graded(curves, warn=now_T > 0.1, error=now_T > 0.2),
        at_once_T=never(curves),
        say=lambda t: f"{100 * now_T[t]:.0f} % of the tokens are clipped and carry no gradient",
        evidence=lambda t: numbers_at(curves, t, ("med10(clip_frac)", "clip_frac_low", "clip_frac_high", "ratio_max")),
    )


def _clip_one_sided(curves: Curves) -> Finding | str:
    if why := _why_no_clipping(curves):
        return why
    low_T, high_T = curves.med10("clip_frac_low"), curves.med10("clip_frac_high")
    return Finding(
        severity_T=graded(curves, info=(low_T > 3 * high_T) & (low_T > 1e-3) & curves.falling("entropy_mean")),
        at_once_T=never(curves),
        say=lambda t: (
            f"the lower clip binds {low_T[t]:.3g} of the tokens, the upper {high_T[t]:.3g}, and entropy falls"
        ),
        evidence=lambda t: numbers_at(
            curves, t, ("med10(clip_frac_low)", "med10(clip_frac_high)", "med10(entropy_mean)")
        ),
    )


def _grad_spikes(curves: Curves) -> Finding | str:
    raw_T = curves.raw("grad_norm")
    raw_T = np.where(raw_T > 0, raw_T, np.nan)  # a batch of dead groups has none, and is no measure for the others
    median_T = rolling_median(raw_T, 50, 10)
    mad_T = rolling_median(np.abs(raw_T - median_T), 50, 10)
    spike_T = (raw_T > 3 * median_T) & (raw_T > median_T + 8 * 1.4826 * mad_T)
    padded = np.concatenate([np.zeros(9), spike_T.astype(float)])
    recent_T = np.lib.stride_tricks.sliding_window_view(padded, 10).sum(axis=1) if curves.T else padded[:0]
    waited_T = np.arange(curves.T) >= 19
    return Finding(
        severity_T=graded(curves, warn=(recent_T >= 3) & curves.hurt),
        at_once_T=at_once(curves, info=spike_T & waited_T),
        say=lambda t: (
            f"the gradient norm was {raw_T[t]:.3g}, {raw_T[t] / max(median_T[t], 1e-30):.0f} times its median; "
            f"it was clipped, {recent_T[t]:.0f} such steps among the last 10"
        ),
        evidence=lambda t: (
            numbers_at(curves, t, ("grad_norm", "med10(grad_norm)")) | {"spikes in 10 steps": float(recent_T[t])}
        ),
    )


POLICY = (
    Rule(
        id="entropy_collapse",
        title="the policy has become one answer",
        judge=_entropy_collapse,
        because_of=("reward_hacking", "kl_runaway"),
        cures=(
            "lower --lr",
            "raise --eps-high to 0.28",
            "fewer updates a batch",
            "an entropy bonus (--entropy-coef)",
            "go on from the checkpoint before",
        ),
    ),
    Rule(
        id="entropy_blowup",
        title="the policy turns to noise",
        judge=_entropy_blowup,
        because_of=("engine_gap",),
        cures=("lower --lr", "go on from the checkpoint before"),
    ),
    Rule(
        id="accuracy_collapse",
        title="the policy has unlearnt the task",
        judge=_accuracy_collapse,
        because_of=("nonfinite", "engine_gap", "reward_hacking", "kl_runaway", "entropy_collapse", "entropy_blowup"),
        cures=("lower --lr", "keep a leash (--beta 0.04)", "go on from the checkpoint before"),
    ),
    Rule(
        id="length_racing",
        title="answers grow and accuracy does not",
        judge=_length_racing,
        because_of=("entropy_blowup", "reward_hacking", "kl_runaway", "accuracy_collapse"),
        cures=("--normaliser token or constant", "a soft penalty on overlong answers"),
    ),
    Rule(
        id="kl_runaway",
        title="the policy runs away from the reference",
        judge=_kl_runaway,
        because_of=("engine_gap", "reward_hacking", "entropy_blowup"),
        cures=("lower --lr", "raise --beta", "lower --max-grad-norm"),
    ),
    Rule(
        id="kl_strangled",
        sample_kind="none",
        title="the policy hardly moves",
        judge=_kl_strangled,
        because_of=("not_moving",),
        cures=("raise --lr", "lower --beta"),
    ),
    Rule(
        id="clipping",
        sample_kind="none",
        title="many tokens are clipped",
        judge=_clipping,
        cures=("lower --lr", "fewer updates a batch (--inner-epochs, --mini-batches)"),
    ),
    Rule(
        id="clip_one_sided",
        sample_kind="none",
        title="the lower clip does the work",
        judge=_clip_one_sided,
        cures=("raise --eps-high to 0.28",),
    ),
    Rule(
        id="grad_spikes",
        title="spikes of the gradient",
        judge=_grad_spikes,
        because_of=("kl_runaway", "nonfinite", "entropy_blowup", "entropy_collapse", "accuracy_collapse"),
        cures=("lower --max-grad-norm", "lower --lr", "look at the samples of these steps"),
    ),
)
