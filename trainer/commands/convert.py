"""`sparkgrpo convert`: metrics under other names, and TRL's log as a run folder."""

from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.convert import Converted, convert_from_trl, convert_to
from sparkgrpo.trainer.hostile_text import visible_text
from sparkgrpo.trainer.metric_names import NAMES
from sparkgrpo.trainer.option_parser import new_parser, parse_options
from sparkgrpo.trainer.run_reader import read_record
from sparkgrpo.trainer.settings import nearest


def main(arguments: list[str]) -> int:
    """Convert one way or the other and say what had no counterpart."""
    parser = new_parser(
        "convert",
        "Write a run's metrics under another trainer's names (--to), or make a run folder of TRL's log (--from trl).",
        arguments="RUN|trainer_state.json",
    )
    parser.add_argument("source", metavar="SOURCE", help="folder of the run, or trainer_state.json with --from trl")
    parser.add_argument("--to", metavar="{trl,verl,prime-rl}", help="whose names")
    parser.add_argument("--from", dest="origin", metavar="{trl}", help="whose log to read")
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write; the run folder to make with --from")
    options = parse_options(parser, arguments)
    target, origin, output = (options.get(name) for name in ("to", "origin", "output"))
    if (target is None) == (origin is None):
        raise UserError(f"expected --to {{{','.join(NAMES)}}}, or --from trl")
    if output is None:
        raise UserError("-o: expected the file to write, or the run folder to make")
    source = Path(str(options["source"]))
    if target is not None:
        if target not in NAMES:
            raise UserError(f"--to: expected one of {', '.join(NAMES)}, got {target!r}{nearest(str(target), NAMES)}")
        done = convert_to(read_record(source), str(target), Path(str(output)))
    else:
        if origin != "trl":
            raise UserError(f"--from: expected trl, got {origin!r}")
        done = convert_from_trl(source, Path(str(output)))
    print("\n".join(_lines(done, str(output))))
    return 0


def _lines(done: Converted, output: str) -> list[str]:
    lines = [f"{done.num_steps} steps, {len(done.mapped)} metrics written to {output}"]
    lines += [
        f"not quite the same: {visible_text(key, 80)} -> {visible_text(done.mapped[key], 80)}: {why}"
        for key, why in done.differences.items()
    ]
    if done.left_out:
        lines.append("no counterpart: " + ", ".join(visible_text(key, 80) for key in done.left_out))
    return lines
