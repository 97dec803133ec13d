"""What kind of trace a file is, by its content, and what the recorder wrote beside it."""

import json
from pathlib import Path

from sparkgrpo.profiling.chrome_trace import GZIP_MAGIC, read_chrome_trace
from sparkgrpo.profiling.nsys import MAGIC, read_nsys
from sparkgrpo.profiling.timeline import Timeline, TraceError

FACTS_FILE = "facts.json"
"""Beside the traces of `sparkgrpo profile`: model, tokens, rates, probes, memory."""


def read_trace(path: Path) -> tuple[Timeline, dict[str, object]]:
    """The trace, and the facts beside it (empty without any).

    Raises:
        TraceError: A folder, an empty file, a file that is no trace, or one that cannot be read.
    """
    return (read_nsys if is_nsys(path) else read_chrome_trace)(path), _facts(path.with_name(FACTS_FILE))


def is_nsys(path: Path) -> bool:
    """Whether the file is an SQLite database; the alternative is a Chrome trace. `TraceError` if it is neither."""
    if path.is_dir():
        raise TraceError(f"{path}: expected a trace, got a folder; name the .sqlite or .json.gz file in it")
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(MAGIC):
        return True
    if head.startswith(GZIP_MAGIC) or head.lstrip()[:1] in (b"{", b"["):
        return False
    if not head:
        raise TraceError(f"{path.name}: expected a trace, got an empty file; record it again")
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path.name}: expected an SQLite export; make it with: nsys export --type sqlite {path.name}")
    raise TraceError(
        f"{path.name}: expected an SQLite export of nsys or a Chrome trace (JSON, gzip too), got neither; an .nsys-rep "
        "is exported with: nsys export --type sqlite FILE.nsys-rep"
    )


def _facts(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TraceError(f"{path.name}: expected the JSON that sparkgrpo profile wrote, got {error}") from None
    if not isinstance(content, dict):
        raise TraceError(f"{path.name}: expected a JSON object as sparkgrpo profile writes it")
    return content if content.get("recorder") == "sparkgrpo" else {}
