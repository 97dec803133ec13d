"""Nsight Systems as a program: where it lies, how two passes over a run are called, and a deadline for each.

The first pass traces graphs as one row each, which costs little: times come from it. The second one traces every node
of a graph, which slows replays down: the kernels inside come from it.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL_PATTERNS = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/opt/nvidia/nsight-systems/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
)
"""Containers of NVIDIA carry it there and not on PATH."""

GraphMode = Literal["graph", "node"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """How a recording ended."""

    export: Path | None
    """The SQLite file; None where there is none."""
    problem: str | None
    """What went wrong, in one sentence."""


def find_nsys(patterns: Sequence[str] = INSTALL_PATTERNS) -> Path | None:
    """The nsys of PATH, else the newest of the usual places; None without any."""
    on_path = shutil.which("nsys")
    if on_path is not None:
        return Path(on_path)
    found = [path for pattern in patterns for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK)]
    return max(found, key=lambda path: [int(part) for part in re.findall(r"\d+", str(path))], default=None)


def record_command(nsys: Path | str, mode: GraphMode, output: Path, program: Sequence[str]) -> list[str]:
    """The command line of one pass; it writes OUTPUT.nsys-rep and OUTPUT.sqlite."""
    return [
        str(nsys), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", f"--cuda-graph-trace={mode}",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--export=sqlite", "--force-overwrite=true",
        f"--output={output}", *program,
    ]  # fmt: skip


def run_pass(command: Sequence[str], output: Path, deadline_s: float) -> PassResult:
    """Run a pass; past the deadline nsys and all that it started are ended (it has been seen to hang on replays)."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return PassResult(export=None, problem=f"ended after {deadline_s:.0f} s without a result (--deadline)")
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    export = output.with_name(f"{output.name}.sqlite")
    if not export.is_file():
        return PassResult(export=None, problem=f"ended with code {code} and no {export.name}; its messages stand above")
    return PassResult(export=export, problem=None if code == 0 else f"ended with code {code}")
