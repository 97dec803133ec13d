"""The page pool against a dictionary, the plan of a wave against its definition token by token, and waves against all
ways to cut.

N prompts, G siblings, P prompt tokens, C most new tokens.
"""

import itertools
import random
import time
from collections import Counter

import pytest

from sparkgrpo.trainer.rollout.pages import NOBODY, PAGE_TOKENS, PagePool, pages_needed, plan_wave, split_into_waves


def assert_balances(pool: PagePool, refcount_of: dict[int, int]) -> None:
    """The pool holds exactly these references; free + used + page 0 = all."""
    for page in range(pool.num_pages):
        assert pool.refcount(page) == refcount_of.get(page, 0), f"page {page}"
    assert pool.num_used == len(refcount_of)
    assert pool.num_free + pool.num_used + 1 == pool.num_pages


@pytest.mark.parametrize("seed", range(6))
def test_pool_equals_a_dictionary_of_references(seed: int) -> None:
    """vllm 1584, sglang 38941: neither a double free nor a leak, whatever is asked for in whatever order."""
    rng = random.Random(seed)
    pool = PagePool(rng.choice([2, 9, 40]))
    refcount_of: dict[int, int] = {}
    outcomes: Counter[str] = Counter()
    for _ in range(800):
        action = rng.choice(["allocate", "share", "release", "release"])
        pages = [rng.randrange(pool.num_pages) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.8:  # else pages that may be free, and page 0
            pages = [page for page in pages if page in refcount_of]
        try:
            if action == "allocate":
                got = pool.allocate(count := rng.randint(0, 5))
                assert len(set(got)) == count and not set(got) & refcount_of.keys() and NOBODY not in got
                refcount_of |= dict.fromkeys(got, 1)
                continue
            if action == "share":
                pool.share(pages, num_more := rng.randint(0, 3))
                added = Counter(pages * num_more)
            else:
                pool.release(pages)
                added = Counter({page: -count for page, count in Counter(pages).items()})
        except ValueError:
            outcomes[f"{action} refused"] += 1
            if action == "release":
                assert any(count > refcount_of.get(page, 0) for page, count in Counter(pages).items())
            elif action == "share":
                assert not refcount_of.keys() >= set(pages)
            else:
                assert count > pool.num_free
        else:
            outcomes[action] += 1
            for page, change in added.items():
                assert page in refcount_of, "a free page was shared or released"
                refcount_of[page] += change
            refcount_of = {page: count for page, count in refcount_of.items() if count}
        finally:
            assert_balances(pool, refcount_of)
    assert {"share", "release", "share refused", "release refused", "allocate refused"} <= outcomes.keys()


def test_allocate_gives_all_or_nothing() -> None:
    pool = PagePool(5)
    with pytest.raises(ValueError, match=r"count of 0 to 4, the free ones of 4 pages, got 5"):
        pool.allocate(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="got 1"):
        pool.allocate(1)
    with pytest.raises(ValueError, match="got -1"):
        pool.allocate(-1)


def test_a_double_free_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(5)
    first, second = pool.allocate(2)
    pool.share([first])
    with pytest.raises(ValueError, match=f"page {second}, which is free"):
        pool.release([first, second, second])
    assert_balances(pool, {first: 2, second: 1})
    pool.release([first, second])
    with pytest.raises(ValueError, match="which is free"):
        pool.release([second])
    with pytest.raises(ValueError, match="which is free"):
        pool.share([first, second])
    assert_balances(pool, {first: 1})


@pytest.mark.parametrize("page", [NOBODY, -1, 5])
def test_pages_that_nobody_can_hold_are_refused(page: int) -> None:
    pool = PagePool(5)
    for action in (pool.release, pool.share):
        with pytest.raises(ValueError, match="expected a page"):
            action([page])


def test_a_pool_without_any_page_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages must be 1 or more"):
        PagePool(0)
    assert PagePool(1).num_free == 0


CASES = [
    ([1], 1, 1), ([5], 3, 1), ([15, 16, 17], 2, 1), ([16], 4, 1), ([16], 4, 2), ([31, 32, 33, 100], 8, 40),
    ([48, 3], 1, 16), ([47, 48, 49], 3, 17), ([100] * 4, 8, 1024), ([], 4, 8),
]  # fmt: skip


@pytest.mark.parametrize(("prompt_lens", "G", "max_new"), CASES)
def test_plan_of_a_wave_token_by_token(prompt_lens: list[int], G: int, max_new: int) -> None:
    """Every token that is written has a place of its own, but prompt tokens of whole pages one for all siblings."""
    pool = PagePool(1 + pages_needed(prompt_lens, G, max_new))
    plan = plan_wave(pool, prompt_lens, G, max_new)
    assert plan.num_pages == pages_needed(prompt_lens, G, max_new) and pool.num_free == 0
    owner_of_place: dict[tuple[int, int], tuple[int, int, int]] = {}
    for n, prompt_len in enumerate(prompt_lens):
        num_whole = prompt_len // PAGE_TOKENS * PAGE_TOKENS
        assert len(plan.prompt_pages[n]) == -(-prompt_len // PAGE_TOKENS)
        for g in range(G):
            pages = plan.row_pages[n * G + g]
            assert len(pages) == max(-(-(prompt_len + max_new - 1) // PAGE_TOKENS), 0)
            for token in range(prompt_len + max_new - 1):
                place = (pages[token // PAGE_TOKENS], token % PAGE_TOKENS)
                owner = (n, -1 if token < num_whole else g, token)
                assert owner_of_place.setdefault(place, owner) == owner
                if g == 0 and token < prompt_len:
                    assert plan.prompt_pages[n][token // PAGE_TOKENS] == place[0]
    assert NOBODY not in {page for page, _ in owner_of_place}


@pytest.mark.parametrize(("prompt_lens", "G", "max_new"), CASES)
def test_partial_pages_are_copied_from_sibling_0(prompt_lens: list[int], G: int, max_new: int) -> None:
    plan = plan_wave(PagePool(1 + pages_needed(prompt_lens, G, max_new)), prompt_lens, G, max_new)
    expected = []
    for n, prompt_len in enumerate(prompt_lens):
        if prompt_len % PAGE_TOKENS:
            partial = [pages[prompt_len // PAGE_TOKENS] for pages in plan.row_pages[n * G : (n + 1) * G]]
            expected += [(partial[0], other) for other in partial[1:]]
    assert plan.copies == expected


@pytest.mark.parametrize(("prompt_lens", "G", "max_new"), CASES)
def test_references_fall_row_by_row(prompt_lens: list[int], G: int, max_new: int) -> None:
    pool = PagePool(3 + pages_needed(prompt_lens, G, max_new))
    kept = pool.allocate(2)
    plan = plan_wave(pool, prompt_lens, G, max_new)
    refcount_of = Counter(itertools.chain(kept, *plan.row_pages))
    for row in random.Random(0).sample(range(len(plan.row_pages)), len(plan.row_pages)):
        assert_balances(pool, refcount_of)
        pool.release(plan.row_pages[row])
        refcount_of = +(refcount_of - Counter(plan.row_pages[row]))
    assert_balances(pool, Counter(kept))


def test_block_table_is_filled_up_with_page_0() -> None:
    plan = plan_wave(PagePool(9), [20, 3], 1, 14)
    table = plan.block_table(4)
    assert [len(row) for row in table] == [4, 4]
    assert [[page for page in row if page] for row in table] == plan.row_pages
    assert table[0][3] == NOBODY and table[1][1:] == [NOBODY] * 3
    with pytest.raises(ValueError, match="width of 3 pages or more"):
        plan.block_table(2)


def test_a_plan_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(pages_needed([100], 8, 64))
    with pytest.raises(ValueError, match="free ones"):
        plan_wave(pool, [100], 8, 64)
    assert_balances(pool, {})


def test_pages_of_the_design_s_example() -> None:
    """512 rows of 100 + 1,024 tokens, G 8: 33,664 pages."""
    assert pages_needed([100] * 64, 8, 1024) == 33_664


def test_a_thousand_rows_are_planned_in_milliseconds() -> None:
    times_s = []
    for _ in range(5):
        pool = PagePool(80_000)
        start = time.process_time()
        plan = plan_wave(pool, [100] * 128, 8, 1024)
        times_s.append(time.process_time() - start)
    assert len(plan.row_pages) == 1024
    assert min(times_s) < 10e-3


@pytest.mark.parametrize(("prompt_lens", "G", "max_new"), [([0], 1, 1), ([5, -1], 1, 1), ([5], 0, 1), ([5], 1, 0)])
def test_sizes_below_one_are_refused(prompt_lens: list[int], G: int, max_new: int) -> None:
    for call in (
        lambda: pages_needed(prompt_lens, G, max_new),
        lambda: plan_wave(PagePool(99), prompt_lens, G, max_new),
        lambda: split_into_waves(prompt_lens, G, max_new, 99, 99),
    ):
        with pytest.raises(ValueError, match="1 token or more"):
            call()


def all_cuts(num_prompts: int) -> list[list[range]]:
    cuts = itertools.product([False, True], repeat=num_prompts - 1)
    bounds = [[0, *(n + 1 for n, is_cut in enumerate(cut) if is_cut), num_prompts] for cut in cuts]
    return [[range(low, high) for low, high in itertools.pairwise(b)] for b in bounds]


@pytest.mark.parametrize("seed", range(60))
def test_waves_are_as_few_and_as_equal_as_any_cut(seed: int) -> None:
    """Against every way to cut 9 prompts or fewer: no fewer waves fit, and of as few, no smaller largest wave."""
    rng = random.Random(seed)
    G, max_new, N = rng.randint(1, 4), rng.randint(1, 40), rng.randint(1, 9)
    prompt_lens = [rng.choice([3, 40, 200]) for _ in range(N)]
    most_pages = max(pages_needed([p], G, max_new) for p in prompt_lens)
    num_pages, max_rows = 1 + rng.randint(most_pages, 3 * most_pages), rng.randint(G, 5 * G)

    def fits(wave: range) -> bool:
        is_small = len(wave) * G <= max_rows
        return is_small and pages_needed([prompt_lens[n] for n in wave], G, max_new) < num_pages

    waves = split_into_waves(prompt_lens, G, max_new, num_pages, max_rows)
    assert [n for wave in waves for n in wave] == list(range(N))
    assert all(wave and fits(wave) for wave in waves)
    possible = [cut for cut in all_cuts(N) if all(fits(wave) for wave in cut)]
    assert len(waves) == min(map(len, possible))
    as_few = [cut for cut in possible if len(cut) == len(waves)]
    assert max(map(len, waves)) == min(max(map(len, cut)) for cut in as_few)


@pytest.mark.parametrize(("num_waves", "sizes"), [(1, [10]), (2, [5, 5]), (4, [3, 3, 2, 2]), (5, [2] * 5)])
@pytest.mark.parametrize("is_bound_by_pages", [True, False])
def test_budgets_that_force_a_number_of_waves(num_waves: int, sizes: list[int], is_bound_by_pages: bool) -> None:
    most_groups = -(-10 // num_waves)
    prompt_lens, G, max_new = [20] * 10, 4, 30
    num_pages = 1 + pages_needed([20] * most_groups, G, max_new) if is_bound_by_pages else 10_000
    max_rows = 10_000 if is_bound_by_pages else most_groups * G + 3
    waves = split_into_waves(prompt_lens, G, max_new, num_pages, max_rows)
    assert [len(wave) for wave in waves] == sizes


def test_no_prompts_are_no_waves() -> None:
    assert split_into_waves([], 4, 8, 1, 1) == []


def test_one_group_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"one group of 8 completions, got 7: .*group size"):
        split_into_waves([20], 8, 16, 1000, 7)
    needed = pages_needed([900], 8, 16)
    with pytest.raises(
        ValueError, match=rf"the {needed} pages .* 900 \+ 16 tokens \(prompt 1\), got {needed - 1} pages"
    ):
        split_into_waves([20, 900, 30], 8, 16, needed, 64)
    assert split_into_waves([20, 900, 30], 8, 16, needed + 1, 64) == [range(1), range(1, 2), range(2, 3)]
