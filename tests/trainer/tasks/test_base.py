import subprocess
import sys
from collections import Counter
from itertools import permutations

import pytest

from sparkgrpo.kernels.philox import philox_words
from sparkgrpo.trainer.tasks.base import KeyedDraws, Score, is_heldout, place_in_order, stream_key


def test_draws_are_the_philox_words_of_their_index_in_order() -> None:
    key, index = stream_key("countdown", "train", 7), (5 << 32) + 3
    draws = KeyedDraws(key, index)
    words = [word for block in range(3) for word in philox_words(key, 3, 5, block)]
    assert [draws.below(1 << 32) for _ in words] == words


def test_neighbouring_seeds_and_indices_share_no_stream() -> None:
    streams = {
        tuple(KeyedDraws(stream_key("countdown", stream, seed), index).below(1 << 32) for _ in range(1))
        for stream in ("train", "heldout")
        for seed in (-1, 0, 1, 2, 2**40)
        for index in (0, 1, 2, 2**32, 2**32 + 1)
    }
    assert len(streams) == 2 * 5 * 5


def test_below_is_uniform_and_stays_in_range() -> None:
    draws = KeyedDraws(stream_key("test", "uniform", 0), 0)
    counts = Counter(draws.below(20) for _ in range(20_000))
    assert set(counts) == set(range(20))
    chi2 = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi2 < 50  # 19 degrees of freedom: a fair draw exceeds 50 with probability 1e-4, and this one is fixed


def test_shuffled_reaches_every_order_equally() -> None:
    draws = KeyedDraws(stream_key("test", "shuffle", 0), 0)
    counts = Counter(tuple(draws.shuffled([1, 2, 3])) for _ in range(6_000))
    assert set(counts) == set(permutations([1, 2, 3]))
    chi2 = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi2 < 26  # 5 degrees of freedom: 1e-4


def test_shuffled_leaves_its_argument_alone() -> None:
    values = [1, 2, 3, 4]
    KeyedDraws(1, 0).shuffled(values)
    assert values == [1, 2, 3, 4]


def test_keys_and_split_do_not_depend_on_the_process() -> None:
    """`hash()` of a string does: resumed runs would train on held-out problems."""
    program = (
        "from sparkgrpo.trainer.tasks.base import is_heldout, stream_key\n"
        "print(stream_key('countdown', 'train', 0), *(int(is_heldout(f'x:{i}', 0.5)) for i in range(64)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert int(printed[0]) == stream_key("countdown", "train", 0)
    assert printed[1:] == [str(int(is_heldout(f"x:{i}", 0.5))) for i in range(64)]


@pytest.mark.parametrize("frac", [0.0, 0.05, 0.4, 1.0])
def test_split_holds_out_its_fraction(frac: float) -> None:
    share = sum(is_heldout(f"word:{i}", frac) for i in range(20_000)) / 20_000
    assert abs(share - frac) < 0.015  # 4 standard deviations at 0.5


def test_larger_fraction_only_adds_problems() -> None:
    names = [f"word:{i}" for i in range(2_000)]
    assert {name for name in names if is_heldout(name, 0.05)} < {name for name in names if is_heldout(name, 0.4)}


def test_score_is_right_by_its_reason_and_not_by_what_it_pays() -> None:
    assert Score(reward=0.0, parts={}, reason="ok").is_right
    assert not Score(reward=0.1, parts={}, reason="wrong_value").is_right


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 257, 7473])
def test_each_epoch_walks_the_whole_set_once(size: int) -> None:
    key = stream_key("test", "order", 1)
    orders = [[place_in_order(key, epoch * size + i, size) for i in range(size)] for epoch in range(2)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size > 3:
        assert orders[0] != orders[1] != list(range(size))
        other = [place_in_order(stream_key("test", "order", 2), i, size) for i in range(size)]
        assert other != orders[0]


def test_every_item_is_as_likely_at_every_place() -> None:
    counts = [
        Counter(place_in_order(stream_key("test", "order", seed), i, 5) for seed in range(2_000)) for i in range(5)
    ]
    for place in counts:
        assert set(place) == set(range(5))
        assert sum((count - 400) ** 2 / 400 for count in place.values()) < 27  # 4 degrees of freedom: 2e-5


def test_the_first_order_never_changes() -> None:
    """A resumed run goes on with it."""
    assert [place_in_order(stream_key("gsm8k", "train", 0), i, 7473) for i in (0, 1, 7472, 7473, 10**12)] == [
        7017,
        2259,
        7451,
        5740,
        951,
    ]
