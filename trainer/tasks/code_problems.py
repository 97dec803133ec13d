"""The programming problems that ship, and the tests drawn for each.

`code_problems.jsonl` has a line a problem, written for this project:

    id, kind ("function" or "program"), statement, signature (empty for a program)
    visible     three tests, which the prompt shows: [arguments, expected value] as Python literals; a program's are
                [standard input, standard output]
    hidden      six fixed edge cases, the same way
    arguments   source of `arguments(draw)`, which makes the arguments (or the input) of one more test
    reference   source of a solution that is right
    is_exact    true where floats must be equal and not just within 1e-9

Sources and literals of this file are part of the program and run in the trainer; what a model wrote never does.
"""

import ast
import contextlib
import copy
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from sparkgrpo.trainer.tasks.base import KeyedDraws, stream_key

PROBLEM_FILE = Path(__file__).with_name("code_problems.jsonl")
NUM_VISIBLE, NUM_FIXED, NUM_DRAWN = 3, 6, 4
MAX_REDRAWS = 200

Test = tuple[object, object]
"""(arguments, expected value) of a function; (standard input, standard output) of a program."""


class Draw:
    """What the argument generators draw from: keyed integers, and what is made of them."""

    def __init__(self, draws: KeyedDraws) -> None:
        self.below = draws.below

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + self.below(high - low + 1)

    def pick(self, values: Sequence) -> object:
        """One of the values."""
        return values[self.below(len(values))]

    def numbers(self, low_count: int, high_count: int, low: int, high: int) -> list[int]:
        """A list of low_count to high_count integers from low to high."""
        return [self.between(low, high) for _ in range(self.between(low_count, high_count))]

    def text(self, alphabet: str, low_count: int, high_count: int) -> str:
        """A text of low_count to high_count characters of the alphabet."""
        return "".join(str(self.pick(alphabet)) for _ in range(self.between(low_count, high_count)))


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeProblem:
    """One problem with its fixed tests."""

    problem_id: str
    kind: Literal["function", "program"]
    statement: str
    signature: str
    """First line of the function, "def f(x: int) -> int:"; empty for a program."""
    visible: tuple[Test, ...]
    fixed: tuple[Test, ...]
    """Hidden edge cases."""
    generator: str
    """Source of `arguments(draw)`."""
    reference: str
    is_exact: bool

    @property
    def entry(self) -> str:
        """Name of the function; empty for a program."""
        return self.signature.removeprefix("def ").partition("(")[0] if self.signature else ""

    @property
    def identity(self) -> str:
        """Canonical text of the problem."""
        return f"code:{self.problem_id}"

    def hidden(self) -> tuple[Test, ...]:
        """The fixed edge cases and the drawn tests."""
        return (*self.fixed, *self.drawn("hidden", NUM_DRAWN))

    def drawn(self, stream: str, count: int) -> list[Test]:
        """`count` further tests, whose arguments repeat neither each other nor a fixed test; the key is the problem's.

        Raises ValueError where the generator does not give that many.
        """
        generate = cast(Callable[[Draw], object], _definitions(self.generator)["arguments"])
        key = stream_key(self.identity, stream, 0)
        seen = {repr(given) for given, _ in (*self.visible, *self.fixed)}
        tests: list[Test] = []
        for index in range(MAX_REDRAWS + count):
            given = generate(Draw(KeyedDraws(key, index)))
            if repr(given) not in seen and len(tests) < count:
                seen.add(repr(given))
                tests.append((given, self.expected(given)))
        if len(tests) < count:
            raise ValueError(f"{self.identity}: expected {count} new tests in {MAX_REDRAWS} draws, got {len(tests)}")
        return tests

    def expected(self, given: object) -> object:
        """What the reference makes of the arguments or of the standard input."""
        if self.kind == "program":
            return _program_output(self.reference, str(given))
        function = cast(Callable[..., object], _definitions(self.reference)[self.entry])
        return function(*copy.deepcopy(cast(tuple, given)))


def read_problems(path: Path = PROBLEM_FILE) -> tuple[CodeProblem, ...]:
    """All problems of the file, in its order. ValueError for a row that is not as described above, with its number."""
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        try:
            problems.append(_problem(json.loads(line)))
        except (KeyError, ValueError, SyntaxError) as error:
            raise ValueError(f"{path.name}:{number}: {type(error).__name__}: {error}") from None
    return tuple(problems)


def _problem(row: Mapping) -> CodeProblem:
    parse = ast.literal_eval if row["kind"] == "function" else str
    visible, fixed = (tuple((parse(given), parse(value)) for given, value in row[key]) for key in ("visible", "hidden"))
    if (len(visible), len(fixed)) != (NUM_VISIBLE, NUM_FIXED):
        raise ValueError(f"expected {NUM_VISIBLE} visible and {NUM_FIXED} hidden tests, got {len(visible), len(fixed)}")
    return CodeProblem(
        problem_id=row["id"],
        kind=row["kind"],
        statement=row["statement"],
        signature=row["signature"],
        visible=visible,
        fixed=fixed,
        generator=row["arguments"],
        reference=row["reference"],
        is_exact=row.get("is_exact", False),
    )


def _definitions(source: str) -> dict[str, object]:
    """The names that a source of ours defines."""
    names: dict[str, object] = {"__name__": "code_problem"}
    exec(compile(source, "<code_problems.jsonl>", "exec"), names)
    return names


def _program_output(source: str, given: str) -> str:
    """Standard output of a reference program of ours for a standard input."""
    printed, before = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(given)
    try:
        with contextlib.redirect_stdout(printed):
            _definitions(source)
    finally:
        sys.stdin = before
    return printed.getvalue()
