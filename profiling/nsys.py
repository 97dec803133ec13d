"""Nsight Systems exports (`nsys export --type sqlite`) as a `Timeline`.

nsys makes a table only when it has rows, and columns come and go with its versions: columns are looked up by name
(`PRAGMA table_info`), never by schema version, and what is missing is listed. The file is opened read-only.

Rows go into arrays in pieces, so that a million kernels take 100 bytes each and not 1,000.
"""

import itertools
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from sparkgrpo.profiling.timeline import (
    UNKNOWN,
    Calls,
    Device,
    DeviceRows,
    KernelShapes,
    Ranges,
    Timeline,
    TraceError,
)

MAGIC = b"SQLite format 3\0"
ROWS_AT_ONCE = 50_000
PUSH_POP = 59
"""Event type of a range that a thread pushed and popped."""
PID_MASK = ~0xFFFFFF
"""A globalTid with its low 24 bits cleared is the globalPid."""
KERNEL, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
REPLAY = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
GRAPH_MODE_KEY = "CUDA_GRAPH_TRACE_OPTIONS:MODE"
COPY_KINDS = {1: "host to device", 2: "device to host", 8: "device to device", 10: "peer to peer", 11: "managed"}
API_VERSION = re.compile(r"_v\d+$")
OP_ID = re.compile(r", (?:op_id|seq) = .*$")

Columns = Mapping[str, Mapping[str, str]]
"""Columns of each table of the file: lower-case name to the name in the file."""


def read_nsys(path: Path) -> Timeline:
    """Read an export.

    Raises:
        TraceError: Not an SQLite file, a damaged or truncated one, one that is no nsys export, or an empty capture.
    """
    _check_size(path)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("PRAGMA query_only = 1")
            return _Reader(connection, path.name).timeline()
    except sqlite3.Error as error:
        raise TraceError(
            f"{path.name}: expected an intact SQLite export of nsys, got a file that SQLite cannot read ({error}); "
            "export it again: nsys export --type sqlite FILE.nsys-rep"
        ) from None
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path.name}: expected numbers in the tables of nsys, got another type ({error})") from None


def _check_size(path: Path) -> None:
    """The header says how long the file is: a copy that was cut short is found before anything is counted."""
    with path.open("rb") as file:
        header = file.read(100)
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    is_current = header[24:28] == header[92:96]  # else the page count is of an old writer and means nothing
    wanted, size = page_bytes * int.from_bytes(header[28:32], "big"), path.stat().st_size
    if len(header) < 100 or (is_current and size < wanted):
        raise TraceError(
            f"{path.name}: the file is cut short: expected {wanted:,} bytes, got {size:,}; copy or export it again"
        )


