"""The walls around programs that a model wrote, tried in children: an open that Landlock must deny, a socket that a
seccomp filter must deny.

Both are forever in the process that puts them up, so each is tried in a child that ends.
"""

import subprocess
import sys

from sparkgrpo.trainer.doctor.finding import Finding, Machine

DEADLINE_S = 30
# Prints "abi N", then "denied" or "allowed". 444, 446: landlock_create_ruleset, landlock_restrict_self, the same number
# on every architecture. Flag 1 asks for the version. 1 << 2: LANDLOCK_ACCESS_FS_READ_FILE.
LANDLOCK = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
abi = libc.syscall(444, None, ctypes.c_size_t(0), 1)
if abi < 1:
    print("none", ctypes.get_errno()); sys.exit()
print("abi", abi)
rules = (ctypes.c_uint64 * 1)(1 << 2)
ruleset = libc.syscall(444, ctypes.byref(rules), ctypes.c_size_t(8), 0)
if ruleset < 0 or libc.prctl(38, 1, 0, 0, 0) or libc.syscall(446, ruleset, 0):
    print("refused", ctypes.get_errno()); sys.exit()
try:
    open("/etc/passwd").close(); print("allowed")
except PermissionError:
    print("denied")
"""
# A classic BPF program: load the number of the call; if it is socket, return EPERM, else allow.
SECCOMP = """
import ctypes, os, socket, struct, sys
number = {"x86_64": 41, "aarch64": 198}.get(os.uname().machine)
if number is None:
    print("unknown"); sys.exit()
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    print("refused", ctypes.get_errno()); sys.exit()
try:
    socket.socket().close(); print("allowed")
except PermissionError:
    print("denied")
"""


def check_landlock(machine: Machine) -> Finding:
    """The kernel's version of Landlock, and an open that it denies."""
    name, said = "landlock", _said_by(LANDLOCK)
    if said.endswith("denied"):
        return Finding(name=name, verdict="ok", found=f"ABI {said.split()[1]}; a child was denied to open a file")
    return Finding(
        name=name,
        verdict="problem",
        found=f"it does not hold ({said}): programs that a model wrote cannot be run safely here",
        cure='Linux 5.13 or newer with "landlock" in the boot option lsm=, and a container that lets its calls pass; '
        "tasks without code need none of it",
    )


def check_seccomp(machine: Machine) -> Finding:
    """A filter of system calls, and a socket that it denies."""
    name, said = "seccomp", _said_by(SECCOMP)
    if said.endswith("denied"):
        return Finding(name=name, verdict="ok", found="a filter was installed in a child, and its socket was denied")
    if said == "unknown":
        return Finding(name=name, verdict="cannot say", found="filters are written for x86_64 and aarch64 alone")
    return Finding(
        name=name,
        verdict="problem",
        found=f"a filter does not hold ({said}): programs that a model wrote cannot be run safely here",
        cure="a kernel built with CONFIG_SECCOMP_FILTER; tasks without code need none of it",
    )


def _said_by(program: str) -> str:
    if sys.platform != "linux":
        return f"this is {sys.platform}, not Linux"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    return " ".join(done.stdout.split()) or f"the child ended with code {done.returncode}"
