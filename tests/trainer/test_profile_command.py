"""`sparkgrpo profile -- train ...` on a CPU, its mistakes, and both passes of nsys by a stand-in."""

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkgrpo.trainer import cli

RUN = "--prompts-per-step 2 --group-size 4 --max-new-tokens 12 --eval-problems 4 --numbers 2"


@pytest.fixture
def program(tiny_folder: Path) -> Callable[[Path], list[str]]:
    """The command line of a quick run."""
    return lambda folder: [
        "--", "train", "--device", "cpu", "--model", str(tiny_folder), "--run-dir", str(folder), *RUN.split(),
    ]  # fmt: skip


def test_costliest_operations_of_every_phase(
    program: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert cli.main(["profile", "--warm-up", "1", "--steps", "2", *program(folder)]) == 0
    out = capsys.readouterr().out
    report = out[out.index("What to do") :]
    assert "2 whole steps of " in report
    table = report[report.index("Costliest operations") :].split("\n\n")[0].splitlines()[3:]
    names = [line.split("  ")[0] for line in table]
    for phase in ("t_gen", "t_train"):
        rows = table[names.index(phase) :][:4]
        assert [line[0] == " " for line in rows] == [False, True, True, True] and "outside of operations" in rows[3]
    facts = json.loads((folder / "profile" / "facts.json").read_text())
    assert facts["num_steps"] == 2 and facts["num_tokens"] > 0 and facts["recording_cost"] > 0
    assert facts["probe_before"]["read_gbps"] == 20.0 and "t_train" in facts["memory"]
    page = (folder / "profile" / "report.html").read_text()
    assert "Costliest operations" in page and str(tmp_path) not in page
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], 'expected "--" and a command to record'),
        (["--"], 'expected the command train after "--", got nothing'),
        (["--", "eval"], "got 'eval'"),
        (["--step", "2", "--", "train"], "unknown option '--step'; did you mean '--steps'?"),
        (["--steps", "0", "--", "train"], "steps: expected 1 or more, got 0"),
        (["--steps", "x", "--", "train"], "steps: expected a number, got 'x'"),
        (["--tool", "nsyss", "--", "train"], "expected one of auto, nsys, torch, got 'nsyss'"),
        (["--", "train", "--lr", "much"], "lr"),
        (["--tool", "nsys", "--", "train", "--device", "cpu", "--run-dir", "new"], "expected nsys on PATH"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert not list(tmp_path.iterdir())


NSYS = """#!{python}
import pathlib, sqlite3, subprocess, sys
options = sys.argv[1:]
mode = [o for o in options if o.startswith("--cuda-graph-trace=")][0].partition("=")[2]
output = [o for o in options if o.startswith("--output=")][0].partition("=")[2]
program = options[options.index("--output=" + output) + 1:]
if mode == "graph":
    subprocess.run(program, check=True)
us, pid = 1000, (1 << 48) | (100 << 24)
with sqlite3.connect(output + ".sqlite") as c:
    c.executescript(
        "CREATE TABLE StringIds(id, value); CREATE TABLE META_DATA_CAPTURE(name, value);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start, end, globalTid, correlationId, nameId);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end, deviceId, correlationId, globalPid, shortName,"
        " graphNodeId);"
        "CREATE TABLE NVTX_EVENTS(start, end, eventType, text, globalTid);")
    c.execute("INSERT INTO META_DATA_CAPTURE VALUES('CUDA_GRAPH_TRACE_OPTIONS:MODE', ?)", (mode,))
    c.executemany("INSERT INTO StringIds VALUES(?, ?)", [(1, "cudaGraphLaunch_v1"), (2, "_inside_kernel")])
    slow = 3 if mode == "node" else 1
    for name in ("grpo.step", "grpo.t_gen"):
        c.execute("INSERT INTO NVTX_EVENTS VALUES(0, ?, 59, ?, ?)", (slow * 1000 * us, name, pid | 7))
    c.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES(?, ?, ?, 5, 1)", (10 * us, 20 * us, pid | 7))
    if mode == "node":
        for i in range(4):
            c.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(?, ?, 0, 5, ?, 2, ?)",
                      ((30 + 10 * i) * us, (38 + 10 * i) * us, pid, i + 1))
"""


def test_both_passes_of_nsys_become_one_report(
    program: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times of the pass in graph mode, kernels of the one in node mode, and how much the latter slowed a step down."""
    (tmp_path / "bin").mkdir()
    nsys = tmp_path / "bin" / "nsys"
    nsys.write_text(NSYS.replace("{python}", sys.executable))
    nsys.chmod(nsys.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(nsys.parent))
    folder = tmp_path / "run"
    assert cli.main(["profile", "--tool", "nsys", "--warm-up", "1", "--steps", "1", *program(folder)]) == 0
    out = capsys.readouterr().out
    assert "1 whole steps of 1 ms" in out and "_inside_kernel" in out
    assert "Recording nodes made a step 3.00 times as long" in out and "4 nodes each" in out
    assert "opaque" not in out and "kernels are those of 1 step recorded in node mode" in out
    names = {path.name for path in (folder / "profile").iterdir()}
    assert {"graph.sqlite", "node.sqlite", "facts.json", "report.html"} == names
