r"""Mathematical answers (extra `math`): the last \boxed{...} against the right expression, by math-verify.

What the model wrote is looked at by three linear scans here; then a confined process compares (`math_compare.py`), one
fork an answer, killed after its deadline. math-verify accepts unevaluated work such as 20-2 for 18.
"""

import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.math_compare import BAD_GOLD, DIFFERENT, SAME, UNPARSABLE
from sparkgrpo.trainer.tasks.math_judge import HANDLER, missing_package
from sparkgrpo.trainer.tasks.sandbox.self_test import SandboxReport, require_sandbox
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Level, Limits
from sparkgrpo.trainer.tasks.scoring import Outcome, ScoringPool, default_num_workers

NO_ANSWER, TOO_COMPLEX, TIMEOUT = "no_answer", "too_complex", "timeout"
REASONS = (NO_ANSWER, TOO_COMPLEX, UNPARSABLE, TIMEOUT, DIFFERENT, SAME)
BOX = r"\boxed{"
MAX_CHARS, MAX_POWERS, MAX_DEPTH, MAX_FACTORIALS = 512, 8, 8, 4
LONG_FACTORIAL = re.compile(r"\d{4}[\s)}\]]*!")
NUM_ATTEMPTS, MARGIN_S = 3, 90.0
MATH_LIMITS = Limits(call_s=2.0, total_s=2.0, memory_bytes=1 << 30, cpu_s=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class MathOptions:
    """The walls around math-verify."""

    sandbox: Level = "strict"
    """Walls around a comparison."""
    is_unsafe_allowed: bool = False
    """Whether comparisons may run without walls, where asked for or where the walls do not stand."""
    limits: Limits = field(default_factory=lambda: MATH_LIMITS)
    """Time and memory of a comparison."""
    num_workers: int = 0
    """Scoring processes; 0: by the number of processors."""


def boxed_answer(text: str) -> str | None:
    r"""The content of the last \boxed{...}; None where there is none, or where its braces do not close."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    start += len(BOX)
    depth, place = 1, start
    while place < len(text):
        if text[place] == "\\":  # \{ and \} are no braces
            place += 2
            continue
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place]
        place += 1
    return None


def is_too_complex(answer: str) -> bool:
    """Whether an answer is longer, deeper or has higher towers than an answer needs."""
    depth = deepest = 0
    for char in answer:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    return (
        len(answer) > MAX_CHARS
        or deepest > MAX_DEPTH
        or answer.count("^") + answer.count("**") > MAX_POWERS
        or answer.count("!") > MAX_FACTORIALS
        or LONG_FACTORIAL.search(answer) is not None
    )


class MathChecker:
    """Judges answers in confined processes; a context manager that ends them.

    Raises:
        UserError: The extra is not installed, or the walls do not stand on this machine.
    """

    def __init__(self, options: MathOptions) -> None:
        missing = missing_package()
        if missing is not None:
            raise UserError(
                f"math: the package {missing} is not installed; expected the extra: pip install 'sparkgrpo[math]'"
            )
        self.options = options
        self.report: SandboxReport = require_sandbox(options.sandbox, is_unsafe_allowed=options.is_unsafe_allowed)
        settings = {"level": self.report.level, "limits": asdict(options.limits)}
        self._pool = ScoringPool(HANDLER, settings, num_workers=options.num_workers or default_num_workers())

    def start(self, gold: str, text: str) -> "Future[Outcome] | str":
        """Begin to judge a completion: a reason where it is known at once, else the comparison under way."""
        answer = boxed_answer(text)
        if answer is None:
            return NO_ANSWER
        if is_too_complex(answer):
            return TOO_COMPLEX
        return self._submit(gold, answer)

    def finish(self, gold: str, text: str, started: "Future[Outcome] | str") -> str:
        """The reason, one of REASONS, for what `start` gave for the same gold and text.

        Raises:
            UserError: The right answer cannot be read.
            RuntimeError: Scoring failed three times, through no fault of the answer.
        """
        if isinstance(started, str):
            return started
        for attempt in range(NUM_ATTEMPTS):
            outcome = started.result()
            if outcome.status == "done":
                return _reason(gold, cast(dict[str, Any], outcome.value))
            if attempt + 1 < NUM_ATTEMPTS:
                started = self._submit(gold, boxed_answer(text) or "")
        raise RuntimeError(f"math: an answer could not be scored in {NUM_ATTEMPTS} attempts; the last: {outcome.error}")

    def judge(self, golds: Sequence[str], texts: Sequence[str]) -> list[str]:
        """The reason for each completion, all of them side by side."""
        started = [self.start(gold, text) for gold, text in zip(golds, texts, strict=True)]
        return [self.finish(*row) for row in zip(golds, texts, started, strict=True)]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, gold: str, answer: str) -> "Future[Outcome]":
        job = [_without_percent(gold), _without_percent(answer)]
        return self._pool.submit(job, self.options.limits.call_s + MARGIN_S)


def _without_percent(expression: str) -> str:
    r"""\% is a unit and never divides."""
    return expression.replace(r"\%", "").replace("%", "").strip()


def _reason(gold: str, reply: dict[str, str]) -> str:
    """A comparison that died (memory, a crash of the parser) is an answer too heavy to compare."""
    status, value = reply["status"], reply["value"]
    if status == "ok" and value == BAD_GOLD:
        raise UserError(f"math: the right answer {gold!r} cannot be read; expected LaTeX or a plain expression")
    if status == "ok" and value in REASONS:
        return value
    return TIMEOUT if status == "timeout" else UNPARSABLE if status == "exception" else TOO_COMPLEX
