"""A chart as HTML: lines in an SVG that stretches, and numbers beside it in HTML that do not.

Stretching the plot alone (`preserveAspectRatio="none"`, strokes that do not scale) keeps letters readable from 360
pixels up. A series is told from another by dash pattern and by its place in the legend, never by colour alone. The
legend's values follow the crosshair, by the page's script.

Letters: P points that are drawn, at most 500 a series: minimum and maximum of each bucket, so that no spike is lost.
"""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sparkgrpo.trainer.dashboard import short
from sparkgrpo.trainer.page.markup import column_key, escaped

Array = np.ndarray

MAX_POINTS = 500
WIDTH, HEIGHT = 1000, 300
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "1 5", "14 4")
_FLOOR_LOG = 1e-9


@dataclass(kw_only=True, slots=True)
class Series:
    """One line or area: a key of the page's data, its values and its name in the legend."""

    key: str
    label: str
    x: Array
    y: Array
    kind: Literal["line", "dots", "area"] = "line"
    """dots: a line with a dot at each value, for the few values of evaluations; area: stacked on those before it."""


@dataclass(kw_only=True, slots=True)
class Mark:
    """A verdict on the axis."""

    step: float
    severity: str
    text: str


@dataclass(kw_only=True, slots=True)
class Chart:
    """What one chart shows."""

    title: str
    unit: str
    series: Sequence[Series]
    is_log: bool = False
    top: float | None = None
    """Upper end of the axis where it is known, such as 1 for shares."""
    off: str | None = None
    """Why there is nothing to show."""
    note: str = ""
    marks: Sequence[Mark] = field(default_factory=tuple)


def chart_html(chart: Chart, x_range: tuple[float, float]) -> str:
    """The figure; a chart that is off says why."""
    caption = f"<figcaption><b>{escaped(chart.title)}</b> <span class=unit>{escaped(chart.unit)}</span></figcaption>"
    shown = [series for series in chart.series if np.isfinite(series.y).any()]
    if chart.off is not None or not shown:
        why = chart.off or "the run does not log it"
        return f'<figure class="chart off">{caption}<p class=note>Off: {escaped(why, 300)}.</p></figure>'
    stacked = _stacked(shown)
    low, high = _y_range(chart, stacked)
    ticks = _log_ticks(low, high) if chart.is_log else round_ticks(low, high)
    marks = "".join(_mark(mark, x_range) for mark in chart.marks)
    note = f"<p class=note>{escaped(chart.note, 400)}</p>" if chart.note else ""
    return (
        f'<figure class="chart" tabindex="0" role="group" aria-label="{escaped(chart.title)}: arrow keys move through '
        f'the steps">{caption}<div class="plot"><div class="ys">{_y_labels(ticks, low, high, chart.is_log)}</div>'
        f'<div class="area">{_svg(stacked, ticks, x_range, (low, high), chart.is_log)}{marks}'
        f'<div class="cross" hidden></div></div><div class="xs">{_x_labels(x_range)}</div></div>'
        f'<ul class="legend">{"".join(_legend(i, series) for i, series in enumerate(shown))}</ul>{note}</figure>'
    )


