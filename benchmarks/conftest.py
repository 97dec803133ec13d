"""What the benchmark functions share: the collector of comparisons, whose tables are printed at the end."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.collector import TABLES, Collector


@pytest.fixture(scope="session")
def collector(pytestconfig: pytest.Config) -> Iterator[Collector]:
    """One for the whole run."""
    yield Collector(pytestconfig, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables, after everything else."""
    for text in config.stash.get(TABLES, []):
        terminalreporter.write_line("")
        for line in text.splitlines():
            terminalreporter.write_line(line)