class _Reader:
    """Reads one open export."""

    def __init__(self, connection: sqlite3.Connection, file_name: str) -> None:
        self.connection, self.file_name = connection, file_name
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        self.columns: Columns = {
            name: {row[1].lower(): row[1] for row in connection.execute(f"PRAGMA table_info({_quoted(name)})")}
            for name in names
        }
        self.missing: list[str] = []
        self.notes: list[str] = []
        self.names: list[str] = []
        self.place_of_name: dict[str, int] = {}

    def timeline(self) -> Timeline:
        """Everything, table by table."""
        if not {"StringIds", KERNEL, RUNTIME} & self.columns.keys():
            raise TraceError(
                f"{self.file_name}: expected tables of an nsys export (StringIds, CUPTI_ACTIVITY_KIND_...), got "
                f"{len(self.columns)} tables and none of these; export with: nsys export --type sqlite FILE.nsys-rep"
            )
        self.strings = dict(self._select("StringIds", {"id": None, "value": ""})) if "StringIds" in self.columns else {}
        self.places = {key: self._place(str(value)) for key, value in self.strings.items()}
        calls, kernels = self._calls(), self._device_rows(KERNEL)
        result = Timeline(
            kind="nsys",
            names=self.names,
            calls=calls,
            kernels=kernels,
            shapes=self._shapes() if kernels is not None else None,
            copies=self._device_rows(MEMCPY, is_required=False),
            fills=self._device_rows(MEMSET, is_required=False),
            replays=self._device_rows(REPLAY, is_required=False),
            devices=self._devices(),
            graph_mode=self._graph_mode(),
            versions=self._versions(),
            missing=self.missing,
            notes=self.notes,
        )
        result.ranges, result.num_other_ranges = self._ranges(_last_ns(result))
        self._count_diagnostics()
        if result.is_empty():
            raise TraceError(
                f"{self.file_name}: the capture is empty: no call, kernel or range in it; with "
                "--capture-range=cudaProfilerApi the program must call cudaProfilerStart and work after it"
            )
        return result

    def _calls(self) -> Calls | None:
        wanted = {"start": None, "end": None, "globalTid": UNKNOWN, "correlationId": UNKNOWN, "nameId": UNKNOWN}
        columns = self._arrays(RUNTIME, wanted)
        if columns is None:
            return None
        start_N, end_N, thread_N, correlation_N, name_N = columns
        process_N = np.where(thread_N == UNKNOWN, UNKNOWN, thread_N & PID_MASK)
        return Calls(
            start_N=start_N, end_N=end_N, process_N=process_N, thread_N=thread_N, correlation_N=correlation_N,
            name_N=self._named(name_N, API_VERSION),
        )  # fmt: skip

    def _device_rows(self, table: str, *, is_required: bool = True) -> DeviceRows | None:
        has = self.columns.get(table, {})
        name = "shortName" if "shortname" in has else "demangledName" if "demangledname" in has else ""
        wanted: dict[str, int | None] = {
            "start": None, "end": None, "deviceId": 0, "correlationId": UNKNOWN, "globalPid": UNKNOWN,
            "streamId": UNKNOWN, "graphNodeId": UNKNOWN, "bytes": UNKNOWN, "copyKind": UNKNOWN,
        }  # fmt: skip
        if name:
            wanted[name] = UNKNOWN
        optional = {"bytes", "copyKind", "graphNodeId"} | ({"globalPid"} if table == MEMSET else set())
        columns = self._arrays(table, wanted, is_required=is_required, unreported=optional)
        if columns is None:
            return None
        start_N, end_N, device_N, correlation_N, process_N, stream_N, node_N, size_N, kind_N, *name_N = columns
        if table == MEMCPY:
            kinds = {kind: self._place(COPY_KINDS.get(kind, "other copy")) for kind in np.unique(kind_N).tolist()}
            place_N = _looked_up(kind_N, kinds)
        else:
            place_N = self._named(name_N[0], None) if name_N else np.full(len(start_N), UNKNOWN)
        return DeviceRows(
            start_N=start_N, end_N=end_N, device_N=device_N.astype(np.int32), correlation_N=correlation_N,
            process_N=process_N, name_N=place_N.astype(np.int32), size_N=size_N if table == MEMCPY else None,
            node_N=node_N if "graphnodeid" in has else None, stream_N=stream_N.astype(np.int32),
        )  # fmt: skip

    def _shapes(self) -> KernelShapes:
        has = self.columns[KERNEL]
        products = (
            ("registersPerThread", ("registersPerThread",), "*"),
            ("sharedMemory", ("staticSharedMemory", "dynamicSharedMemory"), "+"),
            ("blocks", ("gridX", "gridY", "gridZ"), "*"),
            ("threads", ("blockX", "blockY", "blockZ"), "*"),
        )
        terms = [
            f" {sign} ".join(_quoted(has[part.lower()]) for part in parts)
            if all(part.lower() in has for part in parts)
            else str(UNKNOWN)
            for _, parts, sign in products
        ]
        filled = ", ".join(f"COALESCE({term}, {UNKNOWN})" for term in terms)
        registers_N, shared_N, blocks_N, threads_N = self._columns_of(f"SELECT {filled} FROM {KERNEL}", 4, np.int32)
        return KernelShapes(registers_N=registers_N, shared_bytes_N=shared_N, blocks_N=blocks_N, threads_N=threads_N)

    def _ranges(self, last_ns: int) -> tuple[Ranges | None, int]:
        wanted = {"start": None, "end": UNKNOWN, "eventType": PUSH_POP, "globalTid": UNKNOWN, "textId": UNKNOWN}
        has = self.columns.get(NVTX, {})
        if not self._has(NVTX, ("start", "end", "eventType", "globalTid")):
            return None, 0
        values = [self._column(has, name, default) for name, default in wanted.items()]
        text = _quoted(has["text"]) if "text" in has else "NULL"
        rows: dict[str, list[int]] = {key: [] for key in ("start", "end", "thread", "name")}
        num_other = 0
        for start, end, kind, thread, text_id, own in self.connection.execute(
            f"SELECT {', '.join(values)}, {text} FROM {NVTX}"
        ):
            if kind != PUSH_POP:
                num_other += 1
                continue
            name = own if isinstance(own, str) else str(self.strings.get(text_id, "unnamed"))
            for key, value in zip(rows, (start, end, thread, self._place(OP_ID.sub("", name))), strict=True):
                rows[key].append(value)
        start_N, end_N, thread_N, name_N = (np.array(column, dtype=np.int64) for column in rows.values())
        is_open_N = end_N == UNKNOWN
        last_ns = max(last_ns, int(max(start_N.max(initial=0), end_N.max(initial=0))))
        end_N = np.where(is_open_N, last_ns, end_N)
        process_N = np.where(thread_N == UNKNOWN, UNKNOWN, thread_N & PID_MASK)
        found = Ranges(
            start_N=start_N, end_N=end_N, process_N=process_N, thread_N=thread_N, name_N=name_N, is_open_N=is_open_N
        )
        return found, num_other

    def _devices(self) -> dict[int, Device]:
        names = ("id", "name", "smCount", "computeMajor", "computeMinor", "totalMemory", "memoryBandwidth")
        names += ("isDiscrete", "maxWarpsPerSm", "maxBlocksPerSm", "maxRegistersPerSm", "maxShmemPerSm", "cuDevice")
        if "TARGET_INFO_GPU" not in self.columns:
            self.missing.append("TARGET_INFO_GPU")
            return {}
        devices = {}
        for row in self._select("TARGET_INFO_GPU", dict.fromkeys(names)):
            facts = dict(zip(names, row, strict=True))
            major, minor, bandwidth = facts["computeMajor"], facts["computeMinor"], facts["memoryBandwidth"]
            number = facts["id"] if facts["cuDevice"] is None else facts["cuDevice"]
            devices[int(number or 0)] = Device(
                name=str(facts["name"] or "unnamed device"),
                num_sms=facts["smCount"] or None,
                capability=None if major is None or minor is None else f"{major}.{minor}",
                memory_bytes=facts["totalMemory"] or None,
                bandwidth_gbps=bandwidth / 1e9 if bandwidth else None,
                is_integrated=None if facts["isDiscrete"] is None else not facts["isDiscrete"],
                max_warps_per_sm=facts["maxWarpsPerSm"] or None,
                max_blocks_per_sm=facts["maxBlocksPerSm"] or None,
                registers_per_sm=facts["maxRegistersPerSm"] or None,
                shared_bytes_per_sm=facts["maxShmemPerSm"] or None,
            )
        return devices

    def _graph_mode(self) -> str | None:
        found = self._values_of("META_DATA_CAPTURE", f"%{GRAPH_MODE_KEY}")
        return found[0].lower() if found else None

    def _versions(self) -> dict[str, str]:
        keys = {"nsys": "EXPORT_PRODUCT_VERSION", "schema": "EXPORT_SCHEMA_VERSION"}
        found = {name: self._values_of("META_DATA_EXPORT", key) for name, key in keys.items()}
        return {name: values[0] for name, values in found.items() if values}

    def _values_of(self, table: str, pattern: str) -> list[str]:
        if not {"name", "value"} <= self.columns.get(table, {}).keys():
            if table not in self.missing:
                self.missing.append(table)
            return []
        rows = self.connection.execute(f"SELECT value FROM {table} WHERE name LIKE ? ORDER BY name", (pattern,))
        return [str(row[0])[:60] for row in rows]

    def _count_diagnostics(self) -> None:
        """Diagnostics hold paths, so they are counted and not printed."""
        if "text" not in self.columns.get("DIAGNOSTIC_EVENT", {}):
            return
        pattern = re.compile(r"\b(dropped|lost|overflow\w*|incomplete|not all|out of memory)\b", re.IGNORECASE)
        texts = [str(row[0]) for row in self._select("DIAGNOSTIC_EVENT", {"text": None})]
        num_bad = sum(bool(pattern.search(text)) for text in texts)
        if num_bad:
            self.notes.append(f"{num_bad} diagnostics of nsys tell of dropped or incomplete records")

    def _arrays(
        self,
        table: str,
        wanted: Mapping[str, int | None],
        *,
        is_required: bool = True,
        unreported: Sequence[str] | set[str] = (),
    ) -> list[np.ndarray] | None:
        """int64 columns by name; a default (not None) stands for a column that is missing or NULL."""
        essential = [name for name, default in wanted.items() if default is None]
        if not self._has(table, essential, is_required=is_required):
            return None
        has = self.columns[table]
        self.missing += [f"{table}.{name}" for name in wanted if name.lower() not in has and name not in unreported]
        values = [self._column(has, name, default) for name, default in wanted.items()]
        return self._columns_of(f"SELECT {', '.join(values)} FROM {table}", len(values), np.int64)

    def _has(self, table: str, essential: Sequence[str], *, is_required: bool = True) -> bool:
        if table not in self.columns:
            if is_required:
                self.missing.append(table)
            return False
        absent = [name for name in essential if name.lower() not in self.columns[table]]
        if absent:
            raise TraceError(
                f"{self.file_name}: expected columns {', '.join(essential)} in {table}, got a table without "
                f"{', '.join(absent)}: a schema that is not known; export with a newer or older nsys"
            )
        return True

    @staticmethod
    def _column(has: Mapping[str, str], name: str, default: int | None) -> str:
        if name.lower() not in has:
            return str(default)
        column = _quoted(has[name.lower()])
        return column if default is None else f"COALESCE({column}, {default})"

    def _columns_of(self, query: str, width: int, dtype: type) -> list[np.ndarray]:
        pieces: list[np.ndarray] = [np.zeros((0, width), dtype=dtype)]
        cursor = self.connection.execute(query)
        while rows := cursor.fetchmany(ROWS_AT_ONCE):
            flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=dtype, count=len(rows) * width)
            pieces.append(flat.reshape(len(rows), width))
        columns = []
        for index in range(width):  # column by column: the pieces and all columns never stand beside each other twice
            columns.append(np.concatenate([piece[:, index] for piece in pieces]))
        return columns

    def _select(self, table: str, wanted: Mapping[str, object]) -> Iterator[tuple]:
        has = self.columns[table]
        columns = [_quoted(has[name.lower()]) if name.lower() in has else "NULL" for name in wanted]
        return self.connection.execute(f"SELECT {', '.join(columns)} FROM {table}")

    def _place(self, name: str) -> int:
        if name not in self.place_of_name:
            self.place_of_name[name] = len(self.names)
            self.names.append(name)
        return self.place_of_name[name]

    def _named(self, id_N: np.ndarray, tail: re.Pattern[str] | None) -> np.ndarray:
        """Places in `names` of ids of StringIds, a tail of the name cut off."""
        places = {}
        for number in np.unique(id_N).tolist():
            name = str(self.strings.get(number, "unnamed"))
            places[number] = self._place(name if tail is None else tail.sub("", name))
        return _looked_up(id_N, places)


def _looked_up(key_N: np.ndarray, places: Mapping[int, int]) -> np.ndarray:
    keys, inverse_N = np.unique(key_N, return_inverse=True)
    return np.array([places[key] for key in keys.tolist()], dtype=np.int64)[inverse_N]


def _last_ns(timeline: Timeline) -> int:
    tables = [*timeline.device_rows(), *([timeline.calls] if timeline.calls is not None else [])]
    return max((int(table.end_N.max(initial=0)) for table in tables), default=0)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
