"""The run folder: the only truth about a run, written here and nowhere else.

    run.json       what ran, where, and how it ended; replaced as a whole (temporary file, rename)
    metrics.jsonl  one line a step (keys: ``metrics.py``)     evals.jsonl   one line an evaluation
    samples.jsonl  completions for people to read
    events.jsonl   start, resume, checkpoint, warning, verdict, stop
    checkpoints/   see ``checkpoint.py``

JSON Lines, one `write` a line and unbuffered, so that a reader sees whole lines and a crash loses at most the last one.
ASCII only: what a model wrote cannot reach the terminal of whoever prints the file. One writer: a lock on
metrics.jsonl, which is never replaced and which the system releases when the process dies.
"""

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.metrics import SCHEMA_VERSION
from sparkgrpo.trainer.settings import config_json, config_sha256

Status = Literal["running", "finished", "stopped", "failed"]
_LOGS = ("metrics", "evals", "samples", "events")
_TEXT_LIMIT = 4000  # characters of a completion in samples.jsonl: head and tail


class RunLog:
    """The writer of one run folder; a context manager that closes as ``failed`` on an exception.

    Made by `create` for a new run or `reopen` for one that goes on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, io.FileIO] = {}
        try:
            for log in _LOGS:
                path = folder / f"{log}.jsonl"
                if path.exists():
                    _drop_half_line(path)
                self._file_of[log] = io.FileIO(path, "ab")
            fcntl.flock(self._file_of["metrics"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(f"{folder}: another process writes into this run; wait for it or stop it first") from None
        except OSError as error:
            self.close()
            raise _unwritable(folder, error) from None

    @classmethod
    def create(cls, config: Config, *, user_set: Mapping[str, object], environment: Mapping[str, object]) -> Self:
        """Make the folder ``config.run_dir`` and write run.json. `UserError` if it is not empty or not writable.

        Args:
            config: the resolved configuration.
            user_set: what the person set (`settings.resolve`).
            environment: versions, hardware, git, boot_id (`profiling.environment.describe`).
        """
        folder = Path(config.run_dir)
        check_new_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None
        log = cls(folder)
        log.update(
            {
                "v": SCHEMA_VERSION,
                "run_id": folder.resolve().name,
                "status": "running",
                "t_unix_s": time.time(),
                "command": ["sparkgrpo", *sys.argv[1:]],
                "started_in": str(Path.cwd()),
                "config": config_json(config),
                "user_set": dict(user_set),
                "config_sha256": config_sha256(config),
                "seed": config.seed,
                "task": config.task,
                "pid": os.getpid(),
                **environment,
            }
        )
        log.event("start", {"pid": os.getpid()})
        return log

    @classmethod
    def reopen(cls, config: Config, *, step: int, environment: Mapping[str, object]) -> Self:
        """Go on writing into ``config.resume`` after ``step``. `UserError` if it is no run folder or has a writer."""
        folder = Path(config.resume)
        read_run(folder)
        log = cls(folder)
        resolved = {"config": config_json(config), "config_sha256": config_sha256(config)}
        log.update({"status": "running", **resolved, "pid": os.getpid(), **environment})
        log.event("resume", {"step": step, "pid": os.getpid()})
        return log

    def update(self, fields: Mapping[str, object]) -> None:
        """Set fields of run.json (model facts, results); others stay. The file is never seen half written."""
        path = self.folder / "run.json"
        old = read_run(self.folder) if path.exists() else {}
        content, _ = _finite({**old, **fields})
        temporary = path.with_suffix(".json.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(_without_home(content), file, indent=1, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise _unwritable(path, error) from None
        finally:
            with contextlib.suppress(OSError):  # half a file takes room that the logs may need
                temporary.unlink(missing_ok=True)

    def metrics(self, line: Mapping[str, object]) -> None:
        """Append the line of a step (keys: `metrics.METRICS`); num_nonfinite is added, always."""
        self._append("metrics", {"num_nonfinite": 0, **line})

    def evaluation(self, row: Mapping[str, object]) -> None:
        """Append an evaluation: step, num_problems, accuracy, accuracy_se, right_bits, len_mean, reason/<code>, ..."""
        self._append("evals", row)

    def sample(self, row: Mapping[str, object]) -> None:
        """Append a completion; its ``completion`` is cut to 4,000 characters, head and tail.

        Keys: sample_id, step, split ("train" or "heldout"), problem, prompt, completion, num_tokens, reward, parts,
        reason, detail, finish ("stop" or "length"), advantage.
        """
        self._append("samples", {**row, "completion": _head_and_tail(str(row.get("completion", "")))})

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Append an event: start, resume, checkpoint, warning, traceback, stop."""
        self._append("events", {"t_unix_s": time.time(), "event": kind, **_without_home(fields)})

    def finish(self, status: Status, results: Mapping[str, object]) -> None:
        """Complete run.json with the status and the results, and close."""
        self.event("stop", {"status": status})
        self.update({"status": status, **results})
        self.close()

    def close(self) -> None:
        """Close the files and give up the lock; harmless when called twice."""
        for file in self._file_of.values():
            file.close()
        self._file_of = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._file_of:
            status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            try:
                self.finish(status, {"error": f"{type(error).__name__}: {error}"})
            except UserError as problem:
                error.add_note(str(problem))  # a full disk must not hide what went wrong first
        self.close()

    def _append(self, log: str, row: Mapping[str, object]) -> None:
        content, bad_keys = _finite({"v": SCHEMA_VERSION, **row})
        if bad_keys:
            content |= {"num_nonfinite": len(bad_keys), "nonfinite": bad_keys}
        line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
        try:
            written = self._file_of[log].write(line)
        except OSError as error:
            raise _unwritable(self.folder / f"{log}.jsonl", error) from None
        if written != len(line):
            raise UserError(f"{self.folder}: the disk took only a part of a line; make room and resume the run")


