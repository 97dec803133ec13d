"""Tasks by name, and what a configuration makes of them.

A name is one of `TASKS` (which need nothing) or `DATA_TASKS` (which need rows), "gym:<dataset>" for reasoning-gym, or a
reference to a task of the user's own, "file.py:MyTask". Settings that the named task does not take are refused here.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.task_config import CHECKERS, PYTHON, reward_references
from sparkgrpo.trainer.tasks.base import Task, TaskOpening, opened
from sparkgrpo.trainer.tasks.checked_rows import CheckedRows
from sparkgrpo.trainer.tasks.code import Code, CodeOptions
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions
from sparkgrpo.trainer.tasks.gsm8k import Gsm8k, Gsm8kOptions, NumberRewardOptions
from sparkgrpo.trainer.tasks.gym import PREFIX as GYM
from sparkgrpo.trainer.tasks.gym import Gym
from sparkgrpo.trainer.tasks.math_answers import MathOptions
from sparkgrpo.trainer.tasks.math_rows import MathRows
from sparkgrpo.trainer.tasks.own_task import load_task
from sparkgrpo.trainer.tasks.records import Splits, load_splits
from sparkgrpo.trainer.tasks.rewarded import RewardedTask
from sparkgrpo.trainer.tasks.rows import Rows, RowsOptions
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Level
from sparkgrpo.trainer.tasks.user import RewardFunctions
from sparkgrpo.trainer.tasks.word_problems import WordProblems, WordProblemsOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """The options of every task; a run reads those of the task it names."""

    countdown: CountdownOptions = field(default_factory=CountdownOptions)
    """Countdown: numbers, held-out share, what training pays."""
    code: CodeOptions = field(default_factory=CodeOptions)
    """Code: what training pays, the walls around programs."""
    echo: EchoOptions = field(default_factory=EchoOptions)
    """The toy: number of prompts."""
    gsm8k: Gsm8kOptions = field(default_factory=Gsm8kOptions)
    """GSM8K: where the rows are, what training pays."""
    word_problems: WordProblemsOptions = field(default_factory=WordProblemsOptions)
    """Word problems: held-out share, what training pays."""
    rows: RowsOptions = field(default_factory=RowsOptions)
    """Rows of any data set: columns and checker."""
    math: MathOptions = field(default_factory=MathOptions)
    """Rows with the checker math: the walls around a comparison."""
    data: str = ""
    """Where those rows are."""
    heldout_frac: float | None = None
    """Share held out, for data sets of reasoning-gym."""
    reward_timeout_s: float = 60.0
    """Deadline of a function that checks answers."""
    sandbox: Level = "strict"
    """Walls around the scores of reasoning-gym."""
    is_unsafe_allowed: bool = False
    """Whether they may run without walls."""


TASKS: Mapping[str, Callable[[TaskOptions], Task]] = {
    Countdown.name: lambda options: Countdown(options.countdown),
    Code.name: lambda options: Code(options.code),
    Echo.name: lambda options: Echo(options.echo),
    WordProblems.name: lambda options: WordProblems(options.word_problems),
}
DATA_TASKS: Mapping[str, Callable[[TaskOptions], Task]] = {
    Gsm8k.name: lambda options: Gsm8k(options.gsm8k),
    Rows.name: lambda options: _rows_from_data(options),
}

_NUMERIC = (Gsm8k.name, WordProblems.name)
_TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("numbers", "max_number", "max_target", "format_reward", "single_answer"), (Countdown.name,)),
    **dict.fromkeys(("xmlcount_floor", "flexible"), _NUMERIC),
    **dict.fromkeys(("prompt_column", "answer_column", "checker"), (Rows.name,)),
    "data": (Gsm8k.name, Rows.name),
    "heldout_frac": (Countdown.name, *_NUMERIC, Rows.name, GYM),
}
"""Which tasks take a setting that not all take."""
_REWARDS: Mapping[str, tuple[str, ...]] = {
    Countdown.name: ("strict", "sloppy"),
    Code.name: ("strict", "visible"),
    **dict.fromkeys(_NUMERIC, ("five", "correct")),
}
"""The words of `reward` that a task knows beside auto, its default first; others know "strict" alone."""
_OF_OWN_REWARD = ("format_reward", "single_answer", "xmlcount_floor")


def task_options(config: Config) -> TaskOptions:
    """The task options that a run's configuration asks for. ValueError for those that do not go together."""
    word = config.reward
    numbers = tuple(int(number) for number in config.numbers.split(","))
    grading = NumberRewardOptions(
        reward="correct" if word == "correct" else "five",
        xmlcount_floor=config.xmlcount_floor,
    )
    return TaskOptions(
        countdown=CountdownOptions(
            numbers=numbers,
            max_number=config.max_number,
            max_target=config.max_target,
            heldout_frac=config.heldout_frac,
            reward="sloppy" if word == "sloppy" else "strict",
            format_reward=config.format_reward,
            single_answer=config.single_answer,
        ),
        code=CodeOptions(
            reward="visible" if word == "visible" else "strict",
            sandbox=config.sandbox,
            is_unsafe_allowed=config.unsafe_sandbox,
        ),
        gsm8k=Gsm8kOptions(
            data=config.data, heldout_frac=config.heldout_frac, grading=grading, is_flexible=config.flexible
        ),
        word_problems=WordProblemsOptions(
            heldout_frac=config.heldout_frac, grading=grading, is_flexible=config.flexible
        ),
        rows=RowsOptions(
            prompt_column=config.prompt_column,
            answer_column=config.answer_column,
            checker=config.checker,
            heldout_frac=config.heldout_frac,
            is_for_process=config.checker not in CHECKERS
            or any(not reference.startswith(PYTHON) for reference in reward_references(word)),
        ),
        math=MathOptions(sandbox=config.sandbox, is_unsafe_allowed=config.unsafe_sandbox),
        data=config.data,
        heldout_frac=config.heldout_frac,
        reward_timeout_s=config.reward_timeout_s,
        sandbox=config.sandbox,
        is_unsafe_allowed=config.unsafe_sandbox,
    )


