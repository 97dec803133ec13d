"""A task of the user's own: "file.py:MyTask" or "package.module:MyTask", a class without arguments, or an object."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any, cast

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score, Task
from sparkgrpo.trainer.tasks.reward_call import UnknownReference, load_reference

METHODS = {
    "problems": ("seed", "start", "count"),
    "heldout": ("count",),
    "verify": ("problem", "completion"),
    "reward": ("problems", "completions"),
}
FIELDS = {
    "name": str,
    "columns": frozenset,
    "reasons": tuple,
    "num_problems": (int, type(None)),
}


def load_task(reference: str) -> Task:
    """The task that a reference names, checked against the protocol.

    Raises:
        UserError: It leads nowhere, cannot be made without arguments, or lacks a member; what it raises is shown.
    """
    try:
        found = load_reference(reference)
        task: Any = found() if inspect.isclass(found) or inspect.isfunction(found) else found
    except UnknownReference as error:
        raise UserError(f"task: {error}") from None
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task: {reference} could not be made: {type(error).__name__}: {error}") from error
    return checked_task(task, reference)


def checked_task(task: Any, origin: str) -> Task:  # noqa: ANN401
    """The object itself, if it has every member of `Task` and its first problem is one. `UserError` otherwise."""
    for name, kind in FIELDS.items():
        if not hasattr(task, name):
            raise UserError(f"task: {origin} has no {name!r}; a task has {', '.join((*FIELDS, *METHODS))}")
        if not isinstance(getattr(task, name), kind):
            wanted = kind.__name__ if isinstance(kind, type) else "int or None"
            raise UserError(f"task: {origin}: {name} must be {wanted}, got {type(getattr(task, name)).__name__}")
    for name, parameters in METHODS.items():
        method = getattr(task, name, None)
        if not callable(method):
            raise UserError(f"task: {origin} has no method {name}({', '.join(parameters)})")
        try:
            inspect.signature(method).bind(*parameters)
        except TypeError:
            raise UserError(
                f"task: {origin}: expected {name}({', '.join(parameters)}), got {name}{inspect.signature(method)}"
            ) from None
    _check_behaviour(task, origin)
    return cast(Task, task)


def _check_behaviour(task: Any, origin: str) -> None:  # noqa: ANN401
    """The first problem is a `Problem` with the columns that were said, the same when asked for again, and judged.

    `reward` is not tried: reward functions may stand in for it, and it may then be a stub.
    """
    asked, wanted = "problems(0, 0, 1)", "a list of one Problem"
    first, again = (_given(lambda: task.problems(0, 0, 1), origin, asked, wanted) for _ in range(2))
    for given in (first, again):
        if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], Problem):
            raise UserError(f"task: {origin}: expected {asked} to be {wanted}, got {given!r:.80}")
    problem = first[0]
    if not _given(lambda: bool(problem == again[0]), origin, f"{asked} == {asked}", "True, columns compared by =="):
        raise UserError(f"task: {origin}: {asked} gave another problem the second time; it must be pure")
    if set(problem.columns) != set(task.columns):
        raise UserError(
            f"task: {origin}: its columns are {sorted(task.columns)}, its problems have {sorted(problem.columns)}"
        )
    empty = Completion(text="", token_ids=(), is_truncated=False)
    asked, wanted = "verify(problem, completion)", "a Score"
    score = _given(lambda: task.verify(problem, empty), origin, f"{asked} of an empty completion", wanted)
    if not isinstance(score, Score):
        raise UserError(
            f"task: {origin}: expected {asked} to give {wanted} such as Score(reward=1.0, parts={{}}, reason='ok'), "
            f"got {type(score).__name__} {score!r:.80}"
        )
    if score.reason not in task.reasons:
        raise UserError(f"task: {origin}: verify gave the reason {score.reason!r}, which is not among {task.reasons}")


def _given(call: Callable[[], Any], origin: str, asked: str, wanted: str) -> Any:  # noqa: ANN401
    """What the task's own code gives; what it raises becomes a `UserError` that says where."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"task: {origin}: expected {asked} to give {wanted}, but it raised {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno})"
        ) from error
