"""Tasks by name."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.tasks.base import Task
from sparkgrpo.trainer.tasks.code import Code, CodeOptions
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """The options of every task; a run reads those of the task it names."""

    countdown: CountdownOptions = field(default_factory=CountdownOptions)
    """Countdown: numbers, held-out share, what training pays."""
    code: CodeOptions = field(default_factory=CodeOptions)
    """Code: what training pays, the walls around programs."""
    echo: EchoOptions = field(default_factory=EchoOptions)
    """The toy: number of prompts."""


def task_options(config: Config) -> TaskOptions:
    """The task options that a run's configuration asks for."""
    if config.task == Code.name:  # each task checks its own part alone: a reward that one has is unknown to another
        code = CodeOptions(
            reward=config.reward,  # pyright: ignore[reportArgumentType]
            sandbox=config.sandbox,
            is_unsafe_allowed=config.unsafe_sandbox,
        )
        return TaskOptions(code=code)
    numbers = tuple(int(number) for number in config.numbers.split(","))
    countdown = CountdownOptions(numbers=numbers, reward=config.reward)  # pyright: ignore[reportArgumentType]
    return TaskOptions(countdown=countdown)


TASKS: Mapping[str, Callable[[TaskOptions], Task]] = {
    Countdown.name: lambda options: Countdown(options.countdown),
    Code.name: lambda options: Code(options.code),
    Echo.name: lambda options: Echo(options.echo),
}


def make_task(name: str, options: TaskOptions) -> Task:
    """The task of this name with its part of the options. `UserError` for an unknown name, naming the nearest one."""
    if name not in TASKS:
        nearest = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise UserError(f"unknown task {name!r}: {hint}the tasks are {', '.join(sorted(TASKS))}")
    return TASKS[name](options)
