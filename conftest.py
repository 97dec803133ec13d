"""The option ``--benchmark``, which runs benchmarks/ in place of tests/, and ``--benchmark-full``, which adds cases.

It stands at the root because pytest reads options only from a conftest on the way to what it collects.
"""

import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    group = parser.getgroup("sparkgrpo")
    group.addoption("--benchmark", action="store_true", dest="run_benchmarks", help="run benchmarks/, not tests/")
    group.addoption("--benchmark-full", action="store_true", dest="has_all_benchmarks", help="the long cases too")


def pytest_configure(config: pytest.Config) -> None:
    """Collect benchmarks/ where no path was given on the command line; let them be imported by their own name."""
    sys.path.append(str(config.rootpath))  # pytest, unlike python -m pytest, does not
    if config.getoption("run_benchmarks") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(config.rootpath / "benchmarks")]
        config.args_source = pytest.Config.ArgsSource.ARGS  # the header would name testpaths otherwise
