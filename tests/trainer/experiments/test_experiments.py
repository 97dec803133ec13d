"""Experiments: those without training run whole; those with it on made-up runs; the finding of runs on a real one."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.diagnosis.simulated_runs import simulated_run
from sparkgrpo.trainer.experiments import diseases, theory, training_runs
from sparkgrpo.trainer.experiments.no_baseline import noise_ratios
from sparkgrpo.trainer.experiments.outcome import (
    AGREES,
    DISAGREES,
    TOO_SHORT,
    Bench,
    Check,
    Outcome,
    expect_larger,
    standard_error,
)
from sparkgrpo.trainer.experiments.plot import Line, line_plot
from sparkgrpo.trainer.experiments.toy import toy_curves
from sparkgrpo.trainer.run_reader import RunRecord


def bench(folder: Path, num_seeds: int = 3) -> Bench:
    return Bench(folder=folder, num_seeds=num_seeds, num_threads=1, say=lambda text: None)


def test_advantage_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "advantage", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "+3.8730" in output and "outcome: agrees" in output
    content = json.loads((tmp_path / "advantage" / "outcome.json").read_text())
    assert content["verdict"] == "agrees" and len(content["checks"]) == 3
    assert (tmp_path / "advantage" / "outcome.html").read_text().count("<script") == 1


def test_dead_groups_agree_and_a_wrong_formula_would_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "NUM_GROUPS", 20_000)
    assert theory.dead_groups(bench(tmp_path)).verdict == AGREES
    monkeypatch.setattr(theory, "dead_share", lambda p, G: p ** (G - 1) + (1 - p) ** (G - 1))
    assert theory.dead_groups(bench(tmp_path)).verdict == DISAGREES


def test_the_toy_learns_and_seeds_do_not_depend_on_each_other() -> None:
    curves = toy_curves(6, "group", lambda right: right)
    assert curves.shape == (81, 6) and curves[0] == pytest.approx(0.2) and (curves[-1] > 0.93).all()
    shifted = toy_curves(6, "group", lambda right: right + 5)
    np.testing.assert_allclose(shifted, curves, atol=1e-3)
    assert toy_curves(6, "none", lambda right: right + 5)[-1].std() > 5 * curves[-1].std()


def test_noise_ratios_against_draws() -> None:
    rng = np.random.default_rng(0)
    right = rng.random((200_000, 16)) < 0.2
    share = right.mean(1)
    centred = share * (1 - share) * 16 / 15
    raw, shifted = share * 0.8, 6 * share * 0.8 - 5 * (1 - share) * 0.2
    assert centred.mean() == pytest.approx(raw.mean(), rel=0.02) == pytest.approx(shifted.mean(), rel=0.05)
    expected = raw.var() / centred.var(), shifted.var() / centred.var()
    assert noise_ratios(0.2, 16) == pytest.approx(expected, rel=0.03)


def test_directions_need_two_standard_errors() -> None:
    assert expect_larger("", [0.7, 0.71, 0.69], [0.5, 0.52, 0.48]).verdict == AGREES
    assert expect_larger("", [0.5, 0.52, 0.48], [0.7, 0.71, 0.69]).verdict == DISAGREES
    assert expect_larger("", [0.7, 0.71, 0.69], [0.68, 0.7, 0.72]).verdict == TOO_SHORT
    assert expect_larger("", [0.7], [0.5]).verdict == TOO_SHORT
    assert expect_larger("", [0.7], [0.5], least_se=0.03).verdict == AGREES
    assert standard_error([1.0, 1.0], 0.2) == pytest.approx(0.2 / math.sqrt(2))


def test_verdict_of_several_checks() -> None:
    def outcome(*verdicts: str) -> str:
        return Outcome(name="x", checks=[Check(expected="", found="", verdict=v) for v in verdicts]).verdict

    assert outcome(AGREES, AGREES) == AGREES and outcome(AGREES, TOO_SHORT) == TOO_SHORT
    assert outcome(TOO_SHORT, DISAGREES) == DISAGREES


def made_up(folder: Path, name: str, disease: str | None, *accuracies: float, **last: float) -> list[RunRecord]:
    found = []
    for seed in range(3):
        run = simulated_run(seed, disease)
        evals = [
            {"step": 20 * i, "accuracy": a, "accuracy_se": 0.03, "num_problems": 200} for i, a in enumerate(accuracies)
        ]
        steps = [{**row, **last} for row in run.steps]
        record = RunRecord(folder=folder / f"{name}_s{seed}", run={"config": {**run.config, "lr": 5e-4}})
        record.steps, record.evals = steps, evals or run.evals
        found.append(record)
    return found


def test_sloppy_verifier_on_made_up_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        "control": made_up(tmp_path, "control", None, 0.3, 0.5, 0.7),
        "sloppy-verifier": made_up(tmp_path, "sloppy", "hacking", 0.3, 0.3, 0.3, reward_mean=0.95),
    }
    monkeypatch.setattr(diseases, "seeds_of", lambda bench, name, changes: runs[name])
    assert diseases.sloppy_verifier(bench(tmp_path)).verdict == AGREES
    runs["sloppy-verifier"] = made_up(tmp_path, "sloppy", None, 0.3, 0.5, 0.7, reward_mean=0.95)
    outcome = diseases.sloppy_verifier(bench(tmp_path))
    assert [check.verdict for check in outcome.checks] == [AGREES, DISAGREES, DISAGREES]


def test_wild_on_made_up_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Mapping[str, object]] = {}
    runs = {
        "control": made_up(tmp_path, "control", None, 0.3, 0.5, 0.7),
        "wild-10": made_up(tmp_path, "ten", "broken early", 0.3, 0.01, 0.01),
        "wild-20": made_up(tmp_path, "twenty", "noise", 0.3, 0.2, 0.1),
    }

    def seeds_of(bench: Bench, name: str, changes: Mapping[str, object]) -> list[RunRecord]:
        asked[name] = changes
        return runs[name]

    monkeypatch.setattr(diseases, "seeds_of", seeds_of)
    assert diseases.wild(bench(tmp_path)).verdict == AGREES
    assert asked["wild-10"] == {"beta": 0.0, "lr": 5e-3} and asked["wild-20"]["lr"] == 1e-2


def test_a_run_is_made_once_and_found_again(tmp_path: Path) -> None:
    said: list[str] = []
    at = Bench(folder=tmp_path / "runs", num_seeds=1, num_threads=1, say=said.append)
    small = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "max_new_tokens": 8, "eval_problems": 2}
    (record,) = training_runs.seeds_of(at, "control", small)
    assert len(record.steps) == 1 and (record.folder / "report.html").is_file()
    again = training_runs.training_run(at, "control", 0, small)
    assert again.folder == record.folder and said[-1] == "control_s0: found"
    other = training_runs.training_run(at, "control", 0, small | {"lr": 1e-4})
    assert other.folder.name == "control_s0_2"  # other settings never overwrite a run
    with pytest.raises(UserError, match="unknown key"):
        training_runs.training_run(at, "x", 0, {"no_such_setting": 1})


def test_plots_escape_and_leave_out_what_is_not_finite(make_run_folder: Callable[..., Path]) -> None:
    text = line_plot("<b>", [Line(label="&", points=[(0, 1), (1, math.nan), (2, 3)])], x_label="<", y_label=">")
    assert "<b>" not in text and "&lt;b&gt;" in text and "nan" not in text
    assert "nan" not in line_plot("t", [], x_label="x", y_label="y")
