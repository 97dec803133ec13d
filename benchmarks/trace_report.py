"""How long a report of a large nsys export takes, and how much memory: goal 10 s and 500 MB for a million kernels.

    python -m benchmarks.trace_report [NUM_KERNELS]

The export is written to a temporary folder: steps of five phases, each kernel with its call and a range of its own
around every tenth, so that all joins and both attributions have to work. The report runs in a process of its own.
"""

import itertools
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.record import write_result

US = 1_000
PID = (1 << 48) | (100 << 24)
KERNELS_PER_STEP = 10_000
PHASES = ("t_gen", "t_reward", "t_ref", "t_train", "t_opt")
LIMIT_S, LIMIT_BYTES = 10.0, 500_000_000


def write_export(path: Path, num_kernels: int) -> None:
    """An export with so many kernels, as many calls, and a tenth as many ranges."""
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start INT, end INT, deviceId INT, streamId INT, correlationId INT,"
            " globalPid INT, shortName INT, demangledName INT, registersPerThread INT, gridX INT, gridY INT,"
            " gridZ INT, blockX INT, blockY INT, blockZ INT, staticSharedMemory INT,"
            " dynamicSharedMemory INT, graphNodeId INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start INT, end INT, globalTid INT, correlationId INT,"
            " nameId INT);"
            "CREATE TABLE NVTX_EVENTS(start INT, end INT, eventType INT, text TEXT, globalTid INT, textId INT);"
        )
        names = [(1, "cudaLaunchKernel_v7000"), *((i + 2, f"_kernel{chr(97 + i % 26)}{i}_kernel") for i in range(200))]
        connection.executemany("INSERT INTO StringIds VALUES(?, ?)", names)
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(?,?,0,7,?,?,?,?,64,?,1,1,128,1,1,0,1024,NULL)",
            ((i * 10 * US + 6 * US, i * 10 * US + (9 + i % 9) * US, i, PID, 2 + i % 200, 2 + i % 200, 1 + i % 300)
             for i in range(num_kernels)),
        )  # fmt: skip
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES(?,?,?,?,1)",
            ((i * 10 * US, i * 10 * US + 4 * US, PID | (7 + (i % 5 == 4)), i) for i in range(num_kernels)),
        )
        connection.executemany(
            "INSERT INTO NVTX_EVENTS VALUES(?,?,59,?,?,NULL)",
            ((i * 100 * US - 1, i * 100 * US + 90 * US, f"aten::op{i % 50}, op_id = {i}", PID | 7)
             for i in range(num_kernels // 10)),
        )  # fmt: skip
        step = KERNELS_PER_STEP * 10 * US
        edges = [k * step // len(PHASES) for k in range(len(PHASES) + 1)]
        for number in range(-(-num_kernels // KERNELS_PER_STEP)):
            spans = [
                ("grpo.step", 0, step),
                *((f"grpo.{n}", *e) for n, e in zip(PHASES, itertools.pairwise(edges), strict=True)),
            ]
            rows = [(number * step + a, number * step + b, name, PID | 7) for name, a, b in spans]
            connection.executemany("INSERT INTO NVTX_EVENTS VALUES(?,?,59,?,?,NULL)", rows)


def main() -> None:
    """Write, report, and record what it took."""
    num_kernels = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.sqlite"
        write_export(path, num_kernels)
        start = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "sparkgrpo.profiling",
            str(path),
            "--json",
            "-o",
            str(Path(folder) / "report.json"),
        ]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - start
        num_file_bytes = path.stat().st_size
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the report is the only child
    peak_bytes, cpu_s = used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
    figures = {
        "num_kernels": num_kernels,
        "file_bytes": num_file_bytes,
        "seconds": seconds,
        "cpu_seconds": cpu_s,
        "peak_bytes": peak_bytes,
    }
    print(
        f"{num_kernels:,} kernels, {num_file_bytes / 1e6:.0f} MB: {seconds:.2f} s, {cpu_s:.2f} s of one core, "
        f"{peak_bytes / 1e6:.0f} MB"
    )
    if num_kernels == 1_000_000:
        limits = {"limit_s": LIMIT_S, "limit_bytes": LIMIT_BYTES}
        write_result("trace_report", torch.device("cpu"), {**figures, **limits})


if __name__ == "__main__":
    main()
