"""Reads a run folder, once or as it grows; every view of a run stands on this.

Tolerant where a reader may be: unknown keys stay, a missing key is null, a last line without newline is left alone, a
whole line that is no JSON object is skipped and said in `problems`. A number that is not finite becomes null and counts
in num_nonfinite. Strict where guessing would mislead: a folder without run.json and a newer schema are `UserError`s.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.hostile_text import visible_text
from sparkgrpo.trainer.metrics import SCHEMA_VERSION
from sparkgrpo.trainer.runlog import read_run

Row = dict[str, object]

MAX_PROBLEMS_KEPT = 20
_LARGEST_INT = 1 << 63


class JsonlTail:
    """The lines of a growing file: each `read` returns what was appended since the last, and reads nothing else.

    A file that shrank or was replaced is read from its start again, which `num_restarts` counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes_read = 0
        """Bytes fetched from the file so far, a half last line once per read."""
        self.num_restarts = 0
        self.problems: list[str] = []
        self._offset = 0  # behind the newline of the last whole line: a half line that is cut away is no shrinking
        self._line_number = 0
        self._inode: int | None = None

    def read(self) -> list[Row]:
        """New whole rows, in order; none while the file does not exist. `UserError` for a newer schema version."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                    self._restart()
                self._inode = status.st_ino
                if status.st_size == self._offset:
                    return []
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.path}: cannot read it ({error.strerror})") from None
        self.num_bytes_read += len(content)
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.split(b"\n")[:-1] if (row := self._row(line)) is not None]

    def _restart(self) -> None:
        self._offset = self._line_number = 0
        self.num_restarts += 1
        self.problems.clear()

    def _row(self, line: bytes) -> Row | None:
        self._line_number += 1
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            return self._skip(f"not JSON ({str(error)[:80]})")
        version = row.get("v") if isinstance(row, dict) else None
        if not isinstance(version, int):
            return self._skip(f'expected a JSON object with a version "v", got {str(row)[:40]!r}')
        if version > SCHEMA_VERSION:
            raise UserError(
                f"{self.path}: written by a newer sparkgrpo (v {version}, this one reads {SCHEMA_VERSION}); update it"
            )
        return finite_row(row)

    def _skip(self, why: str) -> None:
        if len(self.problems) < MAX_PROBLEMS_KEPT:
            self.problems.append(f"{self.path.name}, line {self._line_number} was skipped: {visible_text(why, 160)}")


def finite_row(row: Row) -> Row:
    """The row with null for each top-level number that is not finite or beyond 2^63; they add to num_nonfinite."""
    bad = [key for key, value in row.items() if _is_unusable(value)]
    if not bad:
        return row
    known = row.get("num_nonfinite")
    named = row.get("nonfinite")
    return {
        **row,
        **dict.fromkeys(bad),
        "num_nonfinite": len(bad) + (known if isinstance(known, int) and "num_nonfinite" not in bad else 0),
        "nonfinite": [*(named if isinstance(named, list) else []), *bad],
    }


def _is_unusable(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and abs(value) > _LARGEST_INT


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """What a run folder holds, in memory; rows are as `metrics.py` defines them."""

    folder: Path
    run: Row
    """run.json."""
    steps: list[Row] = field(default_factory=list)
    """metrics.jsonl, ascending by step; of a step that came twice, the later line."""
    evals: list[Row] = field(default_factory=list)
    """evals.jsonl, in the same way."""
    samples: list[Row] = field(default_factory=list)
    """samples.jsonl, in the order of the file; of a sample_id that came twice, the later one."""
    events: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Lines that could not be used, in words."""

    @property
    def config(self) -> Mapping[str, object]:
        """The resolved configuration; empty where run.json has none."""
        found = self.run.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        """The run's id, safe to print."""
        return visible_text(str(self.run.get("run_id") or self.folder.resolve().name), 100)

    @property
    def status(self) -> str:
        """running, finished, stopped, failed; "unknown" where run.json does not say."""
        return visible_text(str(self.run.get("status", "unknown")), 20)


class RunFollower:
    """A run folder that is read again and again; `record` is what is known by now."""

    def __init__(self, folder: Path) -> None:
        self.record = RunRecord(folder=folder, run=read_run(folder))
        self._tails = {log: JsonlTail(folder / f"{log}.jsonl") for log in ("metrics", "evals", "samples", "events")}
        self._by_step: dict[str, dict[int, Row]] = {"metrics": {}, "evals": {}}
        self._samples: dict[object, Row] = {}
        self._unusable: dict[str, list[str]] = {}
        self._run_stamp: tuple[int, int] | None = None

    @property
    def num_bytes_read(self) -> int:
        """Bytes of logs read so far."""
        return sum(tail.num_bytes_read for tail in self._tails.values())

    def poll(self) -> bool:
        """Take in what was written since the last call; whether anything was.

        Raises:
            UserError: run.json is gone or unreadable, or a line of a newer schema came.
        """
        is_changed = self._poll_run()
        for log, tail in self._tails.items():
            restarts = tail.num_restarts
            rows = tail.read()
            if tail.num_restarts != restarts:
                self._forget(log)
            if rows:
                self._add(log, rows)
            is_changed |= bool(rows) or tail.num_restarts != restarts
        if is_changed:
            problems = [tail.problems for tail in self._tails.values()] + list(self._unusable.values())
            self.record.problems = [text for part in problems for text in part]
        return is_changed

    def _poll_run(self) -> bool:
        path = self.record.folder / "run.json"
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot read it any more ({error.strerror})") from None
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._run_stamp:
            return False
        self.record.run = read_run(self.record.folder)
        self._run_stamp = stamp
        return True

    def _forget(self, log: str) -> None:
        if log in self._by_step:
            self._by_step[log] = {}
        elif log == "samples":
            self._samples = {}
        else:
            self.record.events = []
        self._unusable.pop(log, None)

    def _add(self, log: str, rows: Iterable[Row]) -> None:
        if log == "events":
            self.record.events.extend(rows)
        elif log == "samples":
            for row in rows:
                key = row.get("sample_id")
                key = key if isinstance(key, str) else len(self._samples)
                self._samples.pop(key, None)  # a later one takes its place at the end
                self._samples[key] = row
            self.record.samples = list(self._samples.values())
        else:
            self._add_steps(log, rows)

    def _add_steps(self, log: str, rows: Iterable[Row]) -> None:
        by_step = self._by_step[log]
        for row in rows:
            step = row.get("step")
            if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
                by_step[step] = row
            else:
                unusable = self._unusable.setdefault(log, [])
                if len(unusable) < MAX_PROBLEMS_KEPT:
                    unusable.append(f"{log}.jsonl: a line without a step number was skipped")
        ordered = [by_step[step] for step in sorted(by_step)]
        if log == "metrics":
            self.record.steps = ordered
        else:
            self.record.evals = ordered


def read_record(folder: Path) -> RunRecord:
    """A run folder as it is now. `UserError` if it is none, cannot be read, or is of a newer schema version."""
    if not folder.exists():
        raise UserError(f"{folder}: no such folder; expected the folder of a run, such as runs/2026-11-29_1412_...")
    follower = RunFollower(folder)
    follower.poll()
    return follower.record
