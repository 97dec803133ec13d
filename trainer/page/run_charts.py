"""The charts of one run, and why one is off."""

from collections.abc import Mapping, Sequence

import numpy as np

from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.diagnosis.curves import Array, Curves
from sparkgrpo.trainer.diagnosis.dead_groups import fit_pass_rates, recent_counts
from sparkgrpo.trainer.diagnosis.rule import Diagnosis
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.page.chart import Chart, Mark, Series
from sparkgrpo.trainer.page.markup import column_key, four_digits
from sparkgrpo.trainer.run_reader import RunRecord

MAX_REASONS = 7

_PHASE_NAMES = {
    "t_gen": "sampling",
    "t_reward": "reward",
    "t_old": "old log-probs",
    "t_ref": "reference",
    "t_train": "forward, backward",
    "t_opt": "optimiser",
    "t_eval": "evaluation",
    "t_other": "other",
}
_MARKED_IN = {
    "Right answers": ("reward_hacking", "accuracy_collapse", "plateau", "greedy_is_broken", "format_only"),
    "Dead groups": ("dead_groups", "identical_siblings"),
    "Length": ("length_racing",),
    "Cut off": ("truncation",),
    "KL to the reference": ("kl_runaway", "kl_strangled", "identity_broken"),
    "Entropy": ("entropy_collapse", "entropy_blowup"),
    "Clipped": ("clipping", "clip_one_sided"),
    "Sampler against trainer": ("engine_gap",),
    "Gradient norm": ("grad_spikes", "nonfinite", "not_moving"),
    "Speed": ("slow_machine",),
    "Memory": ("memory_low",),
}


def run_charts(record: RunRecord, diagnosis: Diagnosis) -> tuple[list[Chart], tuple[float, float]]:
    """The charts in the order of the page, and the range of steps that they share."""
    curves = Curves(record.steps, record.evals, record.config, record.run)
    charts = [
        _right(curves),
        _dead_groups(curves, record.steps),
        _length(curves),
        _lines(
            curves,
            "Cut off",
            "share of answers",
            {"frac_truncated": "at max_new_tokens", "frac_truncated_right": "and right"},
        ),
        _or_off(
            _lines(curves, "KL to the reference", "nats a token", {"kl_mean": "mean"}),
            "beta is 0, there is no reference" if curves.setting("beta", 1) == 0 else None,
        ),
        _lines(curves, "Entropy", "nats a token", {"entropy_mean": "policy"}),
        _or_off(
            _lines(curves, "Clipped", "share of tokens", {"clip_frac_low": "low", "clip_frac_high": "high"}),
            "one update a batch: the ratio is exactly 1" if curves.is_one_update else None,
        ),
        _lines(
            curves,
            "Sampler against trainer",
            "nats, log axis",
            {"logprob_gap_mean": "mean", "logprob_gap_p99": "99th percentile", "logprob_gap_max": "largest"},
            is_log=True,
        ),
        _lines(curves, "Gradient norm", "before clipping", {"grad_norm": "norm"}),
        _lines(curves, "Distinct answers", "share of a group", {"frac_unique": "distinct / G"}, top=1.0),
        _reasons(curves, record.steps),
        _time(curves),
        _lines(curves, "Speed", "tokens / s", {"tok_per_s": "sampled tokens"}),
        _memory(curves),
    ]
    for chart in charts:
        ids = _MARKED_IN.get(chart.title, ())
        chart.marks = [
            Mark(step=verdict.first_step, severity=verdict.severity, text=f"{verdict.id}: {verdict.text}")
            for verdict in diagnosis.verdicts
            if verdict.id in ids
        ]
    x = np.concatenate([curves.step_T, curves.eval_step_E])
    return charts, ((float(x.min()), float(x.max())) if len(x) else (0.0, 1.0))


def _lines(
    curves: Curves, title: str, unit: str, keys: Mapping[str, str], *, is_log: bool = False, top: float | None = None
) -> Chart:
    series = [Series(key=key, label=label, x=curves.step_T, y=curves.raw(key)) for key, label in keys.items()]
    return Chart(title=title, unit=unit, series=series, is_log=is_log, top=top)


def _or_off(chart: Chart, why: str | None) -> Chart:
    if why is not None and not any(np.nan_to_num(series.y).any() for series in chart.series):
        chart.off = why
    return chart


def _right(curves: Curves) -> Chart:
    right_T, reward_T, strict_T = (curves.raw(key) for key in ("frac_right", "reward_mean", "frac_right_strict"))
    series = [
        Series(key="frac_right", label="training, by the reward", x=curves.step_T, y=right_T),
        Series(
            key="eval/accuracy", label="held-out, strict check", x=curves.eval_step_E, y=curves.accuracy_E, kind="dots"
        ),
    ]
    if np.nanmax(np.abs(np.append(right_T - strict_T, 0.0))) > 1e-9:
        series.append(Series(key="frac_right_strict", label="training, strict check", x=curves.step_T, y=strict_T))
    if np.nanmax(np.abs(np.append(right_T - reward_T, 0.0))) > 1e-9:
        series.append(Series(key="reward_mean", label="reward", x=curves.step_T, y=reward_T))
    is_share = all(np.nanmax(np.append(s.y, 0.0)) <= 1 and np.nanmin(np.append(s.y, 0.0)) >= 0 for s in series)
    return Chart(title="Right answers", unit="share", series=series, top=1.0 if is_share else None)


