"""What pytest is told in pyproject.toml and the root conftest.py: which folder runs, which warnings are errors."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "tests/test_one.py": "def test_one(): pass\n",
    "tests/test_late.py": "import pytest\n@pytest.mark.slow\ndef test_late(): pass\n",
    "benchmarks/record.py": (
        "import pathlib\nRESULTS = pathlib.Path('kept')\n"
        "def device_name(device): return 'here'\n"
        "def facts_of(name, device): return {'device': 'here'}\n"
    ),
    "benchmarks/bench_one.py": "def bench_one(benchmark): benchmark(int)\ndef bench_two(): pass\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with this one's settings and three small files."""
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in CASES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "functions"),
    [
        ([], {"test_one"}),
        (["-m", "slow"], {"test_late"}),
        (["--benchmark", "--benchmark-disable-gc"], {"bench_one", "bench_two"}),
        (["--benchmark-disable-gc"], {"test_one"}),  # an option of pytest-benchmark, not a longer spelling of ours
    ],
)
def test_collects(project: Path, options: list[str], functions: set[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "pytest_benchmark.plugin", *options]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing them all takes most of the time
    result = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {line.rpartition("::")[2] for line in result.stdout.splitlines() if "::" in line} == functions


def benchmark_run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--benchmark", "-q", "-p", "pytest_benchmark.plugin", *options]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(project)}
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)


def test_a_whole_run_is_kept_and_compared_with(project: Path) -> None:
    """A run of a part keeps nothing; a bare --benchmark-compare needs a kept run and leaves it as it was."""
    kept = project / "kept" / "here" / "pytest_benchmark.json"
    refused = benchmark_run(project, "--benchmark-compare")
    assert refused.returncode == 4 and "run pytest --benchmark once" in refused.stderr
    assert benchmark_run(project, "-k", "bench_one").returncode == 0 and not kept.exists()
    whole = benchmark_run(project)
    assert whole.returncode == 0 and kept.is_file(), whole.stdout + whole.stderr
    result = json.loads(kept.read_text())
    assert result["device"] == "here" and "node" not in result["machine_info"] and "commit_info" not in result
    before = kept.read_bytes()
    compared = benchmark_run(project, "--benchmark-compare")
    assert compared.returncode == 0 and "(NOW)" in compared.stdout, compared.stdout + compared.stderr
    assert kept.read_bytes() == before


def warn_from(module: str, category: type[Warning]) -> None:
    warnings.warn_explicit("seen", category, f"{module}.py", 1, module=module)


@pytest.mark.parametrize("module", ["sparkgrpo.kernels.philox", "sparkgrpo.trainer.tasks.base"])
def test_our_warnings_are_errors(module: str) -> None:
    with pytest.raises(UserWarning, match="seen"):
        warn_from(module, UserWarning)


@pytest.mark.parametrize(
    ("module", "category"),
    [
        ("torch.nn.functional", UserWarning),
        ("mysparkgrpo", UserWarning),
        ("sparkgrpo.kernels.philox", DeprecationWarning),
        ("sparkgrpo.kernels.philox", FutureWarning),
    ],
)
def test_warnings_of_dependencies_are_not(module: str, category: type[Warning]) -> None:
    """Deprecations are a dependency's even where Python pins them on our line, which called it."""
    with warnings.catch_warnings(record=True) as seen:
        warn_from(module, category)
    assert len(seen) == 1
