"""The trusted half of scoring: it holds the tests, and a confined child of its zygote only answers questions.

A verdict is a vector with one entry per test, made here from plain values. Deadlines, caps and full pipes end in a
reason code, never in a hang (`pipes.py`). A reply carries the random id of its call, so a candidate that takes its
whole process over can still only send values. What is not the candidate's doing gives no verdict (`zygote_link.py`).

This file imports the standard library and its siblings alone: scoring processes start it.
"""

import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sparkgrpo.trainer.tasks.sandbox import zygote
from sparkgrpo.trainer.tasks.sandbox.pipes import Child, Failure, exchange, read_output
from sparkgrpo.trainer.tasks.sandbox.wire import Malformed, decode, encode, frame, parse, same
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Equipment, Level, Limits, ZygoteLink

STATUSES = ("ok", "syntax_error", "no_function", "bad_type", "exception", "too_much_output")
"""What a child may say of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judgement on one candidate."""

    passed: tuple[bool, ...]
    """One entry per test, in order."""
    reason: str
    """`ok`, or what went wrong first."""
    detail: str = ""
    """Name of the exception or type behind the reason; text of the candidate's, so to be shown with care."""


class Checker:
    """One zygote and the candidates it runs, one after another; a context manager that ends them.

    Args:
        level: Walls: strict; bwrap, which puts the zygote into bubblewrap too; basic, which is no wall.
        limits: Times may be changed later; memory and processor time are the zygote's.
        equipment: What children know beyond the standard library.

    Raises:
        SandboxError: The zygote did not start; names the layer that this kernel lacks.
    """

    def __init__(
        self,
        *,
        level: Level = "strict",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        equipment: Equipment = Equipment(),  # noqa: B008 - frozen
    ) -> None:
        self.limits = limits
        self.link = ZygoteLink(level, limits, equipment)

    def judge_calls(
        self, code: str, entry: str, tests: Sequence[tuple[tuple, object]], *, is_exact: bool = False
    ) -> Verdict:
        """Load the code, call `entry` with the arguments of each test, compare what it returns.

        Args:
            tests: (arguments, expected value), plain values; every call gets freshly decoded arguments.
            is_exact: Whether floats must be equal, not just within 1e-9.
        """
        end = time.monotonic() + self.limits.total_s
        passed: list[bool] = []
        reason, detail = "ok", ""
        child = self.link.fork(zygote.CALLS)
        try:
            status, value = self._call(child, "", code, self._call_end(end))
            if status != "ok":
                return _verdict(passed, tests, status, value)
            for arguments, expected in tests:
                status, value = self._call(child, entry, encode(arguments), self._call_end(end))
                passed.append(status == "ok" and same(expected, value, is_exact=is_exact))
                if reason == "ok" and not passed[-1]:
                    reason, detail = ("wrong_value", "") if status == "ok" else (status, _text(value))
        except Failure as failure:
            reason = str(failure) if reason == "ok" else reason
        finally:
            self.link.end(child)
        return _verdict(passed, tests, reason, detail)

    def judge_program(self, code: str, tests: Sequence[tuple[str, str]]) -> Verdict:
        """Run the code as a program, once a test in a process of its own, and compare its whole standard output.

        Args:
            tests: (standard input, expected standard output).
        """
        end = time.monotonic() + self.limits.total_s
        passed: list[bool] = []
        reason = "ok"
        for given, expected in tests:
            try:
                printed = self._run_program(code, given, self._call_end(end))
                problem = "ok" if same_stdout(printed, expected) else "wrong_value"
            except Failure as failure:
                problem = str(failure)
            passed.append(problem == "ok")
            reason = problem if reason == "ok" else reason
            if problem in ("syntax_error", "timeout"):  # would be the same again, and takes time again
                break
        return _verdict(passed, tests, reason, "")

    def call_function(self, name: str, arguments: tuple) -> tuple[str, object]:
        """Call one of the equipment's functions in a fresh child: (status, value).

        Status is `ok`, another of STATUSES (value: a text), or timeout, crashed, protocol_error (value: None).
        """
        child = self.link.fork(zygote.CALLS)
        try:
            return self._call(child, name, encode(arguments), time.monotonic() + self.limits.call_s)
        except Failure as failure:
            return str(failure), None
        finally:
            self.link.end(child)

    def close(self) -> None:
        """End the zygote and its children. Harmless when called twice."""
        self.link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call_end(self, end: float) -> float:
        return min(end, time.monotonic() + self.limits.call_s)

    def _call(self, child: Child, entry: str, payload: object, end: float) -> tuple[str, object]:
        """One request and its reply: (status, value). Raises Failure."""
        call_id = secrets.token_hex(8)
        reply = exchange(child, frame(call_id, entry, payload), end)
        try:
            content = parse(reply)
            if child.surplus or not (isinstance(content, list) and len(content) == 3 and content[0] == call_id):
                raise Malformed("not the one reply to this call")
            if content[1] not in STATUSES:
                raise Malformed("not a status")
            return content[1], decode(content[2])
        except Malformed:
            raise Failure("protocol_error") from None

    def _run_program(self, code: str, given: str, end: float) -> bytes:
        """What the program prints until it ends. Raises Failure."""
        child = self.link.fork(zygote.PROGRAM)
        try:
            printed = read_output(child, frame("", "", code) + given.encode("utf-8", "surrogateescape"), end)
        except BaseException:
            self.link.end(child)
            raise
        status = self.link.end(child, max(end - time.monotonic(), 0.0))
        ending = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
        if ending < 0:
            raise Failure("timeout" if time.monotonic() >= end else "crashed")
        if ending > 0:
            raise Failure("syntax_error" if ending == zygote.EXIT_SYNTAX_ERROR else "exception")
        return printed


def same_stdout(printed: bytes | str, expected: str) -> bool:
    """Whole texts are compared; blanks at the ends of lines and empty lines at the end do not count."""
    if isinstance(printed, bytes):
        printed = printed.decode("utf-8", "surrogateescape")
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip(" \t\r") for line in text.split("\n")).rstrip("\n").split("\n")


def _verdict(passed: list[bool], tests: Sequence, reason: str, detail: object) -> Verdict:
    missing = len(tests) - len(passed)
    return Verdict(passed=(*passed, *[False] * missing), reason=reason, detail=_text(detail))


def _text(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""
