"""Comparisons: differences first, McNemar by hand, costs to an accuracy, warnings, and the page."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.compare import compare, held_values, mcnemar_p, x_axis
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.run_reader import RunRecord, read_record

MakeRunFolder = Callable[..., Path]


def folder(
    make: MakeRunFolder, name: str, accuracies: list[float], bits: str = "f0", *, t_step: float = 2.0, **run: object
) -> Path:
    config = {"lr": 1e-3, "seed": 0, "run_dir": name, **run.pop("config", {})}  # type: ignore[dict-item]
    steps = [
        {"v": 1, "step": s, "t_step": t_step, "num_tokens_total": 100 * s, "tok_per_s": 50.0, "frac_right": 0.1 * s}
        for s in range(1, 5)
    ]
    evals = [
        {"v": 1, "step": 2 * i, "accuracy": a, "accuracy_se": 0.1, "num_problems": 8, "right_bits": bits}
        for i, a in enumerate(accuracies)
    ]
    hardware = {"device": "cpu", "cpu": "X", "cpu_cores": 2}
    facts = {"config": config, "hardware": hardware, "eval_sha256": "e", **run}
    return make(name, run=facts, metrics=steps, evals=evals)


def records(*folders: Path) -> list[RunRecord]:
    return [read_record(path) for path in folders]


@pytest.mark.parametrize(
    ("first", "second", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 2 / 32), (1, 9, 2 * 11 / 1024), (0, 1, 1.0)]
)
def test_mcnemar(first: int, second: int, p: float) -> None:
    assert mcnemar_p(first, second) == pytest.approx(p) == mcnemar_p(second, first)


def test_differences_accuracies_and_costs(make_run_folder: MakeRunFolder) -> None:
    a = folder(make_run_folder, "a", [0.2, 0.5, 0.7], "f1")
    b = folder(make_run_folder, "b", [0.2, 0.3, 0.5], "0f", config={"lr": 2e-3, "new_option": 1})
    found = compare(records(a, b))
    assert found.differences == {"lr": [1e-3, 2e-3]}
    assert found.warnings == [] and found.has_equal_speed_terms and found.common_accuracy == 0.5
    assert [(s.accuracy_after, s.seconds, s.seconds_to, s.tokens_to) for s in found.sides] == [
        (0.7, 8.0, 4.0, 200),
        (0.5, 8.0, 8.0, 400),
    ]
    (pair,) = found.pairs  # f1 = 11110001, 0f = 00001111
    assert (pair.num_first_only, pair.num_second_only) == (4, 3) and pair.p_value == 1.0


def test_what_does_not_compare_is_said(make_run_folder: MakeRunFolder) -> None:
    a = folder(make_run_folder, "a", [0.2])
    other = folder(
        make_run_folder, "b", [0.2], eval_sha256="other", status="failed", hardware={"device": "cuda", "name": "GB10"}
    )
    found = compare(records(a, other))
    text = "\n".join(found.warnings)
    assert "different machines" in text and "held-out problems differ" in text and "not finished: b" in text
    assert not found.has_equal_speed_terms and found.pairs == []
    fast = folder(make_run_folder, "c", [0.2], probe_before={"read_gbps": 200.0})
    slow = folder(make_run_folder, "d", [0.2], probe_before={"read_gbps": 150.0})
    assert "the probe read_gbps differs by 33 %" in compare(records(fast, slow)).warnings[0]


def test_number_of_runs(make_run_folder: MakeRunFolder) -> None:
    one = records(folder(make_run_folder, "a", [0.2]))
    for count in (1, 9):
        with pytest.raises(UserError, match=f"expected 2 to 8 runs to compare, got {count}"):
            compare(one * count)
    assert [side.label for side in compare(one * 2).sides] == ["a (1)", "a (2)"]


def test_axes_and_held_values(make_run_folder: MakeRunFolder) -> None:
    (record,) = records(folder(make_run_folder, "a", [0.2]))
    assert x_axis(record, "seconds") == {0: 0.0, 1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0}
    assert x_axis(record, "tokens")[3] == 300 and x_axis(record, "step")[4] == 4
    assert held_values([1.0, 3.0], [5.0, 7.0], np.array([0.0, 1.0, 2.0, 3.0, 4.0])) == [None, 5.0, 5.0, 7.0, None]
    assert held_values([], [], np.array([0.0])) == [None]


@pytest.mark.parametrize("axis", ["step", "tokens", "seconds"])
def test_command_and_page(
    make_run_folder: MakeRunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], axis: str
) -> None:
    hostile = "</script><b>\x1b[2J"
    a = folder(make_run_folder, "a", [0.2, 0.5], config={"task": hostile})
    b = folder(make_run_folder, "b", [0.2, 0.4], config={"task": "t"}, run_id=hostile)
    page = tmp_path / "c.html"
    assert main(["compare", str(a), str(b), "-o", str(page), "--over", axis]) == 0
    output = capsys.readouterr().out
    assert "differs: task: </script><b>\\x1b[2J, t" in output and "exact McNemar p 1" in output
    assert output.replace("\n", "").isprintable()
    text = page.read_text()
    assert text.count("<script") == 2 and "<b>\\x1b" not in text and text.count("<figure") == 13


def test_empty_runs_do_not_raise(make_run_folder: MakeRunFolder, tmp_path: Path) -> None:
    empty = [str(make_run_folder(name)) for name in ("a", "b")]
    assert main(["compare", *empty, "-o", str(tmp_path / "c.html")]) == 0
