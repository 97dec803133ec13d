"""Our metrics under another trainer's names, and TRL's log as a run folder, so that every view serves both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.metric_names import NAMES, TRL, other_name, our_name
from sparkgrpo.trainer.metrics import SCHEMA_VERSION
from sparkgrpo.trainer.report import write_page
from sparkgrpo.trainer.run_reader import Row, RunRecord, finite_row
from sparkgrpo.trainer.runlog import check_new_folder

_BOOKKEEPING = frozenset(("v", "step", "num_nonfinite", "nonfinite", "num_right", "t_unix_s"))


@dataclass(kw_only=True, slots=True)
class Converted:
    """What a conversion did."""

    num_steps: int
    mapped: dict[str, str] = field(default_factory=dict)
    """Name there by name here (or the other way round)."""
    differences: dict[str, str] = field(default_factory=dict)
    """Mapped, but not quite the same."""
    left_out: list[str] = field(default_factory=list)
    """Had no name on the other side."""


def convert_to(record: RunRecord, target: str, output: Path) -> Converted:
    """Write the steps of a run under the names of "trl", "verl" or "prime-rl".

    TRL gets the form of its trainer_state.json; the others one JSON object a line, with "step".
    """
    names = NAMES[target]
    done = Converted(num_steps=len(record.steps))
    rows: list[Row] = []
    for step_row in record.steps:
        row: Row = {"step": step_row.get("step")}
        for key, value in step_row.items():
            if key in _BOOKKEEPING or number(value) is None:
                continue
            other = other_name(names, key)
            if other is None:
                if key not in done.left_out:
                    done.left_out.append(key)
                continue
            row[other.name] = value
            done.mapped[key] = other.name
            if other.difference:
                done.differences[key] = other.difference
        rows.append(row)
    if target == "trl":
        last = rows[-1]["step"] if rows else 0
        text = (
            json.dumps({"global_step": last, "max_steps": record.config.get("steps"), "log_history": rows}, indent=1)
            + "\n"
        )
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    write_page(output, text)
    return done


def convert_from_trl(source: Path, folder: Path) -> Converted:
    """Make a run folder of TRL's trainer_state.json. `UserError` if it is none, or the folder is not empty.

    What TRL does not log (right answers, siblings, precision) stays null; diagnosis lists what it cannot judge.
    """
    state = _read_state(source)
    history = state["log_history"]
    assert isinstance(history, list)
    done = Converted(num_steps=0)
    rows: dict[int, Row] = {}
    evals: dict[int, Row] = {}
    for entry in history:
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int):
            continue
        if any(str(key).startswith("eval_") for key in entry):
            continue  # a mean reward on held-out prompts is no accuracy
        row = _our_row(entry, done)
        if len(row) > 2:
            rows[step] = rows.get(step, {}) | row
    if not rows:
        raise UserError(f"{source}: expected log_history with the metrics of GRPOTrainer, found no step with any")
    done.num_steps = len(rows)
    check_new_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "metrics.jsonl", [rows[step] for step in sorted(rows)])
    _write_lines(folder / "evals.jsonl", [evals[step] for step in sorted(evals)])
    run = {
        "v": SCHEMA_VERSION,
        "run_id": folder.resolve().name,
        "status": "finished",
        "source": "TRL trainer_state.json",
        "config": {"task": "TRL", "steps": max(rows)},
    }
    (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return done


def _our_row(entry: Mapping[str, object], done: Converted) -> Row:
    row: Row = {"v": SCHEMA_VERSION, "step": entry["step"]}
    for key, value in entry.items():
        if key in ("step", "epoch") or number(value) is None:
            continue
        ours = our_name(TRL, key)
        if ours is None:
            if key not in done.left_out:
                done.left_out.append(key)
            continue
        row[ours] = value
        done.mapped[key] = ours
        difference = (TRL.get(ours) or TRL["part/"]).difference
        if difference:
            done.differences[key] = difference
    return finite_row(row)


def _read_state(source: Path) -> Mapping[str, object]:
    try:
        state = json.loads(source.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{source}: cannot read it ({error.strerror}); expected TRL's trainer_state.json") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not JSON ({str(error)[:80]}); expected TRL's trainer_state.json") from None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UserError(f'{source}: expected an object with the list "log_history", as in TRL\'s trainer_state.json')
    return state


def _write_lines(path: Path, rows: list[Row]) -> None:
    write_page(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
