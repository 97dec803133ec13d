"""One GPU in under eight minutes: is everything correct, does it repeat, how fast is it, against whom?

    python benchmarks/gpu_check.py [--budget 460] [--groups correctness,head]

Kernels against float64, their speed beside peers, the decode loop with its graphs, whole GRPO steps. Needs this
checkout, torch and triton (`decode` and `step` also transformers); nothing has to be installed. The most telling groups
come first; each is a process of its own, so that a fault of the device ends one group alone, and what it had found
stays. Results are written after every group: benchmarks/results/<device>/gpu_check.json, and one file for each op all
of whose cases were timed.
Exit code 0: all that ran is right; what was not run is named. 1: something is not, or a group died or was stopped.
2: there is no such device. `--device cpu --quick` runs the same code on tiny shapes and drops its files, unless
`--results` says where to put them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".typings")]  # .typings shows kernels/ as sparkgrpo.kernels

import torch  # noqa: E402

from benchmarks.gpu_check_finding import LEFT_OUT, NOT_STARTED, PROCESS, CheckContext, Finding  # noqa: E402
from benchmarks.gpu_check_items import GROUPS, run_group  # noqa: E402
from benchmarks.record import RESULTS, device_name, write_result  # noqa: E402

START_S = 10.0
"""Left of the budget for a group to be started at all."""


def read_findings(path: Path) -> list[Finding]:
    """What a group has written so far; a last line that was cut off is dropped."""
    findings = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            findings.append(Finding(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return findings


def run_child(group: str, options: argparse.Namespace, lines: Path, limit_s: float) -> list[Finding]:
    """Runs one group in a process of its own; a crash or a timeout becomes a finding."""
    command = [sys.executable, __file__, "--device", options.device, "--budget", str(limit_s), "--group", group]
    command += ["--lines", str(lines), "--results", str(options.results), *(["--quick"] if options.quick else [])]
    failure = None
    try:
        done = subprocess.run(command, timeout=limit_s + START_S, capture_output=True, text=True, check=False)
        if done.returncode:
            failure = f"ended with code {done.returncode}", done.stderr[-4000:]
    except subprocess.TimeoutExpired:
        failure = "out of time", ""
    findings = read_findings(lines)
    if failure is not None:
        # A stopped group is wrong too: a kernel that hangs looks like one that is slow.
        text = f"{failure[0]} after {len(findings)} findings"
        findings.append(Finding(group=group, item=PROCESS, ok=False, text=text, detail=failure[1]))
    return findings


def report(findings: list[Finding]) -> int:
    """Prints the verdict; returns the exit code."""
    wrong = [finding for finding in findings if finding.ok is False]
    num_checked = sum(finding.ok is not None for finding in findings)
    for finding in wrong:
        mark = "UNFINISHED" if finding.item == PROCESS else "WRONG"
        print(f"{mark} {finding.group}/{finding.item}: {finding.text}")
    num_wrong = sum(finding.item != PROCESS for finding in wrong)
    unfinished = [finding.group for finding in wrong if finding.item == PROCESS]
    not_run = [finding.group for finding in findings if finding.text == NOT_STARTED]
    cut_short = [finding.group for finding in findings if finding.text.startswith(LEFT_OUT)]
    verdict = [f"{num_wrong} WRONG"] if num_wrong else []
    verdict += [f"unfinished: groups {', '.join(unfinished)}"] if unfinished else []
    verdict += [f"incomplete: groups {', '.join(not_run)} not run"] if not_run else []
    verdict += [f"incomplete: cases of {', '.join(cut_short)} left out"] if cut_short else []
    print(f"gpu_check: {num_checked} checks, {'; '.join(verdict) or 'all right'}")
    return 1 if wrong or not num_checked else 0


def run_all(options: argparse.Namespace, *, is_dropped: bool) -> int:
    """Runs the groups in order while time is left. `is_dropped`: the result files go when this ends."""
    start, device = time.monotonic(), torch.device(options.device)
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as scratch:
        for group in options.groups.split(","):
            left_s = options.budget - (time.monotonic() - start)
            if left_s < START_S:
                new = [Finding(group=group, item=PROCESS, ok=None, text=NOT_STARTED)]
            else:
                limit_s = min(left_s - START_S / 2, GROUPS[group].limit_s)
                new = run_child(group, options, Path(scratch) / f"{group}.jsonl", limit_s)
            findings += new
            print(f"== {group}  ({time.monotonic() - start:.0f} s)")
            for finding in new:
                print(finding.line(), flush=True)
            content: dict[str, object] = {"conditions": {"budget_s": options.budget, "is_quick": options.quick}}
            content["findings"] = [finding.as_json() for finding in findings]
            write_result("gpu_check", device, content, folder=options.results)
    where = "dropped (--results FOLDER keeps them)" if is_dropped else options.results / device_name(device)
    print(f"result files: {where}")
    return report(findings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for everything")
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: tests the script, not the device")
    parser.add_argument("--results", type=Path, help=f"folder of the result files: {RESULTS}, with --quick none")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.groups.split(",")) - set(GROUPS)
    if unknown:
        parser.error(f"unknown groups {sorted(unknown)}; there are {', '.join(GROUPS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here; --device cpu --quick tests the script itself")
        return 2
    if options.group is None:
        with tempfile.TemporaryDirectory() as dropped:
            # Figures of tiny shapes must not replace measured ones.
            is_dropped = options.results is None and options.quick
            options.results = options.results or (Path(dropped) if is_dropped else RESULTS)
            return run_all(options, is_dropped=is_dropped)
    context = CheckContext(
        device=torch.device(options.device),
        is_quick=options.quick,
        results=options.results,
        lines=options.lines,
        deadline_s=time.monotonic() + options.budget,
    )
    run_group(options.group, context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
