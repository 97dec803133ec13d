"""What an experiment leaves: outcome.json, its plots, and one page for people."""

from pathlib import Path

from sparkgrpo.trainer.experiments.outcome import Bench, Outcome
from sparkgrpo.trainer.page.markup import escaped, page
from sparkgrpo.trainer.report import write_page


def write_outcome(bench: Bench, outcome: Outcome, question: str) -> Path:
    """Write the files into ``<folder>/<name>``; returns the page."""
    folder = bench.folder / outcome.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outcome.json").write_text(outcome.as_json(), encoding="utf-8")
    for name, svg in outcome.plots.items():
        (folder / name).write_text(svg, encoding="utf-8")
    return write_page(folder / "outcome.html", _html(outcome, question))


def _html(outcome: Outcome, question: str) -> str:
    colour = {"agrees": "info", "disagrees": "error", "too short to tell": "warn"}
    checks = "".join(
        f'<section class="verdict {colour[check.verdict]}"><h3><span class="level">{escaped(check.verdict)}</span>'
        f"{escaped(check.expected, 400)}</h3><p>{escaped(check.found, 1000)}</p></section>"
        for check in outcome.checks
    )
    remarks = "".join(f"<li>{escaped(remark, 1000)}</li>" for remark in outcome.remarks)
    runs = "".join(f"<li>{escaped(run.name)}</li>" for run in outcome.runs)
    body = [
        f"<header><h1>{escaped(outcome.name)}</h1><p>{escaped(question, 300)}</p>"
        '<button id="theme" type="button" data-now="auto">theme: auto</button></header>',
        f"<h2>Outcome: {escaped(outcome.verdict)}</h2>{checks}",
        f"<ul>{remarks}</ul>" if remarks else "",
        "<h2>Plots</h2>" if outcome.plots else "",
        *(f'<div class="box">{svg}</div>' for svg in outcome.plots.values()),
        f"<h2>Runs</h2><ul>{runs}</ul>" if runs else "",
    ]
    return page(f"{outcome.name} - sparkgrpo", body)
