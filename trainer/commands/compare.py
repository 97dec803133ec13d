"""`sparkgrpo compare RUN RUN...`: a table, and a page with the curves over each other."""

import sys
from pathlib import Path

from sparkgrpo.trainer.compare import AXES, Comparison, compare
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.dashboard import duration, percent, short
from sparkgrpo.trainer.hostile_text import encodable, visible_text
from sparkgrpo.trainer.option_parser import new_parser, parse_options
from sparkgrpo.trainer.run_reader import read_record
from sparkgrpo.trainer.settings import nearest


def main(arguments: list[str]) -> int:
    """Compare and print; with -o also write the page."""
    parser = new_parser("compare", "Lay up to 8 runs over each other.", arguments="RUN RUN...")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of the runs")
    parser.add_argument("-o", "--output", metavar="FILE.html", help="write a page with the curves")
    parser.add_argument("--over", metavar="{step,tokens,seconds}", help="axis of the page. Default: step.")
    options = parse_options(parser, arguments)
    axis = str(options.get("over", "step"))
    if axis not in AXES:
        raise UserError(f"--over: expected one of {', '.join(AXES)}, got {axis!r}{nearest(axis, AXES)}")
    runs = options["runs"]
    assert isinstance(runs, list)
    found = compare([read_record(Path(str(run))) for run in runs])
    print(encodable("\n".join(_lines(found)), sys.stdout.encoding))
    if "output" in options:
        from sparkgrpo.trainer.page.compare_page import comparison_html
        from sparkgrpo.trainer.report import write_page

        print(write_page(Path(str(options["output"])), comparison_html(found, axis)))
    return 0


def _lines(found: Comparison) -> list[str]:
    lines = [f"warning: {text}" for text in found.warnings]
    for key, values in found.differences.items():
        shown = ", ".join(visible_text(str(value), 60) for value in values)
        lines.append(f"differs: {visible_text(key, 60)}: {shown}")
    if not found.differences:
        lines.append("no setting differs")
    width = max(len(side.label) for side in found.sides)
    for side in found.sides:
        lines.append(
            f"{side.label:{width}}  held-out {percent(side.accuracy_before)} -> {percent(side.accuracy_after)} "
            f"+-{percent(side.accuracy_se)}  {duration(side.seconds)}  {short(side.tokens)} tokens  "
            f"{short(side.tok_per_s)} tok/s"
        )
    if found.common_accuracy is not None:
        for side in found.sides:
            cost = f"{duration(side.seconds_to)}, {short(side.tokens_to)} tokens"
            lines.append(f"{side.label:{width}}  to {percent(found.common_accuracy)}: {cost}")
    for pair in found.pairs:
        lines.append(
            f"{pair.first} against {pair.second}: {pair.num_first_only} problems only the first solved, "
            f"{pair.num_second_only} only the second; exact McNemar p {pair.p_value:.2g}"
        )
    first = found.sides[0]
    if found.has_equal_speed_terms and first.tok_per_s:
        for side in found.sides[1:]:
            if side.tok_per_s:
                lines.append(
                    f"{side.label}: {side.tok_per_s / first.tok_per_s:.2f} times the tokens/s of {first.label}"
                )
    return lines
