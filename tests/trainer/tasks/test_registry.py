import pytest

from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions
from sparkgrpo.trainer.tasks.registry import TASKS, TaskOptions, make_task


def test_each_task_gets_its_own_options() -> None:
    options = TaskOptions(countdown=CountdownOptions(numbers=(2, 4)), echo=EchoOptions(num_tokens=9))
    countdown, echo = make_task("countdown", options), make_task("echo", options)
    assert isinstance(countdown, Countdown) and countdown.options.numbers == (2, 4)
    assert isinstance(echo, Echo) and echo.num_problems == 9


@pytest.mark.parametrize("name", TASKS)
def test_every_task_keeps_the_contract(name: str) -> None:
    task = make_task(name, TaskOptions())
    assert task.name == name
    assert "ok" in task.reasons and len(set(task.reasons)) == len(task.reasons)
    for problem in (*task.problems(0, 0, 3), *task.heldout(3)):
        assert problem.identity.startswith(f"{name}:")
        assert set(problem.columns) == task.columns


@pytest.mark.parametrize(("typo", "nearest"), [("countdwn", "countdown"), ("Echo", "echo")])
def test_unknown_name_names_the_nearest(typo: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown task '{typo}': did you mean '{nearest}'"):
        make_task(typo, TaskOptions())


def test_unknown_name_without_a_neighbour_lists_the_tasks() -> None:
    with pytest.raises(ValueError, match="unknown task 'zzz': the tasks are code, countdown, echo"):
        make_task("zzz", TaskOptions())
