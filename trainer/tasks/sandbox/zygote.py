"""The untrusted half of scoring: a clean zygote, and the confined child that it forks for each candidate.

The zygote has never seen a test or an expected value, so its forks have nothing to find. A child keeps two pipes, is
confined before it reads the first byte of what it is to run, says `ready`, and is killed when the checker is done with
it. Whatever it does to itself can only change the values that it sends.

    checker -- fork, two pipes; end, pid --> zygote                 (`checker.py`, one zygote each)
        \\---- frames of `wire.py` ----> child                       calls: load the code, then one call after another
        \\---- the code, then standard input; standard output back ---->  programs

This file runs in an interpreter of its own and imports the standard library and its siblings alone.
"""

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable

from sparkgrpo.trainer.tasks.sandbox.confine import LayerError, Walls, build_walls, confine
from sparkgrpo.trainer.tasks.sandbox.wire import Malformed, TooLarge, decode, encode, frame

CALLS, PROGRAM = b"c", b"p"
END = b"e"
END_FORMAT, ENDED_FORMAT = "!IId", "!idd"
"""Request to end a child: process id, unused, seconds to wait for its own end; answer: wait status or -1, processor
seconds, peak memory in bytes."""
REQUEST_FD, REPLY_FD, FIRST_OTHER_FD, MAX_FD = 3, 4, 5, 1024
EXIT_SYNTAX_ERROR, EXIT_EXCEPTION = 101, 1
READY, NOT_CONFINED = "ready", "not_confined"

PRELOADED = (
    "array base64 binascii bisect bz2 calendar cmath collections contextlib copy ctypes dataclasses datetime decimal",
    "enum fractions functools hashlib heapq io itertools json lzma math numbers operator random re secrets statistics",
    "string struct textwrap time typing unicodedata zlib",
)
"""Imported before the walls go up: quick for honest programs, and the only way to modules with shared libraries."""


def main(settings_text: str) -> None:
    """Serve the control socket until the checker closes it."""
    settings = json.loads(settings_text)
    control = socket.socket(fileno=settings["control_fd"])
    try:
        functions = _prepare(settings)
    except Exception as error:  # a package that a function needs is missing or broken: the checker says so
        _say_hello(control, {"layer": None, "error": f"{type(error).__name__}: {error}", "is_function": True})
        return
    try:
        walls = build_walls(
            is_strict=settings["is_strict"],
            readable=settings["readable"],
            memory_bytes=settings["memory_bytes"],
            cpu_s=settings["cpu_s"],
        )
    except LayerError as error:
        _say_hello(control, {"layer": error.layer, "error": error.strerror})
        return
    except Exception as error:
        _say_hello(control, {"layer": None, "error": f"{type(error).__name__}: {error}"})
        return
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of the zygote
    _say_hello(control, {"abi": walls.abi, "error": None})
    _serve(control, walls, functions)


def _prepare(settings: dict) -> dict[str, Callable[..., object]]:
    for name in " ".join(PRELOADED).split():
        try:
            importlib.import_module(name)
        except ImportError:  # a Python built without one of the libraries
            continue
    sys.path += settings["search_path"]
    functions = {}
    for name in settings["functions"]:
        module, _, function = name.partition(":")
        functions[name] = getattr(importlib.import_module(module), function)
    for name, arguments in settings["warm_up"]:
        functions[name](*arguments)
    return functions


def _say_hello(control: socket.socket, content: dict) -> None:
    control.send(json.dumps(content).encode())


def _serve(control: socket.socket, walls: Walls, functions: dict[str, Callable[..., object]]) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            return
        if message[:1] == END:
            control.send(_end(message[1:]))
            continue
        zygote_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            try:
                _child(message, descriptors, walls, functions, zygote_pid)
            finally:
                os._exit(EXIT_EXCEPTION)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(struct.pack("!i", pid))


