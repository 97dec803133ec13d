"""Reads the one number of an answer: which place of a text holds the answer, and which exact value it states.

One place is chosen, never several tried: the last complete <answer> block, else the rest of the line after the last
####, else the content of the last \\boxed{}. A unit may follow the number, a second value may not. The text is hostile:
at most 64 characters of a field are read, no pattern can backtrack, and no exponent is ever computed beyond 10^15.

    number   = [sign] [currency] [sign] (digits ["," 3 digits]... ["." digits] | "." digits) ["e" [sign] digits]
    unit     = nothing | % | degree sign | currency | blank, then one to three words
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from sparkgrpo.trainer.tasks.answer_block import find_answer
from sparkgrpo.trainer.tasks.base import OK

MAX_FIELD_CHARS, MAX_DIGITS, MAX_EXPONENT, MAX_BOX_CHARS = 64, 15, 15, 512
MAX_MARKUP_LAYERS = 5
FLEXIBLE_TAIL_CHARS = 4096
NUMBER_REASONS = ("no_answer", "empty", "too_long", "non_ascii", "bad_number", "many_values", "wrong_value", OK)
"""Every code of an answer that is a number, in the order in which they apply."""

_DIGITS = frozenset("0123456789")
_LOOKALIKES = {
    ord(lookalike): symbol
    for symbol, lookalikes in {
        "-": "\u2212\u2013\ufe63\uff0d",  # minus, en dash, small hyphen, fullwidth
        "+": "\uff0b",
        "$": "\u20ac\u00a3\u00a5\u20b9",  # euro, pound, yen, rupee
        "%": "\u00b0",  # a degree sign is a unit of the same shape
        " ": "\u00a0\u2009\u202f\u3000",  # unbreakable, thin, narrow unbreakable, ideographic
    }.items()
    for lookalike in lookalikes
}
_GROUP_SPACE = re.compile("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm)\{([A-Za-z /-]*)\}")
_MARKUP = (("**", "**"), ("*", "*"), ("`", "`"), ("$", "$"), ("\\(", "\\)"), ("\\boxed{", "}"))
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,15}", re.ASCII)
_NUMBER = re.compile(r"([+-]?) ?\$? ?([+-]?)([0-9]+(?:,[0-9]+)*)?(\.[0-9]+)?(?:[eE]([+-]?[0-9]+))?")
_UNIT = re.compile(r"[A-Za-z]+(?:[ /-][A-Za-z]+){0,2}")
_ANY_NUMBER = re.compile(r"(?:(?<![0-9])[+-])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")

_WORDS_NO_UNIT = (
    # words that join a second value
    "and or to plus minus times over by versus than not "
    # words that change the value
    "dozen dozens score scores gross half halves halved double doubled twice triple tripled squared cubed factorial "
    "third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth "
    "ninths tenth tenths hundredth hundredths thousandth thousandths negative point root "
    # scales, in full and in short
    "hundred hundreds thousand thousands million millions billion billions trillion trillions grand mil mio bn mn tn "
    "k m b "
    # numbers in words
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
_NOT_UNITS = frozenset(_WORDS_NO_UNIT.split())


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer field says."""

    value: Fraction | None
    """The number, exactly; None where there is not just one."""
    reason: str
    """`ok` with a value, else one of `NUMBER_REASONS`."""


def answer_field(text: str) -> str | None:
    """The text of the one place that holds the answer, or None."""
    block = find_answer(text)
    if block is not None:
        return block
    mark = text.rfind("####")
    if mark >= 0:
        end = text.find("\n", mark)
        return text[mark + 4 : end if end >= 0 else len(text)]
    return last_box(text)


def last_box(text: str) -> str | None:
    """The content of the last ``\\boxed{`` if its braces close within 512 characters, else None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for i in range(start, min(len(text), start + MAX_BOX_CHARS)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


def read_number(field: str | None) -> Reading:
    """The one number of an answer field, or the reason why there is none; never raises."""
    if field is None:
        return Reading(None, "no_answer")
    field = field.strip()
    if not field:
        return Reading(None, "empty")
    if len(field) > MAX_FIELD_CHARS:
        return Reading(None, "too_long")
    if _PLAIN_INTEGER.fullmatch(field):
        return Reading(Fraction(int(field)), OK)
    if not field.isascii():
        field = _GROUP_SPACE.sub(",", field).translate(_LOOKALIKES)
    if "\\" in field or "{" in field:
        field = _LATEX_TEXT.sub(r" \1", field).replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
    field = _without_markup(field)
    return _read_plain(field) if field.isascii() else Reading(None, "non_ascii")


def read_answer(text: str) -> Reading:
    """The number that a completion answers with, or the reason why there is none."""
    return read_number(answer_field(text))


def judge_number(reading: Reading, gold: Fraction) -> str:
    """The reason code of a reading against the right value: `ok` for exactly the same number."""
    if reading.value is None:
        return reading.reason
    return OK if reading.value == gold else "wrong_value"


def last_number(text: str) -> Fraction | None:
    """The last number anywhere in the last 4,096 characters. No answer: for reports beside the strict accuracy."""
    found = _ANY_NUMBER.findall(text[-FLEXIBLE_TAIL_CHARS:])
    return read_number(found[-1].rstrip(",")).value if found else None


def _without_markup(field: str) -> str:
    """Takes off layers of markup and at most one full stop."""
    has_stop = False
    for _ in range(MAX_MARKUP_LAYERS):
        field = field.strip()
        if field.endswith(".") and not has_stop:
            field, has_stop = field[:-1], True
            continue
        for head, tail in _MARKUP:
            if len(field) > len(head) + len(tail) and field.startswith(head) and field.endswith(tail):
                field = field[len(head) : -len(tail)]
                break
        else:
            break
    return field.strip()


def _read_plain(field: str) -> Reading:
    match = _NUMBER.match(field)
    assert match is not None, "every part of the pattern is optional"
    sign, inner_sign, whole, frac, exponent = match.groups()
    rest = field[match.end() :]
    if whole is None and frac is None:
        return Reading(None, "bad_number")
    if not _DIGITS.isdisjoint(rest):
        return Reading(None, "many_values")
    if (sign and inner_sign) or not _is_in_form(whole or "0", frac or "", exponent or "0") or not _is_unit(rest):
        return Reading(None, "bad_number")
    value = Fraction((whole or "0").replace(",", "") + (frac or ""))
    if exponent:
        value *= Fraction(10) ** int(exponent)
    return Reading(-value if "-" in sign + inner_sign else value, OK)


def _is_in_form(whole: str, frac: str, exponent: str) -> bool:
    """Proper comma groups, and no more digits than can be meant."""
    groups = whole.split(",")
    is_grouped_well = len(groups) == 1 or (
        len(groups[0]) <= 3 and groups[0][0] != "0" and all(len(group) == 3 for group in groups[1:])
    )
    num_digits = sum(map(len, groups))
    is_near = len(exponent) <= 3 and abs(int(exponent)) <= MAX_EXPONENT
    return is_grouped_well and num_digits <= MAX_DIGITS and len(frac) <= 1 + MAX_DIGITS and is_near


def _is_unit(rest: str) -> bool:
    """Whether what stands behind the number names a thing or a measure, and changes no value."""
    unit = rest.strip()
    if unit in ("", "%", "$"):
        return True
    words = re.split("[ /-]", unit.lower())
    return rest[0].isspace() and _UNIT.fullmatch(unit) is not None and _NOT_UNITS.isdisjoint(words)
