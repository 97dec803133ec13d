"""Arithmetic on arrays of half-open intervals [start, end), integer nanoseconds.

Everything a trace is asked comes down to four questions: how long is a union, how much of it lies inside another, what
is not covered, and which range holds a moment. All work on whole arrays: a million rows take a fraction of a second.

N, M: intervals; Q: questions.
"""

import numpy as np

Array = np.ndarray


def merged(start_N: Array, end_N: Array) -> tuple[Array, Array]:
    """The union as disjoint intervals in order; empty and reversed intervals are dropped."""
    is_real_N = end_N > start_N
    start_N, end_N = start_N[is_real_N], end_N[is_real_N]
    if not len(start_N):
        return start_N, end_N
    order_N = np.argsort(start_N, kind="stable")
    start_N, end_N = start_N[order_N], end_N[order_N]
    reach_N = np.maximum.accumulate(end_N)
    is_first_N = np.concatenate(([True], start_N[1:] > reach_N[:-1]))
    first = np.flatnonzero(is_first_N)
    return start_N[first], reach_N[np.concatenate((first[1:], [len(start_N)])) - 1]


def union_ns(start_N: Array, end_N: Array) -> int:
    """Length of the union: what overlaps counts once."""
    start_M, end_M = merged(start_N, end_N)
    return int((end_M - start_M).sum())


def gaps(start_N: Array, end_N: Array, begin_ns: int, stop_ns: int) -> tuple[Array, Array]:
    """What the union leaves uncovered of [begin, stop)."""
    start_M, end_M = merged(np.clip(start_N, begin_ns, stop_ns), np.clip(end_N, begin_ns, stop_ns))
    start_G = np.concatenate((np.array([begin_ns], dtype=np.int64), end_M))
    end_G = np.concatenate((start_M, np.array([stop_ns], dtype=np.int64)))
    is_real_G = end_G > start_G
    return start_G[is_real_G], end_G[is_real_G]


def overlap_ns(start_N: Array, end_N: Array, other_start_M: Array, other_end_M: Array) -> int:
    """Length of what two unions have in common."""
    start_N, end_N = merged(start_N, end_N)
    start_M, end_M = merged(other_start_M, other_end_M)
    return int((_covered_before(start_M, end_M, end_N) - _covered_before(start_M, end_M, start_N)).sum())


def intersection(start_N: Array, end_N: Array, other_start_M: Array, other_end_M: Array) -> tuple[Array, Array]:
    """What two unions have in common, as disjoint intervals."""
    start_N, end_N = merged(start_N, end_N)
    start_M, end_M = merged(other_start_M, other_end_M)
    # Sorted runs are merged by a stable sort; np.unique would hash them, ten times as long.
    cuts = np.sort(np.concatenate((start_N, end_N, start_M, end_M)), kind="stable")
    begin, stop = cuts[:-1], cuts[1:]
    is_inside = (stop > begin) & _holds(start_N, end_N, begin) & _holds(start_M, end_M, begin)
    return begin[is_inside], stop[is_inside]


def difference(start_N: Array, end_N: Array, other_start_M: Array, other_end_M: Array) -> tuple[Array, Array]:
    """What the first union has and the second has not."""
    start_N, end_N = merged(start_N, end_N)
    if not len(start_N):
        return start_N, end_N
    outside = gaps(other_start_M, other_end_M, int(start_N[0]), int(end_N[-1]))
    return intersection(start_N, end_N, *outside)


def _holds(start_M: Array, end_M: Array, moment_Q: Array) -> Array:
    """bool [Q]: whether disjoint intervals in order hold each moment."""
    place_Q = np.searchsorted(start_M, moment_Q, side="right") - 1
    if not len(start_M):
        return np.zeros(len(moment_Q), dtype=bool)
    return (place_Q >= 0) & (moment_Q < end_M[np.maximum(place_Q, 0)])


def _covered_before(start_M: Array, end_M: Array, moment_Q: Array) -> Array:
    """How much of disjoint intervals in order lies before each moment."""
    if not len(start_M):
        return np.zeros(len(moment_Q), dtype=np.int64)
    total_M = np.concatenate(([0], np.cumsum(end_M - start_M)))
    place_Q = np.searchsorted(start_M, moment_Q, side="right") - 1
    place = np.maximum(place_Q, 0)
    inside_Q = np.minimum(moment_Q, end_M[place]) - start_M[place]
    return np.where(place_Q >= 0, total_M[place] + inside_Q, 0)


def innermost(start_N: Array, end_N: Array, query_start_Q: Array, query_end_Q: Array) -> Array:
    """int64 [Q]: the latest-started interval that contains each query; -1 where none does.

    Intervals may cross, as those of several threads do. From the last one that began before the query the search goes
    to the nearest earlier one with a later end, and so on: all that it skips end too early.
    """
    found_Q = np.full(len(query_start_Q), -1, dtype=np.int64)
    if not len(start_N):
        return found_Q
    order_N = np.lexsort((-end_N, start_N))  # of two that start together the longer one is the outer
    starts, ends = start_N[order_N], end_N[order_N]
    outer_N = _previous_with_later_end(ends)
    place_Q = np.searchsorted(starts, query_start_Q, side="right") - 1
    open_Q = np.flatnonzero(place_Q >= 0)
    while len(open_Q):
        place = place_Q[open_Q]
        is_held = ends[place] >= query_end_Q[open_Q]
        found_Q[open_Q[is_held]] = order_N[place[is_held]]
        open_Q = open_Q[~is_held]
        place_Q[open_Q] = outer_N[place_Q[open_Q]]
        open_Q = open_Q[place_Q[open_Q] >= 0]
    return found_Q


def innermost_by_group(
    group_N: Array, start_N: Array, end_N: Array, group_Q: Array, query_start_Q: Array, query_end_Q: Array
) -> Array:
    """`innermost` within groups (threads, processes): a query sees the intervals of its own group alone."""
    found_Q = np.full(len(query_start_Q), -1, dtype=np.int64)
    for group in np.unique(group_N):
        mine_N, mine_Q = np.flatnonzero(group_N == group), np.flatnonzero(group_Q == group)
        if len(mine_Q):
            place_Q = innermost(start_N[mine_N], end_N[mine_N], query_start_Q[mine_Q], query_end_Q[mine_Q])
            found_Q[mine_Q] = np.where(place_Q >= 0, mine_N[place_Q], -1)
    return found_Q


def self_ns(group_N: Array, start_N: Array, end_N: Array) -> Array:
    """int64 [N]: length of each interval less that of the intervals directly inside it (same group, well nested)."""
    own_N = end_N - start_N
    for group in np.unique(group_N):
        mine = np.flatnonzero(group_N == group)
        order = mine[np.lexsort((-end_N[mine], start_N[mine]))]
        ends = end_N[order]
        outer = _previous_with_later_end(ends, or_equal=True)
        has_parent = outer >= 0
        parent = order[np.maximum(outer, 0)]
        np.subtract.at(own_N, parent[has_parent], (end_N - start_N)[order[has_parent]])
    return own_N


def _previous_with_later_end(end_N: Array, *, or_equal: bool = False) -> Array:
    """int64 [N]: the nearest earlier index whose end is later (or equal); -1 where there is none."""
    outer: list[int] = []
    stack: list[tuple[int, int]] = []
    for index, end in enumerate(end_N.tolist()):
        while stack and (stack[-1][0] < end or (stack[-1][0] == end and not or_equal)):
            stack.pop()
        outer.append(stack[-1][1] if stack else -1)
        stack.append((end, index))
    return np.array(outer, dtype=np.int64)
