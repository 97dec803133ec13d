"""Draws a run's curve as an SVG for the README: held-out accuracy and training reward over steps.

    python -m benchmarks.draw_curve RUN... -o curve.svg

Several runs (seeds) share the axes: evaluations as dots with a line each, the batch's share of right answers as a thin
line.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.svg_chart import Line, Point, line_chart
from sparkgrpo.trainer.runlog import read_jsonl


def points(rows: Sequence[dict[str, object]], key: str) -> list[Point]:
    """(step, value) of every row that has the key."""
    return [(float(str(row["step"])), float(str(row[key]))) for row in rows if row.get(key) is not None]


def draw(runs: Sequence[Path], title: str) -> str:
    """The SVG text."""
    lines = [Line(label="held-out, greedy", points=points(read_jsonl(run / "evals.jsonl"), "accuracy")) for run in runs]
    for run in runs:
        train = points(read_jsonl(run / "metrics.jsonl"), "frac_right")
        lines.append(Line(label="training, T = 1", points=train, is_thin=True))
    return line_chart(title, lines, x_label="training step", y_format="{:.0%}".format, y_high=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--title", default="Share of Countdown puzzles solved")
    options = parser.parse_args()
    options.output.write_text(draw(options.runs, options.title))


if __name__ == "__main__":
    main()
