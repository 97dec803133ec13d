"""The option ``--benchmark``, which runs benchmarks/ in place of tests/, and ``--benchmark-full``, which adds cases.

It stands at the root because pytest reads options only from a conftest on the way to what it collects.

A whole run is kept as benchmarks/results/<device>/pytest_benchmark.json, in pytest-benchmark's form, and is what a bare
``--benchmark-compare`` compares with. A run that compares writes no result at all.
"""

import sys
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    group = parser.getgroup("sparkgrpo")
    group.addoption("--benchmark", action="store_true", dest="run_benchmarks", help="run benchmarks/, not tests/")
    group.addoption("--benchmark-full", action="store_true", dest="has_all_benchmarks", help="the long cases too")
    group.addoption("--benchmark-results", type=Path, metavar="FOLDER", help="write there, not to benchmarks/results")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Collect benchmarks/ where no path was given on the command line; let them be imported by their own name."""
    sys.path.append(str(config.rootpath))  # pytest, unlike python -m pytest, does not
    if config.getoption("run_benchmarks") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(config.rootpath / "benchmarks")]
        config.args_source = pytest.Config.ArgsSource.ARGS  # the header would name testpaths otherwise
        if hasattr(config.option, "benchmark_compare"):  # else pytest-benchmark is not there
            _use_kept_run(config)


def _use_kept_run(config: pytest.Config) -> None:
    """Where a bare `--benchmark-compare` reads, and what a whole run writes."""
    option = config.option
    path = _kept_run(option.benchmark_results)
    if option.benchmark_compare is True:
        if not path.is_file():
            raise pytest.UsageError(
                f"--benchmark-compare: there is no {path}: run pytest --benchmark once, or name a run"
            )
        option.benchmark_compare = str(path)
    is_whole = not (option.keyword or option.benchmark_compare or option.collectonly or option.has_all_benchmarks)
    if is_whole and option.benchmark_json is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        option.benchmark_json = path


def _kept_run(results: Path | None) -> Path:
    import torch

    from benchmarks.record import RESULTS, device_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return (results or RESULTS) / device_name(device) / "pytest_benchmark.json"


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """The name of a person's machine is nobody's business, and would make every other machine look different."""
    machine_info.pop("node", None)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """What every result file of this project says of itself."""
    import torch

    from benchmarks.record import facts_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output_json |= facts_of("pytest_benchmark", device)
    del output_json["commit_info"]  # "commit" says it
