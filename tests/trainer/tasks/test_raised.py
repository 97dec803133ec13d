"""The user's own place in an exception."""

import json
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks.raised import told
from sparkgrpo.trainer.tasks.reward_call import load_reference


def _raised_by(path: Path, source: str) -> BaseException:
    path.write_text(source)
    with pytest.raises(Exception) as caught:
        load_reference(f"{path}:f")()  # pyright: ignore[reportCallIssue]
    return caught.value


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f():\n    raise ValueError('my bug')\n", "ValueError: my bug (mine.py line 2)"),
        ("import json\ndef f():\n    json.loads('?')\n", "json.decoder.JSONDecodeError: Expecting value"),
        ("def f():\n    return [1\n", "SyntaxError: '[' was never closed (mine.py line 2)"),
        ("def f():\n    eval('1 +')\n", "SyntaxError: invalid syntax (mine.py line 2)"),
        ("def f():\n    raise ValueError('two\\nlines')\n", "ValueError: two lines (mine.py line 2)"),
    ],
)
def test_the_place_is_the_last_line_of_the_users_file(tmp_path: Path, source: str, text: str) -> None:
    said = told(_raised_by(tmp_path / "mine.py", source))
    assert said.startswith(text) and "(mine.py line " in said and said.endswith(")")


def test_a_library_that_is_the_function_itself_is_named() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("?")
    here = told(caught.value)
    assert "(test_raised.py line " in here, "the caller is a user's file"
    caught.value.__traceback__ = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    assert "(__init__.py line " in told(caught.value)


def test_long_messages_are_cut() -> None:
    assert len(told(ValueError("x" * 5000))) < 400
