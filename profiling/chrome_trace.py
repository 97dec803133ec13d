"""Traces of torch.profiler (Chrome's JSON, plain or gzip) as a `Timeline`.

Times stand there as decimal microseconds. Near 1.7e15 us a 64-bit float is off by up to 0.25 us, so they are read as
text and become integer nanoseconds exactly.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np

from sparkgrpo.profiling.timeline import UNKNOWN, Calls, Device, DeviceRows, KernelShapes, Ranges, Timeline, TraceError

GZIP_MAGIC = b"\x1f\x8b"
CALLS = ("cuda_runtime", "cuda_driver")
RANGES = ("user_annotation",)
OTHER_RANGES = ("gpu_user_annotation", "python_function")
OPERATIONS = ("cpu_op",)
KERNELS, COPIES, FILLS = ("kernel",), ("gpu_memcpy",), ("gpu_memset",)

Event = Mapping[str, object]


def read_chrome_trace(path: Path) -> Timeline:
    """Read a trace.

    Raises:
        TraceError: Not JSON, cut short, no trace events in it, or an empty capture.
    """
    content = trace_content(path)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise TraceError(
            f'{path.name}: expected a list "traceEvents" as torch.profiler writes it, got JSON without one'
        )
    facts = content if isinstance(content, dict) else {}
    by_category: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            by_category.setdefault(str(event.get("cat", "")).lower(), []).append(event)
    try:
        timeline = _Builder(by_category, facts).timeline()
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path.name}: expected times and ids as numbers in every event, got {error}") from None
    if timeline.is_empty():
        raise TraceError(
            f"{path.name}: the capture is empty: no call, kernel, operation or range in it; record at least one step"
        )
    return timeline


def trace_content(path: Path, parse_float: Callable[[str], object] = str) -> object:
    """The JSON of a trace, plain or gzip; decimals go through `parse_float`, which gets them as they stand.

    Raises:
        TraceError: A file that is cut short, damaged, or no JSON.
    """
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
    except (EOFError, OSError, zlib.error) as error:
        raise TraceError(
            f"{path.name}: expected a whole gzip file, got one that is cut short or damaged ({error})"
        ) from None
    try:
        return json.loads(text, parse_float=parse_float)
    except UnicodeDecodeError:
        raise TraceError(f"{path.name}: expected JSON text, got bytes that are no UTF-8") from None
    except (ValueError, RecursionError) as error:
        place = f" at character {error.pos:,} of {len(text):,}" if isinstance(error, json.JSONDecodeError) else ""
        raise TraceError(
            f"{path.name}: expected a whole JSON trace, got text that ends or breaks{place}; a killed run leaves "
            "such a file: record it again"
        ) from None


def nanoseconds(microseconds: object) -> int:
    """Exact nanoseconds of a time in microseconds: an integer, or the text of a decimal."""
    if isinstance(microseconds, int):
        return microseconds * 1000
    whole, point, fraction = str(microseconds).partition(".")
    if point and len(fraction) <= 3 and fraction.isdigit() and whole.isdigit():
        return int(whole) * 1000 + int(fraction.ljust(3, "0"))
    try:
        return round(Decimal(str(microseconds)) * 1000)
    except InvalidOperation:
        raise ValueError(f"{str(microseconds)[:40]!r} in place of a time") from None


class _Builder:
    """Turns events into tables; one list of names for all."""

    def __init__(self, by_category: Mapping[str, list[Event]], facts: Mapping[str, object]) -> None:
        self.by_category, self.facts = by_category, facts
        self.names: list[str] = []
        self.place_of_name: dict[str, int] = {}
        self.number_of_id: dict[str, int] = {}
        """Processes and threads that are texts."""
        self.missing: list[str] = []

    def timeline(self) -> Timeline:
        """Everything."""
        kernels = self._rows(KERNELS)
        calls = self._calls()
        num_processes = len(np.unique(calls.process_N)) if calls is not None else 0
        notes = [] if num_processes < 2 else [f"{num_processes} processes made calls: kernels cannot be told apart"]
        return Timeline(
            kind="chrome",
            names=self.names,
            calls=calls,
            kernels=kernels,
            shapes=self._shapes() if kernels is not None else None,
            copies=self._rows(COPIES),
            fills=self._rows(FILLS),
            ranges=self._ranges(RANGES),
            operations=self._ranges(OPERATIONS),
            devices=self._devices(),
            graph_mode="node" if kernels is not None else None,
            versions=self._versions(),
            missing=self.missing
            + [name for name, table in (("kernel", kernels), ("cuda_runtime", calls)) if not table],
            notes=notes,
            num_other_ranges=sum(len(self.by_category.get(category, ())) for category in OTHER_RANGES),
        )

    def _events(self, categories: Iterable[str]) -> list[Event]:
        return [event for category in categories for event in self.by_category.get(category, ())]

    def _times(self, events: list[Event]) -> tuple[np.ndarray, np.ndarray]:
        start_N = np.array([nanoseconds(event.get("ts")) for event in events], dtype=np.int64)
        long_N = np.array([nanoseconds(event.get("dur", 0)) for event in events], dtype=np.int64)
        return start_N, start_N + long_N

    def _argument(self, events: list[Event], *keys: str) -> np.ndarray:
        return np.array([_number(_argument(event, *keys)) for event in events], dtype=np.int64)

    def _calls(self) -> Calls | None:
        events = self._events(CALLS)
        if not events:
            return None
        start_N, end_N = self._times(events)
        return Calls(
            start_N=start_N,
            end_N=end_N,
            process_N=self._ids(events, "pid"),
            thread_N=self._threads(events),
            correlation_N=self._argument(events, "correlation"),
            name_N=self._name_places(events),
        )

    def _rows(self, categories: Iterable[str]) -> DeviceRows | None:
        events = self._events(categories)
        if not events:
            return None
        start_N, end_N = self._times(events)
        return DeviceRows(
            start_N=start_N,
            end_N=end_N,
            device_N=np.maximum(self._argument(events, "device"), 0).astype(np.int32),
            correlation_N=self._argument(events, "correlation"),
            process_N=np.full(len(events), UNKNOWN, dtype=np.int64),  # pid is the device's number here
            name_N=self._name_places(events).astype(np.int32),
            node_N=np.where(self._argument(events, "graph node id") > 0, 1, UNKNOWN),
            size_N=self._argument(events, "bytes"),
            stream_N=self._argument(events, "stream").astype(np.int32),
        )

    def _shapes(self) -> KernelShapes:
        events = self._events(KERNELS)
        grids, blocks = ([_product(_argument(event, key)) for event in events] for key in ("grid", "block"))
        return KernelShapes(
            registers_N=self._argument(events, "registers per thread"),
            shared_bytes_N=self._argument(events, "shared memory"),
            blocks_N=np.array(grids, dtype=np.int64),
            threads_N=np.array(blocks, dtype=np.int64),
        )

    def _ranges(self, categories: Iterable[str]) -> Ranges | None:
        events = self._events(categories)
        if not events:
            return None
        start_N, end_N = self._times(events)
        return Ranges(
            start_N=start_N,
            end_N=end_N,
            process_N=self._ids(events, "pid"),
            thread_N=self._threads(events),
            name_N=self._name_places(events),
            is_open_N=np.zeros(len(events), dtype=bool),
        )

    def _devices(self) -> dict[int, Device]:
        devices = {}
        listed = self.facts.get("deviceProperties", [])
        for facts in listed if isinstance(listed, list) else []:
            if not isinstance(facts, dict):
                continue
            major, minor = facts.get("computeMajor"), facts.get("computeMinor")
            devices[_number(facts.get("id"))] = Device(
                name=str(facts.get("name", "unnamed device")),
                num_sms=_known(facts.get("numSms")),
                capability=None if major is None or minor is None else f"{major}.{minor}",
                memory_bytes=_known(facts.get("totalGlobalMem")),
                max_warps_per_sm=(_known(facts.get("maxThreadsPerMultiprocessor")) or 0) // 32 or None,
                registers_per_sm=_known(facts.get("regsPerMultiprocessor")),
                shared_bytes_per_sm=_known(facts.get("sharedMemPerMultiprocessor")),
            )
        return devices

    def _versions(self) -> dict[str, str]:
        keys = {"schema": "schemaVersion", "cuda": "cuda_driver_version", "cuda runtime": "cuda_runtime_version"}
        return {name: str(self.facts[key])[:40] for name, key in keys.items() if key in self.facts}

    def _threads(self, events: list[Event]) -> np.ndarray:
        """A number for every thread of every process."""
        pairs = [f"{event.get('pid')}/{event.get('tid')}" for event in events]
        return np.array([self.number_of_id.setdefault(pair, len(self.number_of_id)) for pair in pairs], dtype=np.int64)

    def _ids(self, events: list[Event], key: str) -> np.ndarray:
        texts = [f"{key} {event.get(key)}" for event in events]
        return np.array([self.number_of_id.setdefault(text, len(self.number_of_id)) for text in texts], dtype=np.int64)

    def _name_places(self, events: list[Event]) -> np.ndarray:
        for event in events:
            name = str(event.get("name", "unnamed"))
            if name not in self.place_of_name:
                self.place_of_name[name] = len(self.names)
                self.names.append(name)
        return np.array([self.place_of_name[str(event.get("name", "unnamed"))] for event in events], dtype=np.int64)


def _argument(event: Event, *keys: str) -> object:
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        return None
    return next((arguments[key] for key in keys if key in arguments), None)


def _number(value: object) -> int:
    try:
        return UNKNOWN if value is None else int(float(str(value)))
    except ValueError:
        return UNKNOWN  # "<not available>": torch writes such texts too


def _known(value: object) -> int | None:
    return number if (number := _number(value)) > 0 else None


def _product(sizes: object) -> int:
    if not isinstance(sizes, list) or not sizes:
        return UNKNOWN
    product = 1
    for size in sizes:
        product *= _number(size)
    return product
