"""The checker's hold on its zygote: start it, have it fork confined children, end them.

What is not a candidate's doing is told apart from what is: a failed fork, a dead zygote and a child that does not say
`ready` raise `SandboxError`, after attempts with a fresh zygote.
"""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkgrpo.trainer.tasks.sandbox import zygote
from sparkgrpo.trainer.tasks.sandbox.pipes import Child, Failure, exchange
from sparkgrpo.trainer.tasks.sandbox.wire import Malformed, decode, parse

Level = Literal["strict", "bwrap", "basic"]

ZYGOTE_PROGRAM = Path(__file__).with_name("start_zygote.py")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
"""All that the zygote gets. A fixed seed, so that the order of a set does not vary; `python -I` would ignore it."""
BWRAP = (
    *("--unshare-user-try", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--cap-drop", "ALL"),
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--die-with-parent", "--chdir", "/"),
)
START_S, READY_S, ANSWER_S, NUM_ATTEMPTS = 60.0, 20.0, 30.0, 3


class SandboxError(RuntimeError):
    """No verdict: the sandbox itself failed. `layer` names the wall where one is to blame."""

    def __init__(self, text: str, layer: str | None = None) -> None:
        super().__init__(text)
        self.layer = layer


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
class Equipment:
    """What a zygote and its children know beyond the standard library."""

    functions: Sequence[str] = ()
    """"module:function" names that children may be asked to call; imported before the walls go up."""
    warm_up: Sequence[tuple[str, tuple]] = ()
    """Calls (name, arguments) made once before the walls go up, so that no child pays for a first time."""
    search_path: Sequence[str] = ()
    """Folders in which to look for their modules."""
    readable: Sequence[str] = ()
    """Files and folders that children may read."""


class ZygoteLink:
    """One zygote, started again where it died.

    Raises:
        SandboxError: The zygote did not start; names the layer that this kernel lacks.
    """

    def __init__(self, level: Level, limits: Limits, equipment: Equipment) -> None:
        self.level = level
        self.abi: int | None = None
        """Landlock's version, known once the zygote runs; None at level basic."""
        self._settings = {
            "is_strict": level != "basic",
            "functions": list(equipment.functions),
            "warm_up": [(name, list(arguments)) for name, arguments in equipment.warm_up],
            "search_path": list(equipment.search_path),
            "readable": list(equipment.readable),
            "memory_bytes": limits.memory_bytes,
            "cpu_s": limits.cpu_s,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id of the zygote (of bubblewrap, where it runs inside); None where it has ended."""
        return None if self._process is None else self._process.pid

    def fork(self, mode: bytes) -> Child:
        """A confined child that waits for its first request. `SandboxError` where there is none to be had."""
        problem = SandboxError("no attempt was made")
        for _ in range(NUM_ATTEMPTS):
            try:
                if self._process is None:
                    self._start()
                return self._forked(mode)
            except (OSError, SandboxError) as error:
                problem = error if isinstance(error, SandboxError) else SandboxError(str(error))
                self.close()
        raise SandboxError(f"no confined process in {NUM_ATTEMPTS} attempts: {problem}", problem.layer)

    def end(self, child: Child, wait_s: float = 0.0) -> int | None:
        """Kill the child, after a time for its own end, and wait for it.

        Returns:
            Its wait status; None where the zygote did not answer, was ended, and the child with it.
        """
        child.close()
        try:
            assert self._control is not None
            self._control.send(zygote.END + struct.pack(zygote.END_FORMAT, child.pid, 0, wait_s))
            answer = self._answer(struct.calcsize(zygote.ENDED_FORMAT), ANSWER_S + wait_s)
            return struct.unpack(zygote.ENDED_FORMAT, answer)[0]
        except OSError:
            self.close()
            return None

    def close(self) -> None:
        """End the zygote; its children end with it. Harmless when called twice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None

    def _start(self) -> None:
        """Start the zygote and read what it says of its walls."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        settings = json.dumps({**self._settings, "control_fd": theirs.fileno()})
        python = [sys.executable, "-s", "-S", "-B", "-P", str(ZYGOTE_PROGRAM), settings]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*_bwrap_command(), *python] if self.level == "bwrap" else python,
                    pass_fds=[theirs.fileno()],
                    env=ENVIRONMENT,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            ours.settimeout(START_S)
            hello = ours.recv(1 << 16)
            content = json.loads(hello) if hello else {"layer": None, "error": _last_words(self._process)}
        except OSError as error:
            content = {"layer": None, "error": str(error)}
        if content["error"] is not None:
            self.close()
            what = "they cannot be loaded" if content.get("is_function") else "the sandbox did not start"
            raise SandboxError(f"{what}: {' '.join(content['error'].split())}", content["layer"])
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()
        self.abi = content["abi"]

    def _forked(self, mode: bytes) -> Child:
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        child = Child(pid=0, to_child=to_child, from_child=from_child)
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
            _check_ready(child)
        except BaseException:
            child.close()
            raise
        return child

    def _answer(self, num_bytes: int, timeout_s: float) -> bytes:
        assert self._control is not None
        self._control.settimeout(timeout_s)
        answer = self._control.recv(num_bytes)
        if len(answer) != num_bytes:
            raise OSError(0, "the zygote ended")
        return answer


def _check_ready(child: Child) -> None:
    """Read the first frame of a child, which our own code wrote: ready, or the layer that failed."""
    try:
        content = parse(exchange(child, b"", time.monotonic() + READY_S))
        assert isinstance(content, list)
        word, value = content[1], decode(content[2])
    except (Failure, Malformed) as error:
        raise SandboxError(f"a child did not say that it is confined ({error})") from None
    if word != zygote.READY:
        layer, text = value if isinstance(value, list) and len(value) == 2 else (None, "no word came")
        raise SandboxError(f"a child could not be confined: {layer}: {text}", str(layer))


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """The last line that a zygote, or bubblewrap, wrote before it ended."""
    with suppress(subprocess.TimeoutExpired):
        _, complaint = process.communicate(timeout=2.0)
        lines = complaint.decode("utf-8", "replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it ended without a word")
    return "it closed its socket and did not end"


def _bwrap_command() -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bubblewrap (bwrap) is not installed")
    return [program, *BWRAP, "--"]
