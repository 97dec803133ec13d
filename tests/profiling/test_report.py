"""The report as text, page, JSON, comparison and redacted copy; the command's exit codes; hostile names."""

import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.profiling.__main__ import main, summarise_file
from sparkgrpo.profiling.trace_file import FACTS_FILE

US = 1_000
HOSTILE = "</td><script>alert(1)</script>\x1b[31m\u202e&<img src=x onerror=y>"


class Page(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def said(path: Path | str, *options: str) -> str:
    """What the command prints, from a process of its own: torch is not imported there."""
    done = subprocess.run(
        [sys.executable, "-m", "sparkgrpo.profiling", str(path), *options], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_text_names_phases_and_what_is_opaque(stepped: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    mode, path = stepped
    assert main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "2 whole steps of 1 ms; the phases leave 0.0 % of them unnamed: they add up." in text
    row = next(line for line in text.splitlines() if line.startswith("t_gen "))
    assert ("0 + opaque" in row) == (mode == "Graph")
    assert ("4 replays are opaque: record with --cuda-graph-trace=node" in text) == (mode == "Graph")
    assert ("_nodea_kernel" in text) == (mode == "Node")


def test_json_has_nothing_in_place_of_what_is_not_known(new_export: Callable[..., Any], tmp_path: Path) -> None:
    export = new_export()
    export.call(0, 5 * US, "cudaFree_v3020")
    path = export.done()
    assert main([str(path), "--json", "-o", str(tmp_path / "r.json")]) == 0
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["kernels"] is None and content["num_kernels"] is None and content["phases"] is None
    text = said(path)
    assert "cannot say: the trace has no table of kernels (this is not zero)" in text
    assert "Nothing stands out" not in text


def test_hostile_names_stay_text(new_export: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    export = new_export()
    export.range(0, 100 * US, f"grpo.{HOSTILE}")
    export.launch(20 * US, 30 * US, name=HOSTILE)
    path = export.done()
    assert main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\u202e" not in text and "\\x1b[31m\\u202e" in text
    assert main([str(path), "--html"]) == 0
    page = Page(capsys.readouterr().out)
    assert "script" not in page.tags and "img" not in page.tags
    assert not {name for name in page.attributes if name.startswith("on") or name in ("src", "href")}


def test_hostile_names_in_suggestions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are what a report says first, and name the costliest operations."""
    names = {"user_annotation": ("grpo.step", f"grpo.{HOSTILE}"), "cpu_op": (HOSTILE,)}
    events = [
        {"ph": "X", "cat": cat, "name": name, "ts": 0, "dur": 10_000, "pid": 1, "tid": 1}
        for cat, each in names.items()
        for name in each
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "is 100.0 % of the steps: </td>" in text and "\x1b" not in text and "\u202e" not in text
    assert main([str(path), "--html"]) == 0
    text = capsys.readouterr().out
    assert "script" not in Page(text).tags and "\u202e" not in text and "\x1b" not in text


def test_page_has_no_network_and_both_colour_schemes(
    stepped: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(stepped[1]), "--html"])
    text = capsys.readouterr().out
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sqlite", b"", "got an empty file"),
        ("a.sqlite", b"hello world", "got neither"),
        ("a.nsys-rep", b"hello", "nsys export --type sqlite a.nsys-rep"),
        ("a.json", b"{", "ends or breaks"),
        ("a.sqlite", b"SQLite format 3\0" + b"\1" * 20, "cut short"),
    ],
)
def test_bad_files_end_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_missing_file_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.sqlite")]) == 2 and main([str(tmp_path)]) == 2
    assert "No such file" in capsys.readouterr().err


def test_wrong_usage() -> None:
    for arguments in ([], ["a", "--diff", "b", "c"], ["a", "--fail-over", "x"], ["a", "--json", "--html"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def one_kernel(export: Any, long_us: int, *, mode: str = "Node", other_us: int = 50) -> Path:
    export.facts(mode=mode)
    export.range(0, 1_000 * US, "grpo.step")
    export.range(0, 1_000 * US, "grpo.t_gen")
    export.launch(100 * US, (100 + long_us) * US, name="_slow_kernel")
    export.launch(500 * US, (500 + other_us) * US, name="ncclDevKernel_AllReduce")
    return export.done()


def test_diff_fails_on_a_slower_kernel(new_export: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = one_kernel(new_export("a.sqlite"), 100), one_kernel(new_export("b.sqlite"), 110, other_us=400)
    assert main(["--diff", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "_slow_kernel" in line)
    assert "1.100" in row and "slower" in row
    nccl = next(line for line in text.splitlines() if "nccl" in line)
    assert nccl.startswith("communication") and "slower" not in nccl
    assert main(["--diff", str(a), str(b), "--fail-over", "20%"]) == 0
    assert main(["--diff", str(b), str(a)]) == 0


def test_diff_compares_per_call_and_not_totals(new_export: Callable[..., Any]) -> None:
    """Twice as many launches of the same length are no regression of the kernel."""
    a = one_kernel(new_export("a.sqlite"), 100)
    export = new_export("b.sqlite")
    export.launch(300 * US, 400 * US, name="_slow_kernel")
    assert main(["--diff", str(a), str(one_kernel(export, 100))]) == 0


@pytest.mark.parametrize(
    ("facts_a", "facts_b", "message"),
    [
        ({"model": "a"}, {"model": "b"}, "model: a against b"),
        ({"num_tokens": 5}, {"num_tokens": 6}, "num_tokens: 5 against 6"),
        (
            {"probe_before": {"read_gbps": 200.0}},
            {"probe_before": {"read_gbps": 100.0}},
            "read 200 and 100 GB/s, 50 % apart",
        ),
        ({"probe_before": {"read_gbps": 200.0}}, {"probe_before": {"read_gbps": 190.0}}, None),
    ],
)
def test_diff_refuses_what_cannot_be_compared(
    tmp_path: Path, new_export: Callable[..., Any], capsys: pytest.CaptureFixture[str], facts_a: Any, facts_b: Any,
    message: str | None,
) -> None:  # fmt: skip
    paths = []
    for name, facts in (("a", facts_a), ("b", facts_b)):
        (tmp_path / name).mkdir()
        paths.append(one_kernel(new_export(f"{name}/t.sqlite"), 100))
        (tmp_path / name / FACTS_FILE).write_text(json.dumps({"recorder": "sparkgrpo", **facts}))
    assert main(["--diff", *map(str, paths)]) == (0 if message is None else 3)
    assert message is None or message in capsys.readouterr().err


def test_diff_refuses_another_graph_mode(new_export: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = one_kernel(new_export("a.sqlite"), 100), one_kernel(new_export("b.sqlite"), 100, mode="Graph")
    assert main(["--diff", str(a), str(b)]) == 3
    assert "graph mode: node against graph" in capsys.readouterr().err


def test_a_stranger_facts_file_is_left_alone(new_export: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / FACTS_FILE).write_text('{"rates": "mine"}')
    assert summarise_file(one_kernel(new_export(), 100)).facts == {}


def test_redacted_export_keeps_the_numbers_and_nothing_private(new_export: Callable[..., Any], tmp_path: Path) -> None:
    export = new_export()
    secret = "hunter2-of-alice"
    export.row("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'TOKEN="{secret}"')
    export.row("META_DATA_CAPTURE", name="DEVICE_DISPLAY_NAME", value=secret)
    export.row("PROCESSES", globalPid=1, pid=2, name=secret)
    export.text(f"a process called {secret}")
    export.range(0, 50 * US, f"load /home/{secret}/model.bin")
    path = one_kernel(export, 100)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE OSRT_FILES(filePath)")
        connection.execute("INSERT INTO OSRT_FILES VALUES(?)", (f"/home/{secret}",))
    target = tmp_path / "clean.sqlite"
    assert main([str(path), "--redact", str(target)]) == 0
    assert secret.encode() not in target.read_bytes()
    before, after = summarise_file(path), summarise_file(target)
    for field in ("phases", "kernels", "devices", "graph_mode", "unattributed", "num_processes"):
        assert getattr(before, field) == getattr(after, field)
    assert main([str(path), "--redact", str(target)]) == 2  # never over an existing file
    assert main([str(path), "--redact", str(path)]) == 2 and path.stat().st_size > 0


def test_redacted_chrome_trace(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.5, "dur": 2.25, "pid": 1, "tid": 1}
    stack = {**event, "cat": "python_function", "name": "/home/alice/train.py(3): f"}
    secret = {"args": {"correlation": 4, "Input Dims": "alice", "device": 0}}
    path, target = tmp_path / "t.json", tmp_path / "clean.json"
    exact = "1695835535123456.789"
    text = json.dumps({"hostname": "alice-pc", "traceEvents": [{**event, **secret}, stack]})
    path.write_text(text.replace('"ts": 1.5', f'"ts": {exact}'))
    assert main([str(path), "--redact", str(target)]) == 0
    assert f'"ts":{exact},' in target.read_text()  # a bare number, to its last digit
    assert b"alice" not in target.read_bytes()
    assert summarise_file(target).operations == summarise_file(path).operations


@pytest.mark.parametrize("content", [b"{", b'{"a": 1}', b"\x1f\x8b\x08broken", b"SQLite format 3\0" + b"\1" * 100])
def test_what_cannot_be_redacted_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path, target = tmp_path / "t.bin", tmp_path / "clean"
    path.write_bytes(content)
    assert main([str(path), "--redact", str(target)]) == 2
    assert capsys.readouterr().err.startswith("sparkgrpo.profiling: ") and not target.exists()


def test_damaged_bytes_never_raise(stepped: tuple[str, Path], tmp_path: Path) -> None:
    """Whatever is broken: a report or one sentence."""
    rng, whole, path = random.Random(0), stepped[1].read_bytes(), tmp_path / "damaged.sqlite"
    codes = set()
    for _ in range(40):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 10, 100))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        codes.add(main([str(path), "-o", str(tmp_path / "out")]))
        (tmp_path / "clean").unlink(missing_ok=True)
        codes.add(main([str(path), "--redact", str(tmp_path / "clean")]))
    assert codes == {0, 2}


def test_the_reader_needs_no_torch(stepped: tuple[str, Path]) -> None:
    program = (
        "import sys; from sparkgrpo.profiling.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(stepped[1])], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("False")
