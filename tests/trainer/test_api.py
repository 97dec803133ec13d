"""The Python API: the example that the README prints runs, and so does what TRL's users write."""

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkgrpo.trainer.api import train
from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.runlog import read_jsonl, read_run
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions
from sparkgrpo.trainer.tasks.registry import evaluation_task

ROOT = Path(__file__).resolve().parents[2]
SHORT: dict[str, Any] = {
    "device": "cpu", "steps": 2, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 12, "lr": 1e-3,
    "eval_problems": 4, "plain": True, "num_threads": 1,
}  # fmt: skip
ROWS = [{"prompt": f"Say {n}.", "answer": n, "level": "easy"} for n in range(12)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs land in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    yield


def config_of(result: Any) -> dict[str, Any]:
    config = read_run(Path(result.run_dir))["config"]
    assert isinstance(config, dict)
    return config


def vowels(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(text.count(vowel) for vowel in "aeiou123")) for text in completions]


@pytest.fixture
def run(tiny_folder: Path) -> Callable[..., Any]:
    """Trains the tiny model; returns the result, the lines of its metrics and those of its samples."""

    def make(**values: Any) -> tuple[Any, list[dict], list[dict]]:
        result = train(**{"model": str(tiny_folder), **SHORT, **values})
        folder = Path(result.run_dir)
        return result, read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl")

    return make


