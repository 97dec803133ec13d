"""`sparkgrpo report RUN`: one HTML file."""

from pathlib import Path

from sparkgrpo.trainer.option_parser import new_parser, parse_options
from sparkgrpo.trainer.report import write_report


def main(arguments: list[str]) -> int:
    """Write the page and print its path."""
    parser = new_parser("report", "Write one HTML file that shows a run.", arguments="RUN")
    parser.add_argument("run", metavar="RUN", help="folder of the run, finished or not")
    parser.add_argument("-o", "--output", metavar="FILE.html", help="where to write; default RUN/report.html")
    options = parse_options(parser, arguments)
    run = Path(str(options["run"]))
    print(write_report(run, Path(str(options.get("output", run / "report.html")))))
    return 0
