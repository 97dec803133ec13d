"""Two ways to reward functions of users: a process that can be killed, and a thread that cannot.

A channel serves the functions that are called together: one that is not async, or all that are. Jobs and replies are
those of `reward_call.py`; a reply may have the key `lost` in place of the others: the process had to be replaced.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.records import check_json
from sparkgrpo.trainer.tasks.reward_call import (
    Caller,
    CannotLoad,
    Job,
    Reply,
    RewardFunction,
    UnknownReference,
    describe,
)
from sparkgrpo.trainer.tasks.scoring import Outcome, ScoringPool, WorkerStartError

HANDLER = "sparkgrpo.trainer.tasks.reward_call:make_caller"
DESCRIBE_S = 120.0


class Channel(Protocol):
    """The way to functions that are called together, and back."""

    @property
    def names(self) -> Sequence[str]:
        """The functions, in order."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """What the functions accept (`reward_call.describe`)."""
        ...

    def submit(self, job: Job, deadline_s: float) -> "Future[list[Reply]]":
        """Begin a job. A reply may have the key `lost` in place of those of `Reply`: the process had to be replaced."""
        ...

    def wait(self, future: "Future[list[Reply]]") -> list[Reply]:
        """The replies, in the order of the job's `only`."""
        ...

    @property
    def num_restarts(self) -> int:
        """Processes replaced so far."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class ProcessChannel:
    """Functions by reference, in one process of their own that is killed when it misses a deadline."""

    def __init__(self, references: Sequence[tuple[str, str]], timeout_s: float) -> None:
        self.names = [name for name, _ in references]
        self.timeout_s = timeout_s
        self._texts = ", ".join(reference for _, reference in references)
        try:
            self._pool = ScoringPool(HANDLER, {"functions": [list(pair) for pair in references]}, num_workers=1)
        except WorkerStartError as error:
            raised = last_line(str(error))
            kind, _, text = raised.partition(": ")
            is_told = kind.endswith((UnknownReference.__name__, CannotLoad.__name__))
            raise UserError(
                f"reward: {text}" if is_told else f"reward: {self._texts} cannot be loaded: {raised}",
                details=str(error),
            ) from None

    def describe(self) -> list[dict[str, Any]]:
        """What the process found."""
        (outcome,) = self._pool.run([{"do": "describe"}], DESCRIBE_S)
        if outcome.status != "done" or not isinstance(outcome.value, list):
            raise UserError(
                f"reward: {self._texts} cannot be inspected: {last_line(outcome.error)}", details=outcome.error
            )
        return outcome.value

    def submit(self, job: Job, deadline_s: float) -> "Future[list[Reply]]":
        """Hand the job to the process."""
        # Functions in an event loop mind their own deadline; the kill is for one that blocks the loop.
        try:
            inner: Future[Outcome] = self._pool.submit({**job, "deadline_s": deadline_s}, deadline_s + job["grace_s"])
        except (TypeError, ValueError, RecursionError):  # rows were looked at before; a user's task was not
            for problem in job["problems"]:
                check_json(problem["columns"], f"reward: {self._texts}: problem {str(problem['prompt'])[:60]!r}")
            raise
        future: Future[list[Reply]] = Future()
        inner.add_done_callback(lambda done: _pass_on(done, future, len(job["only"])))
        return future

    def wait(self, future: "Future[list[Reply]]") -> list[Reply]:
        """Wait: the deadline ends it in any case."""
        try:
            return future.result()
        except WorkerStartError as error:
            raise UserError(
                f"reward: {self._texts}: its process cannot be started again: {last_line(str(error))}",
                details=str(error),
            ) from None

    @property
    def num_restarts(self) -> int:
        """Processes replaced so far."""
        return self._pool.num_restarts

    def close(self) -> None:
        """Kill the process."""
        self._pool.close()


def _pass_on(done: "Future[Outcome]", future: "Future[list[Reply]]", count: int) -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(error)
        return
    outcome = done.result()
    if outcome.status == "done" and isinstance(outcome.value, list) and len(outcome.value) == count:
        future.set_result(outcome.value)
    elif outcome.status == "raised":
        future.set_result([{"error": outcome.error}] * count)
    else:
        future.set_result([{"lost": outcome.error or "the process sent no answer"}] * count)


class ThreadChannel:
    """Python objects, in one thread of the trainer. It cannot be killed, so a deadline can only report.

    The thread is a daemon, which those of `concurrent.futures` are not: the interpreter ends though a function hangs.
    """

    def __init__(self, functions: Sequence[RewardFunction], timeout_s: float, warn: Callable[[str], None]) -> None:
        self.names = [function.name for function in functions]
        self.timeout_s = timeout_s
        self._functions, self._warn = functions, warn
        self._caller = Caller(functions)
        self._is_told = False
        self._jobs: queue.SimpleQueue[tuple[Job, Future[list[Reply]]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def describe(self) -> list[dict[str, Any]]:
        """Inspect the functions."""
        return describe(self._functions)

    def submit(self, job: Job, deadline_s: float) -> "Future[list[Reply]]":
        """Hand the job to the thread."""
        future: Future[list[Reply]] = Future()
        self._jobs.put(({**job, "deadline_s": deadline_s}, future))
        return future

    def wait(self, future: "Future[list[Reply]]") -> list[Reply]:
        """Wait for as long as it takes; say once that the deadline passed."""
        try:
            return future.result(timeout=self.timeout_s)
        except TimeoutError:
            if future.done():  # just now
                return future.result()
        if not self._is_told:
            self._is_told = True
            self._warn(
                f"reward {', '.join(self.names)}: no answer within {self.timeout_s:g} s; a Python object cannot be "
                "stopped, the run waits for it (give it as file.py:name, and it runs in a process that can)"
            )
        return future.result()

    @property
    def num_restarts(self) -> int:
        """0: there is no process."""
        return 0

    def close(self) -> None:
        """Let the thread end by itself, after the call that it is in."""
        self._jobs.put(None)

    def _serve(self) -> None:
        """Call the functions for one job after the other."""
        while (order := self._jobs.get()) is not None:
            job, future = order
            try:
                future.set_result(self._caller(job))
            except BaseException as error:  # whoever waits for the answer gets it
                future.set_exception(error)


def last_line(traceback_text: str) -> str:
    """The line of a traceback that says what was raised."""
    lines = traceback_text.strip().splitlines()
    return lines[-1] if lines else ""