def test_the_readme_s_example_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Two steps of it in place of all."""
    block = re.search(
        r"```python\n(from sparkgrpo\.trainer\.api import train\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert block is not None
    code = block.group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    short, count = re.subn(r"steps=\d+", "steps=2, prompts_per_step=2, max_new_tokens=16, plain=True", code)
    assert count == 1
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(short, "README.md", "exec"), names)
    result = names["result"]
    assert result.steps == 2 and result.eval_before is None, "there is no strict check"
    rows = read_jsonl(Path(result.run_dir) / "metrics.jsonl")
    assert len(rows) == 2 and all(row["reward_mean"] is not None for row in rows)
    assert rows[0]["frac_right"] is None and rows[0]["frac_right_strict"] is None and rows[0]["hack_gap"] is None
    assert "a Python object runs in a thread, where its deadline can only report" in capsys.readouterr().out


def test_rows_with_answers_have_an_accuracy(run: Callable[..., Any]) -> None:
    def by_level(completions: list[str], level: list[str], answer: list[int]) -> list[float]:
        assert level == ["easy"] * len(completions) and all(isinstance(a, int) for a in answer)
        return [float(str(a) in text) for text, a in zip(completions, answer, strict=True)]

    result, rows, _ = run(
        reward_funcs=[by_level, vowels], reward_weights=[1.0, 0.1], dataset=ROWS, answer_column="answer"
    )
    assert result.eval_before == 0.0 and result.eval_after is not None
    assert all(row.keys() >= {"part/by_level", "part/vowels", "frac_right_strict", "frac_reward_error"} for row in rows)
    expected = rows[0]["part/by_level"] + 0.1 * rows[0]["part/vowels"]
    assert rows[0]["reward_mean"] == pytest.approx(expected)
    config = config_of(result)
    assert config["task"] == "rows" and config["reward"] == "python:by_level,python:vowels"
    assert config["reward_weights"] == "1.0,0.1"


def test_chat_rows_and_an_evaluation_set(run: Callable[..., Any]) -> None:
    def in_chat(prompts: list, completions: list) -> list[float]:
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        assert all(answer[0]["role"] == "assistant" for answer in completions)
        return [float(len(answer[0]["content"])) for answer in completions]

    chat = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]
    result, rows, _ = run(reward_funcs=in_chat, dataset=chat[:8], eval_dataset=chat[8:], answer_column="answer")
    evals = read_jsonl(Path(result.run_dir) / "evals.jsonl")
    assert evals[0]["num_problems"] == 4 and rows[-1]["step"] == 2


def test_a_task_by_name_or_object(run: Callable[..., Any]) -> None:
    task = Countdown(CountdownOptions(numbers=(2,), reward="sloppy"))
    result, rows, _ = run(task=task)
    assert result.steps == 2 and rows[0]["hack_gap"] is not None and rows[0]["frac_many_answers"] is not None
    again, _, _ = run(task="countdown", numbers="2", reward="sloppy", seed=0)
    assert again.eval_before == result.eval_before
    _with_function, rows, _ = run(
        task="countdown", numbers="2", reward_funcs=lambda completions, target: [1.0] * len(target)
    )
    assert rows[0]["part/lambda"] == 1.0 and rows[0]["hack_gap"] == 0.0


def test_what_functions_log_reaches_the_run_folder(run: Callable[..., Any]) -> None:
    def logging(completions: list[str], log_metric: Any, log_extra: Any, trainer_state: Any) -> list[float]:
        log_metric("step_seen", trainer_state.global_step)
        log_extra("size", [len(text) for text in completions])
        return [float(trainer_state.max_steps + i) for i in range(len(completions))]

    _, rows, samples = run(reward_funcs=logging, dataset=ROWS)
    assert [row["metric/step_seen"] for row in rows] == [0.0, 1.0]
    train_rows = [row for row in samples if row["split"] == "train"]
    assert train_rows and all(row["extra"] == {"size": len(row["completion"])} for row in train_rows)


def test_a_run_whose_completions_cannot_be_scored_stops_with_a_checkpoint(run: Callable[..., Any]) -> None:
    def not_any_more(completions: list[str], trainer_state: Any) -> list[float | None]:
        return [1.0 if trainer_state.global_step < 1 else None] * len(completions)

    with pytest.raises(UserError, match="no completion could be scored"):
        run(reward_funcs=not_any_more, dataset=ROWS, steps=9, run_dir="blind")
    rows = read_jsonl(Path("blind/metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["reward_mean"] for row in rows[1:]] == [None] * 3
    assert [row["reason/not_applicable"] for row in rows[1:]] == [1.0] * 3
    assert Path("blind/checkpoints/step_000004").is_dir()


def test_errors_later_than_step_1_are_counted_and_told(run: Callable[..., Any]) -> None:
    def sometimes(completions: list[str], trainer_state: Any) -> list[float]:
        if trainer_state.global_step == 1:
            raise OSError("the disk is full")
        return [float(i) for i in range(len(completions))]

    result, rows, _ = run(reward_funcs=sometimes, dataset=ROWS, steps=3)
    assert [row["frac_reward_error"] for row in rows] == [0.0, 1.0, 0.0] and result.steps == 3
    assert rows[1]["reason/reward_error"] == 1.0 and rows[1]["num_reward_restarts"] == 0
    events = read_jsonl(Path(result.run_dir) / "events.jsonl")
    assert any(row["event"] == "warning" and "the disk is full" in str(row["text"]) for row in events)


def test_a_run_goes_on_from_python(run: Callable[..., Any]) -> None:
    _whole, rows, _ = run(reward_funcs=vowels, dataset=ROWS, steps=4)
    half, _, _ = run(reward_funcs=vowels, dataset=ROWS, steps=2)
    with contextlib.chdir(Path.cwd()):
        result = train(resume=half.run_dir, steps=4, reward_funcs=vowels, dataset=ROWS, plain=True)
    later = read_jsonl(Path(result.run_dir) / "metrics.jsonl")
    assert result.steps == 4 and [row["reward_mean"] for row in later] == [row["reward_mean"] for row in rows]
    with pytest.raises(UserError, match="vowels was a Python object"):
        train(resume=half.run_dir, steps=5, dataset=ROWS, plain=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_generations": 4}, "unknown argument 'num_generations'; here it is group_size"),
        ({"train_dataset": ROWS}, "unknown argument 'train_dataset'; here it is dataset"),
        ({"stepps": 4}, "unknown argument 'stepps'; did you mean 'steps'"),
        ({"reward_funcs": vowels, "reward": "strict"}, "reward: .* two ways to say one thing"),
        ({"dataset": ROWS}, "rows without an answer column have nothing that judges them"),
        ({"dataset": ROWS, "task": Countdown(CountdownOptions())}, "expected a dataset or a task, got both"),
        ({"dataset": []}, "dataset: expected at least one row"),
        ({"eval_dataset": ROWS}, "eval_dataset: expected together with a dataset"),
        ({"task": object()}, "task: object has no 'name'"),
        ({"task": "cuontdown"}, "did you mean 'countdown'"),
        ({"dataset": ROWS, "reward_funcs": [vowels], "reward_weights": [1, 2]}, "expected one for each of 1 reward"),
        ({"dataset": ROWS, "reward_funcs": [lambda completions, anwser: []], "answer_column": "answer"}, "'answer'"),
        ({"dataset": "nowhere.jsonl", "reward_funcs": vowels}, "nowhere.jsonl is not there"),
        ({"dataset": ROWS, "reward_funcs": vowels, "steps": 0}, "steps: expected at least 1"),
    ],
)  # fmt: skip
def test_mistakes_are_told(run: Callable[..., Any], values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(**values)
    assert not list(Path.cwd().glob("runs/*/metrics.jsonl"))


class Mine(Countdown):
    """A task of one's own, as an object."""


