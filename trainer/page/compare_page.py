"""The page of a comparison: settings that differ, accuracies, and the same charts for all runs."""

from collections.abc import Mapping, Sequence

import numpy as np

from sparkgrpo.trainer.compare import Comparison, held_values, x_axis
from sparkgrpo.trainer.dashboard import duration, number, percent, short
from sparkgrpo.trainer.page.chart import Chart, Series, chart_html, short_count
from sparkgrpo.trainer.page.markup import column_key, escaped, four_digits, json_script, page
from sparkgrpo.trainer.run_reader import Row, RunRecord

_GRID_POINTS = 500
_CHARTS: tuple[tuple[str, str, str, bool], ...] = (
    ("Right answers in training", "share", "frac_right", False),
    ("Reward", "mean", "reward_mean", False),
    ("Dead groups", "share of groups", "frac_zero_std", False),
    ("Length", "tokens", "len_mean", False),
    ("Cut off", "share of answers", "frac_truncated", False),
    ("KL to the reference", "nats a token", "kl_mean", False),
    ("Entropy", "nats a token", "entropy_mean", False),
    ("Gradient norm", "before clipping", "grad_norm", False),
    ("Distinct answers", "share of a group", "frac_unique", False),
    ("Sampler against trainer", "nats, log axis", "logprob_gap_mean", True),
    ("Speed", "tokens / s", "tok_per_s", False),
    ("Step time", "seconds", "t_step", False),
)


def comparison_html(found: Comparison, axis: str) -> str:
    """The page over "step", "tokens" or "seconds"."""
    records = [side.record for side in found.sides]
    labels = [side.label for side in found.sides]
    places = [x_axis(record, axis) for record in records]
    high = max((x for place in places for x in place.values() if np.isfinite(x)), default=1.0)
    x_range = (0.0, high or 1.0)
    charts = [Chart(title="Held-out accuracy", unit="share", series=_accuracy(records, labels, places), top=1.0)]
    charts += [
        Chart(title=title, unit=unit, is_log=is_log, series=_metric(key, records, labels, places))
        for title, unit, key, is_log in _CHARTS
    ]
    body = [
        f"<header><h1>{len(records)} runs over {escaped(axis)}</h1><p>{escaped(', '.join(labels), 600)}</p>"
        '<button id="theme" type="button" data-now="auto">theme: auto</button></header>',
        *(f'<section class="verdict warn"><p>{escaped(text, 400)}</p></section>' for text in found.warnings),
        "<h2>Settings that differ</h2>",
        _difference_table(found),
        "<h2>Outcome</h2>",
        _outcome_table(found),
        _pair_table(found),
        "<h2>Curves</h2>",
        '<div id="step">Point at a chart, or move along with the arrow keys.</div>',
        f'<div class="charts">{"".join(chart_html(chart, x_range) for chart in charts)}</div>',
        json_script("run-data", _data(charts, x_range, axis)),
    ]
    return page("runs compared - sparkgrpo", body)


def _series(key: str, label: str, rows: Sequence[Row], value: str, place: Mapping[int, float], kind: str) -> Series:
    points = [
        (place[step], known)
        for row in rows
        if (step := int(number(row.get("step")) or 0)) in place and (known := number(row.get(value))) is not None
    ]
    x, y = (np.array([point[i] for point in points], dtype=float) for i in (0, 1))
    usable = np.isfinite(x)
    return Series(key=key, label=label, x=x[usable], y=y[usable], kind="dots" if kind == "dots" else "line")


def _accuracy(
    records: Sequence[RunRecord], labels: Sequence[str], places: Sequence[Mapping[int, float]]
) -> list[Series]:
    return [
        _series(f"{i}/accuracy", label, record.evals, "accuracy", place, "dots")
        for i, (record, label, place) in enumerate(zip(records, labels, places, strict=True))
    ]


def _metric(
    key: str, records: Sequence[RunRecord], labels: Sequence[str], places: Sequence[Mapping[int, float]]
) -> list[Series]:
    return [
        _series(f"{i}/{key}", label, record.steps, key, place, "line")
        for i, (record, label, place) in enumerate(zip(records, labels, places, strict=True))
    ]


def _data(charts: Sequence[Chart], x_range: tuple[float, float], axis: str) -> dict[str, object]:
    grid = np.linspace(*x_range, _GRID_POINTS)
    if axis == "step":
        grid = np.unique(grid.round())
    columns = {
        column_key(series.key): [
            four_digits(value) for value in held_values(series.x.tolist(), series.y.tolist(), grid)
        ]
        for chart in charts
        for series in chart.series
    }
    return {"steps": [four_digits(float(x)) for x in grid], "columns": columns, "axis": axis}


def _difference_table(found: Comparison) -> str:
    if not found.differences:
        return "<p class=note>None.</p>"
    head = "".join(f"<th>{escaped(side.label, 60)}</th>" for side in found.sides)
    rows = "".join(
        f"<tr><td>{escaped(key, 80)}</td>{''.join(f'<td>{escaped(value, 120)}</td>' for value in values)}</tr>"
        for key, values in found.differences.items()
    )
    return f'<div class="box"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _outcome_table(found: Comparison) -> str:
    to = "" if found.common_accuracy is None else f"to {percent(found.common_accuracy)}"
    head = "".join(
        f"<th>{escaped(text)}</th>"
        for text in ("run", "before", "after", "time", "tokens", f"time {to}", f"tokens {to}", "tokens/s")
    )
    rows = ""
    for side in found.sides:
        cells = (
            side.label,
            percent(side.accuracy_before),
            f"{percent(side.accuracy_after)} ±{percent(side.accuracy_se)}",
            duration(side.seconds),
            "-" if side.tokens is None else short_count(side.tokens),
            duration(side.seconds_to),
            "-" if side.tokens_to is None or not np.isfinite(side.tokens_to) else short_count(side.tokens_to),
            short(side.tok_per_s),
        )
        rows += f"<tr>{''.join(f'<td>{escaped(cell, 80)}</td>' for cell in cells)}</tr>"
    return f'<div class="box"><table><tr>{head}</tr>{rows}</table></div>'


def _pair_table(found: Comparison) -> str:
    if not found.pairs:
        return "<p class=note>The held-out answers cannot be compared problem by problem.</p>"
    titles = ("first", "second", "only the first solved", "only the second", "p (exact McNemar)")
    head = f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"
    rows = "".join(
        f"<tr><td>{escaped(pair.first, 60)}</td><td>{escaped(pair.second, 60)}</td><td>{pair.num_first_only}</td>"
        f"<td>{pair.num_second_only}</td><td>{pair.p_value:.2g}</td></tr>"
        for pair in found.pairs
    )
    return f'<div class="box"><table>{head}{rows}</table></div>'
