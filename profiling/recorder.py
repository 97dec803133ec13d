"""Recording a few steps of a run: warm-up, then a capture whose ranges are the phases, with nothing left in flight.

Warm-up steps compile kernels and capture graphs. Then, at the boundary of a step and behind a synchronisation, the
capture starts; after the last step it stops in the same way. Two recorders share that: torch.profiler, which writes a
Chrome trace, and nsys around the process, which is told by cudaProfilerStart and cudaProfilerStop.

In a recorded step every boundary of a phase synchronises, so that host ranges hold the device's work; what that
costs is told by the warm-up steps, which run without.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from sparkgrpo.profiling.attribution import PREFIX, STEP
from sparkgrpo.profiling.memory import resident_bytes

Tool = Literal["torch", "nsys"]


class StepRecorder:
    """Observes the clock of a run (`PhaseClock.observers`) and decides when it has seen enough.

    Args:
        device: Where the run works.
        tool: "torch" writes a Chrome trace to `path`; "nsys" only tells the nsys around this process.
        path: FILE.json.gz, for torch.
        warm_up: Steps before the capture. steps: Steps in it.
    """

    def __init__(self, device: torch.device, *, tool: Tool, path: Path | None, warm_up: int, steps: int) -> None:
        if tool == "torch" and path is None:
            raise ValueError("expected a path for the Chrome trace, got None")
        self.device, self.tool, self.path = device, tool, path
        self.warm_up, self.steps = warm_up, steps
        self.num_done = 0
        self.memory: dict[str, dict[str, int | None]] = {}
        """By phase, at the end of it: allocated, reserved, resident bytes; the largest of the recorded steps."""
        self._profiler: torch.profiler.profile | None = None
        self._open: list[AbstractContextManager[object]] = []
        self._phase: str | None = None

    @property
    def is_done(self) -> bool:
        """All steps are in the capture."""
        return self.num_done >= self.warm_up + self.steps

    @property
    def is_recording(self) -> bool:
        """The step that runs is in the capture."""
        return self.warm_up <= self.num_done < self.warm_up + self.steps

    def step_started(self) -> None:
        """The capture starts with its first step."""
        if not self.is_recording:
            return
        if self.num_done == self.warm_up:
            self._start()
        self._push(STEP)

    def entered(self, phase: str, span: str | None) -> None:
        """The range of the last phase ends, that of this one begins; a span lies inside its phase."""
        if not self.is_recording:
            return
        self._settle()
        if self._phase is not None and phase != self._phase:
            self._note_memory(self._phase)
        depth = 2 if self._phase == phase else 1  # the step's range, and that of a phase which goes on
        while len(self._open) > depth:
            self._pop()
        if len(self._open) == 1:
            self._push(f"{PREFIX}{phase}")
        self._phase = phase
        if span is not None:
            self._push(f"{PREFIX}{phase}/{span.removeprefix(f'{phase}_')}")

    def step_ended(self) -> None:
        """The capture ends with its last step."""
        if self.is_recording:
            self._settle()
            while self._open:
                self._pop()
            self._phase = None
        self.num_done += 1
        if self.num_done == self.warm_up + self.steps:
            self._stop()

    def close(self) -> None:
        """End a capture that an exception left open; nothing is written."""
        self._open.clear()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start(self) -> None:
        if self.tool == "torch":
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            assert self.path is not None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self.path))
            self._profiler = None
        elif self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _push(self, name: str) -> None:
        if self.tool == "torch":
            entered: AbstractContextManager[object] = torch.profiler.record_function(name)
            entered.__enter__()
        else:
            entered = _NvtxRange(name) if self.device.type == "cuda" else nullcontext()
        self._open.append(entered)

    def _pop(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def _note_memory(self, phase: str) -> None:
        is_cuda = self.device.type == "cuda"
        now: Mapping[str, int | None] = {
            "allocated_bytes": torch.cuda.memory_allocated(self.device) if is_cuda else None,
            "reserved_bytes": torch.cuda.memory_reserved(self.device) if is_cuda else None,
            "resident_bytes": resident_bytes(),
        }
        before = self.memory.setdefault(phase, dict(now))
        for key, value in now.items():
            known = before[key]
            before[key] = value if known is None else known if value is None else max(known, value)


class _NvtxRange:
    """Push and pop; the file needs no NVTX header, torch carries it."""

    def __init__(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def __enter__(self) -> "_NvtxRange":
        return self

    def __exit__(self, *problem: object) -> None:
        torch.cuda.nvtx.range_pop()
