"""One HTML file that shows a run: did it work, what does it suffer from, where did the time go, what did it write.

It needs no network and no server, and holds nothing that could be run but its own script. `page/` has the parts.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.dashboard import duration, number, percent, short
from sparkgrpo.trainer.diagnose import diagnose
from sparkgrpo.trainer.diagnosis.rule import Diagnosis, Verdict
from sparkgrpo.trainer.liveness import liveness
from sparkgrpo.trainer.metrics import PHASES, metric_of
from sparkgrpo.trainer.page.chart import chart_html, short_count
from sparkgrpo.trainer.page.markup import escaped, json_script, page, sample_anchor
from sparkgrpo.trainer.page.run_charts import chart_data, run_charts
from sparkgrpo.trainer.page.sample_groups import sample_section
from sparkgrpo.trainer.run_reader import RunRecord, read_record

MAX_ROWS = 1000
"""Steps whose numbers the page holds; of a longer run evenly thinned."""
_MAX_TABLE_ROWS = 400


def write_report(folder: Path, output: Path) -> Path:
    """Read a run folder and write its page; returns where. `UserError` for what cannot be read or written."""
    return write_page(output, report_html(read_record(folder)))


def write_page(output: Path, text: str) -> Path:
    """Put a page in its place as a whole: nobody sees half of one."""
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, output)
    except OSError as error:
        raise UserError(f"{output}: cannot write ({error.strerror}); choose another file with -o") from None
    finally:
        with contextlib.suppress(OSError):  # a page that did not get to its place leaves nothing beside it
            temporary.unlink(missing_ok=True)
    return output


def report_html(record: RunRecord) -> str:
    """The page of a run, finished or not."""
    diagnosis = diagnose(record)
    charts, x_range = run_charts(record, diagnosis)
    body = [
        _header(record),
        _tiles(record, diagnosis),
        "<h2>Diagnosis</h2>",
        *_diagnosis(diagnosis),
        "<h2>Curves</h2>",
        '<div id="step">Point at a chart, or move through the steps with the arrow keys.</div>',
        f'<div class="charts">{"".join(chart_html(chart, x_range) for chart in charts)}</div>',
        '<details class="box"><summary>All numbers of a step</summary><table id="all-values"></table></details>',
        "<h2>Time</h2>",
        _time_table(record),
        "<h2>Samples</h2>",
        sample_section(record.samples),
        "<h2>What ran</h2>",
        f'<div class="two">{_config_table(record)}{_environment_table(record)}</div>',
        _definitions(record),
        json_script("run-data", chart_data(charts, record, MAX_ROWS)),
    ]
    return page(f"{record.name} - sparkgrpo", body)


def _header(record: RunRecord) -> str:
    model = record.run.get("model")
    name = model.get("name") if isinstance(model, Mapping) else record.config.get("model")
    parts = [
        str(name or ""),
        str(record.config.get("task", "")),
        str(record.config.get("preset", "")),
        f"seed {record.config.get('seed')}",
        str(record.config.get("device", "")),
        str(record.config.get("precision", "")),
        liveness(record).status,
    ]
    return (
        f"<header><h1>{escaped(record.name)}</h1><p>{escaped(', '.join(part for part in parts if part), 400)}</p>"
        '<button id="theme" type="button" data-now="auto">theme: auto</button></header>'
    )


def _tiles(record: RunRecord, diagnosis: Diagnosis) -> str:
    seconds = sum(number(row.get("t_step")) or 0.0 for row in record.steps)
    tokens = number(record.steps[-1].get("num_tokens_total")) if record.steps else None
    planned = number(record.config.get("steps"))
    done = int(number(record.steps[-1].get("step")) or 0) if record.steps else 0
    tiles = [
        *_accuracy_tiles(record),
        (f"{done}" + (f" of {planned:.0f}" if planned else ""), "steps"),
        (duration(seconds) if record.steps else "-", "time in steps"),
        ("-" if tokens is None else short_count(tokens), "tokens, prompts and answers"),
        (str(len(diagnosis.counting("warn"))), "active warnings and errors"),
    ]
    return (
        '<ul class="tiles">'
        + "".join(f"<li><b>{escaped(v)}</b><span>{escaped(k)}</span></li>" for v, k in tiles)
        + "</ul>"
    )


def _accuracy_tiles(record: RunRecord) -> list[tuple[str, str]]:
    known = [row for row in record.evals if number(row.get("accuracy")) is not None]
    if not known:
        return [("-", "held-out accuracy: no evaluation")]
    first, last = known[0], known[-1]
    before, after = (cast(float, number(row.get("accuracy"))) for row in (first, last))
    se = [number(row.get("accuracy_se")) or 0.0 for row in (first, last)]
    text = f"held-out accuracy ±{percent(se[1])}, {escaped(last.get('num_problems', '?'), 12)} problems"
    if first is last:
        return [(percent(after), text)]
    gain, noise = after - before, 2 * (se[0] ** 2 + se[1] ** 2) ** 0.5
    meaning = "more than noise" if abs(gain) > noise else "within noise"
    return [
        (f"{percent(before)} → {percent(after)}", text),
        (f"{100 * gain:+.1f} points", f"{meaning} (two standard errors are {100 * noise:.1f})"),
    ]


def _diagnosis(diagnosis: Diagnosis) -> list[str]:
    lines = [_verdict(verdict) for verdict in diagnosis.verdicts]
    if not lines:
        few = "; fewer than 20 steps, so little can be seen" if diagnosis.num_steps < 20 else ""
        lines = [f"<p>Nothing found{few}.</p>"]
    lines += [f'<p class="note">{escaped(note, 400)}</p>' for note in diagnosis.notes]
    off = "; ".join(f"{rule_id}: {why}" for rule_id, why in diagnosis.off.items())
    checked = escaped(", ".join(diagnosis.checked), 2000)
    lines.append(
        f'<details class="box"><summary>What was checked</summary><p class="note">Checked: {checked}.</p>'
        f'<p class="note">Off: {escaped(off or "nothing", 2000)}.</p></details>'
    )
    return lines


def _verdict(verdict: Verdict) -> str:
    state = "active" if verdict.is_active else f"cleared after step {verdict.last_step}"
    follows = f", follows from {verdict.because_of}" if verdict.because_of else ""
    numbers = ", ".join(f"{name} {short(value)}" for name, value in verdict.evidence.items())
    links = ", ".join(f'<a href="#{sample_anchor(name)}">{escaped(name, 60)}</a>' for name in verdict.sample_ids)
    samples = f"; samples {links}" if links else ""
    cures = "" if verdict.because_of else f"<ol>{''.join(f'<li>{escaped(cure)}</li>' for cure in verdict.cures)}</ol>"
    return (
        f'<section class="verdict {verdict.severity}{" follows" if verdict.because_of else ""}">'
        f'<h3><span class="level">{verdict.severity}</span>{escaped(verdict.id)}: {escaped(verdict.title)}</h3>'
        f"<p>Since step {verdict.first_step}, {escaped(state + follows)}. {escaped(verdict.text, 500)}.</p>"
        f'<p class="numbers">{escaped(numbers, 1000)}{samples}</p>{cures}</section>'
    )


def _time_table(record: RunRecord) -> str:
    total = sum(number(row.get("t_step")) or 0.0 for row in record.steps)
    if total <= 0:
        return "<p class=note>No step yet.</p>"
    rows = []
    for phase in (*PHASES, "t_unaccounted"):
        seconds = sum(number(row.get(phase)) or 0.0 for row in record.steps)
        if abs(seconds) < 1e-9:
            continue
        metric = metric_of(phase)
        share = seconds / total
        rows.append(
            f"<tr><td>{phase}</td><td>{escaped(metric.definition if metric else '')}</td>"
            f'<td class="n">{duration(abs(seconds))}</td><td class="n">{100 * share:.1f} %</td>'
            f'<td><span class="share" style="width:{max(0.0, 120 * share):.0f}px"></span></td></tr>'
        )
    head = "<tr><th>phase</th><th>what</th><th>in all</th><th>share</th><th></th></tr>"
    return f'<div class="box"><table>{head}{"".join(rows)}</table></div>'


def _table(title: str, rows: Sequence[tuple[str, object, bool]]) -> str:
    body = "".join(
        f"<tr{' class=set' if is_set else ''}><td>{escaped(key, 80)}</td><td>{escaped(value, 300)}</td></tr>"
        for key, value, is_set in rows[:_MAX_TABLE_ROWS]
    )
    return f'<details class="box"><summary>{title}</summary><table>{body}</table></details>'


def _config_table(record: RunRecord) -> str:
    user_set = record.run.get("user_set")
    chosen = set(user_set) if isinstance(user_set, Mapping) else set()
    rows = [(str(key), value, key in chosen) for key, value in record.config.items()]
    return _table("Configuration (bold: set by the person)", rows)


def _environment_table(record: RunRecord) -> str:
    shown = ("command", "git", "versions", "hardware", "model", "config_sha256", "eval_sha256", "status", "error")
    rows: list[tuple[str, object, bool]] = []
    for key in shown:
        value = record.run.get(key)
        if isinstance(value, Mapping):
            rows += [(f"{key}.{name}", inner, False) for name, inner in value.items()]
        elif isinstance(value, list):
            rows.append((key, " ".join(map(str, value)), False))
        elif value is not None:
            rows.append((key, value, False))
    return _table("Command, code and machine", rows)


def _definitions(record: RunRecord) -> str:
    keys = dict.fromkeys(key for row in record.steps for key in row)
    rows = []
    for key in keys:
        metric = metric_of(key)
        what = "not in the schema of this version" if metric is None else metric.definition
        unit = f", {metric.unit}" if metric is not None and metric.unit else ""
        rows.append((key, what + unit, False))
    return _table("Definitions of the numbers", rows)
