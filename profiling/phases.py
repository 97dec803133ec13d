"""A clock of named phases whose times add up.

A step is one line of time cut at boundaries: entering a phase ends the one around it, leaving it resumes that one, and
what no phase names belongs to `t_other`. So the phases add up to the step by construction; `t_unaccounted` compares
that sum with a second, independent measurement of the whole step and is the error of the clock. On CUDA the sum is the
device's and the whole is the host's, so the same check holds the two clocks against each other. A span lies inside a
phase and cuts nothing: the backward pass of the training phase.

CPU: `perf_counter_ns`. CUDA: one event a boundary, read after the one synchronisation at the end of the step, so that
the device's time is measured and nothing waits in between.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

OTHER = "t_other"
MAX_FRAC_UNACCOUNTED, MAX_UNACCOUNTED_S = 0.01, 2e-3
"""The phases of a step must add up to it within 1 %, or within 2 ms where that is more."""

Instant = int | torch.cuda.Event


class PhaseObserver(Protocol):
    """Is told of every boundary, on the host, before its time is taken. What it raises ends the step."""

    def step_started(self) -> None:
        """A step begins."""
        ...

    def entered(self, phase: str, span: str | None) -> None:
        """From now on time belongs to this phase, and to this span of it where there is one."""
        ...

    def step_ended(self) -> None:
        """The step's last boundary has been set."""
        ...


class PhaseClock:
    """Times of one step at a time, by phase, in seconds.

    Args:
        device: Where the work runs.
        names: Every phase that a step may have; those it does not enter are 0.0.
        spans: Spans that are 0.0 in a step without them, like the phases; their times lie inside those of phases.
    """

    def __init__(self, device: torch.device, names: tuple[str, ...], spans: tuple[str, ...] = ()) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._names, self._spans = names, spans
        self._boundaries: list[tuple[str, Instant]] = []
        self._span_times: list[tuple[str, Instant, Instant]] = []
        self._current, self._span = OTHER, None
        self._start_ns = 0
        self.observers: list[PhaseObserver] = []
        """Told of every boundary, in this order."""

    def start_step(self) -> None:
        """Begin a step; whatever was running is forgotten."""
        self._boundaries, self._span_times, self._span = [], [], None
        if self._is_cuda:
            torch.cuda.synchronize()
        for observer in self.observers:
            observer.step_started()
        self._enter(OTHER)
        # Read side by side with the first boundary: between the two lies no observer, whose look at memory (or a
        # garbage collection in it: 8 ms were seen) would be the step's and no phase's.
        self._start_ns = time.perf_counter_ns()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give the time inside to this phase, and none of it to the phase around."""
        if name not in self._names:
            raise ValueError(f"expected a phase of {', '.join(self._names)}, got {name!r}")
        outer = self._current
        self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the phase that runs, called PHASE_PART; spans do not nest."""
        if not name.startswith(f"{self._current}_"):
            raise ValueError(f"expected a span of {self._current}, named {self._current}_..., got {name!r}")
        if self._span is not None:
            raise ValueError(f"expected spans one after another, got {name!r} inside {self._span!r}")
        self._span = name
        self._tell()
        begin = now(self._device)
        try:
            yield
        finally:
            self._span_times.append((name, begin, now(self._device)))
            self._span = None
            self._tell()

    def end_step(self) -> dict[str, float]:
        """Seconds by phase, with `t_step` (their whole, measured apart) and `t_unaccounted` (it minus their sum)."""
        self._enter(OTHER)
        if self._is_cuda:
            torch.cuda.synchronize()
        t_step = (time.perf_counter_ns() - self._start_ns) / 1e9
        for observer in self.observers:
            observer.step_ended()
        seconds = dict.fromkeys((*self._names, OTHER), 0.0)
        for (name, begin), (_, end) in zip(self._boundaries, self._boundaries[1:], strict=False):
            seconds[name] += seconds_between(begin, end)
        seconds["t_unaccounted"] = t_step - sum(seconds.values())
        seconds["t_step"] = t_step
        seconds |= dict.fromkeys(self._spans, 0.0)
        for name, begin, end in self._span_times:
            seconds[name] = seconds.get(name, 0.0) + seconds_between(begin, end)
        return seconds

    def _enter(self, name: str) -> None:
        self._current = name
        self._tell()
        self._boundaries.append((name, now(self._device)))

    def _tell(self) -> None:
        for observer in self.observers:
            observer.entered(self._current, self._span)


def now(device: torch.device) -> Instant:
    """This instant on the clock of the device: of the host, or behind all that is queued on the current CUDA stream."""
    if device.type != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Instant, end: Instant) -> float:
    """Seconds from one instant to another of the same device, which has reached both."""
    if isinstance(begin, int) and isinstance(end, int):
        return (end - begin) / 1e9
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) * 1e-3


def clock_error(seconds: Mapping[str, float]) -> str | None:
    """What is wrong with the times of a step (`PhaseClock.end_step`): phases that do not add up to it. Else None."""
    t_step, missing = seconds["t_step"], seconds["t_unaccounted"]
    if abs(missing) <= max(MAX_FRAC_UNACCOUNTED * t_step, MAX_UNACCOUNTED_S):
        return None
    return f"the phases add up to {t_step - missing:.4f} s, but the step took {t_step:.4f} s: the clock is at fault"
