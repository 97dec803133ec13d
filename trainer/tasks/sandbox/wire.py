"""Values between the trusted checker and an untrusted process, as JSON that holds nothing but arrays and strings.

marshal, pickle and literal_eval are unsafe on hostile bytes. Here a value is a *node*, [tag] or [tag, payload]:

    n None              b bool, "0" or "1"       i int in hexadecimal      f float.hex
    s str               y bytes in hexadecimal   l t e z list, tuple, set, frozenset: an array of nodes
    d dict: an array of keys and values by turns

and a *frame* is 4 bytes of length, then the UTF-8 JSON of [call id, word, node]. The decoder takes exact shapes only,
under caps on bytes, depth, nodes, digits and members, and all else is `Malformed`. Whether two values are the same is
decided here, on plain values, so nothing that the other process defines takes part.

This file runs on both sides and imports the standard library alone.
"""

import json
import math
import re

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_HEX_DIGITS = 1 << 16
MAX_MEMBERS = 2_000
"""Of a set or dict: equal hashes make building one quadratic, 25 ms at this number (measured)."""
MAX_FLOAT_CHARS = 64
REL_TOL = ABS_TOL = 1e-9

PLAIN = (bool, int, float, str, bytes, list, tuple, set, frozenset, dict)
SEQUENCES = {"l": list, "t": tuple, "e": set, "z": frozenset}
TAGS = {kind: tag for tag, kind in SEQUENCES.items()}
_INT = re.compile(f"-?[0-9a-f]{{1,{MAX_HEX_DIGITS}}}")
_BYTES = re.compile("(?:[0-9a-f]{2})*")


class Malformed(ValueError):
    """Not an encoded value within the caps; or, encoding, a value that has no node."""


class TooLarge(Malformed):
    """A value with more nodes or bytes than a frame may hold."""


class Budget:
    """What is left of a frame: nodes and bytes."""

    def __init__(self) -> None:
        self.num_nodes, self.num_bytes = MAX_NODES, MAX_BYTES

    def spend(self, num_bytes: int) -> None:
        """Count a node and the bytes of its payload; raises TooLarge."""
        self.num_nodes -= 1
        self.num_bytes -= num_bytes
        if self.num_nodes < 0 or self.num_bytes < 0:
            raise TooLarge("too many nodes or bytes")


def encode(value: object, depth: int = 0, budget: Budget | None = None) -> list:
    """A plain value as a node; a subclass (Counter, IntEnum, a named tuple) loses its class.

    That is fair to honest answers and no risk: the receiver sees plain data whatever the sender calls it.
    Raises Malformed for other types, depth and long integers, TooLarge as soon as a frame would be exceeded.
    """
    budget = budget or Budget()
    if depth > MAX_DEPTH:
        raise Malformed("too deep")
    if value is None:
        budget.spend(5)
        return ["n"]
    kind = next((kind for kind in PLAIN if isinstance(value, kind)), None)
    if kind in (None, int) and not (kind is int and int.bit_length(value) <= 4 * MAX_HEX_DIGITS):  # pyright: ignore
        raise Malformed(f"not a plain value, or too long: {type(value).__name__}")
    if kind in (bool, int, float, str, bytes):
        node = _scalar(kind, value)
        budget.spend(len(node[1]) + 8)
        return node
    if kind.__len__(value) * (2 if kind is dict else 1) > budget.num_nodes:  # pyright: ignore - before any of them is made
        raise TooLarge("too many nodes")
    if kind is dict:
        budget.spend(8)
        pairs = [encode(x, depth + 1, budget) for item in dict.items(value) for x in item]  # pyright: ignore
        return ["d", pairs]
    budget.spend(8)
    nodes = [encode(x, depth + 1, budget) for x in kind.__iter__(value)]  # pyright: ignore
    return [TAGS[kind], sorted(nodes, key=json.dumps) if kind in (set, frozenset) else nodes]  # pyright: ignore


