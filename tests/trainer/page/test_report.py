"""The page of a run: what stands in it, that nothing in it can act, its size and time, and runs that have little."""

import html.parser
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.page.chart import Chart, Series, chart_html, round_ticks, thinned
from sparkgrpo.trainer.page.markup import four_digits, json_script
from sparkgrpo.trainer.report import report_html
from sparkgrpo.trainer.run_reader import read_record


class Elements(html.parser.HTMLParser):
    """Tags with their attributes, and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def test_hostile_text_is_inert(hostile_run: Path) -> None:
    page = report_html(read_record(hostile_run))
    found = Elements(page)
    names = [tag for tag, _ in found.tags]
    assert names.count("script") == 2 and "img" not in names and "iframe" not in names
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert not any(
        value and re.match(r"\s*(https?:|//|javascript:|data:)", value) for _, a in found.tags for value in a.values()
    )
    policy = next(a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "unsafe-eval" not in policy
    assert not set(page) & set("\x1b\x00\u202e\u2028\ud800")
    data = json.loads(found.scripts[0])
    assert any("</script>" in key for key in data["columns"])  # it is there, as data
    assert len(page) < 400_000


def test_charts_values_and_verdicts(hostile_run: Path) -> None:
    page = report_html(read_record(hostile_run))
    assert page.count('<figure class="chart') == 14
    assert "truncation" in page and 'class="mark error"' in page
    assert "Off: one update a batch: the ratio is exactly 1." in page
    assert re.search(r"<h3><span class=\"level\">error</span>truncation", page)


def test_a_thousand_steps_stay_small_and_quick(long_run: Path) -> None:
    record = read_record(long_run)
    times = []
    for _ in range(3):
        begin = time.process_time()
        page = report_html(record)
        times.append(time.process_time() - begin)
    assert min(times) < 1.0  # CPU seconds: a busy machine must not turn this red
    assert len(page.encode()) < 1_000_000
    data = json.loads(Elements(page).scripts[0])
    assert len(data["steps"]) >= 1000 and len(data["columns"]) >= 35
    assert "groups are shown, evenly over the run" in page


@pytest.mark.parametrize(
    "log", [[], [{"v": 1, "step": 1}], [{"v": 1, "step": 1, "frac_right": 0.5}, {"v": 1, "step": 2}]]
)
def test_runs_that_have_little(make_run_folder: Callable[..., Path], log: list[dict[str, object]]) -> None:
    page = report_html(read_record(make_run_folder(metrics=log)))
    assert page.count("<figure") == 14
    written = page[: page.rindex("<script>")].lower()  # before the page's own script
    assert not re.search(r"\bnan\b|infinity", written)


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_range_of_one_point(make_run_folder: Callable[..., Path], at: int) -> None:
    """An evaluation and no step yet: the run is in its first step, or failed there; or one step and no evaluation."""
    evals = [{"v": 1, "step": at, "accuracy": 0.25, "accuracy_se": 0.1, "num_problems": 8}]
    page = report_html(read_record(make_run_folder("evaluated", evals=evals)))
    assert page.count("<figure") == 14 and "25.0%" in page.replace(" %", "%")
    assert f'<div class="xs"><span style="left:0.0%">{at}</span></div>' in page
    series = Series(key="a", label="a", x=np.array([float(at)]), y=np.array([0.0]))
    for is_log in (False, True):
        text = chart_html(Chart(title="t", unit="u", series=[series], is_log=is_log), (at, at))
        assert "nan" not in text and 'd="M0.0 300.0h0"' in text
    assert round_ticks(at, at) == [at]


def test_numbers_of_a_later_version_and_of_any_size(make_run_folder: Callable[..., Path]) -> None:
    rows = [
        {"v": 1, "step": s, "grad_norm": 10.0 ** (s * 10), "logprob_gap_mean": 10.0**-s, "new_key": s}
        for s in range(1, 30)
    ]
    page = report_html(read_record(make_run_folder(metrics=rows)))
    assert "new_key" in page and "not in the schema of this version" in page


def test_the_command_writes_in_one_piece(
    make_run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run_folder(metrics=[{"v": 1, "step": 1}])
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert main(["report", str(folder), "-o", str(tmp_path / "x.html")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.html"]
    assert main(["report", str(folder), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot write (No such file or directory)" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main(["report", str(folder), "-o", str(tmp_path / "folder")]) == 2
    assert "cannot write (Is a directory)" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run", "x.html"]


def test_thinning_keeps_spikes_ends_and_order() -> None:
    x = np.arange(10_000.0)
    y = np.zeros(10_000)
    y[[0, 7777, 9999]] = (1.0, 9.0, 2.0)
    thin_x, thin_y = thinned(x, y)
    assert len(thin_x) <= 502 and (np.diff(thin_x) > 0).all()
    assert {0.0, 7777.0, 9999.0} <= set(thin_x.tolist()) and thin_y.max() == 9.0
    short_x, _ = thinned(np.array([1.0, 2.0, 3.0]), np.array([1.0, np.nan, 2.0]))
    assert short_x.tolist() == [1.0, 3.0]


def test_numbers_and_data() -> None:
    assert [four_digits(v) for v in (1 / 3, 1234567.0, 0.0, float("nan"), None, 2.0)] == [
        0.3333,
        1235000,
        0,
        None,
        None,
        2,
    ]
    assert json_script("x", {"<&>\u2028": 1}).count("<") == 2
    flat = Series(key="a", label="a", x=np.array([1.0, 2.0]), y=np.array([3.0, 3.0]))
    text = chart_html(Chart(title="t", unit="u", series=[flat]), (1.0, 2.0))
    assert "nan" not in text and "M0.0 0.0L1000.0 0.0" in text
    assert "Off: the run does not log it." in chart_html(Chart(title="t", unit="u", series=[]), (0.0, 1.0))
