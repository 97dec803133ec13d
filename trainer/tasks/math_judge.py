"""The handler of the math checker's scoring processes: a job is a right answer and a given one, a result a reason."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Equipment, Limits

HANDLER = "sparkgrpo.trainer.tasks.math_judge:make_handler"
COMPARE = "sparkgrpo.trainer.tasks.math_compare:compare"
PACKAGES = ("math_verify", "latex2sympy2_extended", "sympy", "mpmath", "antlr4")
"""What a child may read beside the standard library: sympy imports parts of itself when they are needed."""


def missing_package() -> str | None:
    """The first package of the extra that is not installed."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)


def make_handler(settings: dict[str, Any]) -> Callable[[list[str]], dict[str, str]]:
    """A handler with a zygote that has imported sympy.

    Args:
        settings: {"level": of the sandbox, "limits": fields of `Limits`}.
    """
    folders = [Path(str(spec.origin)).parent for name in PACKAGES if (spec := importlib.util.find_spec(name))]
    checker = Checker(
        level=settings["level"],
        limits=Limits(**settings["limits"]),
        equipment=Equipment(
            functions=[COMPARE],
            warm_up=[(COMPARE, (r"\frac{1}{2}", "0.5")), (COMPARE, ("x^2", r"\sqrt{2}"))],
            search_path=sorted({str(folder.parent) for folder in folders}),
            readable=sorted({str(folder) for folder in folders}),
        ),
    )

    def judge(job: list[str]) -> dict[str, str]:
        """[gold, answer] to {"status", "value"} of the call."""
        gold, answer = job
        status, value = checker.call_function(COMPARE, (gold, answer))
        return {"status": status, "value": value if isinstance(value, str) else ""}

    return judge
