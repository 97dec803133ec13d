"""A strict checker that a module shares, and squares as the simplest problem."""

import sys
from collections.abc import Iterator

import pytest

from sparkgrpo.trainer.tasks.sandbox.checker import Checker

SQUARES = [((x,), x * x) for x in (2, 3, 0, -5, 11)]


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker() as checker:
        yield checker


@pytest.fixture
def squares() -> list[tuple[tuple, object]]:
    """(arguments, expected value) of "return the square"."""
    return list(SQUARES)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if sys.platform != "linux":
        pytest.skip("the sandbox is Linux's")
