"""How often diagnosis is wrong: simulated healthy runs, ten sick families, and run folders of real healthy runs.

    python -m benchmarks.false_alarms [--healthy 1000] [--sick 40] [--runs RUN...]

Beside it, the same runs under plain thresholds as small public monitors use them: a value beyond its limit in one step.
"""

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.record import write_result
from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.diagnose import diagnose, diagnose_rows
from sparkgrpo.trainer.diagnosis.simulated_runs import DISEASES, simulated_run
from sparkgrpo.trainer.run_reader import read_record

FIRST_SEED = 10_000
"""The limits were set while looking at seeds below 1,000 and the tests use those below 100: these are new to them."""
PLAIN_LIMITS = {"frac_zero_std": 0.75, "frac_truncated": 0.15, "kl_mean": 0.5, "clip_frac": 0.2}


def has_plain_alarm(steps: Sequence[Mapping[str, object]]) -> bool:
    """Whether any step is beyond a plain limit, or entropy fell to a tenth, or the length grew to 1.5 times."""
    first = steps[0]
    for row in steps:
        if any((number(row.get(key)) or 0.0) > limit for key, limit in PLAIN_LIMITS.items()):
            return True
        entropy, length = number(row.get("entropy_mean")), number(row.get("len_mean"))
        if entropy is not None and entropy < 0.1 * (number(first.get("entropy_mean")) or 0.0):
            return True
        if length is not None and length > 1.5 * (number(first.get("len_mean")) or 1e9):
            return True
    return False


def healthy(num_runs: int) -> dict[str, object]:
    """Alarms on healthy simulated runs."""
    errors, warnings = Counter[str](), Counter[str]()
    runs_with_error = runs_with_warning = num_steps = true_truncation = plain = 0
    for seed in range(FIRST_SEED, FIRST_SEED + num_runs):
        run = simulated_run(seed)
        num_steps += len(run.steps)
        found = diagnose_rows(run.steps, run.evals, run.config).counting("warn", is_active_only=False)
        errors.update(verdict.id for verdict in found if verdict.severity == "error")
        warnings.update(verdict.id for verdict in found if verdict.severity == "warn")
        runs_with_error += any(verdict.severity == "error" for verdict in found)
        runs_with_warning += bool(found)
        true_truncation += run.is_truncated_often and any(verdict.id == "truncation" for verdict in found)
        plain += has_plain_alarm(run.steps)
    return {
        "runs": num_runs,
        "steps": num_steps,
        "runs_with_error": runs_with_error,
        "runs_with_warning": runs_with_warning,
        "of_these_truncated_above_15_percent": true_truncation,
        "errors": dict(errors),
        "warnings": dict(warnings),
        "runs_with_alarm_of_plain_thresholds": plain,
    }


def sick(family: str, num_runs: int) -> dict[str, object]:
    """How a family is named: the planted disease alone, with others, or not."""
    alone = beside = missed = 0
    others = Counter[str]()
    for seed in range(FIRST_SEED, FIRST_SEED + num_runs):
        run = simulated_run(seed, family)
        found = diagnose_rows(run.steps, run.evals, run.config).counting("warn", is_active_only=False)
        ids = {verdict.id for verdict in found}
        others.update(ids - {str(run.disease)})
        alone += ids == {run.disease}
        beside += run.disease in ids and len(ids) > 1
        missed += run.disease not in ids
    return {
        "family": family,
        "named": DISEASES[family][0],
        "runs": num_runs,
        "alone": alone,
        "beside_others": beside,
        "missed": missed,
        "others": dict(others),
    }


def real(folders: Sequence[Path]) -> dict[str, object]:
    """Alarms on run folders of healthy real runs."""
    errors, warnings = Counter[str](), Counter[str]()
    for folder in folders:
        for verdict in diagnose(read_record(folder)).counting("warn", is_active_only=False):
            (errors if verdict.severity == "error" else warnings).update([verdict.id])
    return {"runs": len(folders), "errors": dict(errors), "warnings": dict(warnings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--healthy", type=int, default=1000)
    parser.add_argument("--sick", type=int, default=40)
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    start = time.monotonic()
    content: dict[str, object] = {"healthy": healthy(options.healthy)}
    print(content["healthy"])
    families = [sick(family, options.sick) for family in DISEASES]
    for row in families:
        print(row)
    content |= {"sick": families, "real": real(options.runs)}
    print(content["real"])
    content["conditions"] = {
        "command": "python -m benchmarks.false_alarms",
        "wall_s": round(time.monotonic() - start, 1),
    }
    print(f"written to {write_result('false_alarms', torch.device('cpu'), content)}")


if __name__ == "__main__":
    main()
