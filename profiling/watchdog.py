"""Watches memory while a run works: gives a warning, then asks the run to end while it still can save.

A thread looks every 100 ms and so does every boundary of a phase. It frees nothing and stops nothing by itself: the
run's own thread asks (`poll`), gives back what is cached, or ends between two micro-batches or decode steps. A fall of
21 GiB in 1.5 s has been seen on a DGX Spark, so the budget protects and this is the net.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sparkgrpo.profiling.memory import MemoryLimits, host_available_bytes

PERIOD_S = 0.1


class MemoryFloorReached(Exception):
    """Too little memory is left to go on; what was learnt until the last step can be saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryState:
    """What the watchdog saw since it was asked last."""

    is_low: bool
    """Below the warning: time to give back caches. Told once, until memory has risen above it again."""
    lowest_bytes: int | None
    """Lowest MemAvailable; None where the system does not say."""


class MemoryWatchdog:
    """A context manager around a run.

    Args:
        limits: Where to warn and where to end.
        read: MemAvailable now; tests give their own.
    """

    def __init__(self, limits: MemoryLimits, read: Callable[[], int | None] = host_available_bytes) -> None:
        self.limits, self._read = limits, read
        self._lock = threading.Lock()
        self._lowest: int | None = None
        self._has_warned, self._is_low, self._is_floor = False, False, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watchdog", daemon=True)

    def __enter__(self) -> "MemoryWatchdog":
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def is_at_floor(self) -> bool:
        """Memory has been below the floor; it stays so, for a run that has been asked to end ends."""
        return self._is_floor

    def look(self) -> None:
        """Read the meter once."""
        available = self._read()
        if available is None:
            return
        with self._lock:
            self._lowest = available if self._lowest is None else min(self._lowest, available)
            self._is_floor |= available < self.limits.floor_bytes
            if available >= self.limits.warning_bytes:
                self._has_warned = False
            elif not self._has_warned:
                self._has_warned = self._is_low = True

    def poll(self) -> MemoryState:
        """What was seen since the last call."""
        self.look()
        with self._lock:
            state = MemoryState(is_low=self._is_low, lowest_bytes=self._lowest)
            self._is_low, self._lowest = False, None
        return state

    def check(self) -> None:
        """Raise where the run must end; costs nothing else."""
        if self._is_floor:
            raise MemoryFloorReached(
                f"memory fell below the floor of {self.limits.floor_bytes / 2**30:.1f} GiB that the system needs"
            )

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.look()
