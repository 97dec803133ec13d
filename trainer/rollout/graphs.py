"""Who runs a decode step: the interpreter of Python, or a CUDA graph captured once for each number of slots.

A step's launches cost the host more than the device at small batches; a graph replays all of them with one call. What
makes that safe: the step reads nothing on the host, works on buffers that never move, and is a function of the bucket
alone. Buckets of one pool are captured at first use, largest first by itself, since a rollout starts in its largest
bucket and shrinks.

Warm-up and capture run with every slot parked (`context_len` 0, restored afterwards): a parked step changes nothing, so
capturing in the middle of a live rollout is safe. Before each rollout the addresses of all tensors that graphs read are
compared with those at capture; a difference is an error that names the tensor, because a replay would use stale memory.
"""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NUM_WARM_UPS = 2
"""Runs before a capture: modules load, cuBLAS takes its workspace."""

Step = Callable[[int], None]
"""Advance the first so many slots by one token, in place."""
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""capture(run) -> replay: records what `run` launches, without effect on any live row."""


def bucket_for(num_rows: int, max_rows: int) -> int:
    """The smallest bucket that holds so many rows: one of BUCKETS below max_rows, or max_rows."""
    return next((bucket for bucket in BUCKETS if num_rows <= bucket < max_rows), max_rows)


class Runner(Protocol):
    """Runs decode steps."""

    num_steps: int
    """Steps run since `begin`."""
    num_replayed: int
    """Of these, by a captured graph."""
    t_capture_s: float
    """Spent on captures since `begin`."""

    def begin(self) -> None:
        """A rollout starts. Raises RuntimeError when a tensor that a graph reads has moved."""
        ...

    def step(self, num_slots: int) -> None:
        """Run one step on the first slots."""
        ...


class EagerRunner:
    """Runs the step as it is."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.num_steps = self.num_replayed = 0
        self.t_capture_s = 0.0

    def begin(self) -> None:
        """A rollout starts."""
        self.num_steps = 0

    def step(self, num_slots: int) -> None:
        """Run one step."""
        self._step(num_slots)
        self.num_steps += 1


class GraphRunner:
    """Replays a captured graph of the step for each bucket.

    A capture that fails is reported once; from then on the step runs as it is.

    Args:
        step: The step.
        tensors: Gives, by name, all that the step's launches read or write and that must stay where it is.
        context_len_B: Zeroed while a graph is made.
        capture: `cuda_capture(...)`; a test's stand-in records calls.
        report: Gets the one line that says why graphs are not used.
    """

    def __init__(
        self,
        step: Step,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        context_len_B: torch.Tensor,
        capture: Capture,
        report: Callable[[str], None],
    ) -> None:
        self._step, self._tensors, self._capture, self._report = step, tensors, capture, report
        self._context_len_B = context_len_B
        self._captured: dict[str, torch.Tensor] = {}
        """What the graphs read, kept alive: a freed tensor's address may be another's."""
        self._replays: dict[int, Callable[[], None]] = {}
        self._has_failed = False
        self.num_steps = self.num_replayed = 0
        self.t_capture_s = 0.0

    @property
    def buckets(self) -> tuple[int, ...]:
        """Those that have a graph, in the order of their capture."""
        return tuple(self._replays)

    def begin(self) -> None:
        """A rollout starts.

        Raises:
            RuntimeError: A tensor that the graphs read is no longer where it was when they were made.
        """
        self.num_steps = self.num_replayed = 0
        self.t_capture_s = 0.0
        if not self._captured:
            return
        now = self._tensors()
        moved = [name for name, x in self._captured.items() if name not in now or now[name].data_ptr() != x.data_ptr()]
        if moved:
            raise RuntimeError(
                f"expected every tensor of the decode step where its graph was captured, but these have moved:"
                f" {', '.join(moved[:5])}; change weights in place (copy_), or build a new engine"
            )

    def step(self, num_slots: int) -> None:
        """Run one step on the first slots, captured at its first use."""
        self.num_steps += 1
        replay = self._replays.get(num_slots) or self._make(num_slots)
        if replay is None:
            self._step(num_slots)
        else:
            replay()
            self.num_replayed += 1

    def _make(self, num_slots: int) -> Callable[[], None] | None:
        if self._has_failed:
            return None
        start = time.perf_counter()
        kept_B = self._context_len_B.clone()
        self._context_len_B.zero_()
        try:
            self._replays[num_slots] = self._capture(lambda: self._step(num_slots))
            self._captured = self._captured or {name: x.detach() for name, x in self._tensors().items()}
        except RuntimeError as error:  # torch's and CUDA's errors of a capture all are
            self._has_failed = True
            self._report(
                f"decoding without CUDA graphs, up to several times slower: capturing {num_slots} rows failed"
                f" ({type(error).__name__}: {str(error).splitlines()[0]})"
            )
        finally:
            self._context_len_B.copy_(kept_B)
            self.t_capture_s += time.perf_counter() - start
        return self._replays.get(num_slots)


def cuda_capture(device: torch.device) -> Capture:
    """Captures on a stream of its own, all graphs in one memory pool; warm-up runs on that stream too."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph.replay

    return capture
