"""The handler of the code task's scoring processes: a job is a candidate with its tests, a result is a verdict.

The process is trusted: it holds the tests. The candidate runs in a confined child of its checker's zygote. This file
imports the standard library and the sandbox alone, so that a scoring process starts quickly.
"""

from collections.abc import Callable
from typing import Any

from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.wire import decode
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits

HANDLER = "sparkgrpo.trainer.tasks.code_judge:make_handler"


def make_handler(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, object]]:
    """A handler with a zygote of its own.

    Args:
        settings: {"level": of the sandbox, "limits": fields of `Limits`}.
    """
    checker = Checker(level=settings["level"], limits=Limits(**settings["limits"]))

    def judge(job: dict[str, Any]) -> dict[str, object]:
        """{"kind", "code", "entry", "tests": pairs of nodes or texts, "is_exact"} to {"passed", "reason", "detail"}."""
        if job["kind"] == "program":
            verdict = checker.judge_program(job["code"], [(given, expected) for given, expected in job["tests"]])
        else:
            tests: list[Any] = [(decode(given), decode(expected)) for given, expected in job["tests"]]
            verdict = checker.judge_calls(job["code"], job["entry"], tests, is_exact=job["is_exact"])
        return {"passed": list(verdict.passed), "reason": verdict.reason, "detail": verdict.detail}

    return judge
