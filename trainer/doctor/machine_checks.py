"""Memory, rates, heat, run folder, and the profilers: what a run needs of the machine around it."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from sparkgrpo.profiling.device_state import DeviceMeter
from sparkgrpo.profiling.environment import device_name
from sparkgrpo.profiling.memory import cgroup_left_bytes, meminfo_bytes, memory_limits
from sparkgrpo.profiling.nsys_command import find_nsys, record_command, run_pass
from sparkgrpo.profiling.probe import slow_state
from sparkgrpo.trainer.doctor.finding import Finding, Machine
from sparkgrpo.trainer.rates import take_probe

GIB = 1 << 30
LOAD_S = 1.0
HOT_C = 85
LARGE_PROCESS_BYTES = 2 << 30
MIN_DISK_BYTES = 2 << 30
CAPTURE_DEADLINE_S = 120
TEN_LAUNCHES = (
    "import torch; x = torch.ones(8, device='cuda'); torch.cuda.synchronize(); torch.cuda.profiler.start();"
    " [x.add_(1) for _ in range(10)]; torch.cuda.synchronize(); torch.cuda.profiler.stop()"
)
PERMISSIONS = Path("/proc/driver/nvidia/params")


def check_memory(machine: Machine) -> Finding:
    """Both meters, the control group's limit, swap and page cache, and who else takes much."""
    name = "memory"
    total, available = meminfo_bytes("MemTotal"), meminfo_bytes("MemAvailable")
    if total is None or available is None:
        return Finding(name=name, verdict="cannot say", found="this system has no /proc/meminfo; nothing is budgeted")
    free, cached, swap = (meminfo_bytes(field) or 0 for field in ("MemFree", "Cached", "SwapTotal"))
    limits, left = memory_limits(machine.device), cgroup_left_bytes()
    found = (
        f"{available / GIB:.1f} of {total / GIB:.1f} GiB available (free {free / GIB:.1f}, page cache "
        f"{cached / GIB:.1f}, swap {swap / GIB:.1f}); a run may plan with {(limits.usable_bytes or 0) / GIB:.1f} GiB"
    )
    if left is not None:
        found += f"; the control group leaves {left / GIB:.1f} GiB"
    if machine.has_cuda:
        device_free, device_total = torch.cuda.mem_get_info()
        found += f"; CUDA says {device_free / GIB:.1f} of {device_total / GIB:.1f} GiB free"
        found += " (page cache counts as used there)" if machine.is_integrated else ""
    others = _large_processes()
    if others:
        listed = ", ".join(f"{name} (pid {pid}) {size / GIB:.1f} GiB" for name, pid, size in others[:3])
        found += f"; other large processes: {listed}"
    cures = []
    if not limits.usable_bytes:
        cures.append("nothing is left above the reserve: end other programs")
    if machine.is_integrated and swap:
        cures.append("swap makes a full unified memory worse: sudo swapoff -a")
    return Finding(name=name, verdict="problem" if cures else "ok", found=found, cure="; ".join(cures))


