"""Pages of the key-value cache: who holds which, on the host, in plain integers.

A page holds 16 tokens. A prompt of P tokens takes P // 16 whole pages once, shared by its G siblings; each sibling
takes ceil((P + C - 1) / 16) - P // 16 of its own (the last sampled token is never written). If P % 16 > 0, the prompt's
tail lies in the first own page of sibling 0 and is copied to the first own page of the others before their first step.
All pages of a wave are taken before its prefill, so decoding allocates nothing and cannot run out.

Letters: N prompts, G siblings, B = N G rows (row b = n G + g), M pages of a row, P prompt tokens, C most new tokens.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_TOKENS = 16
NOBODY = 0
"""Page that no row owns: where there is no page a block table says 0, and masked writes go there."""


class PagePool:
    """References to pages 1 to num_pages - 1; page 0 belongs to nobody.

    Raises:
        ValueError: num_pages below 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be 1 or more (page {NOBODY} belongs to nobody), got {num_pages}")
        self.num_pages = num_pages
        self._refcounts = [0] * num_pages
        self._free = list(range(num_pages - 1, NOBODY, -1))  # taken from the end: low pages first

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with a reference; free + used + page 0 are all."""
        return self.num_pages - 1 - len(self._free)

    def refcount(self, page: int) -> int:
        """References to a page; 0: free, or page 0."""
        self._check_number(page)
        return self._refcounts[page]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages with one reference each: all or none.

        Raises:
            ValueError: Fewer are free.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(
                f"expected a count of 0 to {len(self._free)}, the free ones of {self.num_pages - 1} pages, got {count};"
                " release rows first, or give the cache more bytes"
            )
        split = len(self._free) - count
        pages = self._free[split:][::-1]
        del self._free[split:]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def share(self, pages: Sequence[int], num_more: int = 1) -> None:
        """Add num_more references to each page.

        Raises:
            ValueError: A page is free; then none has been touched.
        """
        if num_more < 0:
            raise ValueError(f"expected num_more of 0 or more references, got {num_more}; release takes them away")
        for page in pages:
            self._check_used(page)
        for page in pages:
            self._refcounts[page] += num_more

    def release(self, pages: Sequence[int]) -> None:
        """Take one reference from each page (from one named twice, two); a page without any is free again.

        Raises:
            ValueError: A page has no reference left; then none has been touched.
        """
        freed = []
        for num_done, page in enumerate(pages):
            try:
                self._check_used(page)
            except ValueError:
                for done in pages[:num_done]:
                    self._refcounts[done] += 1
                raise
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                freed.append(page)
        self._free += reversed(freed)

    def _check_number(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"expected a page of 0 to {self.num_pages - 1}, got {page}")

    def _check_used(self, page: int) -> None:
        self._check_number(page)
        if self._refcounts[page] == 0:
            what = f"page {NOBODY}, which belongs to nobody" if page == NOBODY else f"page {page}, which is free"
            raise ValueError(f"expected a page that somebody holds, got {what}: each reference is released once")


@dataclass(frozen=True, kw_only=True, slots=True)
class WavePlan:
    """Pages of one wave, all of them taken; `PagePool.release(row)` of every row gives them back."""

    row_pages: list[list[int]]
    """Of each row, in order of its tokens: shared, then own."""
    prompt_pages: list[list[int]]
    """Of each prompt: where prefill writes it; the last is sibling 0's own where the prompt does not fill it."""
    copies: list[tuple[int, int]]
    """(from, to): the partial page of sibling 0, to each of the others, after prefill."""
    num_pages: int
    """Distinct pages."""

    def block_table(self, width: int) -> list[list[int]]:
        """`row_pages` as B rows of `width` pages, filled up with page 0.

        Raises:
            ValueError: A row has more.
        """
        longest = max(map(len, self.row_pages), default=0)
        if longest > width:
            raise ValueError(f"expected a width of {longest} pages or more, those of the longest row, got {width}")
        return [pages + [NOBODY] * (width - len(pages)) for pages in self.row_pages]


