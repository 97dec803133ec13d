"""Tasks of a user's own, right and wrong, for `test_registry.py`."""

from collections.abc import Sequence

import numpy as np

from sparkgrpo.trainer.tasks.base import Completion, Problem, Score


class Repeat:
    """Say the number."""

    name = "repeat"
    columns = frozenset({"number"})
    reasons = ("wrong_value", "ok")
    num_problems = None

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return [
            Problem(prompt=({"role": "user", "content": f"Say {n}"},), columns={"number": n}, identity=f"repeat:{n}")
            for n in range(start, start + count)
        ]

    def heldout(self, count: int) -> list[Problem]:
        return self.problems(0, 10**6, count)

    def verify(self, problem: Problem, completion: Completion) -> Score:
        is_right = str(problem.columns["number"]) in completion.text
        return Score(reward=float(is_right), parts={}, reason="ok" if is_right else "wrong_value")

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        return [self.verify(problem, answer) for problem, answer in zip(problems, completions, strict=True)]


instance = Repeat()


def made() -> Repeat:
    """A function that makes the task."""
    return Repeat()


class NeedsArguments(Repeat):
    def __init__(self, size: int) -> None:
        self.size = size


class WithoutHeldout:
    name, columns, reasons, num_problems = "x", frozenset(), ("ok",), None

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return []


class ColumnsAsList(Repeat):
    columns = ["number"]  # noqa: RUF012


class OtherParameters(Repeat):
    def problems(self, count: int) -> list[Problem]:
        return []


class Forgets(Repeat):
    calls = 0

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        Forgets.calls += 1
        return super().problems(seed, start + Forgets.calls, count)


class OtherColumns(Repeat):
    columns = frozenset({"target"})


class UnknownReason(Repeat):
    reasons = ("ok",)


class Raises(Repeat):
    def __init__(self) -> None:
        raise OSError("no licence")


class ProblemsRaise(Repeat):
    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        raise KeyError("question")


class NoProblems(Repeat):
    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return []


class GivesOnce(Repeat):
    def __init__(self) -> None:
        self._left = [Repeat.problems(self, 0, 0, 1)]

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return self._left.pop() if self._left else []


class NotToBeCompared(Repeat):
    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return [Problem(prompt=(1,), columns={"number": np.arange(2)}, identity="repeat:0")]


class VerifyGivesBool(Repeat):
    def verify(self, problem: Problem, completion: Completion) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False


class VerifyGivesNothing(Repeat):
    def verify(self, problem: Problem, completion: Completion) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


class VerifyRaises(Repeat):
    def verify(self, problem: Problem, completion: Completion) -> Score:
        return self.rate[completion.text]  # pyright: ignore[reportAttributeAccessIssue]
