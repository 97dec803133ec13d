"""The verifier against independent evaluators, random Unicode, hostile sizes, and rewritings that must not matter."""

import ast
import random
import time
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgrpo.trainer.tasks.base import Completion
from sparkgrpo.trainer.tasks.countdown import REASONS, Countdown, CountdownOptions, judge, make_problem

PROBLEM = make_problem([3, 7, 4], 40)
TASK = Countdown(CountdownOptions())
Tree = int | tuple[str, "Tree"] | tuple[str, "Tree", "Tree"]
"""A number, a negation ("-", tree), or an operation (operator, left, right)."""


def reason_of(text: str) -> str:
    return TASK.verify(PROBLEM, Completion(text=text, token_ids=(), is_truncated=False)).reason


def random_tree(rng: random.Random, nums: Sequence[int]) -> Tree:
    if rng.random() < 0.1:
        return ("-", random_tree(rng, nums))
    if len(nums) == 1:
        return nums[0]
    split = rng.randrange(1, len(nums))
    return (rng.choice("+-*/"), random_tree(rng, nums[:split]), random_tree(rng, nums[split:]))


def tree_value(tree: Tree) -> Fraction | None:
    """None when some division in the tree is by zero."""
    if isinstance(tree, int):
        return Fraction(tree)
    operands = [tree_value(child) for child in tree[1:]]
    if None in operands:
        return None
    left, right = Fraction(0) if len(operands) == 1 else operands[0], operands[-1]
    assert left is not None and right is not None
    if tree[0] == "/":
        return left / right if right else None
    return left * right if tree[0] == "*" else left + right if tree[0] == "+" else left - right


def tree_text(rng: random.Random, tree: Tree) -> str:
    """The tree as people write it: parentheses where they are needed, and now and then where they are not."""

    def render(node: Tree) -> tuple[str, int]:  # text and how tightly it binds: 0 sum, 1 product, 2 atom
        if isinstance(node, int):
            text, binding = str(node), 2
        elif len(node) == 2:
            text, binding = "-" + operand(node[1], 2), 2
        else:
            binding = 0 if node[0] in "+-" else 1
            blank = rng.choice(("", " "))
            text = operand(node[1], binding) + blank + node[0] + blank + operand(node[2], binding + 1)
        return (f"({text})", 2) if rng.random() < 0.1 else (text, binding)

    def operand(node: Tree, at_least: int) -> str:
        text, binding = render(node)
        return text if binding >= at_least else f"({text})"

    return render(tree)[0]


@pytest.mark.parametrize("num_numbers", [2, 3, 4])
def test_agrees_with_an_independent_evaluator(num_numbers: int) -> None:
    rng = random.Random(num_numbers)
    seen = set()
    for _ in range(6_000):
        nums = [rng.randrange(0, 13) for _ in range(num_numbers)]
        tree = random_tree(rng, nums)
        text, value = tree_text(rng, tree), tree_value(tree)
        target = int(value) + rng.choice((0, 0, 1)) if value is not None else 1
        expected = "div_by_zero" if value is None else "ok" if value == target else "wrong_value"
        assert judge(text, rng.sample(nums, num_numbers), target) == expected, (text, target)
        seen.add(expected)
    assert seen == {"div_by_zero", "ok", "wrong_value"}


def python_reading(text: str) -> ast.expr | None:
    """The expression as Python parses it; None when it is none, or one that Countdown does not have."""
    allowed = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub)
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    return body if all(isinstance(node, allowed) for node in ast.walk(body)) else None


def as_tree(node: ast.AST) -> Tree:
    if isinstance(node, ast.UnaryOp):
        return ("-", as_tree(node.operand))
    if isinstance(node, ast.BinOp):
        symbols = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
        return (symbols[type(node.op)], as_tree(node.left), as_tree(node.right))
    assert isinstance(node, ast.Constant) and isinstance(node.value, int)
    return node.value


def test_accepts_exactly_what_is_arithmetic_in_python() -> None:
    """Grammar, precedence and associativity, on random token strings of which a few per cent are expressions."""
    rng = random.Random(0)
    num_expressions = 0
    for _ in range(40_000):
        tokens = [rng.choice("1247+-*/()-") for _ in range(rng.randrange(1, 10))]
        text = " ".join(tokens)  # the blanks keep * * and / / from becoming other operators of Python
        nums = [int(token) for token in tokens if token.isdigit()]
        node = python_reading(text)
        if node is None:
            assert judge(text, nums, 1) == "syntax", text
            continue
        num_expressions += 1
        value = tree_value(as_tree(node))
        target = 1 if value is None else int(value)
        expected = "div_by_zero" if value is None else "ok" if value == target else "wrong_value"
        assert judge(text, nums, target) == expected, text
    assert num_expressions > 1_000


PIECES = st.sampled_from(
    [
        *(
            "<answer>",
            "</answer>",
            "<answer",
            "answer>",
            "</",
            "<",
            ">",
            "\x00",
            "\ud800",
            "\udfff",
            "\u200b",
            "\ufeff",
        ),
        *(
            "3",
            "7",
            "4",
            "40",
            "0",
            "00",
            "9" * 7,
            "+",
            "-",
            "*",
            "/",
            "**",
            "//",
            "(",
            ")",
            "=",
            "= 40",
            " ",
            "\n",
            "\r",
        ),
        *("\u00d7", "\u00f7", "\u2212", "\u2013", "\uff0b", "\uff1d", "\uff08", "\uff09", "\u00a0", "\u2009", "\u00b2"),
        *("\uff11", "\u0663", "1_2", "1e3", "True", "#", "(3 + 7) * 4", "(" * 40, "-" * 40, "3/0", "\x1c", "\x85"),
    ]
)
ANYTHING = st.lists(PIECES | st.text(st.characters(), max_size=8), max_size=12).map("".join)


