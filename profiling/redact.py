"""A copy of a trace without what is private: only tables, columns and keys of an allow-list are written.

An export of nsys holds the command line, the environment with its passwords, the host's and the user's name, every
process and open file. Nothing of that is in the list, and what a later nsys adds is not either.
"""

import gzip
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sparkgrpo.profiling.chrome_trace import trace_content
from sparkgrpo.profiling.timeline import TraceError

_ROW = "start end deviceId contextId streamId correlationId globalPid graphNodeId graphId"
TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_ROW} shortName demangledName registersPerThread gridX gridY gridZ blockX blockY "
    "blockZ staticSharedMemory dynamicSharedMemory sharedMemoryExecuted",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_ROW} bytes copyKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_ROW} value bytes",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{_ROW} syncType",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_ROW} graphExecId",
    "CUDA_GRAPH_NODE_EVENTS": "start end eventClass globalTid nameId graphNodeId originalGraphNodeId",
    "NVTX_EVENTS": "start end eventType text textId globalTid endGlobalTid domainId",
    "TARGET_INFO_GPU": "id name isDiscrete l2CacheSize totalMemory memoryBandwidth clockRate smCount cuDevice "
    "maxShmemPerBlockOptin maxShmemPerSm maxRegistersPerSm maxWarpsPerSm maxBlocksPerSm computeMajor computeMinor",
}
NAMED_BY_ID = {"CUPTI_ACTIVITY_KIND_KERNEL": ("shortName", "demangledName"), "CUPTI_ACTIVITY_KIND_RUNTIME": ("nameId",),
               "NVTX_EVENTS": ("textId",), "CUDA_GRAPH_NODE_EVENTS": ("nameId",)}  # fmt: skip
METADATA = {
    "META_DATA_EXPORT": "name IN ('EXPORT_PRODUCT_VERSION', 'EXPORT_SCHEMA_VERSION')",
    "META_DATA_CAPTURE": "name LIKE '%CUDA_GRAPH_TRACE_OPTIONS:MODE'",
}
PRIVATE_TEXT = re.compile(r"(?:[A-Za-z]:)?[/\\]{1,2}[\w.@~+-]+(?:[/\\]+[\w.@~+-]+)+")
"""A path inside a name."""

MARKED_NUMBER = re.compile(r'"\\u0000([-+.\deE]+)\\u0000"')
"""A decimal that was read as text, and is written as it stood."""

TOP_LEVEL_KEYS = ("schemaVersion", "deviceProperties", "cuda_runtime_version", "cuda_driver_version", "displayTimeUnit")
DEVICE_KEYS = [
    "id",
    "name",
    "totalGlobalMem",
    "computeMajor",
    "computeMinor",
    "maxThreadsPerBlock",
    "maxThreadsPerMultiprocessor",
    "regsPerBlock",
    "warpSize",
    "sharedMemPerBlock",
    "numSms",
    "regsPerMultiprocessor",
    "sharedMemPerBlockOptin",
    "sharedMemPerMultiprocessor",
]
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "user_annotation", "cpu_op",
              "gpu_user_annotation")  # fmt: skip
EVENT_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
ARGUMENTS = (
    "correlation", "device", "stream", "bytes", "grid", "block", "registers per thread", "shared memory",
    "graph node id",
)  # fmt: skip


def redact_nsys(source: Path, target: Path) -> None:
    """Write the allowed part of an export. `TraceError` where the target exists or the source cannot be read."""
    _check_target(source, target)
    try:
        with closing(sqlite3.connect(target)) as connection:
            connection.execute("ATTACH DATABASE ? AS source", (f"{source.resolve().as_uri()}?mode=ro",))
            present = {
                row[0] for row in connection.execute("SELECT name FROM source.sqlite_master WHERE type = 'table'")
            }
            if not present & TABLES.keys():
                raise TraceError(f"{source.name}: expected an export of nsys, got a database without any of its tables")
            for table, wanted in TABLES.items():
                if table in present:
                    _copy(connection, table, wanted.split())
            for table, condition in METADATA.items():
                if table in present:
                    connection.execute(f"CREATE TABLE {table}(name TEXT, value TEXT)")
                    connection.execute(f"INSERT INTO {table} SELECT name, value FROM source.{table} WHERE {condition}")
            _copy_strings(connection, present)
            connection.commit()
            connection.execute("DETACH DATABASE source")
            connection.execute("VACUUM")
    except TraceError:
        target.unlink(missing_ok=True)
        raise
    except (sqlite3.Error, UnicodeError) as error:
        target.unlink(missing_ok=True)
        raise TraceError(f"{source.name}: SQLite cannot copy it ({error})") from None


