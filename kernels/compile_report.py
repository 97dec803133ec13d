"""Compile every kernel for GPUs that are not here, and print what the assembler made of it.

    python -m sparkgrpo.kernels.compile_report
    python -m sparkgrpo.kernels.compile_report --target 121 --only rms_norm

Every file `kernels/*_kernels.py` lists its variants in `compile_cases(capability)`. Exit code 1 where a variant spills
registers, takes more shared memory than the GPU has, keeps a product off the tensor cores, or loads descriptors without
TMA; 2 where the command is wrong. About 1.5 s a variant and core.
"""

import argparse
import dataclasses
import difflib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import triton

from sparkgrpo.kernels.sass_report import LIMITS, CaseReport, CaseResult, examine, load_cases, use_cache
from sparkgrpo.kernels.triton_launch import is_interpreted

KERNELS = Path(__file__).parent
STORED = KERNELS.parent / "benchmarks" / "results" / "offline"
"""Reports of a checkout, written by `python -m benchmarks.offline_report`."""

HEADER = ("case", "warps", "stages", "regs", "LDL", "shared", "blocks/SM", "instructions")


class Job(NamedTuple):
    """One variant for one GPU."""

    module: str
    case: str
    capability: int


def kernel_modules() -> list[str]:
    """Every kernel file of this project, by module name."""
    return [f"sparkgrpo.kernels.{path.stem}" for path in sorted(KERNELS.glob("*_kernels.py"))]


def list_jobs(modules: Iterable[str], capabilities: Iterable[int], only: str = "") -> list[Job]:
    """The variants whose name holds `only`, by GPU, then by file.

    Raises:
        ValueError: none does, or two files use one name.
    """
    jobs, names = [], {}
    for capability in capabilities:
        for module in modules:
            for case in load_cases(module, capability):
                if names.setdefault(case.name, module) != module:
                    raise ValueError(f"case {case.name!r} is both in {names[case.name]} and in {module}: rename one")
                if only in case.name:
                    jobs.append(Job(module, case.name, capability))
    if not jobs:
        near = difflib.get_close_matches(only, names, n=3, cutoff=0.3)
        known = f"near it are {', '.join(near)}" if near else f"there are {', '.join(sorted(names)) or 'none'}"
        raise ValueError(f"no compile case has {only!r} in its name; {known}")
    return jobs


def run_jobs(jobs: list[Job]) -> list[CaseResult]:
    """Compile all, on every core that this process may use; results in the order of `jobs`, progress on stderr."""
    num_workers, start_s = min(len(os.sched_getaffinity(0)), len(jobs)), time.perf_counter()
    print(f"compiling {len(jobs)} variants in {num_workers} processes", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        results = _run_pool(jobs, num_workers, cache)
        for job in (job for job in jobs if job not in results):  # each by itself: which one ends the compiler?
            results |= _run_pool([job], 1, cache)
    print(f"compiled in {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
    problem = "the compiler's process ended without a word: too little memory, or a fault in Triton or ptxas"
    return [
        results.get(job) or CaseResult(name=job.case, capability=job.capability, report=None, problems=(problem,))
        for job in jobs
    ]


def _run_pool(jobs: list[Job], num_workers: int, cache: str) -> dict[Job, CaseResult]:
    """The results that came before a process of the pool ended, if one did."""
    results: dict[Job, CaseResult] = {}
    # Spawned, not forked: the threads of torch and LLVM do not survive a fork.
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), use_cache, (cache,)) as pool:
        futures = {pool.submit(examine, *job): job for job in jobs}
        try:
            for future in as_completed(futures):
                job = futures[future]
                results[job] = future.result()
                _show_progress(f"{len(results)}/{len(jobs)} sm_{job.capability} {job.case}")
        except BrokenProcessPool:
            pass  # the caller sees which results are missing
        finally:
            pool.shutdown(cancel_futures=True)
            _show_progress("")
    return results


