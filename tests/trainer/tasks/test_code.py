"""The code task: what is paid and why, hidden tests that stay hidden, and scoring that no program can stop."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.tasks.base import (
    Completion,
    Message,
    Problem,
    TaskWithProcesses,
    is_heldout,
    opened,
    start_scoring,
)
from sparkgrpo.trainer.tasks.code import Code, CodeOptions, ScoringError, make_problem
from sparkgrpo.trainer.tasks.code_text import last_code_block
from sparkgrpo.trainer.tasks.registry import check_settings, make_task, task_options
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits

pytestmark = pytest.mark.walls


@pytest.fixture(scope="module")
def task() -> Iterator[Code]:
    task = Code(CodeOptions(num_workers=2, limits=Limits(call_s=1.0, total_s=2.0)))
    with opened(task):
        yield task


@pytest.fixture(scope="module")
def problem(task: Code) -> Problem:
    return make_problem(task.problem_by_id["sum_of_evens"])


def answer(code: str, *, is_truncated: bool = False) -> Completion:
    return Completion(text=f"Here:\n```python\n{code}\n```", token_ids=(), is_truncated=is_truncated)


def right(task: Code, problem: Problem) -> Completion:
    return answer(task.problem_by_id[str(problem.columns["problem_id"])].reference)


VISIBLE_ONLY = answer("def sum_of_evens(n): return {(1, 2, 3, 4): 6, (-2, 10): 8}.get(tuple(n), 0)")
"""Knows the tests of the prompt by heart; of the hidden ones it has the zeros."""


def test_a_right_answer(task: Code, problem: Problem) -> None:
    score = task.verify(problem, right(task, problem))
    assert (score.reward, score.reason, score.detail) == (1.0, "ok", "111|1111111111")
    assert score.parts == {"pass_visible": 1.0, "pass_hidden": 1.0, "pass_gap": 0.0}


def test_the_gap_shows_what_knows_the_visible_tests(task: Code, problem: Problem) -> None:
    score = task.verify(problem, VISIBLE_ONLY)
    assert (score.reward, score.reason) == (0.0, "wrong_value")
    assert score.parts["pass_visible"] == 1.0 and score.parts["pass_hidden"] < 0.7
    assert score.parts["pass_gap"] == 1.0 - score.parts["pass_hidden"]
    assert score.detail.startswith("111|")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def sum_of_evens(n): return 0", "no_code"),
        ("", "no_code"),
        ("```python\ndef sum_of_evens(n): return 0", "no_code"),
        ("```python\n" + "x = 1\n" * 12_000 + "```", "too_long"),
        ("```python\ndef sum_of_evens(\n```", "syntax_error"),
        ("```python\nx = '\0'\n```", "syntax_error"),
        ("```python\nsum_of_odds = sum\n```", "no_function"),
        ("```python\n1 / 0\n```", "exception"),
        ("```python\nsum_of_evens = set.pop\n```", "exception"),
        ("```python\nsum_of_evens = iter\n```", "bad_type"),
        ("```python\nsum_of_evens = sum\n```", "wrong_value"),
        ("```python\ndef sum_of_evens(n):\n    while True: pass\n```", "timeout"),
        ("```python\nimport os\nos._exit(0)\n```", "crashed"),
        ("```python\ndef sum_of_evens(n): return [0] * 10**6\n```", "too_much_output"),
        ("```python\nimport os\nos.write(4, bytes(9))\n```", "protocol_error"),
    ],
)
def test_reasons(task: Code, problem: Problem, text: str, reason: str) -> None:
    score = task.verify(problem, Completion(text=text, token_ids=(), is_truncated=False))
    assert (score.reward, score.reason) == (0.0, reason)
    assert reason in task.reasons


def test_surrogates_and_other_letters_are_no_trouble(task: Code, problem: Problem) -> None:
    for code in ("x = '\ud800'", "# \u202e é 漢", "\x1b[2J"):
        assert task.verify(problem, answer(code)).reason in ("syntax_error", "no_function", "exception")


def test_what_is_shown_of_an_exception_is_a_plain_name(task: Code, problem: Problem) -> None:
    assert task.verify(problem, answer("1 / 0")).detail == "000|0000000000 ZeroDivisionError"
    hostile = "raise type('\\x1b[2J<script>', (Exception,), {})()"
    assert task.verify(problem, answer(hostile)).detail == "000|0000000000"


def test_visible_pays_for_the_visible_tests_and_accuracy_does_not(problem: Problem) -> None:
    with opened(Code(CodeOptions(reward="visible", num_workers=1))) as opening:
        task = opening.task
        (paid,) = task.reward([problem], [VISIBLE_ONLY])
        assert (paid.reward, paid.reason) == (1.0, "ok")
        assert task.verify(problem, VISIBLE_ONLY).reward == 0.0
        (unpaid,) = task.reward([problem], [answer("sum_of_evens = sum")])
        assert (unpaid.reward, unpaid.reason) == (0.0, "wrong_value")


def test_programs(task: Code) -> None:
    problem = make_problem(task.problem_by_id["fizz_lines"])
    assert task.verify(problem, right(task, problem)).reason == "ok"
    assert task.verify(problem, answer("print(1)")).detail == "001|0000000000"


def test_a_batch_is_scored_side_by_side_and_equal_answers_once(task: Code, problem: Problem) -> None:
    hanging = [answer(f"x = {n}\nwhile True: pass") for n in range(2)]
    batch = [*hanging, *hanging, right(task, problem), *[VISIBLE_ONLY] * 20]
    start = time.monotonic()
    start_scoring(task, [problem] * len(batch), batch)
    assert time.monotonic() - start < 0.5
    scores = task.reward([problem] * len(batch), batch)
    assert time.monotonic() - start < 1.9  # two workers, two that hang for a second, and no third second
    assert [score.reason for score in scores] == ["timeout"] * 4 + ["ok"] + ["wrong_value"] * 20
    start = time.monotonic()
    assert [task.verify(problem, completion).reason for completion in batch] == [score.reason for score in scores]
    assert time.monotonic() - start < 0.2, "verify and reward share their verdicts"


def test_old_verdicts_are_forgotten(task: Code, problem: Problem) -> None:
    task.reward([problem], [right(task, problem)])
    task.reward([problem], [VISIBLE_ONLY])
    assert len(task._started) == 1


def test_a_killed_scoring_process_costs_no_verdict(problem: Problem) -> None:
    with opened(Code(CodeOptions(num_workers=1))) as opening:
        task = opening.task
        completions = [answer(f"x = {n}\nimport time\ntime.sleep(0.3)") for n in range(2)]
        start_scoring(task, [problem] * 2, completions)
        time.sleep(0.1)
        os.kill(task._pool.pids()[0], signal.SIGKILL)
        assert [task.verify(problem, completion).reason for completion in completions] == ["no_function"] * 2
        assert task._pool.num_restarts == 1


def test_scoring_that_fails_for_good_raises_and_pays_nothing(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(Code(CodeOptions(num_workers=1))) as opening:
        task = opening.task
        monkeypatch.setattr(task, "_job_tests", lambda identity: ["not a test"])
        with pytest.raises(ScoringError, match=r"sum_of_evens: a program could not be scored in 3 attempts"):
            task.verify(problem, answer("x = 1"))


def test_problems_are_split_by_hash_and_never_meet(task: Code) -> None:
    training = {problem.identity for problem in task.problems(0, 0, 500)}
    heldout = {problem.identity for problem in task.heldout(500)}
    assert not training & heldout and len(training) == task.num_problems
    assert len(training | heldout) == len(task.problem_by_id)
    assert 0.15 < len(heldout) / len(task.problem_by_id) < 0.35
    assert all(is_heldout(identity, 0.25) for identity in heldout)


def test_a_stream_is_its_parts_and_every_epoch_has_every_problem(task: Code) -> None:
    size = task.num_problems
    assert size is not None
    whole = [problem.identity for problem in task.problems(3, 0, 3 * size)]
    assert [p.identity for p in (*task.problems(3, 0, 50), *task.problems(3, 50, 3 * size - 50))] == whole
    epochs = [whole[n * size : (n + 1) * size] for n in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and epochs[0] != epochs[1]
    assert whole != [problem.identity for problem in task.problems(4, 0, 3 * size)]


def test_hidden_tests_are_not_in_what_a_model_or_a_reward_function_sees(task: Code) -> None:
    for known in task.problem_by_id.values():
        problem = make_problem(known)
        shown = json.dumps([problem.prompt, problem.columns], ensure_ascii=False)
        assert known.reference not in shown and known.generator not in shown
        assert set(problem.columns) == task.columns
        content = cast(Message, problem.prompt[0])["content"]
        for given, expected in known.visible:
            assert str(given if known.kind == "program" else repr(expected)) in content
        if known.kind == "function":
            calls = [f"({', '.join(map(repr, given))})" for given, _ in known.hidden()]
            assert not [call for call in calls if f"{known.entry}{call}" in content]


def test_opening_tells_the_walls_and_closing_ends_the_processes() -> None:
    task = Code(CodeOptions(num_workers=1))
    assert isinstance(task, TaskWithProcesses)
    with opened(task) as opening:
        assert cast(dict, opening.facts["sandbox"])["level"] == "strict"
        assert opening.notes[0].startswith("sandbox strict: Landlock ABI")
        (pid,) = task._pool.pids()
    assert not Path(f"/proc/{pid}").exists()
    unsafe = Code(CodeOptions(sandbox="basic", is_unsafe_allowed=True, num_workers=1))
    with opened(unsafe) as opening:
        assert opening.notes[0].startswith("UNSAFE: programs that the model writes run without walls")
        assert cast(dict, opening.facts["sandbox"])["layers"] == ["rlimits", "process_group"]


def test_options_of_a_run() -> None:
    task = make_task("code", task_options(Config(task="code", reward="visible", unsafe_sandbox=True)))
    assert isinstance(task, Code)
    assert (task.options.reward, task.options.sandbox, task.options.is_unsafe_allowed) == ("visible", "strict", True)
    with pytest.raises(UserError, match=r"sandbox: .*--unsafe-sandbox"):
        Config(sandbox="basic")
    assert Config(sandbox="basic", unsafe_sandbox=True).sandbox == "basic"
    with pytest.raises(UserError, match=r"the task code pays strict or visible, .* got 'sloppy'"):
        check_settings(Config(task="code", reward="sloppy"), {})
    with pytest.raises(UserError, match="the task countdown pays strict or sloppy"):
        check_settings(Config(task="countdown", reward="visible"), {})


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```PY title=x\na\n```", "a"),
        ("~~~\na\n~~~", None),
        ("```python\na\n```\n```bash\nb\n```", "a"),
        ("```python\na\n```\n```python\nb\n```", "b"),
        ("```python\na\n```\n```python\nb", "a"),
        ("  ```python\n    a\n      b\n  ```", "a\n  b"),
        ("```python\n```", ""),
        ("text ```python\na\n```", None),
        ("```python\na\n```` \nb\n```", "a\n```` \nb"),
    ],
)
def test_the_last_complete_block_counts(completion: str, code: str | None) -> None:
    assert last_code_block(completion) == code


def test_finding_a_block_is_linear() -> None:
    for text in ("```python\n" * 30_000, "```\na\n" * 50_000, "`" * 300_000, "\n" * 300_000):
        start = time.perf_counter()
        last_code_block(text)
        assert time.perf_counter() - start < 1.0  # 10 to 60 ms