def _large_processes() -> list[tuple[str, int, int]]:
    """Name, id and resident bytes of others' processes above 2 GiB, largest first; only those that may be read."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        resident = meminfo_bytes("VmRSS", folder / "status")
        if resident is not None and resident > LARGE_PROCESS_BYTES and int(folder.name) != os.getpid():
            try:
                name = (folder / "comm").read_text().strip()
            except OSError:
                continue  # ended meanwhile
            found.append((name, int(folder.name), resident))
    return sorted(found, key=lambda item: -item[2])


def check_rates(machine: Machine) -> Finding:
    """The probe that every run begins with."""
    probe = take_probe(machine.device)
    found = (
        f"read {probe.read_gbps:.3g} GB/s, copy {probe.copy_gbps:.3g} GB/s, {'bf16' if machine.has_cuda else 'fp32'} "
        f"matrix product {probe.product_tflops:.3g} TFLOP/s"
    )
    slow = slow_state(device_name(machine.device), probe)
    if slow is not None:
        return Finding(name="rates", verdict="problem", found=found, cure=slow)
    load, cores = (
        os.getloadavg()[0],
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    if not machine.has_cuda and load > (cores or 1):
        found += f"; the load of {load:.0f} on {cores} cores is other programs', so rates are low"
    return Finding(name="rates", verdict="ok", found=found)


def check_heat(machine: Machine) -> Finding:
    """Clock, temperature, power and throttling under a second of load; of a CPU what the kernel tells."""
    name = "heat"
    if not machine.has_cuda:
        return _heat_of_cpu(name)
    meter = DeviceMeter(uuid=str(torch.cuda.get_device_properties(0).uuid))
    a = torch.randn(4096, 4096, device=machine.device, dtype=torch.bfloat16)
    end = time.monotonic() + LOAD_S
    while time.monotonic() < end:
        for _ in range(10):
            torch.mm(a, a)
        torch.cuda.synchronize()
    state, reasons = meter.state(), meter.throttle_reasons()
    if state.sm_clock_mhz is None and state.temp_c is None:
        return Finding(name=name, verdict="cannot say", found="the driver tells neither clock nor temperature")
    power = "power: cannot say" if state.power_w is None else f"{state.power_w:.0f} W"
    found = f"after {LOAD_S:.0f} s of load: {state.sm_clock_mhz} MHz, {state.temp_c} C, {power}"
    held = [reason for reason in reasons or [] if "thermal" in reason or "slowdown" in reason or "brake" in reason]
    found += f"; held down by {', '.join(reasons)}" if reasons else ""
    is_hot = state.temp_c is not None and state.temp_c >= HOT_C
    cure = (
        "free the air's way; a clock cap costs decoding nothing: sudo nvidia-smi -lgc 0,2200" if held or is_hot else ""
    )
    return Finding(name=name, verdict="problem" if cure else "ok", found=found, cure=cure)


def _heat_of_cpu(name: str) -> Finding:
    temperatures = []
    for path in Path("/sys/class/thermal").glob("thermal_zone*/temp"):
        try:
            temperatures.append(int(path.read_text()) / 1000)
        except (OSError, ValueError):
            continue  # a zone that is asleep
    if not temperatures:
        return Finding(name=name, verdict="cannot say", found="no thermal zone can be read here (a virtual machine)")
    hottest = max(temperatures)
    cure = "let the machine cool down: it runs slower than it can" if hottest >= 95 else ""
    return Finding(name=name, verdict="problem" if cure else "ok", found=f"hottest zone {hottest:.0f} C", cure=cure)


def check_run_folder(machine: Machine) -> Finding:
    """A file is written, locked by a second handle in vain, and removed; space for checkpoints."""
    name, folder = "run folder", machine.run_folder
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        cure = "choose a folder on a local disk: --run-dir"
        return Finding(name=name, verdict="problem", found=f"{folder}: {error.strerror}", cure=cure)
    free = shutil.disk_usage(nearest).free
    cure = "" if free > MIN_DISK_BYTES else "make room: a checkpoint of a 0.5B model takes 7 GB with its optimiser"
    found = f"can be written and locked, {free / GIB:.1f} GiB of disk are free"
    return Finding(name=name, verdict="problem" if cure else "ok", found=found, cure=cure)


def check_nsys(machine: Machine) -> Finding:
    """Nsight Systems: its version, and a capture of ten launches that is read again."""
    name = "nsys"
    nsys = find_nsys()
    if not machine.has_cuda:
        there = "not installed" if nsys is None else "installed"
        found = (
            f"{there}; without a CUDA device there is nothing for it to record (sparkgrpo profile uses torch.profiler)"
        )
        return Finding(name=name, verdict="cannot say", found=found)
    if nsys is None:
        return Finding(
            name=name, verdict="problem", found="not on PATH and not in the usual folders; torch.profiler stands in",
            cure="apt install nsight-systems-cli (from NVIDIA's repository)",
        )  # fmt: skip
    from sparkgrpo.profiling.nsys import read_nsys

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "ten"
        command = record_command(nsys, "graph", output, [sys.executable, "-c", TEN_LAUNCHES])
        result = run_pass(command, output, CAPTURE_DEADLINE_S)
        if result.export is None:
            return Finding(
                name=name, verdict="problem", found=f"{_version(nsys)}: {result.problem}", cure="update nsys"
            )
        kernels = read_nsys(result.export).kernels
    num = 0 if kernels is None else len(kernels.start_N)
    cure = "" if num >= 10 else "another profiler may hold the device (DCGM, a second nsys); else update nsys"
    found = f"{_version(nsys)}: {num} of 10 launches captured"
    return Finding(name=name, verdict="problem" if cure else "ok", found=found, cure=cure)


def check_ncu(machine: Machine) -> Finding:
    """Nsight Compute and the right to read counters; nothing of ours depends on it."""
    name = "ncu"
    ncu = shutil.which("ncu")
    if not machine.has_cuda:
        there = "not installed" if ncu is None else "installed"
        return Finding(name=name, verdict="cannot say", found=f"{there}; there are no counters without a CUDA device")
    try:
        restricted = re.search(r"RmProfilingAdminOnly:\s*1", PERMISSIONS.read_text()) is not None
    except OSError:
        restricted = None
    right = {None: "counter permission: cannot say", True: "counters are for root alone", False: "counters may be read"}
    found = f"{'not installed' if ncu is None else _version(Path(ncu))}; {right[restricted]}; optional"
    cure = ""
    if ncu is not None and restricted and os.geteuid() != 0:
        cure = "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, then reboot; or sudo ncu"
    return Finding(name=name, verdict="problem" if cure else "ok", found=found, cure=cure)


def _version(program: Path) -> str:
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"version\s+(\S+)", done.stdout, re.IGNORECASE)
    return f"{program.name} {found[1] if found else '(version: cannot say)'}"
