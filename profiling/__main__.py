"""``python -m sparkgrpo.profiling TRACE``: where the time of a recorded run went.

TRACE is an SQLite export of nsys or a Chrome trace of torch.profiler (gzip too). Exit codes: 0; 1 something is slower
than --fail-over allows; 2 a trace that cannot be read, or wrong usage; 3 two traces that cannot be compared.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sparkgrpo.profiling.attribution import PREFIX
from sparkgrpo.profiling.diff import changes, diff_report, why_not_comparable
from sparkgrpo.profiling.redact import redact_chrome_trace, redact_nsys
from sparkgrpo.profiling.report import sections, text_report
from sparkgrpo.profiling.report_page import html_page
from sparkgrpo.profiling.summarise import summarise
from sparkgrpo.profiling.summary import TraceSummary
from sparkgrpo.profiling.timeline import TraceError
from sparkgrpo.profiling.trace_file import is_nsys, read_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.trace is None) == (options.diff is None):
        parser.error("expected one TRACE, or --diff A B")
    try:
        if options.diff is not None:
            return _diff(Path(options.diff[0]), Path(options.diff[1]), options)
        if options.redact is not None:
            source, target = Path(options.trace), Path(options.redact)
            (redact_nsys if is_nsys(source) else redact_chrome_trace)(source, target)
            print(f"{target}: written, {target.stat().st_size:,} bytes; names of kernels and ranges are still in it")
            return 0
        summary = summarise_file(Path(options.trace), prefix=options.prefix)
        _write(_rendered(summary, options), options.output)
    except (TraceError, OSError) as error:
        text = str(error) if isinstance(error, TraceError) else f"{error.filename}: {error.strerror}"
        print(f"sparkgrpo.profiling: {text}", file=sys.stderr)
        return 2
    return 0


def summarise_file(path: Path, *, prefix: str = PREFIX) -> TraceSummary:
    """The summary of a trace, with what `sparkgrpo profile` wrote beside it. `TraceError` if it cannot be read."""
    timeline, facts = read_trace(path)
    return summarise(timeline, prefix=prefix, facts=facts)


def _rendered(summary: TraceSummary, options: argparse.Namespace) -> str:
    if options.json:
        return json.dumps(asdict(summary), indent=1) + "\n"
    if options.html:
        return html_page("Where the time goes", sections(summary))
    return text_report(summary)


def _diff(before_path: Path, after_path: Path, options: argparse.Namespace) -> int:
    before, after = (summarise_file(path, prefix=options.prefix) for path in (before_path, after_path))
    reasons = why_not_comparable(before, after)
    if reasons:
        print(f"sparkgrpo.profiling: not comparable: {'; '.join(reasons)}", file=sys.stderr)
        return 3
    listed = changes(before, after)
    if options.json:
        text = json.dumps([asdict(change) | {"ratio": change.ratio} for change in listed], indent=1) + "\n"
    else:
        text = diff_report(before, after, options.fail_over)
    _write(text, options.output)
    return int(any(change.is_worse(options.fail_over) for change in listed))


def _write(text: str, output: str | None) -> None:
    if output is None:
        sys.stdout.write(text)
    else:
        Path(output).write_text(text, encoding="utf-8")


def _fraction(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a share such as 5% or 0.05, got {text!r}") from None
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"expected a share of 0 or more, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparkgrpo.profiling",
        description="Report where the time of a recorded run went.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="SQLite export of nsys, or Chrome trace (.json, .gz)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all numbers as JSON; null is what the trace cannot say")
    form.add_argument("--html", action="store_true", help="one page without network or script")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there and not to stdout")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="compare two traces, phases per step, kernels per call"
    )
    parser.add_argument(
        "--fail-over",
        type=_fraction,
        default=0.05,
        metavar="SHARE",
        help="exit with 1 where B is slower by more (default 5%%)",
    )
    parser.add_argument(
        "--redact", metavar="OUT", help="write a copy without host, user, paths, processes, environment"
    )
    parser.add_argument(
        "--prefix", default=PREFIX, metavar="TEXT", help=f"ranges that are phases begin so (default {PREFIX})"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
