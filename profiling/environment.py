"""What a run ran on: versions, hardware and the commit of the source. Never host, user, environment or paths."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "tokenizers", "liger-kernel", "flash-attn")


def describe(device: torch.device, source_file: Path) -> dict[str, object]:
    """The environment of a run for run.json: git (of the checkout of ``source_file``), versions, hardware, boot_id."""
    return {
        "git": git_state(source_file),
        "versions": versions(),
        "hardware": hardware(device),
        "boot_id": boot_id(),
    }


def versions() -> dict[str, str | None]:
    """Versions by package name, with python, cuda (of the torch build) and driver; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found | {"cuda": torch.version.cuda, "driver": _driver_version()}


def hardware(device: torch.device) -> dict[str, object]:
    """The device and the host: names, capability, multiprocessors, memory in bytes, cores this process may use."""
    facts: dict[str, object] = {
        "device": device.type,
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "is_integrated": bool(properties.is_integrated),
        }
    return facts


def device_name(device: torch.device) -> str:
    """The name of the device as its maker gives it; the processor's for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


DERIVED = ("benchmarks/results", "docs", "*.md")


def git_state(source_file: Path) -> dict[str, object] | None:
    """Commit of the checkout that tracks ``source_file``, whether it has changes, and their hash; None outside one.

    An installed copy inside somebody else's repository is not tracked there, so its commit is never reported.
    """
    if _git(source_file.parent, "ls-files", "--error-unmatch", source_file.name) is None:
        return None
    commit = _git(source_file.parent, "rev-parse", "HEAD")
    # Results and the documents made from them do not change what is measured: a run's first file would mark the rest.
    diff = _git(
        source_file.parent, "diff", "--no-ext-diff", "HEAD", "--", ":/", *(f":(top,exclude){p}" for p in DERIVED)
    )
    if commit is None or diff is None:
        return None
    diff_sha256 = hashlib.sha256(diff.encode()).hexdigest() if diff else None
    return {"commit": commit.strip(), "dirty": bool(diff), "diff_sha256": diff_sha256}


def boot_id() -> str | None:
    """Random id of this boot of the machine (Linux): tells a process that is gone from one with the same pid."""
    return _first_line(Path("/proc/sys/kernel/random/boot_id"))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git on this machine, or a file system that hangs: the commit is unknown
    return done.stdout if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()  # not Linux
    fields = [line.partition(":") for line in lines]
    named = [value.strip() for key, _, value in fields if key.strip() in ("model name", "Model")]
    return named[0] if named else platform.machine()


def _driver_version() -> str | None:
    line = _first_line(Path("/proc/driver/nvidia/version"))
    return line.split("  ")[1].strip() if line and "  " in line else line


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return None  # another operating system, or no such driver
