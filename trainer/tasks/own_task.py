"""A task of the user's own: "file.py:MyTask" or "package.module:MyTask", a class without arguments, or an object."""

import inspect
from typing import Any, cast

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.base import Completion, Problem, Task
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
    """The first problem is a `Problem` with the columns that were said, the same when asked for again, and judged."""
    first, again = task.problems(0, 0, 1), task.problems(0, 0, 1)
    if not isinstance(first, list) or len(first) != 1 or not isinstance(first[0], Problem):
        raise UserError(f"task: {origin}: expected problems(0, 0, 1) to be a list of one Problem, got {first!r:.80}")
    problem = first[0]
    if problem != again[0]:
        raise UserError(f"task: {origin}: problems(0, 0, 1) gave another problem the second time; it must be pure")
    if set(problem.columns) != set(task.columns):
        raise UserError(
            f"task: {origin}: its columns are {sorted(task.columns)}, its problems have {sorted(problem.columns)}"
        )
    reason = task.verify(problem, Completion(text="", token_ids=(), is_truncated=False)).reason
    if reason not in task.reasons:
        raise UserError(f"task: {origin}: verify gave the reason {reason!r}, which is not among {task.reasons}")
