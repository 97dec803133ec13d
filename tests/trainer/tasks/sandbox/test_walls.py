"""The walls, each tried: what is possible without them and not behind them, as this user and as an ordinary one."""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks.sandbox import seccomp, zygote
from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.confine import LayerError, build_walls
from sparkgrpo.trainer.tasks.sandbox.self_test import PROBES, probe_arguments, probe_program

NUMBERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
OTHER_NAMES = {"newfstatat": ("newfstatat", "fstatat")}
NOBODY = 65534

# Beyond the probes of the self-test. Raw calls: [number on x86_64, on aarch64], arguments.
MORE_PROBES = {
    "read the password file": "open('/etc/passwd').read(1)",
    "look at the parent": "open(f'/proc/{os.getppid()}/cmdline').read(1)",
    "list a folder of processes": "os.listdir('/proc')",
    "make a link": "os.symlink('x', FOLDER + '/link')",
    "make a hard link": "os.link(OWN, FOLDER + '/hard')",
    "rename": "os.rename(FOLDER, FOLDER + '-2'); os.rename(FOLDER + '-2', FOLDER)",
    "make a pipe in the file system": "os.mkfifo(FOLDER + '/fifo')",
    "cut a readable file off": "os.truncate(OWN, os.stat(OWN).st_size)",
    "open to cut off": "os.close(os.open(OWN, os.O_RDONLY | os.O_APPEND | os.O_WRONLY))",
    "change times": "os.utime(OWN, ns=(os.stat(OWN).st_atime_ns, os.stat(OWN).st_mtime_ns))",
    "change an owner": "os.chown(OWN, os.getuid(), -1)",
    "read extended attributes": "os.listxattr(OWN)",
    "Unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "choose processors": "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "change priority": "os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))",
    "new session": "os.setpgid(0, 0)",
    "process descriptor": "os.close(os.pidfd_open(os.getppid()))",
    "descriptor's signal to the parent by ioctl": "import fcntl, socket, struct; a, b = socket.socketpair(); "
    "fcntl.ioctl(a, 0x8901, struct.pack('i', os.getppid()))",
    "size of a pipe": "import fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 16)",
    "forget who dies with whom": "RAW([157, 167], 1, 0, 0, 0, 0) and FAIL()",
    "dumpable again": "RAW([157, 167], 4, 1, 0, 0, 0) and FAIL()",
    "fork by clone": "pid = RAW([56, 220], 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nif pid < 0: FAIL()",
    "new process by clone3": "RAW([435, 435], 0, 0) and ERRNO() == 38 and FAIL()",
    "shared memory": "RAW([29, 194], 0, 4096, 0o600) < 0 and FAIL()",
    "message queue": "RAW([68, 186], 0, 0o600) < 0 and FAIL()",
    "remove a shared memory of another": "RAW([31, 195], 2**30, 0, 0) and ERRNO() == 1 and FAIL()",
    "watch files": "RAW([294, 26], 0) < 0 and FAIL()",
    "key rings": "RAW([250, 219], 0, -3, 0) < 0 and FAIL()",
    "io_uring": "RAW([425, 425], 1, 0) and ERRNO() in (1, 38) and FAIL()",
    "trace the parent": "RAW([101, 117], 16, os.getppid(), 0, 0) < 0 and FAIL()",
    "read another process's memory": "RAW([310, 270], os.getpid(), 0, 0, 0, 0, 0) < 0 and FAIL()",
    "write all buffers to disk": "RAW([162, 81]) < 0 and FAIL()",
    "another filter": "RAW([317, 277], 2, 0, 0) and ERRNO() == 14 or FAIL()",
    "user namespace": "RAW([272, 97], 0x10000000) and FAIL()",
}
PRELUDE = """import ctypes
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
def RAW(numbers, *args):
    number = numbers[os.uname().machine == 'aarch64']
    return LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
def ERRNO(): return ctypes.get_errno()
def FAIL(): raise OSError(ERRNO(), 'denied')
"""
# Possible only where the user, the container or the file system allows it even without our walls.
NEEDS_LUCK = {"user namespace", "trace the parent", "io_uring", "key rings", "another filter", "new session"}


def program(name: str) -> str:
    body = PROBES[name][1] if name in PROBES else MORE_PROBES[name]
    return PRELUDE.replace("import ctypes", "import ctypes, os") + probe_program(body)


@pytest.fixture(scope="module")
def unwalled() -> Iterator[Checker]:
    with Checker(level="basic") as checker:
        yield checker