def _scalar(kind: type, value: object) -> list[str]:
    """By the methods of the plain type, which a subclass cannot replace."""
    if kind is bool:
        return ["b", "1" if value else "0"]
    if kind is int:
        return ["i", format(int.__index__(value), "x")]  # pyright: ignore[reportArgumentType]
    if kind is float:
        return ["f", float.hex(value)]  # pyright: ignore[reportArgumentType]
    return ["s", str.__str__(value)] if kind is str else ["y", bytes.hex(value)]  # pyright: ignore[reportArgumentType]


def _refuse(_: object) -> None:
    raise Malformed("only arrays and strings are allowed")


def parse(data: bytes) -> object:
    """Bytes to nested lists of strings: numbers, objects and constants do not exist in this format."""
    if len(data) > MAX_BYTES:
        raise Malformed("too long")
    try:
        return json.loads(
            data.decode("utf-8"),
            parse_int=_refuse,
            parse_float=_refuse,
            parse_constant=_refuse,
            object_pairs_hook=_refuse,
        )
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)[:200]) from None


def decode(node: object, depth: int = 0, budget: Budget | None = None) -> object:
    """A parsed node as a plain value. Raises Malformed."""
    budget = budget or Budget()
    budget.spend(0)
    if depth > MAX_DEPTH:
        raise Malformed("too deep")
    if node == ["n"]:
        return None
    if not (type(node) is list and len(node) == 2 and type(node[0]) is str):
        raise Malformed("not a node")
    tag, payload = node
    if type(payload) is str:
        return _decode_scalar(tag, payload)
    if type(payload) is not list:
        raise Malformed("bad payload")
    items = [decode(item, depth + 1, budget) for item in payload]
    if tag in ("l", "t"):
        return SEQUENCES[tag](items)
    members = items[::2] if tag == "d" else items
    if tag not in ("d", "e", "z") or len(members) > MAX_MEMBERS or (tag == "d" and len(items) % 2):
        raise Malformed("bad container")
    try:
        value = dict(zip(members, items[1::2], strict=True)) if tag == "d" else SEQUENCES[tag](members)
    except TypeError as error:  # a member that cannot be hashed
        raise Malformed(str(error)) from None
    if len(value) != len(members):
        raise Malformed("repeated member")
    return value


def _decode_scalar(tag: str, payload: str) -> object:
    if tag == "s":
        return payload
    if tag == "b" and payload in ("0", "1"):
        return payload == "1"
    if tag == "i" and _INT.fullmatch(payload):
        return int(payload, 16)
    if tag == "y" and _BYTES.fullmatch(payload):
        return bytes.fromhex(payload)
    if tag == "f" and len(payload) <= MAX_FLOAT_CHARS:
        try:
            return float.fromhex(payload)
        except (ValueError, OverflowError) as error:
            raise Malformed(str(error)) from None
    raise Malformed("bad scalar")


def same(expected: object, got: object, *, is_exact: bool = False) -> bool:
    """Whether a decoded value is the expected one.

    Types must be the same, but an int may stand for an expected float (the mean of ints). Floats may differ by 1e-9,
    relative or absolute, unless is_exact; NaN equals NaN alone. Sets and keys of dicts are compared by their encoding.
    """
    if type(expected) is float and type(got) in (float, int):
        if type(got) is int or is_exact or not math.isfinite(expected):
            return got == expected or (got != got and expected != expected)
        return math.isclose(expected, got, rel_tol=REL_TOL, abs_tol=ABS_TOL)  # pyright: ignore[reportArgumentType]
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        pairs = zip(expected, got, strict=False)
        return len(expected) == len(got) and all(same(a, b, is_exact=is_exact) for a, b in pairs)
    if isinstance(expected, dict) and isinstance(got, dict):
        ours, theirs = _by_encoded_key(expected), _by_encoded_key(got)
        if ours.keys() != theirs.keys():
            return False
        return all(same(value, theirs[key], is_exact=is_exact) for key, value in ours.items())
    return encode(expected) == encode(got)


def _by_encoded_key(value: dict) -> dict[str, object]:
    return {json.dumps(encode(key)): item for key, item in value.items()}


def frame(call_id: str, word: str, node: object) -> bytes:
    """The bytes of one frame."""
    body = json.dumps([call_id, word, node]).encode()
    return len(body).to_bytes(4, "big") + body
