"""What the tests of tasks share: the rows that lie outside the project, completions, and hostile texts."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkgrpo.trainer.tasks.base import Completion

SHARED_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
IS_ABSENT = bool(os.environ.get("CI")) or not SHARED_DATA.is_dir()


def case_rows(name: str) -> list:
    """One parameter a row of a case file; a single skipped one where the file is absent, and always on CI."""
    if IS_ABSENT:
        return [pytest.param({}, marks=pytest.mark.skip(reason="the shared rows lie outside the project"), id="rows")]
    lines = (SHARED_DATA / "cases" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [pytest.param(json.loads(line), id=json.loads(line)["id"]) for line in lines]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument `countdown_row` or `gsm8k_row` runs once a row of that file."""
    for name in ("countdown", "gsm8k"):
        if f"{name}_row" in metafunc.fixturenames:
            metafunc.parametrize(f"{name}_row", case_rows(name))


@pytest.fixture
def gsm8k_folder() -> Path:
    """The folder with GSM8K's two files."""
    if IS_ABSENT:
        pytest.skip("GSM8K lies outside the project")
    return SHARED_DATA / "gsm8k"


@pytest.fixture
def completion() -> Callable[..., Completion]:
    """Makes a completion from its text."""

    def make(text: str, *, is_truncated: bool = False, token_ids: tuple[int, ...] = ()) -> Completion:
        return Completion(text=text, token_ids=token_ids, is_truncated=is_truncated)

    return make


@pytest.fixture
def fastest_s() -> Callable[..., float]:
    """The quickest of a few tries: a busy machine slows some of them, a slow algorithm slows all."""

    def measure(call: Callable[[], object], tries: int = 5) -> float:
        times_s = []
        for _ in range(tries):
            start_s = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - start_s)
        return min(times_s)

    return measure


PIECES = st.sampled_from(
    [
        *(
            "<answer>",
            "</answer>",
            "<answer",
            "</",
            "<",
            ">",
            "<reasoning>",
            "</reasoning>",
            "####",
            "\\boxed{",
            "{",
            "}",
        ),
        *("\x00", "\ud800", "\udfff", "\u200b", "\ufeff", "\x1c", "\x85", "\n", "\r", " ", "\t", "\\", "\\text{", "$"),
        *("3", "7", "18", "0", "00", "9" * 16, "1,234", "1,23", ".5", "5.", "1e3", "1e999999999", "-", "+", "%", "**"),
        *("\u2212", "\u2013", "\u20ac", "\u00b0", "\u00b2", "\uff11", "\u0663", "\u202f", "\u00a0", "\u00bd", "\u2167"),
        *(
            "dollars",
            "or",
            "thousand",
            "k",
            "km/h",
            "NaN",
            "inf",
            "True",
            "=",
            "/",
            ":",
            "(18)",
            "`",
            "*",
            "\\$",
            "{,}",
        ),
    ]
)
ANYTHING = st.lists(PIECES | st.text(st.characters(), max_size=8), max_size=12).map("".join)


@pytest.fixture
def fuzz() -> Callable[[Callable[[str], None], int], None]:
    """Gives random texts (surrogates, NUL, look-alikes, pieces of tags) to a check, bare and inside an answer block."""

    def run(check: Callable[[str], None], num_examples: int) -> None:
        @settings(
            max_examples=num_examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(ANYTHING, st.sampled_from(["{}", "<answer>{}</answer>", "#### {}", "\\boxed{{{}}}"]))
        def each(text: str, frame: str) -> None:
            check(frame.format(text))

        each()

    return run
