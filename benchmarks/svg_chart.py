"""Small charts as SVG text: lines over a linear or logarithmic axis, and horizontal bars. Light and dark.

Coordinates are pixels of the view box. Text that comes from a file is escaped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 64, 190, 40, 48
COLORS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#be123c", "#525252")
DARK_COLORS = ("#fb923c", "#7ca6ff", "#4ade80", "#d8a4ff", "#facc15", "#67e8f9", "#fda4af", "#c0c0c0")
STYLE = """
  .back { fill: #fff; } text { font: 13px system-ui, sans-serif; fill: #333; }
  .title { font-size: 15px; font-weight: 600; } .grid { stroke: #ddd; stroke-width: 1; } .line { fill: none; }
  @media (prefers-color-scheme: dark) { .back { fill: #16181d; } text { fill: #ddd; } .grid { stroke: #444; } }
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that belong together; lines of one label share colour and legend entry."""

    label: str
    points: Sequence[Point]
    is_thin: bool = False
    """Background: no dots, half transparent."""


def _style() -> str:
    light = "".join(f"  .s{i} {{ stroke: {c}; }} .f{i} {{ fill: {c}; }}\n" for i, c in enumerate(COLORS))
    dark = "".join(f" .s{i} {{ stroke: {c}; }} .f{i} {{ fill: {c}; }}" for i, c in enumerate(DARK_COLORS))
    return f"<style>{STYLE}{light}  @media (prefers-color-scheme: dark) {{{dark} }}\n</style>"


def _page(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    back = f'<rect class="back" width="{WIDTH}" height="{height}"/>'
    name = f'<text class="title" x="16" y="22">{escape(title)}</text>'
    return "\n".join((f'{head} aria-label="{escape(title)}">', _style(), back, name, *parts, "</svg>")) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def nice_ticks(largest: float, count: int = 5) -> list[float]:
    """0 and multiples of 1, 2 or 5 times a power of ten, up to `largest`."""
    step = 10 ** math.floor(math.log10(largest / count))
    step = next(step * factor for factor in (1, 2, 5, 10) if largest / (step * factor) <= count)
    return [i * step for i in range(int(largest / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside, or of two where the range is short."""
    base = 10 if high / low >= 100 else 2
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [float(base) ** i for i in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One axis: its range in values, its range in pixels, its ticks."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    @property
    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else nice_ticks(self.high)


def _scale(values: Sequence[float], start: float, end: float, *, is_log: bool, high: float | None = None) -> Scale:
    largest = high or max(values)
    low = min(values) if is_log else 0.0
    if low == largest:
        low, largest = (low / 2, largest * 2) if is_log else (0.0, largest or 1.0)
    return Scale(low=low, high=largest, start=start, end=end, is_log=is_log)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_format: Callable[[float], str] = "{:g}".format,
    y_high: float | None = None,
    is_log: bool = False,
    height: int = 340,
) -> str:
    """Lines over shared axes, a legend at the right; `is_log` makes both axes logarithmic."""
    points = [point for line in lines for point in line.points]
    x = _scale([p[0] for p in points], LEFT, WIDTH - RIGHT, is_log=is_log)
    y = _scale([p[1] for p in points], height - BOTTOM, TOP, is_log=is_log, high=y_high)
    labels = list(dict.fromkeys(line.label for line in lines))
    parts = []
    for tick in y.ticks:
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 8, at + 4, y_format(tick), "end"))
    parts += [_text(x.at(tick), height - BOTTOM + 18, f"{tick:,.10g}", "middle") for tick in x.ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 10, x_label, "middle"))
    for line in lines:
        color = labels.index(line.label) % len(COLORS)
        where = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in line.points)
        look = 'stroke-width="1" opacity="0.5"' if line.is_thin else 'stroke-width="2"'
        parts.append(f'<polyline class="line s{color}" {look} points="{where}"/>')
        if not line.is_thin:
            dots = [f'<circle class="f{color}" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3"/>' for a, b in line.points]
            parts += dots
    for row, label in enumerate(labels):
        at, left, color = TOP + 14 + 22 * row, WIDTH - RIGHT + 14, row % len(COLORS)
        parts.append(f'<line class="s{color}" stroke-width="2" x1="{left}" y1="{at}" x2="{left + 18}" y2="{at}"/>')
        parts.append(_text(left + 24, at + 4, label))
    return _page(title, height, parts)


def bar_chart(title: str, bars: Mapping[str, Mapping[str, float]], *, unit: str) -> str:
    """Horizontal bars, one a label, each a stack of named parts; the total stands at its end."""
    labels = list(bars)
    names = list(dict.fromkeys(name for stack in bars.values() for name in stack))
    largest = max(sum(stack.values()) for stack in bars.values())
    left, row_height = 215, 34
    width, parts = WIDTH - left - 90, []
    for row, label in enumerate(labels):
        at, end = TOP + 8 + row * row_height, float(left)
        parts.append(_text(left - 10, at + 16, label, "end"))
        for name, value in bars[label].items():
            length = width * value / largest
            color = names.index(name) % len(COLORS)
            parts.append(f'<rect class="f{color}" x="{end:.1f}" y="{at}" width="{length:.1f}" height="22"/>')
            end += length
        parts.append(_text(end + 8, at + 16, f"{sum(bars[label].values()):.3g} {unit}"))
    at = TOP + 8 + len(labels) * row_height + 16
    if len(names) > 1:
        for column, name in enumerate(names):
            x = left + 98 * (column % 5)
            y = at + 20 * (column // 5)
            parts.append(f'<rect class="f{column % len(COLORS)}" x="{x}" y="{y - 10}" width="12" height="12"/>')
            parts.append(_text(x + 18, y, name))
        at += 20 * ((len(names) - 1) // 5 + 1)
    return _page(title, int(at + 4), parts)