def fuzz(num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(ANYTHING, st.booleans())
    def check(text: str, is_tagged: bool) -> None:
        text = f"<answer>{text}</answer>" if is_tagged else text
        completion = Completion(text=text, token_ids=(), is_truncated=False)
        score = TASK.verify(PROBLEM, completion)
        assert score.reason in REASONS
        assert score.reward == float(score.reason == "ok")
        assert TASK.reward([PROBLEM], [completion]) == [score]
        if not is_tagged and "<answer>" not in text:
            assert score.reason == "no_answer"

    check()


def test_random_unicode_gets_a_known_reason() -> None:
    fuzz(1_000)


@pytest.mark.slow
def test_much_random_unicode_gets_a_known_reason() -> None:
    fuzz(10_000)


HOSTILE: dict[str, Callable[[int], str]] = {
    "opening tags": lambda size: "<answer>" * (size // 8),
    "closing tags": lambda size: "</answer>" * (size // 9),
    "opening tags, one closed": lambda size: "<answer>" * (size // 8) + "</answer>",
    "blocks": lambda size: "<answer>1</answer>" * (size // 18),
    "almost closing tags": lambda size: "<answer>" + "</answer" * (size // 8),
    "angles": lambda size: "<" * size,
    "parentheses": lambda size: "<answer>" + "(" * size + "</answer>",
    "blanks": lambda size: "<answer>" + " " * size + "</answer>",
    "blanks around": lambda size: "<answer>" + " " * size + "(3+7)*4" + " " * size + "</answer>",
    "digits": lambda size: "<answer>" + "9" * size + "</answer>",
    "look-alikes": lambda size: "<answer>" + "\u2212" * size + "</answer>",
    "prose": lambda size: "Let me think. " * (size // 14) + "<answer>(3 + 7) * 4</answer>",
}


def verify_time_s(text: str) -> float:
    """The quickest of five: a busy machine slows some of them, a slow algorithm slows all."""
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        reason_of(text)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


@pytest.mark.parametrize("shape", HOSTILE)
def test_time_grows_linearly(shape: str) -> None:
    times_s = [verify_time_s(HOSTILE[shape](size)) for size in (16_000, 64_000, 256_000)]
    assert times_s[2] < 0.005  # at most 0.3 ms was measured
    # Sixteen times the text may take 16 times as long, with a factor of 5 for a busy machine; a quadratic scan takes
    # 256 times as long. Below 20 us the clock decides.
    assert times_s[2] < 16 * 5 * max(times_s[0], 20e-6)
    assert times_s[1] < 4 * 5 * max(times_s[0], 20e-6)


@pytest.mark.parametrize("expression", ["/".join(["9"] * 128), "/".join(["999983"] * 36), "-" * 31 + "9" + "*9" * 110])
def test_the_longest_expressions_are_quick(expression: str) -> None:
    assert len(expression) <= 256
    assert verify_time_s(f"<answer>{expression}</answer>") < 0.005


def test_a_hundred_thousand_opening_tags_take_under_10_ms() -> None:
    assert reason_of("<answer>" * 100_000) == "no_answer"
    assert verify_time_s("<answer>" * 100_000) < 0.010  # 0.7 ms measured


def test_ten_thousand_answers_a_second() -> None:
    texts = [
        "10 * 4 <answer>(3 + 7) * 4</answer>",
        "<answer>3 * 7 + 4</answer>",
        "<answer>7 / 3 + 4</answer>",
        "none " * 60,
    ]
    elapsed_s = sum(verify_time_s(text) for text in texts)
    assert elapsed_s / len(texts) < 100e-6  # 4 to 6 us were measured


RIGHT = ("(3 + 7) * 4", "4*(7+3)", "(3 + 7) * 4 = 40")
WRONG = ("3 + 7 + 4", "40", "lol", "", "1/0", "(3 + 7) * 4 = 41", "\u00b2", "((((", "9" * 300, "-" * 40)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_block_after_a_right_one_never_helps(wrong: str) -> None:
    alone = reason_of(f"<answer>{wrong}</answer>")
    assert alone != "ok"
    for right in RIGHT:
        assert reason_of(f"<answer>{right}</answer> or <answer>{wrong}</answer>") == alone
        assert reason_of(f"<answer>{wrong}</answer> or <answer>{right}</answer>") == "ok"


REWRITTEN = (
    *("(3+7)*4", "4*(7+3)", "(3+7)*4=40", "3+7+4", "40", "3/(7-7)", "3//7", "3**7", "3+", "(3", "-3+7*4", "007", "1 2"),
    *("$3", "3.5*2", "3+7+4=14", "(" * 34, "-" * 34),
)


@pytest.mark.parametrize("answer", REWRITTEN)
def test_blanks_and_lookalikes_change_no_verdict(answer: str) -> None:
    rng = random.Random(0)
    lookalikes = {"*": "\u00d7\u22c5\u00b7\u2217\uff0a", "/": "\u00f7\u2215\u2044\uff0f", "+": "\uff0b", "=": "\uff1d"}
    lookalikes |= {"-": "\u2212\u2013\ufe63\uff0d", "(": "\uff08", ")": "\uff09", " ": "\u00a0\u2009\u202f\u3000"}
    expected = reason_of(f"<answer>{answer}</answer>")
    for _ in range(100):
        rewritten = ""
        for char in answer:
            rewritten += rng.choice(lookalikes[char]) if char in lookalikes and rng.random() < 0.5 else char
            if not char.isalnum():
                rewritten += rng.choice(("", "", " ", "\t", "\n", "\r", "\u00a0"))
        assert reason_of(f"<answer>{rewritten}</answer>") == expected, repr(rewritten)
