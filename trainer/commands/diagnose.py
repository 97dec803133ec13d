"""`sparkgrpo diagnose RUN`: verdicts in words or JSON, and an exit code for CI."""

import dataclasses
import json
import sys
from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.dashboard import short
from sparkgrpo.trainer.diagnose import diagnose, exit_code
from sparkgrpo.trainer.diagnosis.rule import WARM_UP_STEPS, Diagnosis, Verdict
from sparkgrpo.trainer.hostile_text import encodable, visible_text
from sparkgrpo.trainer.liveness import DIED, liveness
from sparkgrpo.trainer.option_parser import new_parser, parse_options
from sparkgrpo.trainer.run_reader import RunRecord, read_record


def main(arguments: list[str]) -> int:
    """Judge a run. 0: nothing active; 1: something; 2: unreadable; 3: too short to judge."""
    parser = new_parser("diagnose", "Say what a run suffers from, since when, and what to do.", arguments="RUN")
    parser.add_argument("run", metavar="RUN", help="folder of the run, finished or not")
    parser.add_argument("--fail-on", metavar="{warn,error}", help="severity that gives exit code 1. Default: error.")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of words")
    options = parse_options(parser, arguments)
    fail_on = str(options.get("fail_on", "error"))
    if fail_on not in ("warn", "error"):
        raise UserError(f"--fail-on: expected warn or error, got {fail_on!r}")
    record = read_record(Path(str(options["run"])))
    diagnosis = diagnose(record)
    code = exit_code(diagnosis, fail_on)
    if options.get("json"):
        print(json.dumps({"run": record.name, "exit_code": code, **dataclasses.asdict(diagnosis)}))
    else:
        text = "\n".join(diagnosis_lines(record, diagnosis))
        print(encodable(text, sys.stdout.encoding))
    return code


def diagnosis_lines(record: RunRecord, diagnosis: Diagnosis) -> list[str]:
    """The diagnosis as lines of text, nothing of which a terminal would obey."""
    alive = liveness(record)
    lines = [f"{record.name}: {alive.status}, {diagnosis.num_steps} steps"]
    if alive.status == DIED:
        lines.append(visible_text(alive.text, 400))
    if not record.steps:
        lines.append("nothing to judge yet: metrics.jsonl has no line")
    elif diagnosis.num_steps < WARM_UP_STEPS:
        lines.append(f"fewer than {WARM_UP_STEPS} steps: only what is wrong at once can be seen")
    if not diagnosis.verdicts and record.steps:
        lines.append("nothing found")
    for verdict in diagnosis.verdicts:
        lines += verdict_lines(verdict)
    lines += [f"note: {visible_text(note, 300)}" for note in diagnosis.notes]
    lines.append(f"checked: {', '.join(diagnosis.checked)}")
    for rule_id, why in diagnosis.off.items():
        lines.append(f"off: {rule_id}: {why}")
    return lines


def verdict_lines(verdict: Verdict) -> list[str]:
    """A verdict: what, since when, the numbers, the samples, the cure. One that follows from another is indented."""
    indent = "    " if verdict.because_of else ""
    state = "active" if verdict.is_active else f"cleared after step {verdict.last_step}"
    follows = f", follows from {verdict.because_of}" if verdict.because_of else ""
    again = f", {verdict.num_episodes} times" if verdict.num_episodes > 1 else ""
    since = f"(since step {verdict.first_step}{again}, {state}{follows})"
    head = f"{verdict.severity.upper()} {verdict.id}: {verdict.title} {since}"
    lines = [head, f"  {visible_text(verdict.text, 400)}"]
    if verdict.evidence:
        lines.append("  " + ", ".join(f"{name} {short(value)}" for name, value in verdict.evidence.items()))
    if verdict.sample_ids:
        lines.append("  samples: " + ", ".join(visible_text(sample_id, 60) for sample_id in verdict.sample_ids))
    if not verdict.because_of:
        lines += [f"  {number}. {visible_text(cure, 200)}" for number, cure in enumerate(verdict.cures, start=1)]
    return [indent + line for line in lines]
