"""Store what every kernel compiles to: benchmarks/results/offline/sm_<capability>-triton-<version>.json.

    python -m benchmarks.offline_report

One line a variant, so that a new compiler, or a changed kernel, shows as a diff. A GPU for which a variant breaks a
limit keeps its old file. `python -m sparkgrpo.kernels.compile_report --check` compares with these files.
"""

import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from sparkgrpo.kernels.compile_report import as_records, kernel_modules, list_jobs, run_jobs, stored_path
from sparkgrpo.kernels.sass_report import LIMITS
from sparkgrpo.profiling.environment import git_state, versions


def format_result(capability: int, cases: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of one file."""
    head = {
        "name": "compile_report",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"offline-sm_{capability}",
        "commit": git_state(Path(__file__)),
        "versions": versions(),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    variants = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in sorted(cases.items())]
    return "{\n " + ",\n ".join([*lines, '"cases": {\n  ' + ",\n  ".join(variants) + "\n }"]) + "\n}\n"


def main() -> int:
    """Returns the exit code: 1 where a variant breaks a limit."""
    results = run_jobs(list_jobs(kernel_modules(), LIMITS))
    folder = RESULTS / "offline"
    folder.mkdir(parents=True, exist_ok=True)
    broken = {result.capability for result in results if result.problems}
    for capability, cases in as_records(results).items():
        if capability in broken:
            print(f"sm_{capability}: not stored; python -m sparkgrpo.kernels.compile_report says what is wrong")
            continue
        path = stored_path(folder, capability)
        path.write_text(format_result(capability, cases), encoding="utf-8")
        print(f"{path.relative_to(RESULTS.parent.parent)}: {len(cases)} variants")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
