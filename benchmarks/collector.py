"""Runs the comparisons of one `pytest --benchmark`, keeps their tables for the end and writes their files."""

from pathlib import Path

import pytest
import torch

from benchmarks.comparison import Comparison, run_comparison
from benchmarks.device_probe import copy_gbps
from benchmarks.record import RESULTS, write_result
from benchmarks.table import render

TABLES = pytest.StashKey[list[str]]()


class Collector:
    """Runs comparisons; writes those of an op into one file after each, so that an interrupted run loses little."""

    def __init__(self, config: pytest.Config, device: torch.device) -> None:
        self.device, self.is_full = device, bool(config.getoption("has_all_benchmarks"))
        self.is_comparing = bool(config.getoption("benchmark_compare", None))
        self.results: Path = config.getoption("benchmark_results") or RESULTS
        self.tables = config.stash.setdefault(TABLES, [])
        self.cases: dict[str, list[dict[str, object]]] = {}
        self.copy_gbps = copy_gbps(device)

    def run(self, comparison: Comparison, benchmark, *, is_full: bool = False) -> None:  # noqa: ANN001  may be absent
        """Compares, and hands the first of ours to pytest-benchmark, whose options then work on it.

        Long cases have a file of their own, so that a run without them does not take them away.
        """
        run_comparison(comparison)
        self.tables.append(render(comparison))
        name = f"{comparison.op}_full" if is_full else comparison.op
        self.cases.setdefault(name, []).append(comparison.as_json())
        content = {"conditions": {"threads": torch.get_num_threads()}, "cases": self.cases[name]}
        if not self.is_comparing:
            write_result(name, self.device, content, folder=self.results)
        ours = next(i for i in comparison.implementations if i.is_ours)
        row = next(row for row in comparison.rows if row.is_ours)
        assert row.failure is None, row.failure_traceback
        benchmark.group = f"{comparison.op} {comparison.conditions}"
        benchmark.extra_info.update(min_s=row.min_s, speedup=row.speedup, frac_floor=row.frac_floor, **row.errors)
        benchmark.pedantic(ours.make(comparison.case), rounds=3, warmup_rounds=1)
