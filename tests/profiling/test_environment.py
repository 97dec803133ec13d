"""What a run ran on, and that it tells nothing private."""

import getpass
import json
import socket
import subprocess
from pathlib import Path

import torch

from sparkgrpo.profiling.environment import describe, git_state, versions


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_names_no_host_user_or_home(tmp_path: Path) -> None:
    facts = json.dumps(describe(torch.device("cpu"), tmp_path / "x.py"))
    values = {socket.gethostname(), str(Path.home()), str(tmp_path)}
    if len(getpass.getuser()) > 4:  # "root" also occurs in ordinary words
        values.add(getpass.getuser())
    assert not [value for value in values if value in facts]


def test_versions_and_hardware() -> None:
    facts = describe(torch.device("cpu"), Path(__file__))
    assert versions()["torch"] == torch.__version__
    assert versions()["python"] and "flash-attn" in versions()
    hardware = facts["hardware"]
    assert isinstance(hardware, dict)
    assert hardware["device"] == "cpu" and hardware["cpu_cores"] >= 1 and hardware["host_memory_bytes"] > 2**28


def test_git_state_of_the_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    assert git_state(source) is None  # no checkout
    git(tmp_path, "init", "-q")
    assert git_state(source) is None  # a checkout that does not track it: somebody else's repository
    git(tmp_path, "add", "source.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False, "diff_sha256": None}
    assert git_state(source) == clean
    source.write_text("a = 2\n")
    changed = git_state(source)
    assert changed is not None and changed["dirty"] and len(str(changed["diff_sha256"])) == 64
