"""The problems that ship: the references pass, and what is wrong fails, each on every problem."""

import ast
import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks.base import KeyedDraws
from sparkgrpo.trainer.tasks.code_problems import (
    NUM_DRAWN,
    NUM_FIXED,
    NUM_VISIBLE,
    CodeProblem,
    Draw,
    read_problems,
)
from sparkgrpo.trainer.tasks.sandbox.checker import Checker, Verdict
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits

pytestmark = pytest.mark.walls

PROBLEMS = read_problems()
NUM_WRONG, NUM_FRESH = 3, 20
EACH = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.problem_id)


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker(limits=Limits(call_s=0.5, total_s=4.0)) as checker:
        yield checker


def judge(checker: Checker, problem: CodeProblem, code: str, tests: list | None = None) -> Verdict:
    tests = [*problem.visible, *problem.hidden()] if tests is None else tests
    if problem.kind == "program":
        return checker.judge_program(code, tests)
    return checker.judge_calls(code, problem.entry, tests, is_exact=problem.is_exact)


def test_the_file() -> None:
    assert 40 <= len(PROBLEMS) <= 80
    assert len({problem.problem_id for problem in PROBLEMS}) == len(PROBLEMS)
    assert {problem.kind for problem in PROBLEMS} == {"function", "program"}


@EACH
def test_the_reference_passes(problem: CodeProblem, checker: Checker) -> None:
    verdict = judge(checker, problem, problem.reference)
    assert verdict.reason == "ok" and len(verdict.passed) == NUM_VISIBLE + NUM_FIXED + NUM_DRAWN


@EACH
def test_the_reference_changes_no_argument_and_tests_differ(problem: CodeProblem) -> None:
    tests = [*problem.visible, *problem.hidden()]
    assert len({repr(given) for given, _ in tests}) == len(tests)
    for given, expected in tests:
        before = copy.deepcopy(given)
        assert problem.expected(given) == expected and given == before


@EACH
def test_drawn_tests_are_the_same_every_time(problem: CodeProblem) -> None:
    assert problem.hidden() == problem.hidden()
    assert problem.drawn("hidden", 2) == problem.drawn("hidden", 4)[:2]
    assert problem.drawn("hidden", 4) != problem.drawn("other", 4)


@EACH
def test_no_constant_and_no_empty_answer_passes(problem: CodeProblem, checker: Checker) -> None:
    for _, expected in problem.visible:
        program, function = f"print({expected!r}, end='')", f"def {problem.entry}(*args): return {expected!r}"
        assert not all(judge(checker, problem, program if problem.kind == "program" else function).passed)
    assert judge(checker, problem, "").reason == ("wrong_value" if problem.kind == "program" else "no_function")


@EACH
def test_knowing_the_visible_tests_passes_only_these(problem: CodeProblem, checker: Checker) -> None:
    known = {repr(given): expected for given, expected in problem.visible}
    first = problem.visible[0][1]
    if problem.kind == "program":
        code = f"import sys\nprint({known!r}.get(repr(sys.stdin.read()), {first!r}), end='')"
    else:
        code = f"def {problem.entry}(*args): return {known!r}.get(repr(args), {first!r})"
    verdict = judge(checker, problem, code)
    assert all(verdict.passed[:NUM_VISIBLE]) and not all(verdict.passed[NUM_VISIBLE:])


@EACH
def test_wrong_variants_fail(problem: CodeProblem, checker: Checker) -> None:
    """Variants of the reference with one change, which go wrong on tests that the problem does not have."""
    fresh = problem.drawn("variants", NUM_FRESH if problem.kind == "function" else 6)
    found = []
    for variant in variants(problem.reference):
        if len(found) < NUM_WRONG and not all(judge(checker, problem, variant, fresh).passed):
            found.append(variant)
            verdict = judge(checker, problem, variant)
            assert not all(verdict.passed), f"passes all tests and is wrong:\n{variant}"
    assert len(found) == NUM_WRONG


def variants(source: str) -> Iterator[str]:
    """The source with one comparison, operator or number changed, one at a time."""
    for place in range(len([*_changes(ast.parse(source))])):
        tree = ast.parse(source)
        node, field, value = [*_changes(tree)][place]
        setattr(node, field, value)
        yield ast.unparse(tree)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, object]]:
    swaps: dict[type, type] = {
        ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
        ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in swaps:
            yield node, "ops", [swaps[type(node.ops[0])](), *node.ops[1:]]
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in swaps:
            yield node, "op", swaps[type(node.op)]()
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "value", node.value + 1
        if isinstance(node, ast.Constant) and type(node.value) is str:
            yield node, "value", node.value + "_"
        if isinstance(node, ast.Slice) and node.lower is not None:
            yield node, "lower", None
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name):
            names = {"sorted": "list", "max": "min", "min": "max", "set": "list", "reversed": "list"}
            if node.func.id in names:
                yield node.func, "id", names[node.func.id]
        if isinstance(node, ast.Attribute) and node.attr in ("lower", "upper"):
            yield node, "attr", "title"
        if isinstance(node, ast.Return):
            yield node, "value", ast.Constant(None)
        yield from _without_a_part(node)


def _without_a_part(node: ast.AST) -> Iterator[tuple[ast.AST, str, object]]:
    """A call gives way to its first argument, a statement to nothing."""
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], ast.Starred):
            yield node, field, value.args[0]
        if isinstance(value, list):
            for place, part in enumerate(value):
                if isinstance(part, ast.Call) and part.args and not isinstance(part.args[0], ast.Starred):
                    yield node, field, [*value[:place], part.args[0], *value[place + 1 :]]
                if isinstance(part, ast.stmt) and field == "body" and not isinstance(part, ast.FunctionDef):
                    yield node, field, [*value[:place], ast.Pass(), *value[place + 1 :]]


@pytest.mark.parametrize(
    "change",
    [{"visible": []}, {"hidden": [["(1,)", "1"]]}, {"kind": None}, {"visible": [["(", "1"]] * 3}, {"id": None}],
)
def test_a_broken_row_is_named(change: dict, tmp_path: Path) -> None:
    row = {
        "id": "x", "kind": "function", "statement": "", "signature": "def f(x):", "arguments": "", "reference": "",
        "visible": [["(1,)", "1"]] * 3, "hidden": [["(1,)", "1"]] * 6,
    }  # fmt: skip
    row = {key: value for key, value in (row | change).items() if value is not None}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: "):
        read_problems(path)


def test_a_generator_without_enough_tests_says_so() -> None:
    problem = PROBLEMS[0]
    stuck = copy.copy(problem)
    object.__setattr__(stuck, "generator", "def arguments(draw):\n    return (1, draw.below(2))\n")
    object.__setattr__(stuck, "reference", "def f(*args): return 0\n")
    object.__setattr__(stuck, "signature", "def f(*args):")
    object.__setattr__(stuck, "kind", "function")
    with pytest.raises(ValueError, match="expected 4 new tests in 200 draws, got 2"):
        stuck.drawn("hidden", 4)


def test_draws() -> None:
    draw = Draw(KeyedDraws(1, 2))
    assert all(-3 <= draw.between(-3, 4) <= 4 for _ in range(100))
    assert {len(draw.numbers(0, 3, 5, 5)) for _ in range(50)} == {0, 1, 2, 3}
    assert {*draw.text("ab", 100, 100)} == {"a", "b"}
