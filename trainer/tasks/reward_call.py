"""Calls reward functions of users: found by reference, given what their signatures name, their answers made plain.

The contract is TRL's: keyword arguments `prompts`, `completions`, `completion_ids`, every column of the data set
repeated per completion, `trainer_state`, `log_metric(name, value)` and `log_extra(column, values)`. A list comes back
with one number or None for each completion.

`make_caller` serves jobs inside a scoring process (`scoring_worker.py`), so this file imports next to nothing
beside the standard library: every process pays for what stands here. Jobs and replies are JSON values.
"""

import array
import asyncio
import base64
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sparkgrpo.trainer.tasks.raised import told

Job = Mapping[str, Any]
Reply = dict[str, Any]
"""What one function answered to one job, by exactly one of the keys

    values   a number, None, or {"bad": why} for each completion
    error    the traceback of what it raised, beside `said`: the same in one line, with the user's own place
    late     how it missed its deadline in the event loop
    length   what came back in place of one value for each completion, in words

and beside it `metrics` ([name, value] pairs) and `extras` (values by column).
"""

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""What every function can name beside the columns of the data set."""


class UnknownReference(ValueError):
    """A reference that leads nowhere; the text says what was expected."""


class CannotLoad(ValueError):
    """What the module of a function raised while it was imported, in one line (`raised.told`)."""


def load_reference(reference: str) -> object:
    """What "file.py:name" or "package.module:name" names. The folder of a file is searched for its own imports.

    Raises:
        UnknownReference: No such file or name. Whatever the module itself raises while it is imported.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            raise UnknownReference(
                f"there is no file {path.absolute()}; expected file.py:name, from the folder of the command"
            )
        module = _module_of_file(path.resolve())
    else:
        module = importlib.import_module(place)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownReference(f"{place} has no {name!r}{hint}")
    return getattr(module, name)


def _module_of_file(path: Path) -> object:
    module_name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # data classes look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function and what it can be given."""

    name: str
    function: Callable[..., Any]
    accepts: frozenset[str] | None
    """Names of its parameters; None: any, it has `**kwargs`."""
    required: tuple[str, ...]
    is_async: bool
    problem: str = ""
    """Why it cannot be called by keyword at all; empty where it can."""

    @classmethod
    def of(cls, function: Any, name: str | None = None) -> "RewardFunction":  # noqa: ANN401
        """Inspect anything that is called like a function: partial objects and objects with `__call__` too."""
        named = name or _name_of(function)
        if not callable(function):
            return cls(named, function, None, (), False, f"expected a function, got {type(function).__name__}")
        target = function if inspect.isroutine(function) else getattr(function, "func", None) or type(function).__call__
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(target)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError) as error:
            return cls(named, function, None, (), is_async, f"its parameters cannot be read ({error})")
        by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if by_place:
            return cls(named, function, None, (), is_async, f"the parameter {by_place[0]!r} cannot be given by keyword")
        named_ones = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        accepts = None if takes_all else frozenset(p.name for p in named_ones)
        return cls(named, function, accepts, tuple(p.name for p in named_ones if p.default is p.empty), is_async)

    def wants(self, name: str) -> bool:
        """Whether it can be given this argument."""
        return self.accepts is None or name in self.accepts


def _name_of(function: object) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    name = str(getattr(inner, "__name__", type(function).__name__))
    return "lambda" if name == "<lambda>" else name


@dataclass(slots=True)
class _Notes:
    """What a function logs during one call."""

    num_completions: int
    metrics: list[list[Any]] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: object) -> None:
        """Log a number; the mean of a batch stands in metrics.jsonl as metric/<name>."""
        number = plain_number(value)
        if not isinstance(number, float):
            raise ValueError(f"log_metric({name!r}, ...): expected a finite number, got {value!r}")
        self.metrics.append([str(name), number])

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Keep a value for each completion beside the samples."""
        listed = list(values)
        if len(listed) != self.num_completions:
            raise ValueError(
                f"log_extra({column!r}, ...): expected {self.num_completions} values, one for each completion, "
                f"got {len(listed)}"
            )
        self.extras[str(column)] = [_json_value(value) for value in listed]


class Caller:
    """Functions that are called together: one after the other, or, where they are `async`, in one event loop."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self.functions = functions
        self._runner: asyncio.Runner | None = None

    def __call__(self, job: Job) -> list[Reply]:
        """Serve a job: the replies of the functions that it names, in their order."""
        chosen = [function for function in self.functions if function.name in job["only"]]
        plain = {f.name: self._call(f, job) for f in chosen if not f.is_async}
        concurrent = [f for f in chosen if f.is_async]
        if concurrent:
            self._runner = self._runner or asyncio.Runner()  # kept: clients that a function keeps belong to their loop
            plain |= self._runner.run(_together(concurrent, job))
        return [plain[function.name] for function in chosen]

    @staticmethod
    def _call(function: RewardFunction, job: Job) -> Reply:
        notes = _Notes(len(job["texts"]))
        try:
            return _reply(function.function(**arguments(function, job, notes)), notes)
        except (Exception, SystemExit) as error:
            return _error(error)


