"""Model text on a terminal: nothing in it may act, hide or reorder."""

import unicodedata

import pytest

from sparkgrpo.trainer.hostile_text import encodable, visible_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3 + 7\n\t= 10\r", "3 + 7\\n\\t= 10\\r"),
        ("\x1b[2J\x07\x00\x7f", "\\x1b[2J\\x07\\x00\\x7f"),
        ("\x9b31m\x85", "\\x9b31m\\x85"),  # C1: one byte that begins a command on some terminals
        ("\u202eevil\u2066\u200f", "\\u202eevil\\u2066\\u200f"),
        ("a\u200bb\ufeff\u00ad", "a\\u200bb\\ufeff\\xad"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("[bold]ü 数学 😀[/bold]", "[bold]ü 数学 😀[/bold]"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert visible_text(text, 100) == shown


def test_no_control_character_survives() -> None:
    everything = "".join(chr(number) for number in range(0x3000))
    shown = visible_text(everything, 10**6)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_is_cut() -> None:
    assert visible_text("a" * 10, 10) == "a" * 10
    assert visible_text("a" * 11, 10) == "a" * 7 + "..."
    assert visible_text("\x00" * 10, 10) == "\\x00\\x0..."
    assert len(visible_text("\x1b" * 10**6, 50)) == 50


def test_encoding_never_fails() -> None:
    assert encodable("ü 数", "ascii") == "\\xfc \\u6570"
    assert encodable("ü 数", None) == "\\xfc \\u6570"
    assert encodable("ü", "utf-8") == "ü"
