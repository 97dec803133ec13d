"""Reading Chrome traces: exact times, autograd's thread, operations of the host, and files that are not whole."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.profiling.chrome_trace import nanoseconds, read_chrome_trace
from sparkgrpo.profiling.summarise import summarise
from sparkgrpo.profiling.timeline import TraceError

BASE = 1_700_000_000_000_000
"""Microseconds since 1970: a 64-bit float has no nanoseconds left here."""


def event(cat: str, name: str, start: str, dur: str, *, tid: int = 1, pid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "pid": pid, "tid": tid, "args": args}


def write(path: Path, events: list[dict[str, Any]], **facts: Any) -> Path:
    """JSON with the times as bare decimals, as torch writes them."""
    text = json.dumps({"schemaVersion": 1, **facts, "traceEvents": events})
    for item in events:
        for key in ("ts", "dur"):
            if isinstance(item.get(key), str):
                text = text.replace(f'"{key}": "{item[key]}"', f'"{key}": {item[key]}')
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def gpu_events() -> list[dict[str, Any]]:
    """Two phases; the second one's kernel is launched by another thread, through the driver."""
    return [
        event("user_annotation", "grpo.step", f"{BASE}.000", "100.000"),
        event("user_annotation", "grpo.t_gen", f"{BASE}.000", "50.000"),
        event("user_annotation", "grpo.t_train", f"{BASE + 50}.000", "50.000"),
        event("gpu_user_annotation", "grpo.t_gen", f"{BASE}.000", "90.000", tid=7, pid=0),
        event("cuda_runtime", "cudaLaunchKernel", f"{BASE + 1}.000", "2.000", correlation=5),
        event("kernel", "_ours_kernel", f"{BASE + 4}.001", "10.002", tid=7, pid=0, correlation=5, device=0),
        event("cuda_driver", "cuLaunchKernel", f"{BASE + 60}.000", "2.000", tid=2, correlation=6),
        event("kernel", "triton_poi_fused", f"{BASE + 63}.500", "20.250", tid=7, pid=0, correlation=6, device=0),
    ]


def cpu_events() -> list[dict[str, Any]]:
    """t_gen: linear (30 us) that calls mm (20), then add (10) and 10 us of Python; t_train: mul on a second thread."""
    return [
        event("user_annotation", "grpo.step", f"{BASE}", "100"),
        event("user_annotation", "grpo.t_gen", f"{BASE}", "50"),
        event("user_annotation", "grpo.t_train", f"{BASE + 50}", "50"),
        event("cpu_op", "aten::linear", f"{BASE}", "30"),
        event("cpu_op", "aten::mm", f"{BASE + 5}", "20"),
        event("cpu_op", "aten::add", f"{BASE + 30}", "10"),
        event("cpu_op", "aten::mul", f"{BASE + 60}", "30", tid=2),
    ]


def summary_of(path: Path) -> Any:
    return summarise(read_chrome_trace(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (7, 7000),
        ("1695835535123456.789", 1695835535123456789),
        ("0.1", 100),
        ("12.3456", 12346),
        ("1.5e3", 1_500_000),
        ("-2.001", -2001),
    ],
)
def test_times_are_exact(text: object, expected: int) -> None:
    assert nanoseconds(text) == expected


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_phases_on_a_gpu(tmp_path: Path, name: str) -> None:
    summary = summary_of(write(tmp_path / name, gpu_events()))
    assert [(p.name, p.num_kernels, p.kernel_sum_ns) for p in summary.phases] == [
        ("t_gen", 1, 10_002),
        ("t_train", 1, 20_250),
    ]
    assert summary.devices[0].kernel_busy_ns == 30_252 and summary.num_steps == 1
    assert summary.launch_calls == {"cudaLaunchKernel": 1, "cuLaunchKernel": 1}
    assert {k.name: k.owner for k in summary.kernels} == {"_ours_kernel": "ours", "triton_poi_fused": "compiled"}


def test_a_list_of_events_alone_will_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{**e, "ts": float(e["ts"]), "dur": float(e["dur"])} for e in cpu_events()]))
    assert summary_of(path).num_steps == 1


def test_operations_of_a_cpu_by_self_time(tmp_path: Path) -> None:
    summary = summary_of(write(tmp_path / "trace.json", cpu_events()))
    assert summary.devices is None and summary.kernels is None
    gen, train = summary.phases
    assert [(op.name, op.num_calls, op.self_ns) for op in gen.operations] == [
        ("aten::mm", 1, 20_000),
        ("aten::linear", 1, 10_000),
        ("aten::add", 1, 10_000),
    ]
    assert gen.operations_ns == 40_000 and gen.wall_ns == 50_000
    assert [(op.name, op.self_ns) for op in train.operations] == [("aten::mul", 30_000)]
    assert "t_gen is 50.0 % of the steps: aten::mm 40.0 %" in " ".join(summary.suggestions)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"traceEvents": [{"ph": "X", "ts": 1', "expected a whole JSON trace, got text that ends or breaks"),
        (b'{"hello": 1}', 'expected a list "traceEvents"'),
        (b'{"traceEvents": []}', "the capture is empty"),
        (b'{"traceEvents": [3, null, {"ph": "M"}]}', "the capture is empty"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "soon", "dur": 1}]}',
            "expected times and ids as numbers",
        ),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "dur": 1}]}', "expected times and ids as numbers"),
        (b"\x1f\x8b\x08\x00broken", "expected a whole gzip file"),
        (b'{"a": "\xff\xfe"}', "no UTF-8"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_chrome_trace(path)


def test_a_gzip_that_was_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json.gz", gpu_events())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="cut short"):
        read_chrome_trace(path)
