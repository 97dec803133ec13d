"""Which number an answer states: rows, forms, units, hostile texts, and that no reading takes long."""

import random
import time
from collections.abc import Callable
from fractions import Fraction

import pytest

from sparkgrpo.trainer.tasks.number_text import (
    NUMBER_REASONS,
    answer_field,
    judge_number,
    last_number,
    read_answer,
    read_number,
)


def test_shared_row(gsm8k_row: dict, fastest_s: Callable[..., float]) -> None:
    row = gsm8k_row
    text = row["text"] if "text" in row else "".join(piece * times for piece, times in row["text_parts"])
    reading = read_answer(text)
    assert (None if reading.value is None else str(reading.value)) == row["value"]
    gold = read_number(row["gold"]).value
    assert gold is not None and judge_number(reading, gold) == row["reason"]
    assert fastest_s(lambda: read_answer(text)) < row.get("max_s", 0.005)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", None),
        ("18", None),
        ("<answer>18", None),
        ("18</answer>", None),
        ("<answer>17</answer> or <answer>18</answer>", "18"),
        ("<answer>17</answer> #### 18 \\boxed{19}", "17"),
        ("#### 17 \nso #### 18\nend \\boxed{19}", " 18"),
        ("####", ""),
        ("####\n18", ""),
        ("\\boxed{17} then \\boxed{\\text{a} {18}}.", "\\text{a} {18}"),
        ("\\boxed{18", None),
        ("\\boxed{18} \\boxed{19", None),
        ("\\boxed{" + "{" * 600 + "}" * 601, None),
    ],
)
def test_one_place_holds_the_answer(text: str, field: str | None) -> None:
    assert answer_field(text) == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("18", 18),
            ("-18", -18),
            ("+18", 18),
            ("018", 18),
            ("0", 0),
            ("-0", 0),
            ("18.", 18),
            ("18.50", Fraction(37, 2)),
        ),
        *((".5", Fraction(1, 2)), ("-.5", Fraction(-1, 2)), ("1,234", 1234), ("1,234,567.25", Fraction(4938269, 4))),
        *(("$18", 18), ("$ 18", 18), ("-$18", -18), ("$-18", -18), ("- $18", -18), ("18$", 18), ("18 $", 18)),
        *(("\u20ac18", 18), ("18\u00b0", 18), ("18 %", 18), ("18\\%", 18), ("\\$18", 18), ("1{,}234", 1234)),
        *(("**18**", 18), ("`18`", 18), ("$18$", 18), ("\\(18\\)", 18), ("\\boxed{18}", 18), ("**18**.", 18)),
        *(("**$18.**", 18), ("$\\boxed{18}$", 18), ("18 apples", 18), ("18 km/h", 18), ("18 square metres", 18)),
        *(("18 Dollars.", 18), ("18\\text{ cm}", 18), ("18 \\mathrm{km/h}", 18), ("18 subscriptions", 18)),
        *(
            ("1e3", 1000),
            ("1.5e3", 1500),
            ("2E-2", Fraction(1, 50)),
            ("1e+15", 10**15),
            ("999999999999999", 10**15 - 1),
        ),
        *(("1\u00a0234", 1234), ("12\u202f345\u202f678", 12345678), ("\u221218", -18), ("\uff0b18", 18)),
    ],
)
def test_a_number_in_any_of_its_forms(field: str, value: Fraction | int) -> None:
    reading = read_number(field)
    assert (reading.value, reading.reason) == (value, "ok")


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (None, "no_answer"),
        *(("", "empty"), (" \u2003\n", "empty"), ("9" * 65, "too_long"), ("1" + " " * 62 + "2 3", "too_long")),
        *(
            ("\u00b2", "non_ascii"),
            ("\uff11\uff18", "non_ascii"),
            ("1\u200b8", "non_ascii"),
            ("18 \u00d7 1", "non_ascii"),
        ),
        *(("eighteen", "bad_number"), ("x = 18", "bad_number"), ("(18)", "bad_number"), ("--18", "bad_number")),
        *(("+-18", "bad_number"), ("-$-18", "bad_number"), ("18-", "bad_number"), ("18!", "bad_number")),
        *(("12,34", "bad_number"), ("1234,567", "bad_number"), ("0,123", "bad_number"), ("1,234,56", "bad_number")),
        *(("18k", "bad_number"), ("18km", "bad_number"), ("18 thousand", "bad_number"), ("half", "bad_number")),
        *(
            ("18 or so", "bad_number"),
            ("18 and a half", "bad_number"),
            ("2 dozen", "bad_number"),
            ("3 tenths", "bad_number"),
        ),
        *(("18 squared", "bad_number"), ("18 more than that now", "bad_number"), ("18 (about)", "bad_number")),
        *(
            ("1e16", "bad_number"),
            ("1e999999999", "bad_number"),
            ("1e-99999999", "bad_number"),
            ("9" * 16, "bad_number"),
        ),
        *(
            ("NaN", "bad_number"),
            ("inf", "bad_number"),
            ("True", "bad_number"),
            ("$", "bad_number"),
            ("18..", "bad_number"),
        ),
        *(("\\boxed{}", "bad_number"), ("\\text{18}", "bad_number"), ("18\\text{or 17}", "many_values")),
        *(("17 or 18", "many_values"), ("20-2", "many_values"), ("36/2", "many_values"), ("12:30", "many_values")),
        *(("1 234", "many_values"), ("18, 19", "many_values"), ("1.8.1", "many_values"), ("1_000", "many_values")),
        *(("0x12", "many_values"), ("18 19 20", "many_values"), ("3 4/5", "many_values"), ("18^2", "many_values")),
    ],
)
def test_no_number_and_why(field: str | None, reason: str) -> None:
    reading = read_number(field)
    assert (reading.value, reading.reason) == (None, reason)


