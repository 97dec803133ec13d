"""Draws a run's curve as an SVG for the README: held-out accuracy and training reward over steps.

    python -m benchmarks.draw_curve RUN... -o curve.svg

Several runs (seeds) share the axes: evaluations as dots with a line each, the batch's share of right answers as a thin
line.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sparkgrpo.trainer.runlog import read_jsonl

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 34, 48
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #333; } .title { font-size: 15px; font-weight: 600; }
  .axis { stroke: #999; stroke-width: 1; } .grid { stroke: #ddd; stroke-width: 1; }
  .train { fill: none; stroke: #8aa4c8; stroke-width: 1; opacity: .8; }
  .eval { fill: none; stroke: #c2410c; stroke-width: 2; } .dot { fill: #c2410c; }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd; } .grid { stroke: #444; } .train { stroke: #7f9cc7; }
    .eval { stroke: #fb923c; } .dot { fill: #fb923c; }
  }
"""


def points(rows: Sequence[dict[str, object]], key: str) -> list[tuple[float, float]]:
    """(step, value) of every row that has the key."""
    return [(float(str(row["step"])), float(str(row[key]))) for row in rows if row.get(key) is not None]


def draw(runs: Sequence[Path], title: str) -> str:
    """The SVG text."""
    train = [points(read_jsonl(run / "metrics.jsonl"), "frac_right") for run in runs]
    evals = [points(read_jsonl(run / "evals.jsonl"), "accuracy") for run in runs]
    last_step = max(step for line in (*train, *evals) for step, _ in line)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def path(line: Sequence[tuple[float, float]], kind: str) -> str:
        return f'<polyline class="{kind}" points="{" ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in line)}"/>'

    parts = [f'<text class="title" x="{LEFT}" y="20">{title}</text>']
    for percent in range(0, 101, 20):
        at = y(percent / 100)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    for tick in range(0, int(last_step) + 1, max(1, int(last_step) // 4)):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">training step</text>')
    parts += [path(line, "train") for line in train] + [path(line, "eval") for line in evals]
    parts += [f'<circle class="dot" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3"/>' for line in evals for s, v in line]
    legend_x = WIDTH - RIGHT + 12
    for row, (kind, label) in enumerate((("eval", "held-out, greedy"), ("train", "training, T = 1"))):
        at = TOP + 14 + 22 * row
        parts.append(f'<line class="{kind}" x1="{legend_x}" y1="{at}" x2="{legend_x + 18}" y2="{at}"/>')
        parts.append(f'<text x="{legend_x + 24}" y="{at + 4}">{label}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--title", default="Share of Countdown puzzles solved")
    options = parser.parse_args()
    options.output.write_text(draw(options.runs, options.title))


if __name__ == "__main__":
    main()
