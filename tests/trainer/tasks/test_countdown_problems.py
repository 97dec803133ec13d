"""The puzzles: range, solvability, prompt, keyed stream, and the split, which is counted by enumeration."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import permutations

import pytest

from sparkgrpo.trainer.tasks.base import Completion, Problem, is_heldout
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions, judge, make_problem, problem_identity

DISTINCT = {2: (571, 239), 3: (17_327, 803), 4: (417_877, 20_967)}
"""Distinct problems and how many of them are held out by default, by how many numbers."""


def nums_of(problem: Problem) -> list[int]:
    nums = problem.columns["nums"]
    assert isinstance(nums, list)
    return nums


def target_of(problem: Problem) -> int:
    target = problem.columns["target"]
    assert isinstance(target, int)
    return target


def solutions(nums: Sequence[int], target: int) -> Iterator[str]:
    """Every expression over all the numbers with + - * / that equals the target, by brute force; repeats occur."""

    def search(items: list[tuple[Fraction, str]]) -> Iterator[str]:
        if len(items) == 1:
            value, text = items[0]
            if value == target:
                yield text
            return
        for i, j in permutations(range(len(items)), 2):
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            (a, left), (b, right) = items[i], items[j]
            yield from search([*rest, (a - b, f"({left} - {right})")])
            if b:
                yield from search([*rest, (a / b, f"({left} / {right})")])
            if i < j:
                yield from search([*rest, (a + b, f"({left} + {right})")])
                yield from search([*rest, (a * b, f"({left} * {right})")])

    return search([(Fraction(num), str(num)) for num in nums])


@cache
def all_puzzles(num_numbers: int) -> frozenset[tuple[tuple[int, ...], int]]:
    """(sorted numbers, target) of every chain whose value lies in range, without any of the product's code."""
    chains = {((num,), num) for num in range(1, 21)}
    for _ in range(num_numbers - 1):
        chains = {
            (tuple(sorted((*nums, num))), value)
            for nums, so_far in chains
            for num in range(1, 21)
            for value in (so_far + num, so_far - num, so_far * num)
        }
    return frozenset((nums, target) for nums, target in chains if 1 <= target <= 200)


def test_prompt_is_the_lesson_s_word_for_word() -> None:
    problem = make_problem([3, 7, 4], 40)
    assert problem.prompt == (
        {
            "role": "user",
            "content": "Using the numbers [3, 7, 4], write an arithmetic expression that equals 40. Use each number "
            "exactly once. You may use + - * / and parentheses. Think briefly, then put only the expression inside "
            "<answer></answer>.",
        },
    )
    assert problem.columns == {"nums": [3, 7, 4], "target": 40}
    assert problem.identity == "countdown:3,4,7=40"


def test_the_first_puzzles_never_change() -> None:
    """They are part of a run's meaning: a resumed run and a published curve rest on them."""
    task = Countdown(CountdownOptions())
    assert [(nums_of(problem), target_of(problem)) for problem in task.problems(0, 0, 3)] == [
        ([11, 20, 3], 53),
        ([9, 15, 18], 177),
        ([18, 13, 4], 182),
    ]
    assert [(nums_of(problem), target_of(problem)) for problem in task.heldout(3)] == [
        ([14, 11, 20], 23),
        ([4, 5, 13], 12),
        ([3, 12, 3], 33),
    ]


@pytest.mark.parametrize("num_numbers", [2, 3, 4])
def test_puzzles_are_in_range_and_possible(num_numbers: int) -> None:
    task = Countdown(CountdownOptions(numbers=(num_numbers,)))
    puzzles = all_puzzles(num_numbers)
    for problem in (*task.problems(0, 0, 500), *task.heldout(100)):
        assert len(nums_of(problem)) == num_numbers
        assert (tuple(sorted(nums_of(problem))), target_of(problem)) in puzzles
        assert problem == make_problem(nums_of(problem), target_of(problem))


def test_numbers_are_shuffled() -> None:
    """A chain of subtractions starts with its largest number: unshuffled, the order would give the answer away."""
    problems = Countdown(CountdownOptions(numbers=(2,))).problems(0, 0, 2_000)
    differences = [nums_of(p) for p in problems if abs(nums_of(p)[0] - nums_of(p)[1]) == target_of(p)]
    share = sum(a > b for a, b in differences) / len(differences)
    assert 0.4 < share < 0.6


