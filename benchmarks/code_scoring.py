"""Programs scored per second: the whole way from the trainer through scoring process, zygote and confined child.

    python -m benchmarks.code_scoring [--seconds 4] [--workers 2]

Rows: right answers with 8 tests each; the same as programs, a process a test; a batch in which each eighth answer is
hostile (it crashes, floods or does not compile); one process alone, whose wall time a single answer waits; what one
more test costs in the same child; and math-verify, where its extra is installed. Beside them, the deadline: how long
a batch of answers that loop for ever, one for each process, takes beyond the limit of a call.
"""

import argparse
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.record import write_result
from sparkgrpo.trainer.tasks.code_judge import HANDLER
from sparkgrpo.trainer.tasks.math_answers import MathChecker, MathOptions
from sparkgrpo.trainer.tasks.math_judge import missing_package
from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.self_test import self_test
from sparkgrpo.trainer.tasks.sandbox.wire import encode
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits
from sparkgrpo.trainer.tasks.scoring import ScoringPool

NUM_TESTS, BATCH = 8, 64
RIGHT = "def f(x):\n    return x * x\n"
PROGRAM = "print(int(input()) ** 2)\n"
HOSTILE = (
    "import os\nos._exit(0)\n",
    "def f(x): return [0] * 10**6\n",
    "def f(x:\n",
    "import os\nos.write(4, bytes(8))\n",
)


def job(code: str, num_tests: int = NUM_TESTS) -> dict[str, object]:
    """A function job: squares."""
    tests = [(encode((x,)), encode(x * x)) for x in range(num_tests)]
    return {"kind": "function", "code": code, "entry": "f", "tests": tests, "is_exact": False}


def program_job() -> dict[str, object]:
    return {
        "kind": "program",
        "code": PROGRAM,
        "entry": "",
        "tests": [(f"{x}\n", f"{x * x}\n") for x in range(NUM_TESTS)],
        "is_exact": False,
    }


def processor_s(pool: ScoringPool) -> float:
    """Processor seconds of the scoring processes, their zygotes and all children these waited for."""
    total = 0
    for worker in pool.pids():
        zygotes = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        for pid in (worker, *zygotes):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def rate(pool: ScoringPool, jobs: list, seconds: float) -> dict[str, float]:
    """Answers per second over batches; and processor time, which a busy machine changes less."""
    pool.run(jobs[:8], 60)
    rates: list[float] = []
    before_s = processor_s(pool)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        outcomes = pool.run(jobs, 60)
        rates.append(len(jobs) / (time.perf_counter() - start))
        assert all(outcome.status == "done" for outcome in outcomes)
    return {
        "answers_per_s": statistics.median(rates),
        "least": min(rates),
        "largest": max(rates),
        "num_batches": len(rates),
        "processor_ms_an_answer": (processor_s(pool) - before_s) / (len(rates) * len(jobs)) * 1e3,
    }


def alone(seconds: float) -> dict[str, float]:
    """One checker, one answer at a time, in this process: milliseconds an answer, and a further test."""
    found = {}
    with Checker() as checker:
        for num_tests in (NUM_TESTS, 10 * NUM_TESTS):
            tests: list[tuple[tuple, object]] = [((x,), x * x) for x in range(num_tests)]
            times: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                start = time.perf_counter()
                assert checker.judge_calls(RIGHT, "f", tests).reason == "ok"
                times.append((time.perf_counter() - start) * 1e3)
            found[num_tests] = statistics.median(times)
            found[f"best_{num_tests}"] = min(times)
    per_test = (found[10 * NUM_TESTS] - found[NUM_TESTS]) / (9 * NUM_TESTS)
    return {"median_ms": found[NUM_TESTS], "best_ms": found[f"best_{NUM_TESTS}"], "one_more_test_ms": per_test}


def beyond_the_deadline(num_workers: int) -> float:
    """Seconds that answers which loop for ever take beyond the limit of a call, one for each worker."""
    limits = Limits(call_s=0.5, total_s=2.0)
    with ScoringPool(HANDLER, {"level": "strict", "limits": asdict(limits)}, num_workers=num_workers) as pool:
        start = time.perf_counter()
        outcomes = pool.run([job("while True: pass")] * num_workers, 60)
        assert all(outcome.value["reason"] == "timeout" for outcome in outcomes)
        return time.perf_counter() - start - limits.call_s


def math_rate(num_workers: int, seconds: float) -> float | None:
    """Pairs per second of the math checker; None without its extra."""
    if missing_package() is not None:
        return None
    with MathChecker(MathOptions(num_workers=num_workers)) as checker:
        golds, texts = ["1/2"] * BATCH, [r"\boxed{\frac{1}{2}}"] * BATCH
        checker.judge(golds, texts)
        start, num_pairs = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            checker.judge(golds, texts)
            num_pairs += BATCH
        return num_pairs / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="measuring time of each row")
    parser.add_argument("--workers", type=int, default=2, help="scoring processes")
    options = parser.parse_args()
    hostile = [job(HOSTILE[n // 8 % len(HOSTILE)] if n % 8 == 0 else RIGHT) for n in range(BATCH)]
    settings = {"level": "strict", "limits": asdict(Limits())}
    with ScoringPool(HANDLER, settings, num_workers=options.workers) as pool:
        rows = {
            "functions_with_8_tests": rate(pool, [job(RIGHT)] * BATCH, options.seconds),
            "programs_with_8_tests": rate(pool, [program_job()] * BATCH, options.seconds),
            "every_eighth_hostile": rate(pool, hostile, options.seconds),
        }
    content = {
        "num_workers": options.workers,
        "sandbox": self_test().facts(),
        **rows,
        "one_process": alone(options.seconds),
        "beyond_the_deadline_s": beyond_the_deadline(options.workers),
        "math_pairs_per_s": math_rate(options.workers, options.seconds),
    }
    for name, value in content.items():
        print(name, value)
    print(write_result("code_scoring", torch.device("cpu"), content))


if __name__ == "__main__":
    main()
