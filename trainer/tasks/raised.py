"""An exception of a user's code as one line: what it was, and in which file and line of the user's own.

It runs inside scoring processes as well, so it imports the standard library alone.
"""

import sysconfig
import traceback
from pathlib import Path

_OWN = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MAX_CHARACTERS = 300


def told(error: BaseException) -> str:
    """Such as "ValueError: my bug (mine.py line 2)": one line, whatever the message holds, cut to 300 characters."""
    if isinstance(error, SyntaxError):
        text = f"{type(error).__name__}: {error.msg}"  # its full form repeats the place and the source
    else:
        text = "".join(traceback.TracebackException(type(error), error, None).format_exception_only())
    text = " ".join(text.split())
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}..."
    place = _place(error)
    return f"{text} ({place})" if place else text


def _place(error: BaseException) -> str:
    """The last line that is the user's; "" where none is known."""
    # `eval` of a completion raises a SyntaxError in "<string>": there the frames say more.
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{Path(error.filename).name} line {error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [(file, line) for file, line in frames if not file.startswith(("<", _OWN))]
    users = [(file, line) for file, line in foreign if not file.startswith(_LIBRARIES)]
    if not users:  # the function is that of an installed package: its file is the first that is not ours
        users = [(file, line) for file, line in foreign if file == foreign[0][0]]
    return f"{Path(users[-1][0]).name} line {users[-1][1]}" if users else ""
