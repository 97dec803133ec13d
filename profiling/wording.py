"""How numbers and foreign text are written for people, in the report, the page and the messages alike."""

import unicodedata

CANNOT_SAY = "cannot say"


def duration(nanoseconds: float | None) -> str:
    """A time with three digits and its unit; "cannot say" for None."""
    if nanoseconds is None:
        return CANNOT_SAY
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(nanoseconds) >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}"
                if abs(nanoseconds) < 1000 * size
                else f"{nanoseconds / size:,.0f} {unit}"
            )
    return f"{nanoseconds:.0f} ns"


def percent(fraction: float | None) -> str:
    """A share; "cannot say" for None, and "<0.1 %" for what would read as nothing."""
    if fraction is None:
        return CANNOT_SAY
    if 0 < fraction < 0.001:
        return "<0.1 %"
    return f"{100 * fraction:.1f} %"


def count(number: float | None) -> str:
    """A whole number with thousands marked; "cannot say" for None."""
    return CANNOT_SAY if number is None else f"{number:,.0f}"


def plain(text: str, limit: int = 120) -> str:
    """Text of a stranger, as it may be printed: control and formatting characters become escapes, long text is cut."""
    cut = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(
        ch if unicodedata.category(ch)[0] != "C" and ch not in "\u2028\u2029" else ch.encode("unicode_escape").decode()
        for ch in cut
    )
