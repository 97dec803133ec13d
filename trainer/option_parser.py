"""Options of a command: a parser whose mistakes are `UserError`s that name the nearest option.

argparse prints usage and exits; here one sentence says what was expected, and the command line prints it.
"""

import argparse
import os
from collections.abc import Sequence

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.contradictions import name_elsewhere
from sparkgrpo.trainer.settings import nearest


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s."""

    def error(self, message: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """argparse found a mistake: raises it as `UserError`."""
        raise UserError(message.removeprefix("argument "))


def new_parser(command: str, summary: str, *, arguments: str = "") -> OptionParser:
    """The parser of `sparkgrpo COMMAND`; an option that is not given leaves no trace in the result.

    Args:
        summary: First sentence of the help.
        arguments: Positional arguments as the usage line shows them, such as "RUN".
    """
    return OptionParser(
        prog=f"sparkgrpo {command}",
        usage=" ".join(filter(None, ("sparkgrpo", command, arguments, "[OPTIONS]"))),
        description=summary,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=_help_width()),
    )


def _help_width() -> int:
    try:
        return min(os.get_terminal_size().columns, 120)
    except OSError:
        return 100  # not a terminal


def parse_options(parser: OptionParser, arguments: Sequence[str]) -> dict[str, object]:
    """What was given, by name, not yet converted. --max_new_tokens is the same as --max-new-tokens.

    Raises:
        UserError: An option or argument that the command does not have.
    """
    known, unknown = parser.parse_known_args([_with_dashes(argument) for argument in arguments])
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        kind = "option" if word.startswith("-") else "argument"
        options = [option for action in parser._actions for option in action.option_strings]
        elsewhere = name_elsewhere(word) if parser.prog == "sparkgrpo train" else ""
        hint = elsewhere or nearest(word.partition("=")[0], options)
        hint = hint or f"; {parser.prog} --help lists the options"
        raise UserError(f"unknown {kind} {word!r}{hint}")
    return vars(known)


def _with_dashes(argument: str) -> str:
    option, equals, value = argument.partition("=")
    return option.replace("_", "-") + equals + value if option.startswith("--") else argument
