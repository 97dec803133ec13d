"""A plot as a plain SVG for documents: lines with labels, light and dark by preference."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparkgrpo.trainer.page.chart import round_ticks, tick_step

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 190, 38, 46
DASHES = ("", "7 4", "2 3", "10 3 2 3", "1 5", "14 4")
COLOURS = ("#0b5cad", "#c2410c", "#1d7a46", "#8a3ffc", "#8a6a00", "#b0246a")
DARK_COLOURS = ("#6cb2ff", "#ff9a62", "#5fd08f", "#c4a1ff", "#e3c04c", "#ff8ec2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line. Lines of the same label share colour, dash pattern and legend entry."""

    label: str
    points: Sequence[tuple[float, float]]
    is_thin: bool = False


def line_plot(
    title: str, lines: Sequence[Line], *, x_label: str, y_label: str, y_range: tuple[float, float] | None = None
) -> str:
    """The SVG text; points that are not finite are left out."""
    points = [p for line in lines for p in line.points if all(map(math.isfinite, p))]
    if not points:
        points = [(0.0, 0.0), (1.0, 1.0)]
    x_low, x_high = _round_range(0.0, max(x for x, _ in points))
    y_low, y_high = y_range or _round_range(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    x_span, y_span = x_high - x_low, y_high - y_low

    def at(point: tuple[float, float]) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (point[0] - x_low) / x_span
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max((point[1] - y_low) / y_span, 0), 1)
        return f"{x:.1f},{y:.1f}"

    labels = list(dict.fromkeys(line.label for line in lines))
    parts = [f'<text class="title" x="{LEFT}" y="20">{html.escape(title)}</text>']
    for value in round_ticks(y_low, y_high):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - y_low) / y_span
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for tick in round_ticks(x_low, x_high):
        x = LEFT + (WIDTH - LEFT - RIGHT) * (tick - x_low) / x_span
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:.3g}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{html.escape(x_label)}; up: {html.escape(y_label)}</text>')
    for line in lines:
        known = [p for p in line.points if all(map(math.isfinite, p))]
        style = _style(labels.index(line.label)) + (' stroke-opacity=".45" stroke-width="1"' if line.is_thin else "")
        parts.append(f'<polyline{style} points="{" ".join(map(at, known))}"/>')
    for row, label in enumerate(labels):
        y = TOP + 8 + 22 * row
        parts.append(f'<polyline{_style(row)} points="{WIDTH - RIGHT + 12},{y} {WIDTH - RIGHT + 40},{y}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 46}" y="{y + 4}">{html.escape(label)}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}">\n<style>{_sheet()}</style>\n{body}\n</svg>\n'
    )


def _round_range(low: float, high: float) -> tuple[float, float]:
    step = tick_step(high - low or 1.0)
    return math.floor(low / step + 1e-9) * step, max(math.ceil(high / step - 1e-9) * step, low + step)


def _style(i: int) -> str:
    dash = DASHES[i % len(DASHES)]
    return f' class="line k{i % len(COLOURS)}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _sheet() -> str:
    light = " ".join(f".k{i} {{ stroke: {colour}; }}" for i, colour in enumerate(COLOURS))
    dark = " ".join(f".k{i} {{ stroke: {colour}; }}" for i, colour in enumerate(DARK_COLOURS))
    return (
        "text { font: 13px system-ui, sans-serif; fill: #444; } .title { font-size: 15px; font-weight: 600; } "
        f".grid {{ stroke: #ddd; }} .line {{ fill: none; stroke-width: 2; }} {light} "
        f"@media (prefers-color-scheme: dark) {{ text {{ fill: #ddd; }} .grid {{ stroke: #444; }} {dark} }}"
    )
