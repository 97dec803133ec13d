"""The Python API: a script of ten lines trains.

    from sparkgrpo.trainer.api import train

    def close_to_ten_words(completions, **kwargs):
        return [-abs(10 - len(text.split())) for text in completions]

    dataset = [{"prompt": f"Say something about {thing}."} for thing in ("rain", "bread", "ships", "owls")]
    result = train(model="embedded", reward_funcs=[close_to_ten_words], dataset=dataset, steps=20)

Names are those of TRL's trainer where it has them; every field of `Config` is a keyword argument. The command line does
the same with references to functions and files, and its functions run in processes that can be stopped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sparkgrpo.trainer.cli import settled
from sparkgrpo.trainer.config import UserError, field_types
from sparkgrpo.trainer.contradictions import name_elsewhere
from sparkgrpo.trainer.dashboard import RunView, make_view
from sparkgrpo.trainer.run import TrainResult
from sparkgrpo.trainer.run import train as run_train
from sparkgrpo.trainer.settings import nearest
from sparkgrpo.trainer.task_config import PYTHON
from sparkgrpo.trainer.tasks.base import Task
from sparkgrpo.trainer.tasks.own_task import checked_task
from sparkgrpo.trainer.tasks.records import Splits, in_memory
from sparkgrpo.trainer.tasks.registry import rows_task, task_options
from sparkgrpo.trainer.tasks.reward_call import RewardFunction
from sparkgrpo.trainer.tasks.rows import Rows

RewardFunc = str | Callable[..., Sequence[float | None]]
"""A Python function in TRL's contract, or a reference such as "file.py:name"."""


def train(
    model: str = "auto",
    reward_funcs: RewardFunc | Sequence[RewardFunc] = (),
    dataset: str | Iterable[Mapping[str, Any]] | None = None,
    *,
    eval_dataset: Iterable[Mapping[str, Any]] | None = None,
    task: str | Task | None = None,
    reward_weights: Sequence[float] | None = None,
    config: str | None = None,
    view: RunView | None = None,
    **settings: Any,  # noqa: ANN401
) -> TrainResult:
    """Train a model with GRPO.

    Args:
        model: (With `resume`, the settings of that run hold, and model, task and weights are not looked at.) A Hugging
            Face folder, a hub name, a FILE.gguf, "embedded" or "auto".
        reward_funcs: One or several functions; without any, what the task itself pays. Their contract is that of
            `tasks/user.py`: keyword arguments, a list of numbers or None back.
        dataset: Rows with the column `prompt` (text or chat messages) and any others, which reward functions get as
            lists; or a JSONL file, a folder or a hub name. Without it, the task makes its problems.
        eval_dataset: Rows to evaluate on; without them a share of the dataset is held out.
        task: A task by name ("countdown", "gsm8k", "gym:...", "file.py:MyTask"), or an object that is one.
        reward_weights: One for each function; 1.0 each if not given.
        config: A YAML file of settings.
        view: Shows the run; by default what the command line shows.
        settings: Fields of `Config`, such as steps=100 or group_size=16.

    Returns:
        The run's folder, its steps, and the accuracy before and after, where the task has a strict check.

    Raises:
        UserError: A mistake in what was given; the text says what to do.
    """
    functions = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs)
    rows = None if dataset is None or isinstance(dataset, str) else _rows(dataset, eval_dataset)
    if eval_dataset is not None and rows is None:
        raise UserError("eval_dataset: expected together with a dataset of rows; a file takes test.jsonl beside it")
    if rows is not None and task is not None:
        raise UserError("dataset: rows are a task of their own; expected a dataset or a task, got both")
    made = None if isinstance(task, str | None) else checked_task(task, type(task).__name__)
    options = _checked(settings, functions)
    if "resume" not in options:  # a run that goes on has these in its run.json
        options |= _named(model, functions, reward_weights, dataset, task)
    resolved, user_set, notes = settled(options, config)
    if "resume" in settings and (made is not None or rows is not None):
        _check_same_task(resolved.task, Rows.name if made is None else _task_name(made))
    if rows is not None:
        made = rows_task(task_options(resolved), rows)
    shown = view or make_view(resolved.plain)
    try:
        for note in notes:
            shown.note(note)
        return run_train(resolved, user_set=user_set, view=shown, task=made, reward_functions=functions)
    finally:
        if view is None:
            shown.close()


def _named(
    model: str,
    functions: Sequence[RewardFunc],
    reward_weights: Sequence[float] | None,
    dataset: object,
    task: str | Task | None,
) -> dict[str, object]:
    """The arguments of `train` as settings, as far as they have names."""
    options: dict[str, object] = {"model": model}
    if functions:  # an object is recorded by its name alone
        named = [f if isinstance(f, str) else f"{PYTHON}{RewardFunction.of(f).name}" for f in functions]
        options["reward"] = ",".join(named)
    if reward_weights:
        options["reward_weights"] = ",".join(map(str, reward_weights))
    if task is not None:
        options["task"] = _task_name(task)
    elif dataset is not None:
        options["task"] = Rows.name
    return options | ({"data": dataset} if isinstance(dataset, str) else {})


def _task_name(task: str | Task) -> str:
    """A task as the setting; an object is recorded by its type's name alone."""
    return task if isinstance(task, str) else f"{PYTHON}{type(task).__name__}"


def _check_same_task(recorded: str, given: str) -> None:
    """`UserError` where rows or an object would go on in a run of another task."""
    if given != recorded:
        raise UserError(
            f"task: the run to go on with is one of {recorded.removeprefix(PYTHON)}, got "
            f"{'rows' if given == Rows.name else f'an object of {given.removeprefix(PYTHON)}'}: "
            f"{'give an object of that type' if recorded.startswith(PYTHON) else 'leave it out'}"
        )


def _rows(dataset: Iterable[Mapping[str, Any]], eval_dataset: Iterable[Mapping[str, Any]] | None) -> Splits:
    train_rows = in_memory(dataset)
    if eval_dataset is None:
        return train_rows
    return Splits(train=train_rows.train, test=in_memory(eval_dataset).train, source=train_rows.source)


def _checked(settings: Mapping[str, Any], functions: Sequence[object]) -> dict[str, object]:
    """The settings, if all are known and `reward` is said once."""
    for name in settings:
        if name not in field_types():
            raise UserError(f"train: unknown argument {name!r}{name_elsewhere(name) or nearest(name, field_types())}")
    if functions and "reward" in settings:
        raise UserError("reward: the name of a reward and reward_funcs are two ways to say one thing: leave one out")
    return dict(settings)
