"""Rows of a data set: from a JSONL file, a folder of them, or the Hugging Face hub, with errors that name the row."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.base import Problem, hash64, is_heldout, place_in_order, stream_key

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")
TEST_SPLITS = ("test", "validation")


@dataclass(frozen=True, slots=True)
class Record:
    """One row and where it stands, for messages."""

    fields: Mapping[str, object]
    place: str
    """Such as "train.jsonl:17" or "openai/gsm8k train row 17"."""

    def text(self, name: str) -> str:
        """A field that must be text. `UserError` that names the place."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            got = f"the fields {', '.join(self.fields)}" if value is None else repr(value)[:60]
            raise UserError(f"{self.place}: expected text in the field {name!r}, got {got}")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The rows of a data set."""

    train: Sequence[Record]
    """At least one."""
    test: Sequence[Record] | None
    """None: the data set has no test split."""
    source: str
    """What was read, in words."""


def load_splits(data: str, *, default_config: str | None = None) -> Splits:
    """Read a data set.

    Args:
        data: A JSONL file (train.jsonl takes test.jsonl beside it as its test split), a folder that holds train.jsonl
            and perhaps test.jsonl, or a hub name "owner/name" or "owner/name:config".
        default_config: The config of a hub name that names none.

    Raises:
        UserError: Nothing there, or a row that is no JSON object, by its number.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return _load_files(path / "train.jsonl", path / "test.jsonl")
    if path.is_file():
        is_train = path.name == "train.jsonl"
        return _load_files(path, path.with_name("test.jsonl") if is_train else None)
    if path.suffix in (".jsonl", ".json") or not HUB_NAME.fullmatch(data):
        raise UserError(
            f"data: {path.absolute()} is not there; expected a JSONL file, a folder with train.jsonl, or a hub name"
        )
    return _load_hub(data, default_config)


def in_memory(rows: Iterable[object]) -> Splits:
    """Rows that are there already, such as a list of dictionaries or a `datasets.Dataset`. `UserError` by row."""
    records = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"dataset row {number}: expected a dictionary, got {type(row).__name__}")
        records.append(Record(dict(row), f"dataset row {number}"))
    if not records:
        raise UserError("dataset: expected at least one row, got none")
    return Splits(train=records, test=None, source="rows given from Python")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSplit:
    """Problems to train on and to evaluate on, which never meet."""

    train: Sequence[Problem]
    """At least one."""
    heldout: Sequence[Problem]
    """Distinct; at least one."""
    num_dropped: int
    """Training rows left out because they occur in the test split."""
    notes: tuple[str, ...]
    """What people should know."""

    def training_problems(self, task_name: str, seed: int, start: int, count: int) -> list[Problem]:
        """Problems start .. start + count - 1 of this seed's stream, which walks all of them once an epoch."""
        key, size = stream_key(task_name, "train", seed), len(self.train)
        return [self.train[place_in_order(key, index, size)] for index in range(start, start + count)]

    def heldout_problems(self, task_name: str, count: int) -> list[Problem]:
        """The first `count` held-out problems of a fixed order, or all there are."""
        key, size = stream_key(task_name, "heldout", 0), len(self.heldout)
        return [self.heldout[place_in_order(key, index, size)] for index in range(min(count, size))]


def split_by_identity(
    train: Sequence[Problem],
    test: Sequence[Problem] | None,
    heldout_frac: float | None,
    default_frac: float,
    source: str,
) -> ProblemSplit:
    """Keep a test split, and drop the training rows that occur in it; without one, hold a share out by hash.

    A share that holds nothing out still gives one row, so that every run can be evaluated; a single row serves both.

    Raises:
        UserError: `heldout_frac` beside a test split, or nothing left to train on.
    """
    if test is not None and heldout_frac is not None:
        raise UserError(f"heldout_frac: {source} has a test split, which decides; leave heldout_frac out")
    by_identity = {problem.identity: problem for problem in test or train}
    if test is None:
        frac = default_frac if heldout_frac is None else heldout_frac
        by_identity = {name: problem for name, problem in by_identity.items() if is_heldout(name, frac)}
        if not by_identity:
            first = min(train, key=lambda problem: hash64(problem.identity))
            by_identity = {first.identity: first}
    kept = [problem for problem in train if problem.identity not in by_identity]
    notes = []
    if not kept and test is None:
        kept = list(train)
        notes.append("the data have one row alone, so that the evaluation is on what is trained on")
    if not kept:
        raise UserError(f"data: {source} leaves no row to train on: all of them occur in its test split")
    num_dropped = 0 if test is None else len(train) - len(kept)
    dropped = f"; {num_dropped} training rows dropped that occur in the test split" if test is not None else ""
    notes.insert(0, f"data {source}: {len(kept)} rows to train on, {len(by_identity)} held out{dropped}")
    return ProblemSplit(train=kept, heldout=list(by_identity.values()), num_dropped=num_dropped, notes=tuple(notes))


def check_json(columns: Mapping[str, object], place: str) -> None:
    """`UserError` by place and column for a value that cannot go to a process, such as a date or an array."""
    for name, value in columns.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{place}: the column {name!r} holds a {type(value).__name__}, and a reward function given by "
                f"reference runs in a process, which gets columns as JSON ({error}); expected text, numbers, "
                "true, false, None, or lists and dictionaries of these: convert it, or give the function as a Python "
                "object"
            ) from None


def normalised(text: str) -> str:
    """A text as it counts when rows are compared: NFKC, lower case, white space collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def text_digest(text: str) -> str:
    """16 hexadecimal digits that are the same for texts that differ in spacing, case or form of characters alone."""
    return hashlib.blake2b(normalised(text).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _load_files(train: Path, test: Path | None) -> Splits:
    has_test = test is not None and test.is_file()
    source = f"{train} and {test.name}" if test is not None and has_test else str(train)
    return Splits(train=_read_jsonl(train), test=_read_jsonl(test) if test and has_test else None, source=source)


def _read_jsonl(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"data: cannot read {path} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"data: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise UserError(f"{path}:{number}: expected a JSON object, got {line[:60]!r}")
        records.append(Record(fields, f"{path.name}:{number}"))
    if not records:
        raise UserError(f"data: {path} holds no row")
    return records


def _load_hub(name: str, default_config: str | None) -> Splits:
    try:
        import datasets  # the extra `data`
    except ImportError:
        raise UserError(
            f"data: {name} comes from the hub through the package datasets, which is not installed: "
            "pip install 'sparkgrpo[data]', or give a JSONL file"
        ) from None
    repository, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, config or default_config)
    except Exception as error:  # network, names, formats: as many kinds as the library has; one meaning
        raise UserError(f"data: {name} could not be loaded from the hub ({type(error).__name__}: {error})") from error
    if "train" not in loaded:
        raise UserError(f"data: {name} has the splits {', '.join(map(str, loaded))}; expected one named train")
    test_name = next((split for split in TEST_SPLITS if split in loaded), None)
    return Splits(
        train=_hub_records(loaded["train"], f"{name} train"),
        test=None if test_name is None else _hub_records(loaded[test_name], f"{name} {test_name}"),
        source=name if test_name is None else f"{name} with its split {test_name}",
    )


def _hub_records(rows: Iterable[Any], place: str) -> list[Record]:
    return [Record(dict(row), f"{place} row {number}") for number, row in enumerate(rows, start=1)]
