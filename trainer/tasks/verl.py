"""Reward functions in verl's contract: compute_score(data_source, solution_str, ground_truth, extra_info=None).

Such a function is called once for each completion, in a fresh confined fork (`confined_call.py`): many of them evaluate
what the model wrote. It returns a number, or a dictionary with `score`, whose other numbers become parts.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.confined_call import Answer, ConfinedFunctions
from sparkgrpo.trainer.tasks.reward_call import Job, Reply, plain_number
from sparkgrpo.trainer.tasks.sandbox.wire import Malformed
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Level

PREFIX = "verl:"
MAX_CALL_S = 10.0


class VerlChannel:
    """The way to one such function (`reward_channels.Channel`).

    Args:
        name: Of its part.
        reference: "module:function" or "file.py:function".
        timeout_s: Deadline of a batch; a call gets this, and at most 10 s.
        sandbox, is_unsafe_allowed: The walls around a call (`ConfinedFunctions`).
    """

    def __init__(
        self, name: str, reference: str, timeout_s: float, *, sandbox: Level = "strict", is_unsafe_allowed: bool = False
    ) -> None:
        self.names = [name]
        self._call_s = min(timeout_s, MAX_CALL_S)
        self._function, folders = _module_and_function(reference)
        self._confined = ConfinedFunctions(
            [self._function],
            folders=folders,
            call_s=self._call_s,
            sandbox=sandbox,
            is_unsafe_allowed=is_unsafe_allowed,
        )
        self._calls: dict[int, list[Any]] = {}

    def describe(self) -> list[dict[str, Any]]:
        """Called by position, whatever its parameters are named."""
        return [{"required": [], "accepts": None, "is_async": False, "problem": ""}]

    def submit(self, job: Job, deadline_s: float) -> "Future[list[Reply]]":
        """Begin a call for each completion."""
        future: Future[list[Reply]] = Future()
        try:
            calls = [(self._function, _arguments(job, row)) for row in range(len(job["texts"]))]
            self._calls[id(future)] = self._confined.submit(calls)
        except Malformed as error:
            raise UserError(f"reward verl:{self._function}: a column holds what cannot be sent: {error}") from None
        return future

    def wait(self, future: "Future[list[Reply]]") -> list[Reply]:
        """The values of all completions; where every call raised, that."""
        answers = self._confined.answers(self._calls.pop(id(future)))
        if all(answer.status == "exception" for answer in answers):
            return [{"error": f"every call raised; the first {answers[0].value}"}]
        values, parts = zip(*map(_read, answers), strict=True)
        return [{"values": list(values), "parts": list(parts), "metrics": [], "extras": {}}]

    @property
    def num_restarts(self) -> int:
        """Scoring processes replaced so far."""
        return self._confined.num_restarts

    def close(self) -> None:
        """End the processes."""
        self._confined.close()


def _module_and_function(reference: str) -> tuple[str, list[str]]:
    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        return reference, []
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"reward: there is no file {path}; expected verl:file.py:function")
    return f"{path.stem}:{name}", [str(path.parent)]


def _arguments(job: Job, row: int) -> tuple[object, ...]:
    """What verl passes, found under verl's names of columns or under plainer ones."""
    columns: Mapping[str, Any] = job["problems"][job["problem_of_row"][row]]["columns"]
    model = columns.get("reward_model")
    truth = columns.get("ground_truth", model.get("ground_truth") if isinstance(model, Mapping) else None)
    return (
        columns.get("data_source", ""),
        job["texts"][row],
        columns.get("answer") if truth is None else truth,
        columns.get("extra_info", dict(columns)),
    )


def _read(answer: Answer) -> tuple[float | dict[str, str] | None, dict[str, float]]:
    if answer.status != "ok":
        return {"bad": f"{answer.status} {answer.value or ''}".strip()}, {}
    if not isinstance(answer.value, dict):
        return plain_number(answer.value), {}
    if "score" not in answer.value:
        return {"bad": f"a dictionary without score: {', '.join(map(str, answer.value))}"}, {}
    numbers = {str(name): plain_number(value) for name, value in answer.value.items() if name != "score"}
    return plain_number(answer.value["score"]), {k: value for k, value in numbers.items() if isinstance(value, float)}