def check_new_folder(folder: Path) -> None:
    """Raise `UserError` unless ``folder`` is new or empty, and can be written as far as its permissions tell."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"run_dir: expected a folder, but {nearest} is a file; choose another --run-dir")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unwritable(nearest, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    try:
        is_used = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error) from None
    if is_used:
        raise UserError(
            f"run_dir: {folder} is not empty; choose another --run-dir, or go on with that run: --resume {folder}"
        )


def read_run(folder: Path) -> dict[str, object]:
    """The content of run.json; `UserError` if the folder holds no run or one of a newer sparkgrpo."""
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: not a run folder, cannot read run.json ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{folder}/run.json: not JSON ({error})") from None
    _check_version(content, folder / "run.json")
    return content


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """The lines of a log, in order. A last line without newline is still being written and is left alone.

    Raises `UserError` for a file that cannot be read, a whole line that is no JSON object, or a newer version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror})") from None
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON ({error})") from None
        _check_version(row, path)
        rows.append(row)
    return rows


def _check_version(row: object, path: Path) -> None:
    version = row.get("v") if isinstance(row, dict) else None
    if not isinstance(version, int):
        raise UserError(f'{path}: expected JSON objects with a version "v", got {str(row)[:60]!r}')
    if version > SCHEMA_VERSION:
        raise UserError(
            f"{path}: written by a newer sparkgrpo (v {version}, this one reads {SCHEMA_VERSION}); update it"
        )


def _drop_half_line(path: Path) -> None:
    """Cut what a crash left behind the last newline, so that the next line does not grow out of it."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)


def _finite(value: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Replace numbers that are not finite by null, at any depth; also their keys ("a.b", "a[2]")."""
    bad_keys: list[str] = []

    def clean(key: str, item: object) -> object:
        if isinstance(item, float) and not math.isfinite(item):
            bad_keys.append(key)
            return None
        if isinstance(item, Mapping):
            return {str(name): clean(f"{key}.{name}" if key else str(name), inner) for name, inner in item.items()}
        if isinstance(item, Sequence) and not isinstance(item, str):
            return [clean(f"{key}[{i}]", inner) for i, inner in enumerate(item)]
        return item

    return {name: clean(name, item) for name, item in value.items()}, bad_keys


def _without_home(fields: Mapping[str, object]) -> dict[str, object]:
    """Write the home folder as ``~`` in every text: a run folder is made to be shared."""
    home = str(Path.home())

    def clean(value: object) -> object:
        if isinstance(value, str):
            return value.replace(home, "~") if len(home) > 1 else value
        if isinstance(value, Mapping):
            return {key: clean(item) for key, item in value.items()}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {key: clean(value) for key, value in fields.items()}


def _head_and_tail(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot write ({error.strerror}); choose another --run-dir or make room")