def _show_progress(line: str) -> None:
    """Overwrite the last line of a terminal; nothing in a log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def as_records(results: Iterable[CaseResult]) -> dict[int, dict[str, dict[str, Any]]]:
    """Capability -> case -> fields of its report, as JSON keeps them; variants that did not compile are left out."""
    records: dict[int, dict[str, dict[str, Any]]] = {}
    for result in results:
        of_target = records.setdefault(result.capability, {})
        if result.report is not None:
            of_target[result.name] = dataclasses.asdict(result.report)
    return records


def format_table(results: Iterable[CaseResult]) -> str:
    """One line a variant in aligned columns; numbers to the right."""
    rows = [HEADER, *(_row(result.name, result.report) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    lines = []
    for name, *numbers, kinds in rows:
        cells = [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join([*cells, kinds]).rstrip())
    return "\n".join(lines)


def _row(name: str, report: CaseReport | None) -> tuple[str, ...]:
    if report is None:
        return (name, "-", "-", "-", "-", "-", "-", "does not compile")
    numbers = (report.num_warps, report.num_stages, report.registers, report.instructions.get("LDL", 0))
    kinds = " ".join(f"{kind} {count}" for kind, count in report.instructions.items() if kind != "LDL")
    return (name, *map(str, numbers), f"{report.shared_bytes:,}", str(report.blocks_per_sm), kinds)


def stored_path(folder: Path, capability: int) -> Path:
    """Where the report of this Triton version is kept."""
    return folder / f"sm_{capability}-triton-{triton.__version__}.json"


def compare(stored: Mapping[str, Mapping[str, Any]], cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs from the stored cases, a line each."""
    lines = [f"{name}: gone, or not compiled" for name in stored if name not in cases]
    for name, now in cases.items():
        if name not in stored:
            lines.append(f"{name}: new")
            continue
        before = stored[name]
        changes = [f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
        if changes:
            lines.append(f"{name}: {', '.join(changes)}")
    return lines


def _print_comparison(folder: Path, results: list[CaseResult], only: str) -> None:
    for capability, cases in as_records(results).items():
        path = stored_path(folder, capability)
        if not path.is_file():
            print(f"sm_{capability}: no {path.name} to compare with; python -m benchmarks.offline_report writes one")
            continue
        stored = json.loads(path.read_text(encoding="utf-8"))["cases"]
        lines = compare({name: case for name, case in stored.items() if only in name}, cases)
        print(f"sm_{capability}: {len(lines) or 'no'} changes since {path.name}")
        print("".join(f"  {line}\n" for line in lines), end="")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; ends the process with code 2 and a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m sparkgrpo.kernels.compile_report",
        description="Compile every kernel without a GPU; report registers, spills, shared memory, instruction kinds.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target", type=int, action="append", choices=sorted(LIMITS), help="compute capability; repeatable"
    )
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only cases with this in their name")
    parser.add_argument("--module", action="append", help="a module with compile_cases in place of all kernel files")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report there")
    parser.add_argument(
        "--check", type=Path, nargs="?", const=STORED, metavar="FOLDER", help="say what changed since the stored report"
    )
    options = parser.parse_args(arguments)
    if is_interpreted():
        parser.error("TRITON_INTERPRET is set, which leaves nothing to compile: run `env -u TRITON_INTERPRET ...`")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)
    capabilities = sorted(set(options.target or LIMITS))
    try:
        jobs = list_jobs(options.module or kernel_modules(), capabilities, options.only)
    except (ValueError, ImportError) as error:
        print(f"compile_report: {error}", file=sys.stderr)
        return 2
    results = run_jobs(jobs)
    print(f"Triton {triton.__version__}")
    for capability in capabilities:
        print(f"\nsm_{capability}\n{format_table(r for r in results if r.capability == capability)}")
    if options.json:
        records = {f"sm_{capability}": cases for capability, cases in as_records(results).items()}
        content = {"triton": triton.__version__, "targets": records}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.check:
        print()
        _print_comparison(options.check, results, options.only)
    problems = [f"FAILED sm_{r.capability} {r.name}: {problem}" for r in results for problem in r.problems]
    print("\n" + ("\n".join(problems) or f"{len(results)} variants, all within the limits"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