@pytest.mark.walls
@pytest.mark.parametrize("name", [*PROBES, *MORE_PROBES])
def test_denied(name: str, checker: Checker, tmp_path: Path) -> None:
    verdict = checker.judge_calls(program(name), "probe", [(probe_arguments(str(tmp_path)), "denied")])
    assert verdict.reason == "ok", verdict
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted({*PROBES, *MORE_PROBES} - NEEDS_LUCK))
def test_possible_without_walls(name: str, unwalled: Checker, tmp_path: Path) -> None:
    """Else the denial proves nothing."""
    if name in ("allocate 1 GiB", "gain privileges"):
        pytest.skip("level basic has this limit too")
    if name == "hold a capability" and os.getuid() != 0:
        pytest.skip("an ordinary user holds none")
    folder = tmp_path / "folder"
    folder.mkdir()
    own = folder / "own.py"
    own.write_text("#")
    arguments = (str(own), probe_arguments("")[1], str(folder), sys.executable)
    verdict = unwalled.judge_calls(program(name), "probe", [(arguments, "possible")])
    assert verdict.reason == "ok", verdict


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may use, with the package in it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        (Path(folder) / "sparkgrpo").mkdir()
        (Path(folder) / "sparkgrpo" / "trainer").symlink_to(Path(zygote.__file__).resolve().parents[2])
        yield Path(folder)


def reachable_interpreter() -> str | None:
    """A Python that an ordinary user can start and that is new enough; the tests' own may lie in somebody's home."""
    for path in (sys.executable, "/usr/bin/python3"):
        try:
            command = [path, "-c", "import json, sys; sys.exit(sys.version_info < (3, 11))"]
            subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], check=True, env={}, cwd="/")
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    return None