def redact_chrome_trace(source: Path, target: Path) -> None:
    """Write the allowed part of a Chrome trace, gzip where the target's name ends in .gz."""
    _check_target(source, target)
    content = trace_content(source, parse_float="\0{}\0".format)  # no float: times must stay exact
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise TraceError(f'{source.name}: expected a list "traceEvents" as torch.profiler writes it')
    facts = content if isinstance(content, dict) else {}
    kept = {key: facts[key] for key in TOP_LEVEL_KEYS if key in facts}
    devices = kept.get("deviceProperties")
    if isinstance(devices, list):
        kept["deviceProperties"] = [
            {key: device[key] for key in DEVICE_KEYS if key in device} for device in devices if isinstance(device, dict)
        ]
    kept["traceEvents"] = [_kept_event(event) for event in events if _is_kept(event)]
    text = MARKED_NUMBER.sub(r"\1", json.dumps(kept, separators=(",", ":"))).encode()
    target.write_bytes(gzip.compress(text, mtime=0) if target.suffix == ".gz" else text)


def _check_target(source: Path, target: Path) -> None:
    if target.exists():
        same = " (the trace itself)" if target.resolve() == source.resolve() else ""
        raise TraceError(f"{target}: expected a name that is free, got a file that exists{same}; choose another name")


def _copy(connection: sqlite3.Connection, table: str, wanted: list[str]) -> None:
    rows = connection.execute(f"PRAGMA source.table_info({table})").fetchall()
    has = {row[1]: row[2] for row in rows}
    kept = [name for name in wanted if name in has]
    connection.execute(f"CREATE TABLE {table}({', '.join(f'{name} {has[name]}' for name in map(str, kept))})")
    listed = ", ".join(f'"{name}"' for name in kept)
    connection.execute(f"INSERT INTO {table} SELECT {listed} FROM source.{table}")
    if "text" in kept:
        _clean_texts(connection, table, "text")


def _copy_strings(connection: sqlite3.Connection, present: set[str]) -> None:
    """Only texts that a kept row names; StringIds also holds names of processes, threads and files."""
    if "StringIds" not in present:
        return
    used = []
    for table, columns in NAMED_BY_ID.items():
        if table in present:
            has = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            used += [f"SELECT {column} FROM {table}" for column in columns if column in has]
    connection.execute("CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    if used:
        connection.execute(
            f"INSERT INTO StringIds SELECT id, value FROM source.StringIds WHERE id IN ({' UNION '.join(used)})"
        )
        _clean_texts(connection, "StringIds", "value")


def _clean_texts(connection: sqlite3.Connection, table: str, column: str) -> None:
    connection.create_function("without_paths", 1, _without_paths, deterministic=True)
    connection.execute(f"UPDATE {table} SET {column} = without_paths({column}) WHERE {column} IS NOT NULL")


def _without_paths(text: Any) -> Any:  # noqa: ANN401  whatever a column holds
    return PRIVATE_TEXT.sub("<path>", text) if isinstance(text, str) else text


def _is_kept(event: object) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and str(event.get("cat", "")).lower() in CATEGORIES


def _kept_event(event: dict[str, object]) -> dict[str, object]:
    kept = {key: event[key] for key in EVENT_KEYS if key in event}
    kept["name"] = _without_paths(str(kept.get("name", "")))
    arguments = event.get("args")
    if isinstance(arguments, dict):
        kept["args"] = {key: arguments[key] for key in ARGUMENTS if key in arguments}
    return kept