def make_task(name: str, options: TaskOptions) -> Task:
    """The task of this name with its part of the options. `UserError` for an unknown name, naming the nearest one."""
    check_name(name)
    if name.startswith(PYTHON):
        raise UserError(
            f"task: {name.removeprefix(PYTHON)} was a Python object, which no name leads to: go on from Python, "
            "by train(resume=..., task=...)"
        )
    if name.startswith(GYM):
        return Gym(
            name.removeprefix(GYM),
            heldout_frac=options.heldout_frac,
            sandbox=options.sandbox,
            is_unsafe_allowed=options.is_unsafe_allowed,
        )
    return load_task(name) if ":" in name else {**TASKS, **DATA_TASKS}[name](options)


def check_name(name: str) -> None:
    """`UserError` for a name that is no task's, naming the nearest one; a reference is followed later."""
    known = {**TASKS, **DATA_TASKS}
    if name in known or ":" in name:
        return
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    if name.endswith((".jsonl", ".json")):
        hint = f"rows of a file are --task rows --data {name}; "
    raise UserError(
        f"unknown task {name!r}: {hint}the tasks are {', '.join(sorted(known))}, gym:<dataset>, file.py:MyTask"
    )


def rows_task(options: TaskOptions, splits: Splits) -> Task:
    """Rows that are there already as a task, with the checker that the options name."""
    checker = options.rows.checker
    if not options.rows.answer_column or checker in ("number", "exact"):
        return Rows(options.rows, splits)
    if checker == "math":
        return MathRows(options.rows, splits, options.math)
    return CheckedRows(options.rows, splits, checker=checker, timeout_s=options.reward_timeout_s)


