"""Are the walls up? Tried, not assumed: confined children attempt what must fail, and one does honest work.

A run of model code begins with this, its header carries the result, and `sparkgrpo doctor` prints it. Where a wall does
not stand, model code is refused with the layer, the kernel and the flag.
"""

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.confine import BASIC_LAYERS, STRICT_LAYERS
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Level, SandboxError

HONEST = "honest work"

# name: (layer that must deny it, expression or statements). OWN, INSTALLED: readable files; FOLDER: a writable folder.
PROBES: dict[str, tuple[str, str]] = {
    "read a file of the program": ("landlock", "open(OWN).read(1)"),
    "read an installed package": ("landlock", "open(INSTALLED).read(1)"),
    "list the root folder": ("landlock", "os.listdir('/')"),
    "write a file": ("landlock", "open(FOLDER + '/probe', 'w').close()"),
    "make a folder": ("landlock", "os.mkdir(FOLDER + '/probe-folder')"),
    "change the mode of a readable file": ("seccomp", "os.chmod(os.__file__, os.stat(os.__file__).st_mode & 0o7777)"),
    "open a TCP socket": ("seccomp", "import socket; socket.socket()"),
    "open a UDP socket": ("seccomp", "import socket; socket.socket(type=socket.SOCK_DGRAM)"),
    "fork": ("seccomp", "if os.fork() == 0: os._exit(0)"),
    "start a program": ("seccomp", "import subprocess; subprocess.run([PYTHON, '-S', '-c', ''], check=True)"),
    "signal the parent": ("seccomp", "os.kill(os.getppid(), 0)"),
    "raise a limit": ("seccomp", "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"),
    "anonymous file": ("seccomp", "os.memfd_create('probe')"),
    "own a descriptor's signals elsewhere": (
        "seccomp",
        "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    ),
    "allocate 1 GiB": ("rlimits", "bytearray(1 << 30)"),
    "hold a capability": (
        "no_capabilities",
        "import ctypes; sets = (ctypes.c_uint32 * 6)()\n"
        "number = {'x86_64': 125, 'aarch64': 90}[os.uname().machine]\n"
        "head = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
        "if ctypes.CDLL(None).syscall(number, head, sets) or not any(sets): raise OSError('none')",
    ),
    "gain privileges": (
        "no_new_privs",
        "import ctypes\nif ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) != 0: raise OSError('no_new_privs is set')",
    ),
}
HONEST_WORK = """
import asyncio, decimal, hashlib, json, re, threading, zlib
results = []
thread = threading.Thread(target=results.append, args=(1,))
thread.start(); thread.join()
asyncio.run(asyncio.sleep(0, result=2))
open(os.devnull, "w").write("x")
results.append(len(hashlib.sha256(zlib.compress(json.dumps({"a": 1}).encode())).hexdigest()))
if results != [1, 64] or not re.match("a+", "aa"): raise OSError(str(results))
"""

CURES = {
    "landlock": 'Landlock needs Linux 5.13 or newer with "landlock" in the kernel\'s list of security modules '
    "(boot option lsm=), and a container runtime that lets its system calls through",
    "seccomp": "Filters of system calls need x86_64 or aarch64 and a kernel built with CONFIG_SECCOMP_FILTER",
    "bwrap": "Install bubblewrap (apt install bubblewrap) and let it make user namespaces, or use --sandbox strict",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was tried."""

    name: str
    """What was tried, in words."""
    layer: str
    """The wall that has to deny it; HONEST for work that must succeed."""
    is_good: bool
    """Denied where it must be denied, possible where it must be possible."""
    detail: str = ""
    """What happened where it is not good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxReport:
    """What stands between model code and this machine."""

    level: Level
    abi: int | None
    """Landlock's version; None where it is not in force."""
    kernel: str
    machine: str
    layers: tuple[str, ...]
    """The walls in force."""
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What is not as it must be."""
        return tuple(finding for finding in self.findings if not finding.is_good)

    def facts(self) -> dict[str, object]:
        """For run.json."""
        return {
            "level": self.level,
            "landlock_abi": self.abi,
            "layers": list(self.layers),
            "kernel": self.kernel,
            "machine": self.machine,
            "num_probes": len(self.findings),
        }

    def __str__(self) -> str:
        abi = "" if self.abi is None else f"Landlock ABI {self.abi}, "
        return f"sandbox {self.level}: {abi}{', '.join(self.layers)}"


def self_test(level: Level = "strict") -> SandboxReport:
    """Try every wall of a level; about a quarter of a second. Never raises for a wall that is missing."""
    uname = os.uname()
    layers = BASIC_LAYERS if level == "basic" else STRICT_LAYERS + (("bwrap",) if level == "bwrap" else ())
    abi: int | None = None
    try:
        if sys.platform != "linux":
            raise SandboxError(f"the walls are Linux's, this is {uname.sysname}", "landlock")
        with Checker(level=level) as checker, tempfile.TemporaryDirectory() as folder:
            abi = checker.link.abi
            findings = tuple(_findings(checker, folder, must_deny=set(layers)))
    except SandboxError as error:
        layer = error.layer or ("bwrap" if level == "bwrap" else "zygote")
        layers = ()
        findings = (Finding(name="put the walls up", layer=layer, is_good=False, detail=str(error)),)
    return SandboxReport(
        level=level, abi=abi, kernel=uname.release, machine=uname.machine, layers=layers, findings=findings
    )


def require_sandbox(level: Level, *, is_unsafe_allowed: bool) -> SandboxReport:
    """The report of a level whose walls all stand. Without them: level basic if that is allowed, else `UserError`."""
    if level == "basic" and not is_unsafe_allowed:
        raise UserError(
            "sandbox: level basic puts no wall around model code, which could read, change and send your files; "
            "expected strict or bwrap, or --unsafe-sandbox beside it if you accept that"
        )
    report = self_test(level)
    if not report.failures:
        return report
    if is_unsafe_allowed and level != "basic":
        return require_sandbox("basic", is_unsafe_allowed=True)
    raise UserError(refusal(report))


def refusal(report: SandboxReport) -> str:
    """Why model code is not run here, and what to do."""
    finding = report.failures[0]
    cure = CURES.get(finding.layer, "")
    more = f" (and {len(report.failures) - 1} more)" if len(report.failures) > 1 else ""
    return (
        f"sandbox: layer {finding.layer} does not hold on this machine, Linux {report.kernel} {report.machine}: "
        f"{finding.name}: {finding.detail}{more}. Programs that a model wrote are run behind all walls or not at all."
        f"{' ' + cure + '.' if cure else ''} To run them unprotected, at your own risk: --sandbox basic "
        "--unsafe-sandbox"
    )


def probe_program(body: str) -> str:
    """Source of a function `probe` that says what became of a probe."""
    indented = "\n".join("        " + line for line in body.strip().splitlines())
    return (
        "import os\ndef probe(OWN, INSTALLED, FOLDER, PYTHON):\n    try:\n"
        f"{indented}\n"
        "    except (OSError, ValueError, MemoryError, RuntimeError) as error:\n"
        "        return 'denied' if type(error) is not RuntimeError else str(error)\n    return 'possible'\n"
    )


def probe_arguments(folder: str) -> tuple[str, str, str, str]:
    """(a file of the program, an installed file, a writable folder, the interpreter)."""
    own = str(Path(__file__).resolve())
    return own, _installed_file() or own, folder, sys.executable


def _findings(checker: Checker, folder: str, must_deny: set[str]) -> Iterator[Finding]:
    arguments = probe_arguments(folder)
    for name, (layer, body) in PROBES.items():
        if layer in must_deny:
            verdict = checker.judge_calls(probe_program(body), "probe", [(arguments, "denied")])
            detail = "it was possible" if verdict.reason == "wrong_value" else f"{verdict.reason} {verdict.detail}"
            is_good = verdict.reason == "ok"
            yield Finding(name=name, layer=layer, is_good=is_good, detail="" if is_good else detail.strip())
    verdict = checker.judge_calls(probe_program(HONEST_WORK), "probe", [(arguments, "possible")])
    is_good = verdict.reason == "ok"
    detail = "" if is_good else f"imports, threads or an event loop failed: {verdict.reason} {verdict.detail}"
    yield Finding(name=HONEST, layer=HONEST, is_good=is_good, detail=detail.strip())


def _installed_file() -> str | None:
    """Some file of an installed package, where hidden tests might lie."""
    folder = Path(sysconfig.get_path("purelib"))
    return next((str(path) for path in folder.glob("*/*.py")), None) if folder.is_dir() else None
