"""The program of a scoring process (`scoring.py`): make the handler, then answer one job after the other.

Frames in both directions: 8 bytes of length, then JSON. The first frame in is the hello, {"handler", "settings",
"sys_path", "parent_pid"}; every other one is a job. A frame out is {"value": ...} or {"error": traceback}. The program
is started by its path and takes the trainer's search path over, so that it finds what the trainer found; its own
imports are few, because every worker pays for them.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def main(connection: socket.socket) -> None:
    """Serve until the trainer closes its end."""
    hello = json.loads(_receive(connection) or b"{}")
    _die_with_parent(hello["parent_pid"])
    sys.path[:] = hello["sys_path"]
    try:
        handle = make_handler(hello["handler"], hello["settings"])
    except BaseException:
        _send(connection, {"error": traceback.format_exc()})
        return
    _send(connection, {"value": None})
    while (job := _receive(connection)) is not None:
        _send(connection, _answer(handle, json.loads(job)))


def make_handler(name: str, settings: dict[str, object]) -> Callable[[object], object]:
    """What "package.module:factory" makes of the settings."""
    module, _, factory = name.partition(":")
    return getattr(importlib.import_module(module), factory)(settings)


def _answer(handle: Callable[[object], object], job: object) -> dict[str, object]:
    try:
        value = handle(job)
        json.dumps(value)  # a result that is no JSON is the handler's mistake, with its traceback
        return {"value": value}
    except (Exception, SystemExit, KeyboardInterrupt):
        return {"error": traceback.format_exc()}


def _receive(connection: socket.socket) -> bytes | None:
    """One frame; None where the connection ended."""
    head = _receive_exactly(connection, 8)
    return None if head is None else _receive_exactly(connection, int.from_bytes(head, "big"))


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(count - len(received), 1 << 20))
        if not piece:
            return None
        received += piece
    return bytes(received)


def _send(connection: socket.socket, content: dict[str, object]) -> None:
    data = json.dumps(content).encode()
    connection.sendall(len(data).to_bytes(8, "big") + data)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; it may have ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as trainer:
        os.set_inheritable(trainer.fileno(), False)
        main(trainer)