def check_settings(config: Config, user_set: Mapping[str, object]) -> None:
    """Refuse what the named task does not take, and settings that contradict each other. `UserError` with the way out.

    Args:
        user_set: What the person set; a default or a recipe may hold settings of other tasks.
    """
    check_name(config.task)
    kind = GYM if config.task.startswith(GYM) else config.task
    shown = config.task.removeprefix(PYTHON)
    for name, tasks in _TAKEN_BY.items():
        if name in user_set and kind not in tasks:
            raise UserError(
                f"{name}: belongs to the task {' or '.join(task.rstrip(':') for task in tasks)}, "
                f"got the task {shown}: leave {name} out"
            )
    functions = reward_references(config.reward)
    words = _REWARDS.get(kind, ("strict",))
    if not functions and config.reward not in ("auto", *words):
        raise UserError(
            f"reward: the task {shown} pays {' or '.join(words)}, or functions such as file.py:name; "
            f"got {config.reward!r}"
        )
    own = [name for name in _OF_OWN_REWARD if name in user_set and functions]
    if own:
        raise UserError(f"{own[0]}: is part of the task's own reward, which {config.reward} replaces: leave one out")
    if config.reward_weights and not functions:
        raise UserError("reward_weights: weighs reward functions, and none is given: expected --reward file.py:name")


@contextmanager
def run_task(
    config: Config,
    user_set: Mapping[str, object],
    *,
    warn: Callable[[str], None],
    task: Task | None = None,
    functions: Sequence[str | Callable[..., Any]] = (),
) -> Iterator[TaskOpening]:
    """The task of a run, ready to judge; reward functions, where there are some, stand in for its reward.

    Args:
        user_set: What the person set.
        warn: Told what cannot wait for the end of a step.
        task: An object in place of the name that the configuration has.
        functions: Python objects, or references, in place of those that the configuration names.

    Raises:
        UserError: Settings that do not go together; data, a task or a function that cannot be had.
    """
    if task is None:
        check_settings(config, user_set)
        task = _named_task(config)
    rewards = functions or reward_references(config.reward)
    lost = [reward for reward in rewards if isinstance(reward, str) and reward.startswith(PYTHON)]
    if lost:
        raise UserError(
            f"reward: {lost[0].removeprefix(PYTHON)} was a Python object, which no name leads to: go on from Python, "
            "by train(resume=..., reward_funcs=[...])"
        )
    with _closing(task), opened(task) as opening:
        if not rewards:
            if isinstance(task, Rows) and not task.options.answer_column:
                raise UserError(
                    "reward: rows without an answer column have nothing that judges them; expected --answer-column, "
                    "or --reward file.py:name"
                )
            yield replace(opening, notes=(*getattr(task, "notes", ()), *opening.notes))
            return
        reward_functions = RewardFunctions(
            rewards,
            weights=tuple(float(weight) for weight in config.reward_weights.split(",") if weight),
            columns=task.columns,
            is_plain=isinstance(task, Rows) and task.has_text_prompts,
            timeout_s=config.reward_timeout_s,
            warn=warn,
            sandbox=config.sandbox,
            is_unsafe_allowed=config.unsafe_sandbox,
        )
        with closing(reward_functions):
            rewarded = RewardedTask(task, reward_functions, num_steps=config.steps)
            yield replace(opening, task=rewarded, notes=(*rewarded.notes, *opening.notes))


@contextmanager
def evaluation_task(config: Config) -> Iterator[Task]:
    """The task by whose strict check a model is measured; closed in the end. `UserError` where it has none."""
    task = _named_task(config)
    with _closing(task), opened(task):
        if isinstance(task, Rows) and not task.options.answer_column:
            raise UserError("answer_column: without it no strict check can measure; expected --answer-column")
        yield task


def _named_task(config: Config) -> Task:
    try:
        return make_task(config.task, task_options(config))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"task: {error}") from None


@contextmanager
def _closing(task: Task) -> Iterator[None]:
    """End the processes of a task that has some."""
    try:
        yield
    finally:
        close = getattr(task, "close", None)
        if callable(close):
            close()


def _rows_from_data(options: TaskOptions) -> Task:
    if not options.data:
        raise UserError(
            "data: the task rows needs rows; expected --data FILE.jsonl or --data owner/name (the hub, with the extra "
            "data). A run whose rows came from Python goes on from Python"
        )
    return rows_task(options, load_splits(options.data))