def thinned(x: Array, y: Array, max_points: int = MAX_POINTS) -> tuple[Array, Array]:
    """At most ``max_points`` of the known points: minimum and maximum of each bucket, in order."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= max_points:
        return x, y
    keep: set[int] = {0, len(x) - 1}
    edges = np.linspace(0, len(x), max_points // 2).astype(int)
    for begin, end in itertools.pairwise(edges.tolist()):
        keep |= {begin + int(np.argmin(y[begin:end])), begin + int(np.argmax(y[begin:end]))}
    index = np.array(sorted(keep))
    return x[index], y[index]


@dataclass(slots=True)
class _Drawn:
    series: Series
    base: Array
    """Lower edge of an area [as y]; 0 for lines."""
    top: Array


def _stacked(shown: Sequence[Series]) -> list[_Drawn]:
    drawn: list[_Drawn] = []
    base: Array | None = None
    for series in shown:
        if series.kind != "area":
            drawn.append(_Drawn(series, np.zeros_like(series.y), series.y))
            continue
        lower = np.zeros_like(series.y) if base is None else base
        base = lower + np.nan_to_num(series.y)
        drawn.append(_Drawn(series, lower, base))
    return drawn


def _y_range(chart: Chart, drawn: Sequence[_Drawn]) -> tuple[float, float]:
    values = np.concatenate([part.top[np.isfinite(part.top)] for part in drawn])
    if chart.is_log:
        values = values[values > _FLOOR_LOG]
        low = 10.0 ** math.floor(math.log10(values.min())) if len(values) else 1e-3
        high = 10.0 ** math.ceil(math.log10(values.max()) + 1e-9) if len(values) else 1.0
        return low, max(high, 10 * low)
    high = max(float(values.max()), 0.0) if chart.top is None else chart.top
    low = min(float(values.min()), 0.0)
    high = high if high > low else low + 1.0
    step = tick_step(high - low)
    return math.floor(low / step + 1e-9) * step, (high if chart.top else math.ceil(high / step - 1e-9) * step)


def tick_step(span: float) -> float:
    """A round distance that cuts the span, above 0, into about four."""
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    return power * next(factor for factor in (1, 2, 2.5, 5, 10) if raw <= factor * power * (1 + 1e-9))


def round_ticks(low: float, high: float) -> list[float]:
    """Four or five round numbers from ``low``, which is one, up to ``high``; ``low`` alone where they are the same."""
    if high <= low:
        return [low]
    step = tick_step(high - low)
    count = int((high - low) / step + 1e-6) + 1
    return [low + i * step for i in range(count)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    every = max(1, math.ceil((last - first) / 4))
    return [10.0**power for power in range(first, last + 1, every)]


def _share(value: Array | float, low: float, high: float, is_log: bool) -> Array:
    """Height in the plot, 0 at the bottom to 1 at the top."""
    if is_log:
        value, low, high = np.log10(np.maximum(value, low)), math.log10(low), math.log10(high)
    return np.clip((np.asarray(value, dtype=float) - low) / (high - low), 0, 1)


def _svg(
    drawn: Sequence[_Drawn], ticks: Sequence[float], xs: tuple[float, float], ys: tuple[float, float], is_log: bool
) -> str:
    parts = []
    for tick in ticks:
        at = HEIGHT * (1 - float(_share(tick, *ys, is_log)))
        parts.append(f'<path class="grid" d="M0 {at:.1f}H{WIDTH}"/>')
    for i, part in enumerate(drawn):
        parts.append(_shape(i, part, xs, ys, is_log))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        f"{''.join(parts)}</svg>"
    )


def _shape(i: int, part: _Drawn, xs: tuple[float, float], ys: tuple[float, float], is_log: bool) -> str:
    def points(x: Array, y: Array) -> list[str]:
        at_x = WIDTH * (x - xs[0]) / max(xs[1] - xs[0], 1e-9)
        at_y = HEIGHT * (1 - _share(y, *ys, is_log))
        return [f"{a:.1f} {b:.1f}" for a, b in zip(at_x, at_y, strict=True)]

    if part.series.kind == "area":
        every = max(1, math.ceil(len(part.top) / (MAX_POINTS // 2)))
        edge = points(part.series.x[::every], part.top[::every])
        back = points(part.series.x[::every], part.base[::every])[::-1]
        return f'<path class="fill c{i % 8}{" pale" if i % 2 else ""}" d="M{"L".join(edge)}L{"L".join(back)}Z"/>'
    x, y = thinned(part.series.x, part.top)
    line = points(x, y)
    dash = _DASHES[i % len(_DASHES)]
    style = f' stroke-dasharray="{dash}"' if dash else ""
    path = f'<path class="line c{i % 8}"{style} d="M{"L".join(line)}"/>' if len(line) > 1 else ""
    if part.series.kind == "dots" or len(line) == 1:
        path += f'<path class="dots c{i % 8}" d="{"".join(f"M{point}h0" for point in line)}"/>'
    return path


def _y_labels(ticks: Sequence[float], low: float, high: float, is_log: bool) -> str:
    def shown(tick: float) -> str:
        return f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e") if is_log else _tick_text(tick, high - low)

    return "".join(
        f'<span style="bottom:{100 * float(_share(tick, low, high, is_log)):.1f}%">{shown(tick)}</span>'
        for tick in ticks
    )


def _tick_text(tick: float, span: float) -> str:
    if abs(tick) >= 1e4 or (span < 1e-3 and tick):
        return short(tick)
    return f"{0.0 if abs(tick) < 1e-9 * span else tick:.4g}"


def _x_labels(x_range: tuple[float, float]) -> str:
    low, high = x_range
    if high <= low:  # an evaluation and no step yet, or one step
        return f'<span style="left:0.0%">{short_count(low)}</span>'
    step = tick_step(max(high - low, 1))
    ticks = [low] + [t for t in round_ticks(0, high) if t > low + step / 2 and t < high - step / 2] + [high]
    return "".join(f'<span style="left:{100 * (t - low) / (high - low):.1f}%">{short_count(t)}</span>' for t in ticks)


def short_count(value: float) -> str:
    """A step, a count of tokens or seconds, without needless digits."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if abs(value) >= 1e5 else f"{value:.0f}"


def _legend(i: int, series: Series) -> str:
    dash = _DASHES[i % len(_DASHES)]
    style = f' stroke-dasharray="{dash}"' if dash else ""
    shape = (
        f'<rect class="fill c{i % 8}{" pale" if i % 2 else ""}" width="24" height="10"/>'
        if series.kind == "area"
        else f'<path class="line c{i % 8}"{style} d="M0 5H24"/>'
        + (f'<path class="dots c{i % 8}" d="M12 5h0"/>' if series.kind == "dots" else "")
    )
    return (
        f'<li><svg class="key" width="24" height="10" aria-hidden="true">{shape}</svg> '
        f"<span>{escaped(series.label, 60)}</span> "
        f'<output data-key="{html.escape(column_key(series.key))}"></output></li>'
    )


def _mark(mark: Mark, x_range: tuple[float, float]) -> str:
    at = 100 * (mark.step - x_range[0]) / max(x_range[1] - x_range[0], 1e-9)
    if not 0 <= at <= 100:
        return ""
    sign = {"error": "✕", "warn": "!", "info": "i"}.get(mark.severity, "i")
    title = escaped(mark.text, 200)
    return f'<span class="mark {escaped(mark.severity)}" style="left:{at:.1f}%" title="{title}">{sign}</span>'