def test_agrees_with_python_on_plain_numbers() -> None:
    rng = random.Random(0)
    for _ in range(5_000):
        whole = str(rng.randrange(10 ** rng.randrange(1, 13)))
        decimals = (
            "." + "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 9))) if rng.random() < 0.5 else ""
        )
        grouped = f"{int(whole):,}" if rng.random() < 0.5 else whole
        sign = rng.choice(("", "", "-"))
        unit = rng.choice(("", " kg", "%", " euros a day"))
        expected = Fraction(sign + whole + decimals)
        assert read_number(sign + grouped + decimals + unit).value == expected
        assert read_number(f"{sign}{rng.choice(('$', '€'))}{grouped}{decimals}").value == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("", None), ("none", None), ("so 17, no: 18", 18), ("it is $1,234.50!", Fraction(2469, 2)), ("20-2", 2)),
        *(("-5 degrees", -5), ("3.", 3), ("18 " + "x" * 4_000, 18), ("18 " + "x" * 5_000, None), ("1" * 70, None)),
    ],
)
def test_the_last_number_anywhere_is_for_reports(text: str, value: Fraction | int | None) -> None:
    assert last_number(text) == value


def check_reading(text: str) -> None:
    start_s = time.perf_counter()
    reading = read_answer(text)
    took_s = time.perf_counter() - start_s
    assert reading.reason in NUMBER_REASONS and (reading.value is None) == (reading.reason != "ok")
    assert took_s < 0.25, "a scheduler's pause, not a second's work"
    last_number(text)


def test_random_unicode_is_read(fuzz: Callable[..., None]) -> None:
    fuzz(check_reading, 1_000)


@pytest.mark.slow
def test_much_random_unicode_is_read(fuzz: Callable[..., None]) -> None:
    fuzz(check_reading, 10_000)


HOSTILE: dict[str, Callable[[int], str]] = {
    "opening tags": lambda size: "<answer>" * (size // 8),
    "opening tags, one closed": lambda size: "<answer>" * (size // 8) + "</answer>",
    "marks": lambda size: "####" * (size // 4),
    "boxes": lambda size: "\\boxed{" * (size // 7),
    "one box, open": lambda size: "\\boxed{" + "{" * size,
    "one box, far away": lambda size: "\\boxed{18}" + " " * size,
    "digits": lambda size: "<answer>" + "9" * size + "</answer>",
    "blanks around": lambda size: "<answer>" + " " * size + "18" + " " * size + "</answer>",
    "groups": lambda size: "#### " + ",999" * (size // 4),
    "unbreakable groups": lambda size: "#### " + "\u202f999" * (size // 4),
    "layers": lambda size: "#### " + "*" * size + "18" + "*" * size,
    "numbers": lambda size: "1 " * (size // 2),
    "latex": lambda size: "<answer>" + "\\text{" * (size // 6) + "</answer>",
}


@pytest.mark.parametrize("shape", HOSTILE)
def test_time_grows_linearly(shape: str, fastest_s: Callable[..., float]) -> None:
    texts = [HOSTILE[shape](size) for size in (16_000, 256_000)]
    times_s = [fastest_s(lambda t=text: read_answer(t)) for text in texts]
    assert times_s[1] < 0.005
    # Sixteen times the text, with a factor of 5 for a busy machine; below 20 us the clock decides.
    assert times_s[1] < 16 * 5 * max(times_s[0], 20e-6)
    assert fastest_s(lambda: last_number(texts[1])) < 0.005