def _dead_groups(curves: Curves, steps: Sequence[Mapping[str, object]]) -> Chart:
    x = curves.step_T
    series = [
        Series(key="frac_all_wrong", label="all wrong", x=x, y=curves.raw("frac_all_wrong"), kind="area"),
        Series(key="frac_all_right", label="all right", x=x, y=curves.raw("frac_all_right"), kind="area"),
        Series(key="frac_zero_std_floor", label="if all were equally hard", x=x, y=curves.raw("frac_zero_std_floor")),
    ]
    found = recent_counts(steps)
    fit = None if found is None else fit_pass_rates(*found)
    note = ""
    if fit is not None:
        note = f"A spread of pass rates fitted to the last 20 steps gives {100 * fit.dead(fit.group_size):.0f} % dead "
        note += f"(measured {100 * fit.measured:.0f} %) and expects {100 * fit.dead(2 * fit.group_size):.0f} % with "
        note += f"group size {2 * fit.group_size}." if fit.fits else "twice the group size, but it does not fit well."
    return Chart(title="Dead groups", unit="share of groups, stacked", series=series, top=1.0, note=note)


def _length(curves: Curves) -> Chart:
    keys = {"len_mean": "mean", "len_right_mean": "right answers", "len_wrong_mean": "wrong answers"}
    chart = _lines(curves, "Length", "tokens", keys)
    cap = curves.setting("max_new_tokens", np.nan)
    if np.isfinite(cap):
        chart.series = [*chart.series, Series(key="cap", label="cap", x=curves.step_T, y=np.full(curves.T, cap))]
    return chart


def _reasons(curves: Curves, steps: Sequence[Mapping[str, object]]) -> Chart:
    """The most frequent codes stacked, the others as one."""
    codes = sorted({key for row in steps for key in row if key.startswith("reason/")})
    share_of = {code: np.nan_to_num(curves.raw(code)) for code in codes}
    order = sorted(codes, key=lambda code: (code != "reason/ok", -float(share_of[code].sum())))
    series = [
        Series(key=code, label=code.removeprefix("reason/"), x=curves.step_T, y=share_of[code], kind="area")
        for code in order[:MAX_REASONS]
    ]
    if len(order) > MAX_REASONS:
        rest: Array = np.sum([share_of[code] for code in order[MAX_REASONS:]], axis=0)
        series.append(Series(key="reasons_left", label="all others", x=curves.step_T, y=rest, kind="area"))
    return Chart(title="Reasons", unit="share of answers, stacked", series=series, top=1.0)


def _time(curves: Curves) -> Chart:
    series = [
        Series(key=phase, label=_PHASE_NAMES[phase], x=curves.step_T, y=np.nan_to_num(curves.raw(phase)), kind="area")
        for phase in PHASES
        if np.nan_to_num(curves.raw(phase)).any()
    ]
    return Chart(title="Time", unit="seconds a step, stacked", series=series)


def _memory(curves: Curves) -> Chart:
    keys = {"mem_peak_bytes": "peak", "mem_reserved_bytes": "reserved", "mem_available_min_bytes": "lowest available"}
    series = [
        Series(key=f"{key}/GiB", label=label, x=curves.step_T, y=curves.raw(key) / 2**30) for key, label in keys.items()
    ]
    return Chart(title="Memory", unit="GiB", series=series)


def chart_data(charts: Sequence[Chart], record: RunRecord, max_rows: int) -> dict[str, object]:
    """What the page's script shows at a step: every number of every step, and every accuracy.

    Args:
        max_rows: More steps than that are thinned evenly, first and last kept.
    """
    rows_of = {int(number(row.get("step")) or 0): row for row in record.steps}
    evals_of = {int(number(row.get("step")) or 0): row for row in record.evals}
    steps = sorted(rows_of.keys() | evals_of.keys())
    if len(steps) > max_rows:
        index = np.unique(np.linspace(0, len(steps) - 1, max_rows).round().astype(int))
        steps = [steps[i] for i in index]
    keys = dict.fromkeys(
        key
        for row in record.steps
        for key, value in row.items()
        if number(value) is not None and key not in ("v", "step")
    )
    columns: dict[str, list[object]] = {
        column_key(key): [four_digits(number(rows_of[step].get(key))) if step in rows_of else None for step in steps]
        for key in keys
    }
    columns["eval/accuracy"] = [
        four_digits(number(evals_of[step].get("accuracy"))) if step in evals_of else None for step in steps
    ]
    known = set(columns)
    for chart in charts:  # what charts derive: caps, GiB, the rest of the reasons
        for series in chart.series:
            if column_key(series.key) not in known and chart.off is None:
                value_at = dict(zip(series.x.tolist(), series.y.tolist(), strict=True))
                columns[column_key(series.key)] = [four_digits(value_at.get(float(step))) for step in steps]
    return {"steps": steps, "columns": columns}
