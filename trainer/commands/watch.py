"""`sparkgrpo watch RUN`: the live view of a run that goes, or the last frame of one that ended."""

import os
import sys
from pathlib import Path

from sparkgrpo.trainer.dashboard import is_live_terminal
from sparkgrpo.trainer.option_parser import new_parser, parse_options
from sparkgrpo.trainer.watch import watch


def main(arguments: list[str]) -> int:
    """Follow until the run is over; q or Ctrl-C ends the watching with 0."""
    parser = new_parser("watch", "Follow a run on the terminal, while it goes or afterwards.", arguments="RUN")
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--plain", action="store_true", help="one line a step in place of the live view")
    parser.add_argument("--once", action="store_true", help="show what is there and end")
    options = parse_options(parser, arguments)
    is_plain = bool(options.get("plain")) or not is_live_terminal(sys.stdout, environ=os.environ)
    try:
        watch(Path(str(options["run"])), is_plain=is_plain, is_once=bool(options.get("once")))
    except KeyboardInterrupt:
        return 0
    return 0
