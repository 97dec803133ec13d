"""The trusted half of scoring: it holds the tests, and a confined child of its zygote only answers questions.

A verdict is a vector with one entry per test, made here from plain values. Deadlines, caps and full pipes end in a
reason code, never in a hang: every wait has an end on the monotonic clock, tested on each turn (a child may drip one byte
at a time), and requests are written without blocking (a child may not read). A reply carries the random id of its call,
so a candidate that takes its whole process over can still only send values.

What is not the candidate's doing gives no verdict: a failed fork, a dead zygote, a child that does not say `ready`. It
is tried again with a fresh zygote, and then raises `SandboxError`.

This file imports the standard library and its siblings alone: scoring processes start it.
"""

import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from sparkgrpo.trainer.tasks.sandbox import zygote
from sparkgrpo.trainer.tasks.sandbox.wire import MAX_BYTES, Malformed, decode, encode, frame, parse, same

Level = Literal["strict", "bwrap", "basic"]
LEVELS: tuple[Level, ...] = ("strict", "bwrap", "basic")

ZYGOTE_PROGRAM = Path(__file__).with_name("start_zygote.py")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
"""All that the zygote gets. A fixed seed, so that the order of a set does not vary; `python -I` would ignore it."""
BWRAP = (
    *("--unshare-user-try", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--cap-drop", "ALL"),
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--die-with-parent", "--chdir", "/"),
)
START_S, READY_S, ANSWER_S, NUM_ATTEMPTS = 60.0, 20.0, 30.0, 3

STATUSES = ("ok", "syntax_error", "no_function", "bad_type", "exception", "too_much_output")
"""What a child may say of a call."""


class SandboxError(RuntimeError):
    """No verdict: the sandbox itself failed. `layer` names the wall where one is to blame."""

    def __init__(self, text: str, layer: str | None = None) -> None:
        super().__init__(text)
        self.layer = layer


class Failure(Exception):
    """Carries the reason code that ends a candidate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a candidate may use."""

    call_s: float = 2.0
    """Wall time of loading the code, and of each call or program run."""
    total_s: float = 8.0
    """Wall time of the whole candidate."""
    memory_bytes: int = 512 << 20
    """Address space."""
    cpu_s: int = 10
    """Processor time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judgement on one candidate."""

    passed: tuple[bool, ...]
    """One entry per test, in order."""
    reason: str
    """`ok`, or what went wrong first."""
    detail: str = ""
    """Name of the exception or type behind the reason; text of the candidate's, so to be shown with care."""


@dataclass(kw_only=True, slots=True)
class _Child:
    """A confined process and the ends of its two pipes."""

    pid: int
    to_child: int
    from_child: int
    surplus: bytearray = field(default_factory=bytearray)
    """What came in behind the frame that was read."""


class Checker:
    """One zygote and the candidates it runs, one after another; a context manager that ends them.

    Args:
        level: Walls: strict; bwrap, which puts the zygote into bubblewrap too; basic, which is no wall.
        functions: "module:function" names for `call_function`; they are imported before the walls go up.
        search_path: Folders in which to look for their modules, beside the standard library.
        readable: Files and folders that children may read, beside the standard library.

    Raises:
        SandboxError: The zygote did not start; names the layer that this kernel lacks.
    """

    def __init__(
        self,
        *,
        level: Level = "strict",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        functions: Sequence[str] = (),
        search_path: Sequence[str] = (),
        readable: Sequence[str] = (),
    ) -> None:
        self.level, self.limits = level, limits
        self.abi: int | None = None
        """Landlock's version, known once the zygote runs; None at level basic."""
        self._settings = {
            "is_strict": level != "basic",
            "functions": list(functions),
            "search_path": list(search_path),
            "readable": list(readable),
            "memory_bytes": limits.memory_bytes,
            "cpu_s": limits.cpu_s,
        }
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start()

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
        child = self._fork(zygote.CALLS)
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
            self._end(child)
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
        """Call one of `functions` in a fresh child: (status, value).

        Status is `ok`, another of STATUSES (value: a text), or timeout, crashed, protocol_error (value: None).
        """
        child = self._fork(zygote.CALLS)
        try:
            return self._call(child, name, encode(arguments), time.monotonic() + self.limits.call_s)
        except Failure as failure:
            return str(failure), None
        finally:
            self._end(child)

    def close(self) -> None:
        """End the zygote; its children end with it. Harmless when called twice."""
        if self._zygote is not None:
            self._zygote.send_signal(signal.SIGKILL)
            self._zygote.wait()
        if self._control is not None:
            self._control.close()
        self._zygote = self._control = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        """Start the zygote and read what it says of its walls."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = json.dumps({**self._settings, "control_fd": theirs.fileno()})
        python = [sys.executable, "-s", "-S", "-B", "-P", str(ZYGOTE_PROGRAM), settings]
        try:
            with theirs:
                self._zygote = subprocess.Popen(
                    [*_bwrap_command(), *python] if self.level == "bwrap" else python,
                    pass_fds=[theirs.fileno()],
                    env=ENVIRONMENT,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            self._control = ours
            ours.settimeout(START_S)
            hello = ours.recv(1 << 16)
            content = json.loads(hello) if hello else {"layer": None, "error": "it ended without a word"}
        except OSError as error:
            self._control = ours
            content = {"layer": None, "error": str(error)}
        if content["error"] is not None:
            self.close()
            raise SandboxError(f"the sandbox did not start: {content['error']}", content["layer"])
        self.abi = content["abi"]

    def _fork(self, mode: bytes) -> _Child:
        """A confined child that waits for its first request."""
        problem = SandboxError("no attempt was made")
        for _ in range(NUM_ATTEMPTS):
            if self._zygote is None:
                self._start()
            try:
                return self._forked(mode)
            except (OSError, SandboxError) as error:
                problem = error if isinstance(error, SandboxError) else SandboxError(str(error))
                self.close()
        raise SandboxError(f"no confined process in {NUM_ATTEMPTS} attempts: {problem}", problem.layer)

    def _forked(self, mode: bytes) -> _Child:
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        child = _Child(pid=0, to_child=to_child, from_child=from_child)
        try:
            try:
                assert self._control is not None
                socket.send_fds(self._control, [mode], [child_in, child_out])
            finally:
                os.close(child_in)
                os.close(child_out)
            os.set_blocking(to_child, False)
            child.pid = struct.unpack("!i", self._answer(4, ANSWER_S))[0]
            if child.pid < 0:
                raise OSError(-child.pid, f"fork: {os.strerror(-child.pid)}")
            word, value = self._confined_word(child)
            if word != zygote.READY:
                layer, text = value if isinstance(value, list) and len(value) == 2 else (None, "no word came")
                raise SandboxError(f"a child could not be confined: {layer}: {text}", str(layer))
        except BaseException:
            _close(child)
            raise
        return child

    def _confined_word(self, child: _Child) -> tuple[str, object]:
        """The first frame of a child, which our own code wrote: ready, or the layer that failed."""
        try:
            content = parse(self._exchange(child, b"", time.monotonic() + READY_S))
            assert isinstance(content, list)
            return str(content[1]), decode(content[2])
        except (Failure, Malformed) as error:
            raise SandboxError(f"a child did not say that it is confined ({error})") from None

    def _end(self, child: _Child, wait_s: float = 0.0) -> int | None:
        """Kill the child and wait for it; its wait status, None where the zygote did not answer and was ended too."""
        _close(child)
        try:
            assert self._control is not None
            self._control.send(zygote.END + struct.pack(zygote.END_FORMAT, child.pid, 0, wait_s))
            answer = self._answer(struct.calcsize(zygote.ENDED_FORMAT), ANSWER_S + wait_s)
            return struct.unpack(zygote.ENDED_FORMAT, answer)[0]
        except OSError:
            self.close()  # the child dies with it; the next candidate gets a fresh one
            return None

    def _answer(self, num_bytes: int, timeout_s: float) -> bytes:
        assert self._control is not None
        self._control.settimeout(timeout_s)
        answer = self._control.recv(num_bytes)
        if len(answer) != num_bytes:
            raise OSError(0, "the zygote ended")
        return answer

    def _call_end(self, end: float) -> float:
        return min(end, time.monotonic() + self.limits.call_s)

    def _call(self, child: _Child, entry: str, payload: object, end: float) -> tuple[str, object]:
        """One request and its reply: (status, value). Raises Failure."""
        call_id = secrets.token_hex(8)
        reply = self._exchange(child, frame(call_id, entry, payload), end)
        try:
            content = parse(reply)
            if child.surplus or not (isinstance(content, list) and len(content) == 3 and content[0] == call_id):
                raise Malformed("not the one reply to this call")
            if content[1] not in STATUSES:
                raise Malformed("not a status")
            return content[1], decode(content[2])
        except Malformed:
            raise Failure("protocol_error") from None

    def _exchange(self, child: _Child, request: bytes, end: float) -> bytes:
        """Write the request while reading one frame. Raises Failure: timeout, crashed, too_much_output."""
        unsent, reply = memoryview(request), child.surplus
        poll = select.poll()
        poll.register(child.from_child, select.POLLIN)
        if unsent:
            poll.register(child.to_child, select.POLLOUT)
        while len(reply) < 4 or len(reply) < 4 + _frame_bytes(reply):
            for descriptor in _ready(poll, end):
                if descriptor == child.from_child:
                    reply += _piece(descriptor) or _crashed()
                else:
                    unsent = _written(descriptor, unsent)
                    if not unsent:
                        poll.unregister(descriptor)
        if unsent:
            raise Failure("protocol_error")  # an answer to a question it has not read
        size = 4 + _frame_bytes(reply)
        body = bytes(reply[4:size])
        del reply[:size]
        return body

    def _run_program(self, code: str, given: str, end: float) -> bytes:
        """What the program prints until it ends. Raises Failure."""
        child = self._fork(zygote.PROGRAM)
        status: int | None = None
        try:
            printed = self._printed(child, frame("", "", code) + given.encode("utf-8", "surrogateescape"), end)
        except BaseException:
            self._end(child)
            raise
        status = self._end(child, max(end - time.monotonic(), 0.0))
        code_or_signal = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
        if code_or_signal < 0:
            raise Failure("timeout" if time.monotonic() >= end else "crashed")
        if code_or_signal > 0:
            raise Failure("syntax_error" if code_or_signal == zygote.EXIT_SYNTAX_ERROR else "exception")
        return printed

    def _printed(self, child: _Child, request: bytes, end: float) -> bytes:
        unsent, printed = memoryview(request), child.surplus
        poll = select.poll()
        poll.register(child.from_child, select.POLLIN)
        poll.register(child.to_child, select.POLLOUT)
        is_open = True
        while True:
            for descriptor in _ready(poll, end):
                if descriptor == child.from_child:
                    piece = _piece(descriptor)
                    if not piece:
                        return bytes(printed)
                    printed += piece
                elif is_open:
                    try:
                        unsent = _written(descriptor, unsent)
                    except Failure:  # it ended, or closed its input: what it printed counts all the same
                        unsent = memoryview(b"")
                    if not unsent:
                        poll.unregister(descriptor)
                        os.close(descriptor)  # the end of its input
                        child.to_child, is_open = -1, False
            if len(printed) > MAX_BYTES:
                raise Failure("too_much_output")


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


def _frame_bytes(reply: bytearray) -> int:
    size = int.from_bytes(reply[:4], "big")
    if size > MAX_BYTES:
        raise Failure("too_much_output")
    return size


def _ready(poll: select.poll, end: float) -> list[int]:
    left_s = end - time.monotonic()
    events = poll.poll(left_s * 1000 + 1) if left_s > 0 else []
    if not events:
        raise Failure("timeout")
    return [descriptor for descriptor, _ in events]


def _piece(descriptor: int) -> bytes:
    return os.read(descriptor, 1 << 16)


def _crashed() -> bytes:
    raise Failure("crashed")


def _written(descriptor: int, unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(descriptor, unsent) :]
    except BrokenPipeError:
        raise Failure("crashed") from None


def _close(child: _Child) -> None:
    for descriptor in (child.to_child, child.from_child):
        if descriptor >= 0:
            os.close(descriptor)
    child.to_child = child.from_child = -1


def _bwrap_command() -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bubblewrap (bwrap) is not installed")
    return [program, *BWRAP, "--"]
