"""Small exports of nsys and Chrome traces, written row by row; nothing of them comes from a recorded file."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

US = 1_000
PID, OTHER_PID = (1 << 48) | (100 << 24), (1 << 48) | (200 << 24)
MAIN, AUTOGRAD, OTHER = PID | 7, PID | 8, OTHER_PID | 9
KERNEL, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
MEMCPY, REPLAY = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COLUMNS = {
    KERNEL: "start end deviceId streamId correlationId globalPid shortName demangledName registersPerThread gridX "
    "gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory graphNodeId",
    RUNTIME: "start end globalTid correlationId nameId",
    NVTX: "start end eventType text globalTid textId domainId",
    MEMCPY: "start end deviceId streamId correlationId globalPid bytes copyKind graphNodeId",
    REPLAY: "start end deviceId streamId correlationId globalPid graphId graphExecId",
    "TARGET_INFO_GPU": "id name isDiscrete totalMemory memoryBandwidth smCount computeMajor computeMinor maxWarpsPerSm "
    "maxBlocksPerSm maxRegistersPerSm maxShmemPerSm",
    "StringIds": "id value",
    "META_DATA_EXPORT": "name value",
    "META_DATA_CAPTURE": "name value",
    "PROCESSES": "globalPid pid name",
}


class Export:
    """An export being written; a table is made with its first row, as nsys does. Columns can be left out."""

    def __init__(self, path: Path, without: tuple[str, ...] = ()) -> None:
        self.path, self.without = path, without
        self.connection = sqlite3.connect(path)
        self.columns: dict[str, list[str]] = {}
        self.ids: dict[str, int] = {}
        self.correlation = 1000

    def row(self, table: str, /, **values: object) -> None:
        if table not in self.columns:
            self.columns[table] = [name for name in COLUMNS[table].split() if name not in self.without]
            self.connection.execute(f"CREATE TABLE {table}({', '.join(self.columns[table])})")
        kept = {name: value for name, value in values.items() if name in self.columns[table]}
        marks = ", ".join("?" * len(kept))
        self.connection.execute(f"INSERT INTO {table}({', '.join(kept)}) VALUES({marks})", list(kept.values()))

    def text(self, value: str) -> int:
        if value not in self.ids:
            self.ids[value] = len(self.ids) + 1
            self.row("StringIds", id=self.ids[value], value=value)
        return self.ids[value]

    def call(self, start: int, end: int, name: str, *, thread: int = MAIN, correlation: int | None = None) -> int:
        self.correlation += correlation is None
        number = self.correlation if correlation is None else correlation
        self.row(RUNTIME, start=start, end=end, globalTid=thread, correlationId=number, nameId=self.text(name))
        return number

    def kernel(self, start: int, end: int, correlation: int, name: str = "_ours_kernel", **other: object) -> None:
        shape = {"registersPerThread": 64, "gridX": 96, "gridY": 1, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1}
        shape |= {
            "staticSharedMemory": 0,
            "dynamicSharedMemory": 49_152,
            "deviceId": 0,
            "streamId": 7,
            "globalPid": PID,
        }
        names = {"shortName": self.text(name), "demangledName": self.text(f"void {name}(int)")}
        self.row(KERNEL, start=start, end=end, correlationId=correlation, **{**shape, **names, **other})

    def launch(self, start: int, end: int, *, name: str = "_ours_kernel", thread: int = MAIN, **other: object) -> None:
        """A call of 5 us that ends before the kernel from `start` to `end` begins."""
        call = self.call(start - 6 * US, start - US, "cudaLaunchKernel_v7000", thread=thread)
        self.kernel(start, end, call, name, **other)

    def range(
        self, start: int, end: int | None, name: str, *, thread: int = MAIN, by_id: bool = False, kind: int = 59
    ) -> None:
        named = {"textId": self.text(name)} if by_id else {"text": name}
        self.row(NVTX, start=start, end=end, eventType=kind, globalTid=thread, **named)

    def facts(self, mode: str = "Node", key: str = "CUDA_GRAPH_TRACE_OPTIONS:MODE", schema: str = "3.25.0") -> None:
        self.row("META_DATA_CAPTURE", name=key, value=mode)
        self.row("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value=schema)
        self.row(
            "TARGET_INFO_GPU", id=0, name="NVIDIA GB10", isDiscrete=0, totalMemory=130_663_006_208, memoryBandwidth=0,
            smCount=48, computeMajor=12, computeMinor=1, maxWarpsPerSm=48, maxBlocksPerSm=24, maxRegistersPerSm=65_536,
            maxShmemPerSm=102_400,
        )  # fmt: skip

    def done(self) -> Path:
        self.connection.commit()
        self.connection.close()
        return self.path


def two_steps(export: Export, *, mode: str) -> Export:
    """Two steps of 1 ms whose phases fill them: 2 replays of 3 nodes, nothing on the device, a backward off the thread.

    By step: t_gen 0-400 us (replays of 90 us from 60 and 200), t_reward 400-500, t_train 500-900 (20 us forward, 100 us
    backward by autograd's thread), t_opt 900-1000 (30 us, running past the end of the step).
    """
    export.facts(mode=mode)
    for step in range(2):
        t0 = step * 2_000 * US
        export.range(t0, t0 + 1_000 * US, "grpo.step", by_id=True)
        phases = {"t_gen": (0, 400), "t_reward": (400, 500), "t_train": (500, 900), "t_opt": (900, 1_000)}
        for name, (begin, end) in phases.items():
            export.range(t0 + begin * US, t0 + end * US, f"grpo.{name}", by_id=name == "t_gen")
        for begin in (60, 200):
            call = export.call(t0 + (begin - 20) * US, t0 + (begin - 10) * US, "cudaGraphLaunch_v10000")
            start = t0 + begin * US
            if mode == "Graph":
                lost = step == 1 and begin == 200  # a replay without time
                times = {"start": 0, "end": 0} if lost else {"start": start, "end": start + 90 * US}
                export.row(REPLAY, **times, deviceId=0, streamId=7, correlationId=call, globalPid=PID, graphId=3)
            else:
                for node in range(3):
                    begin_ns = start + 30 * node * US
                    export.kernel(
                        begin_ns, begin_ns + 30 * US, call, f"_node{'abc'[node]}_kernel", graphNodeId=11 + node
                    )
        export.launch(t0 + 520 * US, t0 + 540 * US, name="ampere_sgemm")
        export.launch(t0 + 600 * US, t0 + 700 * US, name="_loss_bwd_kernel", thread=AUTOGRAD)
        export.launch(t0 + 990 * US, t0 + 1_020 * US, name="_adamw_kernel")
    return export


@pytest.fixture
def new_export(tmp_path: Path) -> Callable[..., Export]:
    """Starts an export: `new_export(name, without=("globalPid",))`."""

    def make(name: str = "trace.sqlite", without: tuple[str, ...] = ()) -> Export:
        return Export(tmp_path / name, without)

    return make


@pytest.fixture(params=["Graph", "Node"])
def stepped(request: pytest.FixtureRequest, new_export: Callable[..., Export]) -> tuple[str, Path]:
    """The mode and the path of an export of two steps."""
    return request.param, two_steps(new_export(), mode=request.param).done()
