"""Text and numbers on their way into HTML: what came from a run is escaped here and nowhere else.

Text enters by `html.escape`, data as JSON in a script element of type application/json whose characters that HTML could
read are escaped; the page's own script shows it with textContent. The content security policy forbids everything but
the page's inline style and this one script, by its hash: what slipped through could not run.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path

from sparkgrpo.trainer.hostile_text import readable_text, visible_text

_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
FOLDER = Path(__file__).parent


def escaped(text: object, max_chars: int = 200) -> str:
    """One line of text for HTML, control and invisible characters as escapes."""
    return html.escape(visible_text(str(text), max_chars))


def column_key(key: str) -> str:
    """A key of the page's data, the same in the data and in the attribute that asks for it."""
    return visible_text(key, 120)


def sample_anchor(sample_id: object) -> str:
    """Where a sample stands in the page; any text makes a harmless one."""
    return f"sample-{hashlib.sha256(str(sample_id).encode('utf-8', 'backslashreplace')).hexdigest()[:12]}"


def escaped_block(text: object, *, head: int, tail: int) -> str:
    """Text of several lines for HTML; its middle is left out where it is longer than head + tail characters."""
    return html.escape(readable_text(str(text), head=head, tail=tail))


def json_script(element_id: str, content: object) -> str:
    """Data for the page's script."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    return f'<script type="application/json" id="{element_id}">{text}</script>'


def four_digits(value: float | None) -> float | int | None:
    """The number with four significant digits; None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def page(title: str, body: Sequence[str]) -> str:
    """A whole HTML document that needs nothing but itself."""
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *body,
            f"<script>{script}</script>\n</body>\n</html>\n",
        )
    )
