"""A pool of scoring processes: jobs in, outcomes out, and nothing that a job does can hold the trainer up.

Rewards come from code that may hang, crash, leak or eat memory: a user's function, a library, a program that the model
wrote. None of it runs in the trainer. A job goes to one of W worker processes with a deadline; a worker that misses it,
or dies, is killed with all that it started and replaced, and the job's outcome says so. Jobs are handed out in the
order of submission, outcomes come back as futures: what is submitted while answers are still being sampled is scored
meanwhile.

What a job means is the *handler's* business: "package.module:factory" names a function that a worker calls once with
the settings; what it returns is called with each job (`scoring_worker.py`). Settings, jobs and results are JSON values:
a worker that a hostile library took over can send wrong numbers, not objects.

    with ScoringPool("package.module:factory", {"path": "x"}, num_workers=2) as pool:
        outcomes = pool.run(jobs, deadline_s=60)            # in the order of the jobs
        ahead = pool.submit(job, deadline_s=60)             # or at once, `ahead.result()` later
"""

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

WORKER_PROGRAM = Path(__file__).with_name("scoring_worker.py")
MAX_REPLY_BYTES = 256 << 20
READ_BYTES = 1 << 20
MAX_WORKERS = 12

Status = Literal["done", "raised", "timeout", "died"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended."""

    status: Status
    """done: the handler returned; raised: it raised, and its process goes on; timeout: the deadline passed, and its
    process was killed; died: its process ended by itself, or broke the protocol."""
    value: Any = None
    """What the handler returned, a JSON value; None unless done."""
    error: str = ""
    """raised: the traceback; timeout, died: a sentence; empty when done."""
    wall_s: float = 0.0
    """From the hand-over to the worker to the end; time in the queue is not in it."""


class WorkerStartError(RuntimeError):
    """A worker could not be started, or its handler could not be made; the text has the traceback."""


def default_num_workers() -> int:
    """As many as there are processors beyond two, which the trainer keeps; 1 to 12."""
    return min(max(len(os.sched_getaffinity(0)) - 2, 1), MAX_WORKERS)


class ScoringPool:
    """W worker processes that serve one handler; a context manager that ends them.

    Args:
        handler: "package.module:factory"; the factory takes the settings and returns what takes a job.
        settings: JSON values for the factory.
        num_workers: Processes, at least 1.
        start_timeout_s: How long a worker may take until its handler stands.

    Raises:
        WorkerStartError: The first workers did not start. Later, a worker that cannot be replaced makes the job that
            waited for it raise this.
    """

    def __init__(
        self, handler: str, settings: Mapping[str, object], *, num_workers: int, start_timeout_s: float = 120.0
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"expected at least one worker, got {num_workers}")
        self.num_workers = num_workers
        self.num_restarts = 0
        """Workers that were killed or died, and were replaced, so far."""
        self._hello = {"handler": handler, "settings": dict(settings), "sys_path": sys.path, "parent_pid": os.getpid()}
        self._start_timeout_s = start_timeout_s
        self._jobs: queue.SimpleQueue[tuple[bytes, float, Future[Outcome]] | None] = queue.SimpleQueue()
        self._workers: list[_Worker | None] = [None] * num_workers
        self._is_closed = False
        self._lock = threading.Lock()
        started: list[Future[None]] = [Future() for _ in range(num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(place, started[place]), name=f"scoring-{place}", daemon=True)
            for place in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                future.result()
        except BaseException:
            self.close()
            raise

    def submit(self, job: object, deadline_s: float) -> Future[Outcome]:
        """Queue a job (a JSON value); its deadline counts from the moment a worker gets it."""
        if self._is_closed:
            raise ValueError("the pool is closed")
        future: Future[Outcome] = Future()
        self._jobs.put((json.dumps(job).encode(), deadline_s, future))
        return future

    def run(self, jobs: Iterable[object], deadline_s: float) -> list[Outcome]:
        """Submit all jobs and wait for all; outcomes in the order of the jobs."""
        return [future.result() for future in [self.submit(job, deadline_s) for job in jobs]]

    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        return [worker.process.pid for worker in self._workers if worker is not None]

    def close(self) -> None:
        """Kill the workers and all that they started; jobs not yet done are cancelled. Harmless when called twice."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                if worker is not None:
                    worker.signal_group(signal.SIGKILL)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, place: int, started: "Future[None]") -> None:
        """The thread of one worker, which is started here: the kernel ends a worker with the thread that made it."""
        try:
            self._replace(place)
            started.set_result(None)
        except BaseException as error:
            started.set_exception(error)
            return
        while (item := self._jobs.get()) is not None:
            job, deadline_s, future = item
            if self._is_closed:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                self._serve_job(place, job, deadline_s, future)
        self._drop(place)

    def _serve_job(self, place: int, job: bytes, deadline_s: float, future: "Future[Outcome]") -> None:
        try:
            worker = self._workers[place] or self._replace(place)
            outcome = worker.run(job, deadline_s)
        except BaseException as error:  # a worker that cannot be replaced: its job must not wait for ever
            future.set_exception(error)
            return
        is_lost = outcome.status in ("timeout", "died")
        if is_lost:
            self._drop(place)
            self.num_restarts += 1
        future.set_result(outcome)
        if is_lost and not self._is_closed:
            try:
                self._replace(place)  # ahead of the next job
            except (WorkerStartError, OSError):
                self._drop(place)  # that job tries again, and says why it cannot

    def _replace(self, place: int) -> "_Worker":
        worker = _Worker(self._hello)
        with self._lock:
            self._workers[place] = worker
            is_closed = self._is_closed
        if is_closed:
            worker.signal_group(signal.SIGKILL)
        try:
            worker.wait_until_ready(self._start_timeout_s)
        except BaseException:
            self._drop(place)
            raise
        return worker

    def _drop(self, place: int) -> None:
        with self._lock:
            worker, self._workers[place] = self._workers[place], None
        if worker is not None:
            worker.kill()


