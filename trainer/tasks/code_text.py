"""Which program a completion contains."""

import textwrap

MAX_CODE_CHARS = 1 << 16
FENCE = "```"
LANGUAGES = ("", "python", "python3", "py")


def last_code_block(completion: str) -> str | None:
    """The content of the last complete fence that says python, python3, py or no language; dedented. One linear scan.

    A fence that never closes is no block: it was cut off at the token limit.
    """
    block: list[str] | None = None
    last, is_python = None, False
    for line in completion.split("\n"):
        mark = line.strip()
        if block is None and mark.startswith(FENCE):
            words = mark[len(FENCE) :].split()
            block, is_python = [], (words[0].lower() if words else "") in LANGUAGES
        elif block is not None and mark == FENCE:
            last = "\n".join(block) if is_python else last
            block = None
        elif block is not None:
            block.append(line)
    return None if last is None else textwrap.dedent(last)