@pytest.mark.parametrize("num_numbers", [2, 3, 4])
def test_solver_s_expressions_are_right_for_their_target_alone(num_numbers: int) -> None:
    task = Countdown(CountdownOptions(numbers=(num_numbers,)))
    for problem in task.heldout({2: 100, 3: 50, 4: 5}[num_numbers]):
        nums, target = nums_of(problem), target_of(problem)
        found = set(solutions(nums, target))
        assert found, problem.identity
        for text in found:
            answer = Completion(text=f"<answer>{text}</answer>", token_ids=(), is_truncated=False)
            assert task.verify(problem, answer).reason == "ok"
            assert judge(text, nums, target + 1) == judge(text, nums, -target) == "wrong_value"
            assert judge(text, [*nums[1:], nums[0] + 1], target) == "wrong_numbers"


@pytest.mark.parametrize("numbers", [(3,), (2, 3, 4)])
def test_parts_of_the_stream_make_the_whole(numbers: tuple[int, ...]) -> None:
    task = Countdown(CountdownOptions(numbers=numbers))
    whole = task.problems(5, 0, 60)
    assert whole == task.problems(5, 0, 1) + task.problems(5, 1, 32) + task.problems(5, 33, 0) + task.problems(
        5, 33, 27
    )
    assert whole == Countdown(CountdownOptions(numbers=numbers)).problems(5, 0, 60)
    assert [p.identity for p in whole] != [p.identity for p in task.problems(6, 0, 60)]
    assert len({p.identity for p in whole}) > 50


def test_reward_options_do_not_change_the_puzzles() -> None:
    plain, other = CountdownOptions(), CountdownOptions(reward="sloppy")
    assert Countdown(plain).problems(1, 0, 20) == Countdown(other).problems(1, 0, 20)


def test_a_mix_has_even_shares_on_both_sides() -> None:
    task = Countdown(CountdownOptions(numbers=(2, 3, 4)))
    for problems in (task.problems(0, 0, 1_500), task.heldout(300)):
        counts = Counter(len(nums_of(problem)) for problem in problems)
        # held-out puzzles of 2 numbers repeat soonest and repeats are dropped, so their share is a little smaller
        assert all(0.2 < counts[num_numbers] / len(problems) < 0.45 for num_numbers in (2, 3, 4))


def test_a_number_named_twice_comes_twice_as_often() -> None:
    problems = Countdown(CountdownOptions(numbers=(2, 3, 3))).problems(0, 0, 1_500)
    share = sum(len(nums_of(problem)) == 3 for problem in problems) / len(problems)
    assert abs(share - 2 / 3) < 0.05  # 4 standard deviations


@pytest.mark.parametrize("num_numbers", [2, 3, 4])
def test_counts_of_the_split(num_numbers: int) -> None:
    puzzles = all_puzzles(num_numbers)
    heldout_frac = {2: 0.40, 3: 0.05, 4: 0.05}[num_numbers]
    num_heldout = sum(is_heldout(problem_identity(nums, target), heldout_frac) for nums, target in puzzles)
    assert (len(puzzles), num_heldout) == DISTINCT[num_numbers]


def test_heldout_can_give_every_held_out_puzzle_of_two_numbers() -> None:
    expected = {problem_identity(*puzzle) for puzzle in all_puzzles(2) if is_heldout(problem_identity(*puzzle), 0.40)}
    problems = Countdown(CountdownOptions(numbers=(2,))).heldout(239)
    assert {problem.identity for problem in problems} == expected
    with pytest.raises(ValueError, match="300 held-out puzzles were asked for, but only 239 turned up"):
        Countdown(CountdownOptions(numbers=(2,))).heldout(300)


@pytest.mark.parametrize("numbers", [(2,), (3,), (4,), (2, 3, 4)])
def test_training_never_meets_the_held_out_side(numbers: tuple[int, ...]) -> None:
    task = Countdown(CountdownOptions(numbers=numbers))
    heldout = task.heldout(200)
    held_identities = {problem.identity for problem in heldout}
    assert len(held_identities) == 200
    assert heldout[:50] == task.heldout(50)
    for seed in range(3):
        for problem in task.problems(seed, 0, 700):
            assert not is_heldout(problem.identity, 0.40 if len(nums_of(problem)) == 2 else 0.05)
            assert problem.identity not in held_identities


def test_heldout_frac_moves_the_split() -> None:
    task = Countdown(CountdownOptions(heldout_frac=0.5))
    assert all(is_heldout(problem.identity, 0.5) for problem in task.heldout(200))
    assert not any(is_heldout(problem.identity, 0.5) for problem in task.problems(0, 0, 200))
    everything = Countdown(CountdownOptions(heldout_frac=0.0))
    assert any(is_heldout(problem.identity, 0.05) for problem in everything.problems(0, 0, 500))
    assert everything.heldout(0) == []
    with pytest.raises(ValueError, match=r"heldout_frac 0\.0 holds out no puzzle of 3 numbers"):
        everything.heldout(1)
