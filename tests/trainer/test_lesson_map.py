"""docs/lesson.md names files, settings and curves: each of them must exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.experiments.registry import EXPERIMENTS
from sparkgrpo.trainer.metrics import EVAL_METRICS, METRICS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "lesson.md").read_text(encoding="utf-8")


def tables() -> list[list[str]]:
    """The cells of each row that names a file in its second cell."""
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == 4]


def test_files_exist() -> None:
    paths = re.findall(r"`((?:trainer|kernels|profiling)/[\w/]+\.py)`", TEXT)
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).is_file()]


def test_settings_exist() -> None:
    known = {field.name for field in dataclasses.fields(Config)}
    named = [name for row in tables() for name in re.findall(r"`(\w+)[^`]*`", row[2])]
    values = {"sequence", "token", "constant"}
    assert len(named) > 20 and set(named) - values <= known, set(named) - values - known


def test_curves_exist() -> None:
    keys = {metric.key for metric in (*METRICS, *EVAL_METRICS)}
    named = [name for row in tables() for name in re.findall(r"`([\w/.]+)`", row[3])]
    unknown = {name for name in named if name.replace("...", "") not in keys} - {"evals.jsonl"}
    assert len(named) > 25 and not unknown


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_named(name: str) -> None:
    assert f"`sparkgrpo experiment {name}`" in TEXT
