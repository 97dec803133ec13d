"""``sparkgrpo doctor``: what a run needs of this machine, tried row by row, with the way to mend what fails.

Every check runs something; none only reads a version. What cannot be tried here says so, and is no problem. Exit codes:
0 no problem, 1 at least one.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.doctor.compute_checks import (
    check_compiler,
    check_flash_attention,
    check_graphs,
    check_liger,
    check_python,
    check_tiles,
    check_torch,
    check_triton,
)
from sparkgrpo.trainer.doctor.finding import Check, Finding, run_check, this_machine
from sparkgrpo.trainer.doctor.machine_checks import (
    check_heat,
    check_memory,
    check_ncu,
    check_nsys,
    check_rates,
    check_run_folder,
)
from sparkgrpo.trainer.doctor.sandbox_checks import check_landlock, check_seccomp
from sparkgrpo.trainer.hostile_text import visible_text
from sparkgrpo.trainer.option_parser import new_parser, parse_options

CHECKS: dict[str, Check] = {
    "python": check_python,
    "torch": check_torch,
    "triton": check_triton,
    "c compiler": check_compiler,
    "tiles": check_tiles,
    "cuda graphs": check_graphs,
    "flash-attn": check_flash_attention,
    "liger-kernel": check_liger,
    "nsys": check_nsys,
    "ncu": check_ncu,
    "memory": check_memory,
    "rates": check_rates,
    "heat": check_heat,
    "landlock": check_landlock,
    "seccomp": check_seccomp,
    "run folder": check_run_folder,
}


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = new_parser("doctor", "Check what a run needs on this machine, by trying each of it.")
    parser.add_argument("--json", action="store_true", help="One JSON object on stdout.")
    parser.add_argument("--run-dir", metavar="FOLDER", help="Where runs would be written. Default: runs.")
    parser.add_argument("--only", metavar="NAMES", help=f"Some checks, by comma: {', '.join(CHECKS)}.")
    options = parse_options(parser, arguments)
    machine = this_machine(Path(str(options.get("run_dir", "runs"))))
    findings = []
    for name in _chosen(options.get("only")):
        findings.append(run_check(name, CHECKS[name], machine))
        if not options.get("json"):
            print(_as_text(findings[-1]), flush=True)
    num_problems = sum(finding.verdict == "problem" for finding in findings)
    if options.get("json"):
        print(json.dumps({"v": 1, "num_problems": num_problems, "checks": [asdict(finding) for finding in findings]}))
    else:
        print("no problem found" if not num_problems else f"{num_problems} to mend", file=sys.stdout)
    return int(num_problems > 0)


def _chosen(names: object) -> list[str]:
    if names is None:
        return list(CHECKS)
    chosen = [name.strip() for name in str(names).split(",")]
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        raise UserError(f"only: expected names of {', '.join(CHECKS)}, got {unknown[0]!r}")
    return chosen


def _as_text(finding: Finding) -> str:
    line = f"{finding.verdict:11} {finding.name:13} {visible_text(finding.found, 400)}"
    return line if not finding.cure else f"{line}\n{'':25} -> {visible_text(finding.cure, 600)}"