def _end(request: bytes) -> bytes:
    """Kill a child, after a time for its own end if one is given, and wait for it."""
    pid, _, wait_s = struct.unpack(END_FORMAT, request)
    if wait_s > 0:
        descriptor = os.pidfd_open(pid)
        select.select([descriptor], [], [], wait_s)
        os.close(descriptor)
    try:
        os.killpg(pid, signal.SIGKILL)  # its own group: without walls it may have forked
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it has not made its group yet
    _, status, usage = os.wait4(pid, 0)
    return struct.pack(ENDED_FORMAT, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0)


def _child(
    mode: bytes, descriptors: list[int], walls: Walls, functions: dict[str, Callable[..., object]], zygote_pid: int
) -> None:
    """Never returns to the zygote's loop: its caller ends the process."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # Above 3 and 4 first: those may be the numbers of the two, or of the zygote's socket, which a child must not keep.
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_OTHER_FD) for descriptor in descriptors]
    for copy, descriptor in zip(copies, (REQUEST_FD, REPLY_FD), strict=True):
        os.dup2(copy, descriptor)
    try:
        confine(walls, zygote_pid)
    except LayerError as error:
        _write(REPLY_FD, frame("", NOT_CONFINED, ["l", [["s", error.layer], ["s", str(error.strerror)]]]))
        return
    os.closerange(FIRST_OTHER_FD, MAX_FD)
    _write(REPLY_FD, frame("", READY, ["n"]))
    if mode == PROGRAM:
        _run_program()
    else:
        _answer_calls(functions)


def _answer_calls(functions: dict[str, Callable[..., object]]) -> None:
    """Requests [call id, entry, arguments]; an empty entry brings the code. Untrusted once that is loaded."""
    module = sys.modules["answer"] = types.ModuleType("answer")  # data classes look their module up by name
    names = functions or module.__dict__
    while head := _read_exactly(REQUEST_FD, 4):
        call_id, entry, payload = json.loads(_read_exactly(REQUEST_FD, int.from_bytes(head, "big")))
        status, node = _answer(names, entry, payload)
        _write(REPLY_FD, frame(call_id, status, node))


def _answer(names: dict, entry: str, payload: object) -> tuple[str, list]:
    try:
        if not entry:
            exec(compile(str(payload), "<answer>", "exec", dont_inherit=True), names)
            return "ok", ["n"]
        function = names.get(entry)
        if not callable(function):
            return "no_function", ["n"]
        return "ok", encode(function(*decode(payload)))  # pyright: ignore[reportGeneralTypeIssues]
    except TooLarge:
        return "too_much_output", ["n"]
    except Malformed as error:
        return "bad_type", ["s", str(error)[:200]]
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers too
        # compile() refuses a NUL by ValueError, and deep nesting by MemoryError or RecursionError
        is_syntax = not entry and isinstance(error, SyntaxError)
        return "syntax_error" if is_syntax else "exception", ["s", type(error).__name__[:200]]


def _run_program() -> None:
    """The code is one frame; what follows it in the pipe is the program's standard input."""
    _, _, code = json.loads(_read_exactly(REQUEST_FD, int.from_bytes(_read_exactly(REQUEST_FD, 4), "big")))
    os.dup2(REQUEST_FD, 0)
    os.dup2(REPLY_FD, 1)
    os.close(REQUEST_FD)
    os.close(REPLY_FD)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.argv = ["answer.py"]
    status = _exit_status(code)
    try:
        for thread in threading.enumerate():  # a program ends when its threads have
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
    except BaseException:
        status = EXIT_EXCEPTION
    os._exit(status)


def _exit_status(code: str) -> int:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<answer>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        is_number = isinstance(error.code, int)
        return 0 if error.code is None else int(error.code) & 0xFF if is_number else EXIT_EXCEPTION  # pyright: ignore
    except SyntaxError:
        return EXIT_SYNTAX_ERROR
    except BaseException:
        return EXIT_EXCEPTION
    return 0


def _read_exactly(descriptor: int, count: int) -> bytes:
    """So many bytes, and none more: what follows may be for another reader. Fewer where the pipe ends."""
    data = bytearray()
    while len(data) < count and (piece := os.read(descriptor, count - len(data))):
        data += piece
    return bytes(data)


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
