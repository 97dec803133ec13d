"""The self-test finds what is missing, and model code is then refused with the layer, the kernel and the flag."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.self_test import HONEST, PROBES, require_sandbox, self_test

pytestmark = pytest.mark.walls

# A kernel without a system call: a filter in front of ours answers it with an error. 444: landlock_create_ruleset,
# 446: landlock_restrict_self, 317 and 157: seccomp and prctl, of which x86_64 alone is spelt out here.
WITHOUT = """
import ctypes, errno, json, os, struct, sys
sys.path = json.loads(sys.argv[1])
from sparkgrpo.trainer.tasks.sandbox.confine import install_filter
from sparkgrpo.trainer.tasks.sandbox.landlock import KernelCalls
from sparkgrpo.trainer.tasks.sandbox.self_test import require_sandbox, self_test
number, error = int(sys.argv[2]), getattr(errno, sys.argv[3])
kernel = KernelCalls()
kernel.prctl(38, 1)
ops = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | error), (6, 0, 0, 0x7FFF0000)]
install_filter(kernel, b"".join(struct.pack("HBBI", *op) for op in ops))
report = self_test()
failures = [[failure.layer, failure.detail] for failure in report.failures]
print(json.dumps({"failures": failures, "layers": report.layers}))
try:
    require_sandbox("strict", is_unsafe_allowed=False)
    print("accepted")
except ValueError as refused:
    print(refused)
print(json.dumps(require_sandbox("strict", is_unsafe_allowed=True).facts()))
"""


def test_all_walls_stand_here() -> None:
    report = self_test()
    assert report.failures == () and report.level == "strict"
    assert report.abi is not None and report.abi >= 1
    assert {finding.layer for finding in report.findings} == {*report.layers, HONEST}
    assert len(report.findings) == len(PROBES) + 1
    assert require_sandbox("strict", is_unsafe_allowed=False).facts() == report.facts()
    json.dumps(report.facts())
    assert str(report) == f"sandbox strict: Landlock ABI {report.abi}, {', '.join(report.layers)}"


@pytest.mark.parametrize(
    ("number", "error", "layer"),
    [
        (444, "ENOSYS", "landlock"),  # older than 5.13, or a runtime that hides it
        (444, "EOPNOTSUPP", "landlock"),  # built in, but not among the active modules
        (445, "EPERM", "landlock"),
        (446, "EPERM", "landlock"),
        (91 if os.uname().machine == "aarch64" else 126, "EPERM", "no_capabilities"),
    ],
)
def test_a_missing_layer_is_refused(number: int, error: str, layer: str) -> None:
    command = [sys.executable, "-c", WITHOUT, json.dumps(sys.path), str(number), error]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    findings, refusal, unsafe = done.stdout.splitlines()
    assert [found[0] for found in json.loads(findings)["failures"]] == [layer]
    assert json.loads(findings)["layers"] == []
    for word in (f"layer {layer}", os.uname().release, os.uname().machine, "--sandbox basic --unsafe-sandbox"):
        assert word in refusal
    facts = json.loads(unsafe)
    assert facts["level"] == "basic" and facts["landlock_abi"] is None and "landlock" not in facts["layers"]


def test_no_walls_only_with_the_flag() -> None:
    with pytest.raises(UserError, match="--unsafe-sandbox"):
        require_sandbox("basic", is_unsafe_allowed=False)
    assert require_sandbox("basic", is_unsafe_allowed=True).level == "basic"


def test_bubblewrap_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"layer bwrap .* not installed.*apt install bubblewrap"):
        require_sandbox("bwrap", is_unsafe_allowed=False)


def test_bubblewrap_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where user namespaces are switched off: it ends, and no zygote comes."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    with pytest.raises(UserError, match=r"layer bwrap .* No permissions to create a new namespace"):
        require_sandbox("bwrap", is_unsafe_allowed=False)


def test_bubblewrap_that_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in that drops its options, as the real one would run what follows `--`: the command line is in order."""
    program = tmp_path / "bwrap"
    program.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    report = require_sandbox("bwrap", is_unsafe_allowed=False)
    assert report.level == "bwrap" and "bwrap" in report.layers and "landlock" in report.layers


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_real_bubblewrap(squares: list) -> None:
    report = self_test("bwrap")
    if any("namespace" in failure.detail for failure in report.failures):
        pytest.skip("bubblewrap may make no namespaces here")
    assert report.failures == ()
    with Checker(level="bwrap") as checker:
        assert checker.judge_calls("def f(x): return x * x", "f", squares).reason == "ok"
        own_pid = "import os\ndef f(): return os.getppid() < 10"
        assert checker.judge_calls(own_pid, "f", [((), True)]).reason == "ok", "it sees processes of the machine"


def test_a_wall_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROBES, "do what is allowed", ("seccomp", "os.getpid()"))
    report = self_test()
    (failure,) = report.failures
    assert (failure.name, failure.detail) == ("do what is allowed", "it was possible")
    with pytest.raises(UserError, match="layer seccomp does not hold"):
        require_sandbox("strict", is_unsafe_allowed=False)
