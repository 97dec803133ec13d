"""The walls around one process, in the order in which they go up: ctypes only, no privilege, irrevocable.

    dies with its parent; not dumpable; no new privileges; limits on memory, time, files and descriptors; Landlock
    (`landlock.py`); no capabilities; and last, because it would forbid the rest, the filter of system calls
    (`seccomp.py`)

RLIMIT_NPROC is not among the limits: it counts per user, and not at all for root. fork and exec are denied, and memory
ends threads.
"""

import ctypes
import fcntl
import os
import resource
import signal
import struct
from dataclasses import dataclass

from sparkgrpo.trainer.tasks.sandbox.landlock import KernelCalls, build_ruleset, restrict_self
from sparkgrpo.trainer.tasks.sandbox.seccomp import (
    MACHINES,
    PR_SET_SECCOMP,
    SECCOMP_MODE_FILTER,
    filter_template,
    program_for,
)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522
TRUNCATE_SINCE_ABI = 3
MAX_DESCRIPTORS, MAX_FILE_BYTES = 64, 1 << 20
FIRST_KEPT_FD = 100
"""The ruleset is kept above the descriptors that a child arranges before it is confined."""

STRICT_LAYERS = ("landlock", "seccomp", "rlimits", "no_capabilities", "no_new_privs")
BASIC_LAYERS = ("rlimits", "process_group")


class LayerError(OSError):
    """A wall could not be put up; `layer` names it."""

    def __init__(self, layer: str, error: OSError) -> None:
        super().__init__(error.errno, f"{layer}: {error.strerror or error}")
        self.layer = layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Walls:
    """What every fork of a zygote will be confined by."""

    kernel: KernelCalls
    ruleset: int | None
    """Landlock's ruleset; None at level basic."""
    abi: int | None
    """Landlock's version."""
    filter_template: bytes
    memory_bytes: int
    """Address space."""
    cpu_s: int
    """Processor time."""


def build_walls(*, is_strict: bool, readable: list[str], memory_bytes: int, cpu_s: int) -> Walls:
    """Prepare what can be prepared before the forks. `LayerError` where this kernel or machine lacks a layer."""
    kernel = KernelCalls()
    if not is_strict:
        return Walls(kernel=kernel, ruleset=None, abi=None, filter_template=b"", memory_bytes=memory_bytes, cpu_s=cpu_s)
    machine = os.uname().machine
    try:
        built, abi = build_ruleset(kernel, readable)
        ruleset = fcntl.fcntl(built, fcntl.F_DUPFD_CLOEXEC, FIRST_KEPT_FD)
        os.close(built)
    except OSError as error:
        raise LayerError("landlock", error) from None
    try:
        template = filter_template(machine, denies_truncation=abi < TRUNCATE_SINCE_ABI)
    except OSError as error:
        raise LayerError("seccomp", error) from None
    assert machine in MACHINES
    return Walls(
        kernel=kernel, ruleset=ruleset, abi=abi, filter_template=template, memory_bytes=memory_bytes, cpu_s=cpu_s
    )


def confine(walls: Walls, parent_pid: int) -> None:
    """Confine this process; `LayerError` names the wall that failed. Call in a fresh fork with a single thread."""
    kernel = walls.kernel
    try:
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(0)
        kernel.prctl(PR_SET_DUMPABLE, 0)
        kernel.prctl(PR_SET_NO_NEW_PRIVS, 1)
    except OSError as error:
        raise LayerError("no_new_privs", error) from None
    try:
        _limit(walls.memory_bytes, walls.cpu_s)
    except (OSError, ValueError) as error:
        raise LayerError("rlimits", OSError(0, str(error))) from None
    if walls.ruleset is None:
        return
    try:
        restrict_self(kernel, walls.ruleset)
    except OSError as error:
        raise LayerError("landlock", error) from None
    try:
        kernel.syscall(CAPSET[os.uname().machine], struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    except OSError as error:
        raise LayerError("no_capabilities", error) from None
    try:
        install_filter(kernel, program_for(walls.filter_template, os.getpid()))
    except OSError as error:
        raise LayerError("seccomp", error) from None


def install_filter(kernel: KernelCalls, program: bytes) -> None:
    """Put a filter of system calls into force; needs no_new_privs. OSError where the kernel refuses it."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    kernel.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header)


def _limit(memory_bytes: int, cpu_s: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
