"""README and docs say what the result files say; plots and tables from results that have just been made."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.draw_performance import DEVICE, documents, plots_of
from benchmarks.performance_tables import SOURCES, gpu_part, numbers_part, parts_of, with_parts
from benchmarks.record import RESULTS
from benchmarks.scaling import exponent
from benchmarks.svg_chart import Line, line_chart, log_ticks, nice_ticks
from benchmarks.table_rows import seconds, times

ROOT = Path(__file__).resolve().parents[2]
HEAD = {
    "device": "box",
    "hardware": {"device": "cpu", "cpu": "Z80", "cpu_cores": 1},
    "versions": {"torch": "9.9"},
    "commit": {"commit": "0123456789", "dirty": True, "diff_sha256": "x"},
}


def keep(folder: Path, name: str, content: dict[str, object], device: str = "box") -> None:
    (folder / device).mkdir(parents=True, exist_ok=True)
    (folder / device / f"{name}.json").write_text(json.dumps({"name": name, **HEAD, **content}))


@pytest.mark.parametrize("path", documents(ROOT, RESULTS, DEVICE), ids=str)
def test_documents_and_plots_equal_the_result_files(path: Path) -> None:
    """Mend with python -m benchmarks.draw_performance."""
    assert (ROOT / path).read_text(encoding="utf-8") == documents(ROOT, RESULTS, DEVICE)[path]


def test_no_plot_is_left_of_a_file_that_is_gone() -> None:
    kept = {path.name for path in (ROOT / "docs" / "performance").glob("*.svg")}
    assert kept == set(plots_of(RESULTS, DEVICE))


def test_a_figure_comes_from_its_file(tmp_path: Path) -> None:
    keep(tmp_path, "default_run", {"runs": [{"eval_before": 0.25, "eval_after": a, "wall_s": 61} for a in (0.5, 0.75)]})
    text = numbers_part(tmp_path, "box")
    assert "25 % to 62 % (2 seeds: 50 to 75 %, standard deviation 17.7)" in text and "61 to 61 s" in text
    assert "0123456+" in text and "1 cores of Z80, torch 9.9" in text
    for source in SOURCES[1:]:
        assert source.what in text.rpartition("Not measured here yet")[2]


def test_a_device_without_results_says_so(tmp_path: Path) -> None:
    assert numbers_part(tmp_path, "moon") == "Nothing has been measured on moon yet."
    assert all("yet" in text for text in parts_of(tmp_path, "moon").values())


def test_update_rows_are_ratios_of_processor_time(tmp_path: Path) -> None:
    def side(cpu_s: float) -> dict[str, object]:
        return {"wall_s": [9.0, 9.0], "cpu_s": [cpu_s, cpu_s], "peak_bytes": 2**30}

    sides = {"ours": side(2.0), "ours, half of the groups dead and beta 0": side(0.5), "TRL": side(7.0)}
    keep(tmp_path, "update_against_trl", {"conditions": {"model": "m"}, "sides": sides})
    text = numbers_part(tmp_path, "box")
    assert (
        "| 2 s (n 2), 1,024 MiB | 7 s (n 2), 1,024 MiB | **3.5x** |" in text and "| 0.5 s | ours 2 s | **4x** |" in text
    )


def test_gpu_figures_appear_with_the_first_gpu(tmp_path: Path) -> None:
    finding = {
        "group": "step",
        "item": "GRPO step",
        "ok": True,
        "text": "1.5 s",
        "figures": {"t_step": 1.5},
        "detail": "",
    }
    keep(tmp_path, "gpu_check", {"findings": [finding]}, device="cpu-here")
    assert "No GPU figure" in gpu_part(tmp_path)
    wrong = {**finding, "group": "head", "item": "bits", "ok": False}
    keep(tmp_path, "gpu_check", {"findings": [finding, wrong]}, device="nvidia-gb10")
    text = gpu_part(tmp_path)
    assert "2 checks, wrong: head/bits" in text and "- GRPO step: 1.5 s" in text


def test_parts_are_replaced_and_the_rest_stays() -> None:
    text = "a\n<!-- x: by me -->\nold\n<!-- /x -->\nb\n<!-- x: by me -->\n<!-- /x -->\n"
    once = with_parts(text, {"x": "new"})
    assert once == "a\n<!-- x: by me -->\nnew\n<!-- /x -->\nb\n<!-- x: by me -->\nnew\n<!-- /x -->\n"
    assert with_parts(once, {"x": "new"}) == once
    with pytest.raises(ValueError, match="expected a generated part of y, got 'x'"):
        with_parts(text, {"y": ""})


def test_numbers_are_short() -> None:
    assert [seconds(s) for s in (13.77, 0.2851, 0.00291)] == ["13.8 s", "0.285 s", "2.91 ms"]
    assert [times(x) for x in (3.646, 12.34, 250.4)] == ["**3.65x**", "**12.3x**", "**250x**"]


def test_every_plot_is_xml_and_holds_its_figures(tmp_path: Path) -> None:
    side = {"split_s": {"t_gen": 1.0, "t_ref": 0.5, "t_train": 2.0, "t_opt": 0.1, "t_step": 4.0}, "median_s": 4.0}
    conditions = {"batch": "2 x 2, beta 0", "model": "<m&m>"}
    keep(tmp_path, "versus_trl_step_embedded", {"conditions": conditions, "sides": {"ours/fp32": side}, "ratios": {}})
    points = [{"step": s, "seconds": s, "tokens": 1000 * s, "accuracy": s / 10} for s in range(4)]
    summary = {
        "target_accuracy": 0.3,
        "seconds_ratio": None,
        "at_equal_seconds": {"budget": 3, "ours": 0.3, "trl": 0.3},
        "at_equal_tokens": {"budget": 3000, "ours": 0.3, "trl": 0.25},
    }
    summary |= {"ours_seconds_to_target": 3.0, "trl_seconds_to_target": None}
    keep(tmp_path, "versus_trl_learn_embedded", {"curves": {"ours": points, "trl": points}, "summary": summary})
    axis = {"sizes": [8, 16, 32], "why": "", "phases": {}}
    phase = {"median_s": [1.0, 2.0, 4.0], "exponent": 1.0, "is_within": True, "expected_at_most": 1.1}
    keep(tmp_path, "scaling", {"axes": {"completions": {**axis, "phases": {"t_gen": phase, "t_update": phase}}}})
    plots = plots_of(tmp_path, "box")
    expected = {"step_embedded", "learn_seconds", "learn_tokens", "scaling_generation", "scaling_update"}
    assert {name.removesuffix(".svg") for name in plots} == expected
    for text in plots.values():
        ElementTree.fromstring(text)
    assert ">4 s</text>" in plots["step_embedded.svg"] and "completions 1.00" in plots["scaling_update.svg"]
    numbers = numbers_part(tmp_path, "box")
    assert "not reached" in numbers and "| 30.0 % | TRL 25.0 % |" in numbers
    assert "seconds of" in numbers and "| **1x** |" in numbers


def test_a_gain_of_precision_is_not_shown_as_ours(tmp_path: Path) -> None:
    side, pairs = (
        {"median_s": 4.0, "split_s": {}},
        ("fp32 over ours/fp32", "default over ours/bf16", "fp32 over ours/bf16"),
    )
    content = {
        "conditions": {"batch": "2 x 2", "model": "m"},
        "sides": dict.fromkeys(("ours/fp32", "ours/bf16", "trl/fp32", "trl/default"), side),
        "ratios": {f"trl/{pair}": {"median": 2.0} for pair in pairs},
    }
    keep(tmp_path, "versus_trl_step_embedded", content)
    rows = [line for line in numbers_part(tmp_path, "box").splitlines() if "whole GRPO step" in line]
    assert len(rows) == 2 and "ours fp32, TRL fp32" in rows[0] and "ours bf16, TRL bf16 autocast" in rows[1]


def test_exponent_is_the_slope_of_the_upper_half() -> None:
    assert exponent([1, 2, 4, 8, 16, 32], [9, 9, 9, 16, 64, 256]) == pytest.approx(2)
    assert exponent([1, 2], [3, 6]) == pytest.approx(1)


def test_ticks() -> None:
    assert nice_ticks(1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and nice_ticks(37) == [0, 10, 20, 30]
    assert log_ticks(1, 1000) == [1, 10, 100, 1000] and log_ticks(1, 8) == [1, 2, 4, 8]


def test_a_chart_of_one_point_can_be_drawn() -> None:
    ElementTree.fromstring(line_chart("t", [Line(label="a<b", points=[(0, 0)])], x_label="x"))