class _Worker:
    """One process and the socket to it."""

    def __init__(self, hello: Mapping[str, object]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER_PROGRAM), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,  # stdout is for results
                start_new_session=True,  # Ctrl-C is for the trainer; and one signal reaches all that a job started
            )
        self.socket.setblocking(False)
        self._hello = json.dumps(hello).encode()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Send the hello and wait until the handler stands."""
        outcome = self.run(self._hello, timeout_s)
        if outcome.status != "done":
            raise WorkerStartError(f"a scoring process did not start: {outcome.error}")

    def run(self, job: bytes, deadline_s: float) -> Outcome:
        """Send one frame and wait for its answer, whatever the worker does meanwhile."""
        start = time.monotonic()
        try:
            reply = self._exchange(len(job).to_bytes(8, "big") + job, start + deadline_s)
        except TimeoutError:
            return Outcome(
                status="timeout", error=f"no answer within {deadline_s:g} s", wall_s=time.monotonic() - start
            )
        except (OSError, EOFError, ValueError) as error:
            text = f"the process ended without an answer ({self._ending() or error})"
            return Outcome(status="died", error=text, wall_s=time.monotonic() - start)
        wall_s = time.monotonic() - start
        if "error" in reply:
            return Outcome(status="raised", error=str(reply["error"]), wall_s=wall_s)
        return Outcome(status="done", value=reply.get("value"), wall_s=wall_s)

    def _exchange(self, request: bytes, end: float) -> dict[str, object]:
        unsent, reply, size = memoryview(request), bytearray(), None
        poll = select.poll()  # select() has no place for descriptors above 1,023
        while size is None or len(reply) < 8 + size:
            poll.register(self.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            left_s = end - time.monotonic()
            events = poll.poll(left_s * 1000) if left_s > 0 else []
            if not events:
                raise TimeoutError
            if events[0][1] & select.POLLOUT:
                unsent = unsent[self.socket.send(unsent) :]
            if events[0][1] & ~select.POLLOUT:
                piece = self.socket.recv(READ_BYTES)
                if not piece:
                    raise EOFError("end of file")
                reply += piece
            if size is None and len(reply) >= 8:
                size = int.from_bytes(reply[:8], "big")
                if size > MAX_REPLY_BYTES:
                    raise ValueError(f"a reply of {size} bytes, more than {MAX_REPLY_BYTES}")
        content = json.loads(reply[8:])
        if not isinstance(content, dict) or unsent:
            raise ValueError("a reply that is none")
        return content

    def _ending(self) -> str:
        """How the process ended, in words; empty while it runs. It stays a zombie, so that its number stays its own."""
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            state = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None and state.si_code == os.CLD_EXITED:
                return f"exit code {state.si_status}"
            if state is not None:
                return f"signal {signal.Signals(state.si_status).name}"
            time.sleep(0.005)
        return ""

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and all that it started in its session."""
        if self.process.returncode is None:  # not yet waited for, so the number is still its own
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                self.process.send_signal(number)  # it has not made its session yet

    def kill(self) -> None:
        """End it and all that it started, and wait for it."""
        self.signal_group(signal.SIGKILL)
        self.process.wait()
        self.socket.close()
