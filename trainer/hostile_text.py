"""Text that a model wrote, made safe to show: it may hold terminal commands, or letters that reorder or hide others."""

import unicodedata

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Control (C0, C1), format (bidirectional, zero width), surrogate, private, unassigned, line and paragraph separator.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def visible_text(text: str, max_chars: int) -> str:
    """``text`` on one line with every control or invisible character as an escape, cut to ``max_chars`` characters."""
    shown = _line(text[: max_chars + 1])
    return shown if len(shown) <= max_chars else shown[: max(max_chars - 3, 0)] + "..."


def readable_text(text: str, *, head: int, tail: int) -> str:
    """``text`` with its line breaks and everything else that is hidden as escapes; a long one without its middle."""
    if len(text) > head + tail:
        left_out = len(text) - head - tail
        text = f"{text[:head]} [... {left_out} characters ...] {text[-tail:] if tail else ''}"
    return "\n".join(_line(line) for line in text.split("\n"))


def encodable(text: str, encoding: str | None) -> str:
    """``text`` with what the terminal's encoding lacks as escapes, so that printing it cannot fail."""
    name = encoding or "ascii"
    return text.encode(name, "backslashreplace").decode(name)


def _line(text: str) -> str:
    return text if text.isprintable() else "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    if number < 0x100:
        return _SHORT.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
