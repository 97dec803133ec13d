"""A clock of named phases whose times add up.

A step is one line of time cut at boundaries: entering a phase ends the one around it, leaving it resumes that one, and
what no phase names belongs to `t_other`. So the phases add up to the step by construction; `t_unaccounted` compares
that sum with a second, independent measurement of the whole step and is the error of the clock.

CPU: `perf_counter_ns`. CUDA: one event a boundary, read after the one synchronisation at the end of the step, so that
the device's time is measured and nothing waits in between.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

OTHER = "t_other"
MAX_FRAC_UNACCOUNTED, MAX_UNACCOUNTED_S = 0.01, 2e-3
"""The phases of a step must add up to it within 1 %, or within 2 ms where that is more."""


class PhaseClock:
    """Times of one step at a time, by phase, in seconds.

    Args:
        device: Where the work runs.
        names: Every phase that a step may have; those it does not enter are 0.0.
    """

    def __init__(self, device: torch.device, names: tuple[str, ...]) -> None:
        self._is_cuda = device.type == "cuda"
        self._names = names
        self._boundaries: list[tuple[str, int | torch.cuda.Event]] = []
        self._current = OTHER
        self._start_ns = 0

    def start_step(self) -> None:
        """Begin a step; whatever was running is forgotten."""
        self._boundaries = []
        if self._is_cuda:
            torch.cuda.synchronize()
        self._start_ns = time.perf_counter_ns()
        self._enter(OTHER)

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

    def end_step(self) -> dict[str, float]:
        """Seconds by phase, with `t_step` (their whole, measured apart) and `t_unaccounted` (it minus their sum)."""
        self._enter(OTHER)
        if self._is_cuda:
            torch.cuda.synchronize()
        t_step = (time.perf_counter_ns() - self._start_ns) / 1e9
        seconds = dict.fromkeys((*self._names, OTHER), 0.0)
        for (name, begin), (_, end) in zip(self._boundaries, self._boundaries[1:], strict=False):
            seconds[name] += _seconds_between(begin, end)
        seconds["t_unaccounted"] = t_step - sum(seconds.values())
        seconds["t_step"] = t_step
        return seconds

    def _enter(self, name: str) -> None:
        if self._is_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter_ns()
        self._boundaries.append((name, now))
        self._current = name


def clock_error(seconds: Mapping[str, float]) -> str | None:
    """What is wrong with the times of a step (`PhaseClock.end_step`): phases that do not add up to it. Else None."""
    t_step, missing = seconds["t_step"], seconds["t_unaccounted"]
    if abs(missing) <= max(MAX_FRAC_UNACCOUNTED * t_step, MAX_UNACCOUNTED_S):
        return None
    return f"the phases add up to {t_step - missing:.4f} s, but the step took {t_step:.4f} s: the clock is at fault"


def _seconds_between(begin: int | torch.cuda.Event, end: int | torch.cuda.Event) -> float:
    if isinstance(begin, int) and isinstance(end, int):
        return (end - begin) / 1e9
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) * 1e-3
