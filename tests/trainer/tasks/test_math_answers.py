"""The math checker: right answers in many forms, hostile ones within their deadline, each in a process of its own."""

import importlib.util
import random
import sys
import time
from collections.abc import Iterator

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.math_answers import (
    REASONS,
    MathChecker,
    MathOptions,
    boxed_answer,
    is_too_complex,
)
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None or sys.platform != "linux", reason="needs the extra math, and Linux"
)
CALL_S = 1.0


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    limits = Limits(call_s=CALL_S, total_s=CALL_S, memory_bytes=1 << 30)
    with MathChecker(MathOptions(num_workers=2, limits=limits)) as checker:
        yield checker


@needs_library
@pytest.mark.walls
@pytest.mark.parametrize(
    ("gold", "text", "reason"),
    [
        ("1/2", r"so \boxed{\frac{1}{2}}.", "ok"),
        ("1/2", r"\boxed{0.5}", "ok"),
        ("1/2", r"\boxed{\dfrac{2}{4}}", "ok"),
        ("x^2+1", r"\boxed{1+x^2}", "ok"),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", "ok"),
        ("(1,2)", r"\boxed{(1, 2)}", "ok"),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", "ok"),
        ("50", r"\boxed{50\%}", "ok"),
        (r"50\%", r"\boxed{50}", "ok"),
        ("18", r"\boxed{20-2}", "ok"),  # the library accepts unevaluated work
        ("2", r"first \boxed{1}, better \boxed{2}", "ok"),
        ("1", r"first \boxed{1}, better \boxed{2}", "wrong_value"),
        ("18", r"\boxed{19}", "wrong_value"),
        ("0.5", r"\boxed{50\%}", "wrong_value"),
        ("1/2", r"\boxed{}", "unparsable"),
        ("1/2", "1/2", "no_answer"),
        ("1/2", r"\boxed{1/2", "no_answer"),
        ("1/2", r"\boxed{" + "1+" * 300 + "1}", "too_complex"),
        ("1/2", r"\boxed{2^{2^{2^{2^{2^{2^{2^{2^{2^{2}}}}}}}}}}", "too_complex"),
        ("1/2", r"\boxed{((((((((((1))))))))))}", "too_complex"),
        ("1/2", r"\boxed{5000!}", "too_complex"),
        ("120", r"\boxed{5!}", "ok"),
    ],
)
def test_reasons(checker: MathChecker, gold: str, text: str, reason: str) -> None:
    assert checker.judge([gold], [text]) == [reason]


@needs_library
@pytest.mark.walls
def test_a_tower_ends_at_the_deadline_and_holds_nothing_up(checker: MathChecker) -> None:
    start = time.monotonic()
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{3}", r"\boxed{3}", r"\boxed{999!^{999!}}", r"\boxed{3}"]
    reasons = checker.judge(["3"] * 5, texts)
    assert [reasons[place] for place in (1, 2, 4)] == ["ok"] * 3
    assert {reasons[0], reasons[3]} <= {"timeout", "too_complex", "wrong_value"}
    assert time.monotonic() - start < 2 * CALL_S + 2.0


@needs_library
@pytest.mark.walls
def test_a_right_answer_that_cannot_be_read_is_a_mistake_of_the_data(checker: MathChecker) -> None:
    with pytest.raises(UserError, match="right answer '' cannot be read"):
        checker.judge([""], [r"\boxed{3}"])


@needs_library
@pytest.mark.walls
def test_random_text_gives_a_known_reason(checker: MathChecker) -> None:
    pieces = [
        *[r"\frac", r"\sqrt", r"{", r"}", r"1", r"x", r"^", r"_", r"(", r")", r"!", r"=", r",", r"\%"],
        "\ud800",
        "\0",
        "é",
        "+",
    ]
    draw = random.Random(0)
    texts = [r"\boxed{" + "".join(draw.choices(pieces, k=draw.randint(0, 20))) + "}" for _ in range(60)]
    assert set(checker.judge(["3"] * len(texts), texts)) <= set(REASONS)


@needs_library
@pytest.mark.walls
def test_answers_share_no_process(checker: MathChecker) -> None:
    """What one parse leaves behind cannot reach the next: each is the first of its process."""
    assert checker.judge(["x"] * 3, [r"\boxed{x}"] * 3) == ["ok"] * 3
    assert checker._pool.num_restarts == 0


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkgrpo.trainer.tasks.math_judge.PACKAGES", ("no_such_package",))
    with pytest.raises(UserError, match=r"no_such_package is not installed.*sparkgrpo\[math\]"):
        MathChecker(MathOptions())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} and", r"\frac{1}{2}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed 1", None),
        ("", None),
        ("\\boxed{\\", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_scans_are_linear() -> None:
    for text in (r"\boxed{" * 40_000, r"\boxed{" + "{" * 300_000, r"\boxed{" + "1" * 300_000 + "}", "\\" * 300_000):
        start = time.perf_counter()
        boxed_answer(text)
        is_too_complex(text)
        assert time.perf_counter() - start < 2.0  # 30 to 100 ms
