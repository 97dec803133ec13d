"""The wire: what goes in comes out, and hostile bytes give a value or `Malformed`, never anything else."""

import json
import math
import time
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgrpo.trainer.tasks.sandbox.wire import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_HEX_DIGITS,
    MAX_MEMBERS,
    MAX_NODES,
    Malformed,
    TooLarge,
    decode,
    encode,
    frame,
    parse,
    same,
)

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
VALUES = st.recursive(
    HASHABLE | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=20,
)
NODES = st.recursive(
    st.text(max_size=6) | st.sampled_from(list("nbifsyltezd")) | st.sampled_from(["1", "-0", "0x1p3", "ff", "nan"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=15,
)


def through(value: object) -> Any:
    return decode(parse(json.dumps(encode(value)).encode()))


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_decode_of_encode_is_the_value(value: object) -> None:
    got = through(value)
    assert same(value, got, is_exact=True) and same(got, value, is_exact=True)
    assert type(got) is type(value)


@settings(max_examples=600, deadline=None)
@given(st.binary(max_size=200) | NODES.map(lambda node: json.dumps(node).encode()))
def test_any_bytes_give_a_value_or_malformed(data: bytes) -> None:
    try:
        value = decode(parse(data))
    except Malformed:
        return
    assert same(value, through(value), is_exact=True)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(st.binary(max_size=2000) | NODES.map(lambda node: json.dumps(node).encode()))
def test_many_bytes_give_a_value_or_malformed(data: bytes) -> None:
    try:
        decode(parse(data))
    except Malformed:
        return


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[", b"null", b"1", b"NaN", b'{"n":1}', b'["i",1]', b'["s","\xff"]', b'["i","1_0"]', b'["i","0x1"]'),
        *(
            b'["i"," 1"]',
            b'["i",""]',
            b'["i","-"]',
            b'["b","2"]',
            b'["b",true]',
            b'["y","0"]',
            b'["y","0 0"]',
            b'["l"]',
        ),
        *(b'["f","0x1p99999999999"]', b'["x",[]]', b'["n","n"]', b'["n",[]]', b'["d",[["n"]]]'),
        *(
            b'["e",[["l",[]]]]',
            b'["e",[["n"],["n"]]]',
            b'["d",[["n"],["n"],["n"],["n"]]]',
            b'["l","n"]',
            b'["s",["n"]]',
        ),
        b"[" * 900_000,
        b"9" * 1_000_000,
        b'["i","' + b"f" * (MAX_HEX_DIGITS + 1) + b'"]',
        b'["f","' + b"0" * 65 + b'"]',
        b'["l",[' + b'["n"],' * MAX_NODES + b'["n"]]]',
        b'["l",[' * (MAX_DEPTH + 1) + b'["n"]' + b"]]" * (MAX_DEPTH + 1),
        json.dumps(["e", [["i", format(n, "x")] for n in range(MAX_MEMBERS + 1)]]).encode(),
        b'["s","' + b"x" * MAX_BYTES + b'"]',
    ],
    ids=lambda data: repr(data[:24]),
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(parse(data))


def test_the_worst_decodable_frames_are_quick() -> None:
    collide = ["e", [["i", format(n * (2**61 - 1), "x")] for n in range(1, MAX_MEMBERS + 1)]]
    nested = ["l", [["l", [["n"]] * 40]] * 2000]
    long_int = ["l", [["i", "f" * MAX_HEX_DIGITS]] * 15]
    for node in (collide, nested, long_int):
        data = json.dumps(node).encode()
        assert len(data) <= MAX_BYTES
        start = time.perf_counter()
        decode(parse(data))
        assert time.perf_counter() - start < 4.0  # 25 to 150 ms on a quiet machine


def test_subclasses_arrive_as_their_plain_base() -> None:
    pair = namedtuple("pair", "low high")
    colour = IntEnum("colour", "RED BLUE")
    assert through(Counter("aab")) == {"a": 2, "b": 1} and type(through(Counter())) is dict
    assert type(through(OrderedDict(a=1))) is dict
    assert through(pair(1, 2)) == (1, 2) and type(through(pair(1, 2))) is tuple
    assert type(through(colour.RED)) is int


def test_a_lying_subclass_changes_nothing() -> None:
    class Liar(int):
        def __index__(self) -> int:
            return 99

        def __format__(self, spec: str) -> str:
            return "99"

        def bit_length(self) -> int:
            return 0

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert through(Liar(7)) == 7
    with pytest.raises(Malformed):
        encode(Liar(1 << 5 * MAX_HEX_DIGITS))


@pytest.mark.parametrize(
    "value",
    [object(), 1j, range(3), {}.keys(), bytearray(b"x"), print, 1 << 4 * MAX_HEX_DIGITS],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_node(value: object) -> None:
    with pytest.raises(Malformed) as caught:
        encode(value)
    assert not isinstance(caught.value, TooLarge)


@pytest.mark.parametrize(
    "value",
    [[0] * 10**7, "x" * (MAX_BYTES + 1), [["y" * 1000] * 100] * 20, {n: n for n in range(60_000)}],
    ids=lambda value: type(value).__name__,
)
def test_encoding_stops_early(value: object) -> None:
    start = time.perf_counter()
    with pytest.raises(TooLarge):
        encode(value)
    assert time.perf_counter() - start < 4.0  # 0 to 70 ms


def test_a_list_that_holds_itself_has_no_node() -> None:
    ring: list = []
    ring.append(ring)
    with pytest.raises(Malformed):
        encode(ring)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (2.0, 2),
        (0.3, 0.1 + 0.2),
        (1e300, 1e300 * (1 + 1e-12)),
        (math.nan, math.nan),
        (math.inf, math.inf),
        (0.0, -0.0),
        ([1.0, (2.0,)], [1, (2,)]),
        ({1, 2}, {2, 1}),
        ({"a": [1.0]}, {"a": [1]}),
        ({(1, "x"): 0}, {(1, "x"): 0}),
    ],
)
def test_same(expected: object, got: object) -> None:
    assert same(expected, got)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (2, 2.0),
        (1, True),
        (True, 1),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({1}, {True}),
        ("1", 1),
        (b"1", "1"),
        (0.5, math.nan),
        (1.0, 1.0 + 1e-06),
        (math.inf, 1e308),
        (math.inf, -math.inf),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ({1: 2}, {True: 2}),
        ({"a": 1}, {"a": 1, "b": 2}),
        (None, 0),
        (2.0, 10**400),
        (0.0, False),
        ({1.0}, {1}),
    ],
)
def test_not_same(expected: object, got: object) -> None:
    assert not same(expected, got)


def test_exact_floats() -> None:
    assert not same(0.3, 0.1 + 0.2, is_exact=True) and same(0.3, 0.3, is_exact=True)


def test_frames_carry_their_length() -> None:
    data = frame("id", "ok", encode("\ud800é"))
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert parse(data[4:]) == ["id", "ok", ["s", "\ud800é"]]
