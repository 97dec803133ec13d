"""What a trace holds, whoever recorded it: calls of the host, rows of the device, named ranges, operations.

`nsys.py` and `chrome_trace.py` fill it; everything after reads it alone. Times are integer nanoseconds of one clock.
A table that the file does not have is None: what it would have told is "cannot say", never 0.

N: rows of a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

UNKNOWN = -1
"""In place of an integer that the file does not give."""


class TraceError(ValueError):
    """A file that cannot be read as a trace: one sentence that says what was expected, what came, and what would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Calls of the CUDA runtime and driver, on the host."""

    start_N: np.ndarray
    end_N: np.ndarray
    process_N: np.ndarray
    """Process, `UNKNOWN` where not given."""
    thread_N: np.ndarray
    correlation_N: np.ndarray
    name_N: np.ndarray
    """Index into `Timeline.names`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows:
    """Kernels, copies, fills or graph replays, on the device."""

    start_N: np.ndarray
    end_N: np.ndarray
    device_N: np.ndarray
    correlation_N: np.ndarray
    process_N: np.ndarray
    """Process, `UNKNOWN` where not given."""
    name_N: np.ndarray
    """Index into `Timeline.names`; `UNKNOWN` for fills and replays."""
    node_N: np.ndarray | None = None
    """Node of a CUDA graph, `UNKNOWN` for what was launched on its own; None where the file has no such column."""
    size_N: np.ndarray | None = None
    """Bytes of a copy."""
    stream_N: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelShapes:
    """What a launch asked for, per kernel row; `UNKNOWN` where not given."""

    registers_N: np.ndarray
    """Registers a thread."""
    shared_bytes_N: np.ndarray
    """Shared memory a block, static and dynamic."""
    blocks_N: np.ndarray
    threads_N: np.ndarray
    """Threads a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """Named ranges of the host's threads (NVTX push/pop, `record_function`), or its operations."""

    start_N: np.ndarray
    end_N: np.ndarray
    process_N: np.ndarray
    thread_N: np.ndarray
    name_N: np.ndarray
    is_open_N: np.ndarray
    """bool: not closed in the capture; its end is the capture's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device and its limits, None where the file does not give them."""

    name: str
    num_sms: int | None = None
    capability: str | None = None
    memory_bytes: int | None = None
    bandwidth_gbps: float | None = None
    is_integrated: bool | None = None
    max_warps_per_sm: int | None = None
    max_blocks_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_bytes_per_sm: int | None = None


@dataclass(kw_only=True, slots=True)
class Timeline:
    """A whole trace."""

    kind: str
    """"nsys" or "chrome"."""
    names: list[str]
    calls: Calls | None = None
    kernels: DeviceRows | None = None
    shapes: KernelShapes | None = None
    copies: DeviceRows | None = None
    fills: DeviceRows | None = None
    replays: DeviceRows | None = None
    """Graph replays recorded as one row; start = end = 0 where the recorder has no time of it."""
    ranges: Ranges | None = None
    operations: Ranges | None = None
    """Operations of torch on the host; Chrome traces alone have them."""
    devices: Mapping[int, Device] = field(default_factory=dict)
    graph_mode: str | None = None
    """"graph", "node", or None where the file does not say."""
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Tables and columns that would have told more."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know before he trusts the numbers."""
    num_other_ranges: int = 0
    """Ranges and marks of other kinds: listed, not attributed."""

    def device_rows(self) -> list[DeviceRows]:
        """Every table of device activity that there is."""
        return [rows for rows in (self.kernels, self.copies, self.fills, self.replays) if rows is not None]

    def is_empty(self) -> bool:
        """Nothing happened in the capture."""
        tables = (self.calls, self.ranges, self.operations, *self.device_rows())
        return not any(table is not None and len(table.start_N) for table in tables)


def no_rows() -> np.ndarray:
    """An empty column."""
    return np.zeros(0, dtype=np.int64)