class Other(Countdown):
    """Another one."""


def test_a_run_of_a_task_object_goes_on_with_the_object_alone(run: Callable[..., Any]) -> None:
    options = CountdownOptions(numbers=(2,))
    _whole, rows, _ = run(task=Mine(options), steps=4)
    half, _, _ = run(task=Mine(options))
    config = config_of(half)
    assert config["task"] == "python:Mine" == read_run(Path(half.run_dir))["task"]
    lost = (
        r"task: Mine was a Python object, which no name leads to: go on from Python, by train\(resume=..., task=...\)"
    )
    with pytest.raises(UserError, match=lost):
        train(resume=half.run_dir, steps=4, plain=True)
    assert main(["train", "--resume", half.run_dir, "--steps", "4"]) == 2
    with pytest.raises(UserError, match="the run to go on with is one of Mine, got an object of Other: give an object"):
        train(resume=half.run_dir, steps=4, plain=True, task=Other(options))
    with pytest.raises(UserError, match="the run to go on with is one of Mine, got rows"):
        train(resume=half.run_dir, steps=4, plain=True, dataset=ROWS, reward_funcs=vowels)
    result = train(resume=half.run_dir, steps=4, plain=True, task=Mine(options))
    later = read_jsonl(Path(half.run_dir) / "metrics.jsonl")
    assert result.steps == 4 and [row["reward_mean"] for row in later] == [row["reward_mean"] for row in rows]
    with pytest.raises(UserError, match=lost), evaluation_task(Config(task="python:Mine")):
        pass


def test_a_task_object_is_not_judged_by_the_rules_of_countdown(run: Callable[..., Any]) -> None:
    task = Mine(CountdownOptions(numbers=(2,)))
    for values, message in (
        ({"numbers": "2"}, "numbers: belongs to the task countdown, got the task Mine: leave numbers out"),
        ({"data": "x"}, "data: belongs to the task gsm8k or rows, got the task Mine"),
        ({"reward": "sloppy"}, "reward: the task Mine pays strict, or functions"),
    ):
        with pytest.raises(UserError, match=message):
            run(task=task, **values)


class Odd:
    """A value that JSON has no form for."""


@pytest.mark.parametrize("odd", [Odd(), [Odd()], {1, 2}, datetime.date(2024, 5, 1), np.arange(3)])
def test_columns_that_no_process_can_get_are_refused_by_row(run: Callable[..., Any], odd: object) -> None:
    Path("mine.py").write_text("def pay(completions, **columns):\n    return [1.0] * len(completions)\n")
    rows = [*ROWS[:6], *({**row, "level": odd} for row in ROWS[6:])]
    with pytest.raises(UserError, match=rf"dataset row 7: the column 'level' holds a {type(odd).__name__}, and a rew"):
        run(dataset=rows, reward_funcs="mine.py:pay")
    with pytest.raises(UserError, match="dataset row 7: the column 'level'"):
        run(dataset=ROWS[:6], eval_dataset=rows, answer_column="answer", checker="mine.py:pay")
    result, _, _ = run(dataset=rows, reward_funcs=vowels, steps=1)
    assert result.steps == 1, "a Python object gets any value"


def test_a_file_as_dataset_and_a_function_by_reference(run: Callable[..., Any]) -> None:
    Path("mine.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    Path("mine.py").write_text("def pay(completions, level):\n    return [float(i % 3) for i in range(len(level))]\n")
    result, rows, _ = run(dataset="mine.jsonl", reward_funcs="mine.py:pay")
    config = config_of(result)
    assert (config["task"], config["data"], config["reward"]) == ("rows", "mine.jsonl", "mine.py:pay")
    assert rows[0]["part/pay"] is not None
    again = train(resume=result.run_dir, steps=3, plain=True)
    assert again.steps == 3, "what stands in the configuration by reference is found again"
