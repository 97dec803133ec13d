"""Functions of others that may run what a model wrote: each call in a fresh fork, behind the walls of `sandbox/`.

A foreign checker that evaluates an answer can be made to change every later verdict of its process; a fork that serves
one call has no later verdict. `ConfinedFunctions` is the trainer's side; `make_handler` serves the scoring processes
(`scoring_worker.py`), each of which has a zygote that imported the functions once, before the walls went up.
"""

import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.self_test import require_sandbox
from sparkgrpo.trainer.tasks.sandbox.wire import Malformed, TooLarge, decode, encode
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Equipment, Level, Limits, SandboxError
from sparkgrpo.trainer.tasks.scoring import ScoringPool, WorkerStartError, default_num_workers

HANDLER = "sparkgrpo.trainer.tasks.confined_call:make_handler"
MEMORY_BYTES, GRACE_S = 2 << 30, 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call."""

    status: str
    """`ok`, or exception, bad_type, timeout, crashed, too_much_output, protocol_error, died."""
    value: object
    """What the function returned, plain values; otherwise a text or None."""


class ConfinedFunctions:
    """Calls functions behind walls; a context manager that ends their processes.

    Args:
        functions: "module:function" names, imported before the walls go up.
        folders: Where their modules are looked for, before the trainer's own search path.
        call_s: Wall time of a call.
        sandbox: The walls. is_unsafe_allowed: Whether to go on without, where they do not stand.
        num_workers: Scoring processes; None: as many as the machine has to spare.

    Raises:
        UserError: A function that cannot be imported, or a machine whose kernel lacks one of the walls.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        folders: Sequence[str] = (),
        call_s: float,
        sandbox: Level = "strict",
        is_unsafe_allowed: bool = False,
        num_workers: int | None = None,
    ) -> None:
        self._call_s = call_s
        path = [folder for folder in (*folders, *sys.path) if folder and Path(folder).is_dir()]
        standard = sysconfig.get_path("stdlib")
        settings = {
            "functions": list(functions),
            "search_path": path,
            "readable": [folder for folder in path if folder != standard],
            "call_s": call_s,
            "level": require_sandbox(sandbox, is_unsafe_allowed=is_unsafe_allowed).level,
        }
        workers = default_num_workers() if num_workers is None else num_workers
        try:
            self._pool = ScoringPool(HANDLER, settings, num_workers=workers)
        except WorkerStartError as error:
            raised = str(error).strip().splitlines()[-1]
            kind, _, text = raised.partition(": ")
            told = text if kind.endswith(SandboxError.__name__) else raised
            raise UserError(f"confined functions {', '.join(functions)}: {told}", details=str(error)) from None

    def call(self, calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[Answer]:
        """(function, arguments) pairs to answers, in order. Arguments are plain values; ValueError for others."""
        return self.answers(self.submit(calls))

    def submit(self, calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[Any]:
        """Begin the calls; what comes back is for `answers`."""
        jobs = [[name, encode(arguments)] for name, arguments in calls]
        return [self._pool.submit(job, self._call_s + GRACE_S) for job in jobs]

    def answers(self, pending: Sequence[Any]) -> list[Answer]:
        """Wait for calls that `submit` began."""
        return [self._answer(future.result()) for future in pending]

    @staticmethod
    def _answer(outcome: Any) -> Answer:  # noqa: ANN401
        if outcome.status == "done" and isinstance(outcome.value, list) and len(outcome.value) == 2:
            status, node = outcome.value
            return Answer(status, decode(node))
        return Answer("died" if outcome.status != "raised" else "exception", outcome.error[-500:])

    @property
    def num_restarts(self) -> int:
        """Scoring processes replaced so far; the forks of single calls are not counted."""
        return self._pool.num_restarts

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def make_handler(settings: Mapping[str, Any]) -> Callable[[Any], object]:
    """The handler of a scoring process: one zygote, and a confined fork of it for each job."""
    checker = Checker(
        level=settings["level"],
        equipment=Equipment(
            functions=settings["functions"], search_path=settings["search_path"], readable=settings["readable"]
        ),
        limits=Limits(
            call_s=settings["call_s"],
            total_s=settings["call_s"] + 1.0,
            memory_bytes=MEMORY_BYTES,
            cpu_s=int(settings["call_s"]) + 2,
        ),
    )

    def handle(job: Any) -> object:  # noqa: ANN401
        name, node = job
        status, value = checker.call_function(name, decode(node))  # pyright: ignore[reportArgumentType]
        try:
            return [status, encode(value)]
        except (Malformed, TooLarge) as error:
            return ["bad_type", encode(str(error))]

    return handle