async def _together(functions: Sequence[RewardFunction], job: Job) -> dict[str, Reply]:
    replies = await asyncio.gather(*(_call_async(function, job) for function in functions))
    return {function.name: reply for function, reply in zip(functions, replies, strict=True)}


async def _call_async(function: RewardFunction, job: Job) -> Reply:
    notes = _Notes(len(job["texts"]))
    limit = asyncio.timeout(job["deadline_s"])
    try:
        async with limit:
            return _reply(await function.function(**arguments(function, job, notes)), notes)
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return {"late": f"no answer within {job['deadline_s']:g} s"}
        return _error(error)


def _error(error: BaseException) -> Reply:
    return {"error": "".join(traceback.format_exception(error)), "said": told(error)}


def arguments(function: RewardFunction, job: Job, notes: _Notes) -> dict[str, Any]:
    """The keyword arguments of one call; fresh values for each row, which a function may change as it likes."""
    problems = [job["problems"][n] for n in job["problem_of_row"]]
    given: dict[str, Callable[[], Any]] = {
        "prompts": lambda: [_fresh(problem["prompt"]) for problem in problems],
        "completions": lambda: _completions(job),
        "completion_ids": lambda: _token_ids(job),
        "trainer_state": lambda: SimpleNamespace(**job["state"]),
        "log_metric": lambda: notes.log_metric,
        "log_extra": lambda: notes.log_extra,
    }
    columns = {
        name: [_fresh(problem["columns"][name]) for problem in problems]
        for name in problems[0]["columns"]
        if function.wants(name)
    }
    return columns | {name: make() for name, make in given.items() if function.wants(name)}


def _fresh(value: Any) -> Any:  # noqa: ANN401
    """A copy of a JSON value; `copy.deepcopy` takes ten times as long."""
    if isinstance(value, (list, tuple)):
        return [_fresh(item) for item in value]
    return {key: _fresh(item) for key, item in value.items()} if isinstance(value, dict) else value


def _completions(job: Job) -> list[Any]:
    if job["is_plain"]:
        return list(job["texts"])
    return [[{"role": "assistant", "content": text}] for text in job["texts"]]


def _token_ids(job: Job) -> list[list[int]]:
    packed, rows, start = array.array("i"), [], 0
    packed.frombytes(base64.b64decode(job["ids"]))
    for length in job["lengths"]:
        rows.append(packed[start : start + length].tolist())
        start += length
    return rows


def packed_ids(rows: Sequence[Sequence[int]]) -> str:
    """Token ids of all completions as a job carries them: 32-bit integers in base64, ten times as fast as JSON's."""
    return base64.b64encode(array.array("i", itertools.chain.from_iterable(rows)).tobytes()).decode()


def _reply(answer: object, notes: _Notes) -> Reply:
    beside = {"metrics": notes.metrics, "extras": notes.extras}
    if isinstance(answer, (str, bytes, Mapping)) or not isinstance(answer, Iterable):
        return {"length": f"one {type(answer).__name__}"}
    values = list(answer)
    if len(values) != notes.num_completions:
        return {"length": f"{len(values)} values"}
    return {"values": [plain_number(value) for value in values], **beside}


def plain_number(value: object) -> float | dict[str, str] | None:
    """A number as a float, None as it is, and anything else (NaN and infinities too) as {"bad": why}.

    Numbers are float, int, bool and other real numbers, NumPy scalars, and tensors without dimensions.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = getattr(value, "item", lambda: value)()
    if not isinstance(value, numbers.Real):
        return {"bad": f"expected a number or None, got {type(value).__name__} {repr(value)[:60]}"}
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else {"bad": f"expected a finite number, got {repr(value)[:60]}"}


def _json_value(value: object) -> object:
    """A value as JSON holds it: numbers of libraries as numbers, what has no JSON form as its text."""
    number = plain_number(value)
    if isinstance(number, float) and not isinstance(value, (bool, int)):
        return number
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)[:1000]
    return value


def describe(functions: Iterable[RewardFunction]) -> list[dict[str, Any]]:
    """What the trainer checks before a run, as JSON values."""
    return [
        {
            "required": list(function.required),
            "accepts": None if function.accepts is None else sorted(function.accepts),
            "is_async": function.is_async,
            "problem": function.problem,
        }
        for function in functions
    ]


def make_caller(settings: Mapping[str, Any]) -> Callable[[Job], object]:
    """The handler of a scoring process: `settings["functions"]` holds [name, reference] pairs.

    A job is {"do": "describe"} or a call.

    Raises:
        UnknownReference: No such file or name.
        CannotLoad: A module raised while it was imported.
    """
    functions = []
    for name, reference in settings["functions"]:
        try:
            functions.append(RewardFunction.of(load_reference(reference), name))
        except UnknownReference:
            raise
        except (Exception, SystemExit) as error:
            raise CannotLoad(f"{reference} cannot be loaded: {told(error)}") from error
    caller = Caller(functions)
    return lambda job: describe(functions) if job["do"] == "describe" else caller(job)
