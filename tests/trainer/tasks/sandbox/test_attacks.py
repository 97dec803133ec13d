"""The attack corpus: each program fails as expected on squares, in bounded time, and on every problem that ships."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sparkgrpo.trainer.tasks import code_problems
from sparkgrpo.trainer.tasks.sandbox.checker import Checker
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits

pytestmark = pytest.mark.walls

ATTACKS = yaml.safe_load(Path(__file__).with_name("attacks.yaml").read_text(encoding="utf-8"))
TAKEOVER = Path(__file__).with_name("takeover.txt").read_text(encoding="utf-8")
CALL_S, TOTAL_S = 0.3, 1.0
MARGIN_S = 4.0  # a busy machine; a deadline that did not hold would be missed by far more

PROGRAM_ATTACKS = {
    "prints nothing": "pass",
    "prints its input": "import sys; print(sys.stdin.read(), end='')",
    "ends with code 0": "import os; os._exit(0)",
    "closes its output": "import os; os.close(1)",
    "prints no text": "import os; os.write(1, bytes(range(256)))",
    "reads the shipped problems": "print(open({problem_file!r}).read())",
    "imports the program": "from sparkgrpo.trainer.tasks import code_problems",
    "writes into its input": "import os; os.write(0, b'x')",
    "does not compile": "print(",
    "raises": "1 / 0",
    "prints 2 MiB": "print('x' * (2 << 20))",
}
SLOW_PROGRAM_ATTACKS = {
    "loops": "while True: pass",
    "prints for ever": "while True: print('x' * 1000)",
    "waits after closing its output": "import os, time; os.close(1); time.sleep(60)",
    "waits in a thread": "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
}


def source(attack: dict, entry: str) -> str:
    code = attack["code"].replace("{problem_file!r}", repr(str(code_problems.PROBLEM_FILE)))
    needs_takeover = attack["kind"] == "protocol" or attack.get("needs_takeover")
    return (TAKEOVER if needs_takeover else "") + code.replace("ENTRY", entry)


@pytest.fixture
def short_deadlines(checker: Checker) -> Iterator[None]:
    checker.limits = replace(Limits(), call_s=CALL_S, total_s=TOTAL_S)
    yield
    checker.limits = Limits()


def of_kind(*kinds: str) -> list[dict]:
    return [attack for attack in ATTACKS if attack["kind"] in kinds]


def test_the_corpus_is_whole() -> None:
    names = [attack["name"] for attack in ATTACKS]
    assert len(names) == len(set(names)) >= 60
    assert {attack["kind"] for attack in ATTACKS} == {"value", "escape", "limit", "protocol"}


@pytest.mark.parametrize("attack", of_kind("value", "escape", "protocol"), ids=lambda attack: attack["name"])
def test_quick_attack_on_squares(attack: dict, checker: Checker, squares: list) -> None:
    verdict = checker.judge_calls(source(attack, "f"), "f", squares)
    assert verdict.reason == attack["reason"], verdict
    assert sum(verdict.passed) <= 1  # a constant is right once


@pytest.mark.parametrize("attack", of_kind("limit"), ids=lambda attack: attack["name"])
def test_slow_attack_on_squares(attack: dict, checker: Checker, squares: list, short_deadlines: None) -> None:
    start = time.monotonic()
    verdict = checker.judge_calls(source(attack, "f"), "f", squares)
    assert time.monotonic() - start < TOTAL_S + MARGIN_S
    assert verdict.reason in (attack["reason"], "timeout"), verdict  # on a busy machine the deadline may come first
    assert sum(verdict.passed) == 0
    checker.limits = Limits()
    honest = checker.judge_calls("def f(x): return x * x", "f", squares)
    assert honest.reason == "ok", "the attack left something behind"


def problems(kind: str) -> list[code_problems.CodeProblem]:
    return [problem for problem in code_problems.read_problems() if problem.kind == kind]


def fails(checker: Checker, code: str, problem: code_problems.CodeProblem) -> bool:
    tests = [*problem.visible, *problem.hidden()]
    if problem.kind == "program":
        verdict = checker.judge_program(code, tests)
    else:
        verdict = checker.judge_calls(code, problem.entry, tests, is_exact=problem.is_exact)
    return not all(verdict.passed) and verdict.reason != "ok"


@pytest.mark.parametrize("problem", problems("function")[::10], ids=lambda problem: problem.problem_id)
def test_quick_attacks_on_some_problems(problem: code_problems.CodeProblem, checker: Checker) -> None:
    quick = of_kind("value", "escape", "protocol")
    assert [attack["name"] for attack in quick if not fails(checker, source(attack, problem.entry), problem)] == []


@pytest.mark.slow
@pytest.mark.parametrize("problem", problems("function"), ids=lambda problem: problem.problem_id)
def test_quick_attacks_on_every_problem(problem: code_problems.CodeProblem, checker: Checker) -> None:
    quick = of_kind("value", "escape", "protocol")
    assert [attack["name"] for attack in quick if not fails(checker, source(attack, problem.entry), problem)] == []


@pytest.mark.slow
@pytest.mark.parametrize("problem", problems("function"), ids=lambda problem: problem.problem_id)
def test_slow_attacks_on_every_problem(
    problem: code_problems.CodeProblem, checker: Checker, short_deadlines: None
) -> None:
    checker.limits = replace(Limits(), call_s=0.1, total_s=0.3)  # one minute for all of them
    slow = of_kind("limit")
    assert [attack["name"] for attack in slow if not fails(checker, source(attack, problem.entry), problem)] == []


@pytest.mark.parametrize("problem", problems("program")[::4], ids=lambda problem: problem.problem_id)
def test_program_attacks(problem: code_problems.CodeProblem, checker: Checker) -> None:
    for name, code in PROGRAM_ATTACKS.items():
        assert fails(checker, code.replace("{problem_file!r}", repr(str(code_problems.PROBLEM_FILE))), problem), name


@pytest.mark.parametrize("name", SLOW_PROGRAM_ATTACKS)
def test_slow_program_attacks(name: str, checker: Checker, short_deadlines: None) -> None:
    start = time.monotonic()
    assert fails(checker, SLOW_PROGRAM_ATTACKS[name], problems("program")[0]), name
    assert time.monotonic() - start < TOTAL_S + MARGIN_S


def test_without_walls_the_reference_would_be_found() -> None:
    """The attack works where it can, so its failure behind the walls proves something."""
    attack = next(attack for attack in ATTACKS if attack["name"] == "runs the shipped reference")
    problem = problems("function")[0]
    with Checker(level="basic") as unwalled:
        assert not fails(unwalled, source(attack, problem.entry), problem)
