"""Golden values of public traces, computed by an independent program. The files are no part of the project."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.profiling.report import sections, text_report
from sparkgrpo.profiling.report_page import html_page
from sparkgrpo.profiling.summarise import summarise
from sparkgrpo.profiling.trace_file import read_trace

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "nsys"
NAMES = (
    "nsysai_mfu_2gpu_before.sqlite", "nsysai_h100_2gpu_1s.sqlite", "nsysai_mock.sqlite", "nsysai_healthy_1pct.sqlite",
    "weatherbench2_report1.sqlite", "hta_alexnet.json.gz", "hta_resnet_ns.json.gz", "hta_triton.json.gz",
)  # fmt: skip
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the public traces are not beside this checkout")


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Any]:
    expected = json.loads((FOLDER / "expected.json").read_text())[request.param]
    timeline, _ = read_trace(FOLDER / request.param)
    return expected, summarise(timeline)


def test_devices(case: tuple[dict[str, Any], Any]) -> None:
    expected, summary = case
    if "devices" not in expected:
        assert summary.kernels is None and summary.num_kernels_with_call is None
        return
    for device in summary.devices:
        wanted = expected["devices"][str(device.number)]
        found = {
            "num_kernels": device.num_kernels,
            "kernel_sum_ns": device.kernel_sum_ns,
            "kernel_union_ns": device.kernel_busy_ns,
            "kernel_window_ns": device.kernel_window_ns,
            "frac_kernel_busy": round(device.frac_kernel_busy, 4),
            "activity_union_ns": device.activity_busy_ns,
            "activity_window_ns": device.activity_window_ns,
            "frac_activity_busy": round(device.frac_activity_busy, 4),
        }
        assert found == {key: wanted[key] for key in found}
    assert {str(device.number) for device in summary.devices} == set(expected["devices"])


def test_joins_and_attribution(case: tuple[dict[str, Any], Any]) -> None:
    expected, summary = case
    if "num_kernels" not in expected:
        return
    assert summary.num_kernels == expected["num_kernels"]
    without = summary.num_kernels - summary.num_kernels_with_call
    assert without == expected["num_kernels_without_launch"]
    assert summary.launch_calls == expected["launch_api"]
    if "unattributed_kernels" in expected:
        assert summary.unattributed.num_kernels == expected["unattributed_kernels"]
    else:
        assert summary.unattributed is None and summary.ranges is None
    if "frac_kernel_time_unattributed" in expected:
        assert round(summary.unattributed.frac_of_time, 4) == expected["frac_kernel_time_unattributed"]


def test_kernels_and_ranges(case: tuple[dict[str, Any], Any]) -> None:
    expected, summary = case
    tops = expected.get("kernels_top", [])
    kernels = (summary.kernels or ())[: len(tops)]
    assert [(k.num_calls, k.total_ns) for k in kernels] == [(top["num_calls"], top["total_ns"]) for top in tops]
    assert all(k.name.startswith(top["name"].removesuffix("...")) for k, top in zip(kernels, tops, strict=True))
    if "num_kernel_names" in expected:
        assert len(summary.kernels) == expected["num_kernel_names"]
    ranges = expected.get("innermost_ranges_top", expected.get("innermost_annotations", []))
    found = [tuple((r.name, r.num_kernels, r.sum_ns)) for r in (summary.ranges or ())[: len(ranges)]]
    assert found == [tuple(item.values()) for item in ranges]
    if "num_innermost_range_names" in expected:
        assert len(summary.ranges) == expected["num_innermost_range_names"]
    kinds = {"1": "host to device", "2": "device to host", "8": "device to device"}
    for kind, copies in expected.get("memcpy_by_kind", {}).items():
        assert summary.copies[kinds[kind]] == (copies["num"], copies["bytes"], copies["sum_ns"])


def test_graph_mode(case: tuple[dict[str, Any], Any]) -> None:
    expected, summary = case
    if "graph_trace_mode" in expected:
        assert (summary.graph_mode or "").title() == (expected["graph_trace_mode"] or "")


def test_phases_are_looked_for_in_the_whole_process() -> None:
    """Of 2,810 kernels of the backward pass the launching thread alone would find 30."""
    expected = json.loads((FOLDER / "expected.json").read_text())["hta_resnet_ns.json.gz"]["phases_by_process"]
    summary: Any = summarise(read_trace(FOLDER / "hta_resnet_ns.json.gz")[0], prefix="## ")
    found = {p.name: {"num_kernels": p.num_kernels, "kernel_sum_ns": p.kernel_sum_ns} for p in summary.phases}
    assert found == {name: values for name, values in expected.items() if name != "outside"}
    assert summary.unattributed.num_kernels == 0


@pytest.mark.parametrize("name", NAMES)
def test_reports_print_nothing_private(name: str) -> None:
    """Host and user names, command lines, environment and paths of the recording machine."""
    summary = summarise(read_trace(FOLDER / name)[0])
    text = text_report(summary) + html_page("x", sections(summary))
    for secret in ("DESKTOP-", "rich-wsl", "/home/", "/usr/", "VSCODE", "AUTH_TOKEN", "python3", "ENVIRONMENT"):
        assert secret not in text