@pytest.mark.walls
def test_as_an_ordinary_user(open_folder: Path) -> None:
    """The walls need no privilege: the same probes, from the start, in a process without any."""
    if os.getuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    python = reachable_interpreter()
    if python is None:
        pytest.skip("the interpreter lies where an ordinary user cannot reach it")
    names = [*PROBES, *MORE_PROBES]
    script = (
        f"import sys; sys.path.insert(0, {str(open_folder)!r})\n"
        "from sparkgrpo.trainer.tasks.sandbox.checker import Checker\n"
        "from sparkgrpo.trainer.tasks.sandbox.self_test import probe_arguments, self_test\n"
        "import json\n"
        f"programs = json.loads({json.dumps({name: program(name) for name in names})!r})\n"
        "assert not self_test().failures, self_test().failures\n"
        "with Checker() as checker:\n"
        f"    tests = [(probe_arguments({str(open_folder)!r}), 'denied')]\n"
        "    for name, code in programs.items():\n"
        "        verdict = checker.judge_calls(code, 'probe', tests)\n"
        "        assert verdict.reason == 'ok', (name, verdict)\n"
        "print(len(programs), 'denied')\n"
    )
    done = subprocess.run(
        [python, "-B", "-c", script],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.stdout == f"{len(names)} denied\n", done.stderr[-2000:]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_numbers_agree_with_the_kernel_headers(machine: str) -> None:
    header = Path(NUMBERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    known = {name: int(number) for name, number in found}
    column = seccomp.MACHINES[machine][0]
    rows = seccomp.allowed_numbers(column)
    single = {
        "ioctl": seccomp.IOCTL, "fcntl": seccomp.FCNTL, "prctl": seccomp.PRCTL, "clone": seccomp.CLONE,
        "kill": seccomp.KILL, "tgkill": seccomp.TGKILL, "socketpair": seccomp.SOCKETPAIR, "openat": seccomp.OPENAT,
        "prlimit64": seccomp.PRLIMIT64, "clone3": seccomp.CLONE3,
    }  # fmt: skip
    rows |= {name: numbers[column] for name, numbers in single.items()}
    assert len(rows) > 110
    for name, number in rows.items():
        assert number in [known.get(other) for other in OTHER_NAMES.get(name, (name,))], name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_gets_the_right_verdict(machine: str) -> None:
    """The program, run on every number by a small interpreter of BPF: what is not listed is denied."""
    template = seccomp.filter_template(machine)
    column, architecture = seccomp.MACHINES[machine]
    allowed = set(seccomp.allowed_numbers(column).values())
    conditional = {number for number, _ in seccomp.conditions(column, denies_truncation=False)}
    for number in range(seccomp.FIRST_UNKNOWN):
        verdict = run_bpf(template, number, architecture, [0xDEAD] * 6)
        if number == seccomp.CLONE3[column]:
            assert verdict == seccomp.ENOSYS
        elif number in conditional:
            assert verdict in (seccomp.EPERM, seccomp.ALLOW)
        else:
            assert verdict == (seccomp.ALLOW if number in allowed else seccomp.EPERM), number
    assert run_bpf(template, seccomp.FIRST_UNKNOWN, architecture, [0] * 6) == seccomp.ENOSYS
    assert run_bpf(template, 0, 0xDEADBEEF, [0] * 6) == seccomp.KILL_PROCESS
    if machine == "x86_64":
        assert run_bpf(template, seccomp.X32_BIT, architecture, [0] * 6) == seccomp.KILL_PROCESS


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("call", "arguments", "is_allowed"),
    [
        (seccomp.CLONE, [0x3D0F00], True),  # what the C library's threads ask for
        (seccomp.CLONE, [17], False),
        (seccomp.CLONE, [0x10000 | 0x10000000], False),
        (seccomp.KILL, [seccomp.OWN_PID, 9], True),
        (seccomp.KILL, [1, 9], False),
        (seccomp.TGKILL, [seccomp.OWN_PID, 5, 9], True),
        (seccomp.TGKILL, [5, seccomp.OWN_PID, 9], False),
        (seccomp.SOCKETPAIR, [1, 1, 0], True),
        (seccomp.SOCKETPAIR, [2, 1, 0], False),
        (seccomp.PRCTL, [15], True),
        (seccomp.PRCTL, [1], False),
        (seccomp.PRCTL, [22], False),
        (seccomp.FCNTL, [0, 4], True),
        (seccomp.FCNTL, [0, 8], False),
        (seccomp.FCNTL, [0, 10], False),
        (seccomp.IOCTL, [0, 0x5401], True),
        (seccomp.IOCTL, [0, 0x8901], False),
        (seccomp.IOCTL, [0, 0x5412], False),
        (seccomp.PRLIMIT64, [0, 7, 0], True),
        (seccomp.PRLIMIT64, [0, 7, 1 << 40], False),
        (seccomp.PRLIMIT64, [5, 7, 0], False),
        (seccomp.OPENAT, [0, 0, 0], True),
        (seccomp.OPENAT, [0, 0, 0o1000], True),
    ],
)
def test_arguments(machine: str, call: tuple[int, int], arguments: list[int], is_allowed: bool) -> None:
    column, architecture = seccomp.MACHINES[machine]
    verdict = run_bpf(seccomp.filter_template(machine), call[column], architecture, [*arguments, 0, 0, 0, 0, 0, 0])
    assert verdict == (seccomp.ALLOW if is_allowed else seccomp.EPERM)


def test_cutting_off_is_denied_beside_an_old_landlock() -> None:
    template = seccomp.filter_template("x86_64", denies_truncation=True)
    assert run_bpf(template, seccomp.OPENAT[0], 0xC000003E, [0, 0, 0o1000, 0, 0, 0]) == seccomp.EPERM
    assert run_bpf(template, seccomp.OPENAT[0], 0xC000003E, [0, 0, 0o2, 0, 0, 0]) == seccomp.ALLOW


@pytest.mark.walls
def test_a_machine_without_table_has_no_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="riscv64"):
        seccomp.filter_template("riscv64")
    uname = os.uname()
    other = os.uname_result((uname.sysname, uname.nodename, uname.release, uname.version, "riscv64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    with pytest.raises(LayerError, match="seccomp"):
        build_walls(is_strict=True, readable=[], memory_bytes=1 << 29, cpu_s=1)


def run_bpf(program: bytes, number: int, architecture: int, arguments: list[int]) -> int:
    """Classic BPF over struct seccomp_data, the instructions that the filter uses."""
    record = struct.pack("=IIQ6Q", number, architecture, 0, *arguments[:6])
    ops, at, accumulator = list(struct.iter_unpack("HBBI", program)), 0, 0
    tests = {
        seccomp.EQUAL: lambda a, k: a == k,
        seccomp.GREATER: lambda a, k: a > k,
        seccomp.AT_LEAST: lambda a, k: a >= k,
        seccomp.ANY_BIT: lambda a, k: a & k != 0,
    }
    while True:
        code, if_true, if_false, operand = ops[at]
        at += 1
        if code == seccomp.LOAD:
            accumulator = struct.unpack_from("=I", record, operand)[0]
        elif code == seccomp.RETURN:
            return operand
        else:
            at += if_true if tests[code](accumulator, operand) else if_false
