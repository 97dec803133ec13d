"""Writes a benchmark's result where a reader looks for it: benchmarks/results/<device>/<name>.json."""

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from sparkgrpo.profiling.environment import git_state, hardware, versions

RESULTS = Path(__file__).parent / "results"


def device_name(device: torch.device) -> str:
    """A folder name for the device: "cpu-x86_64-2-cores", "nvidia-gb10"."""
    if device.type == "cuda":
        return re.sub(r"\W+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu-{platform.machine()}-{num_cores}-cores"


def facts_of(name: str, device: torch.device) -> dict[str, object]:
    """What a result was measured on; the head of every file."""
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device_name(device),
        "hardware": hardware(device),
        "commit": git_state(Path(__file__)),
        "versions": versions(),
        "load_average": os.getloadavg(),
    }


def write_result(name: str, device: torch.device, content: Mapping[str, object], *, folder: Path = RESULTS) -> Path:
    """Write one result with what it was measured on; returns the path."""
    path = folder / device_name(device) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts_of(name, device), **content}, indent=1) + "\n")
    return path