def _pages_of_prompt(prompt_len: int, G: int, max_new: int) -> tuple[int, int]:
    """(shared pages, own pages of each row)."""
    if prompt_len < 1 or G < 1 or max_new < 1:
        raise ValueError(
            f"expected a prompt of 1 token or more, G of 1 or more and max_new of 1 or more, got {prompt_len}, {G} and"
            f" {max_new}"
        )
    num_shared = prompt_len // PAGE_TOKENS
    return num_shared, -(-(prompt_len + max_new - 1) // PAGE_TOKENS) - num_shared


def pages_needed(prompt_lens: Sequence[int], G: int, max_new: int) -> int:
    """Distinct pages that a wave of these prompts takes; page 0 is not among them.

    Raises:
        ValueError: A prompt without tokens; G or max_new below 1.
    """
    counts = [_pages_of_prompt(prompt_len, G, max_new) for prompt_len in prompt_lens]
    return sum(num_shared + G * num_own for num_shared, num_own in counts)


def plan_wave(pool: PagePool, prompt_lens: Sequence[int], G: int, max_new: int) -> WavePlan:
    """Take all pages of a wave.

    Raises:
        ValueError: As `pages_needed`, or fewer pages are free; then none has been taken.
    """
    pages = pool.allocate(pages_needed(prompt_lens, G, max_new))
    row_pages, prompt_pages, copies = [], [], []
    start = 0
    for prompt_len in prompt_lens:
        num_shared, num_own = _pages_of_prompt(prompt_len, G, max_new)
        shared = pages[start : start + num_shared]
        start += num_shared
        own = [pages[start + g * num_own : start + (g + 1) * num_own] for g in range(G)]
        start += G * num_own
        pool.share(shared, G - 1)
        row_pages += [shared + mine for mine in own]
        if prompt_len % PAGE_TOKENS:
            prompt_pages.append([*shared, own[0][0]])
            copies += [(own[0][0], mine[0]) for mine in own[1:]]
        else:
            prompt_pages.append(shared)
    return WavePlan(row_pages=row_pages, prompt_pages=prompt_pages, copies=copies, num_pages=len(pages))


def split_into_waves(prompt_lens: Sequence[int], G: int, max_new: int, num_pages: int, max_rows: int) -> list[range]:
    """Ranges of prompts: whole groups in order, as few waves and as equal in rows as pages and max_rows allow.

    Args:
        num_pages: Of the pool, page 0 included.
        max_rows: Most rows that decode together.

    Raises:
        ValueError: As `pages_needed`, or one group does not fit.
    """
    needed_N = [pages_needed([prompt_len], G, max_new) for prompt_len in prompt_lens]
    _check_group(prompt_lens, needed_N, G, max_new, num_pages - 1, max_rows)
    if not needed_N:
        return []
    N, most_groups = len(needed_N), max_rows // G
    before_N = list(itertools.accumulate(needed_N, initial=0))
    fewest = _fewest_waves(before_N, num_pages - 1, most_groups)[0]
    # The smallest bound on a wave's groups that takes no further wave, then within it the most equal ranges.
    bounds = range(-(-N // fewest), most_groups + 1)
    bound = bounds[
        bisect_left(bounds, True, key=lambda groups: _fewest_waves(before_N, num_pages - 1, groups)[0] <= fewest)
    ]
    fewest_from_N = _fewest_waves(before_N, num_pages - 1, bound)
    waves, start = [], 0
    for num_left in range(fewest, 0, -1):
        equal = start - (start - N) // num_left
        stop = min(equal, _end_of_wave(before_N, start, num_pages - 1, bound))
        while fewest_from_N[stop] >= num_left:
            stop += 1
        waves.append(range(start, stop))
        start = stop
    return waves


def _end_of_wave(before_N: Sequence[int], start: int, num_usable: int, most_groups: int) -> int:
    """First prompt beyond the longest wave from `start`. before_N: pages of all prompts before each, [N + 1]."""
    last = min(start + most_groups, len(before_N) - 1)
    return bisect_left(before_N, before_N[start] + num_usable + 1, start, last + 1) - 1


def _fewest_waves(before_N: Sequence[int], num_usable: int, most_groups: int) -> list[int]:
    """Waves that the prompts from each one on take at least, [N + 1]: filling each wave is optimal for ranges."""
    fewest = [0] * len(before_N)
    for start in range(len(before_N) - 2, -1, -1):
        fewest[start] = 1 + fewest[_end_of_wave(before_N, start, num_usable, most_groups)]
    return fewest


def _check_group(
    prompt_lens: Sequence[int], needed_N: Sequence[int], G: int, max_new: int, num_usable: int, max_rows: int
) -> None:
    if needed_N and max_rows < G:
        raise ValueError(
            f"expected max_rows of at least one group of {G} completions, got {max_rows}: a group is never split; lower"
            " the group size or give the rollout more memory"
        )
    largest = max(needed_N, default=0)
    if largest > num_usable:
        n = needed_N.index(largest)
        raise ValueError(
            f"expected the {largest} pages of one group, {G} completions of {prompt_lens[n]} + {max_new} tokens (prompt"
            f" {n}), got {num_usable} pages of {PAGE_TOKENS} tokens: a group is never split; lower the group size or"
            " max_new_tokens, drop long prompts, or raise kv_budget_bytes"
        )
