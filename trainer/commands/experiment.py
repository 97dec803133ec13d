"""`sparkgrpo experiment NAME`: expectation, outcome, and whether they agree."""

from pathlib import Path

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.experiments.outcome import EXIT_CODES, Bench
from sparkgrpo.trainer.experiments.registry import EXPERIMENTS
from sparkgrpo.trainer.option_parser import OptionParser, new_parser, parse_options
from sparkgrpo.trainer.settings import nearest


def main(arguments: list[str]) -> int:
    """Run one experiment. 0: agrees; 1: disagrees; 3: too short to tell."""
    options = parse_options(_parser(), arguments)
    name = str(options["name"])
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise UserError(f"unknown experiment {name!r}; the experiments are {known}{nearest(name, EXPERIMENTS)}")
    bench = Bench(
        folder=Path(str(options.get("out", "runs/experiments"))),
        num_seeds=_count(options.get("seeds", "3"), "--seeds", least=1),
        num_threads=_count(options.get("num_threads", "0"), "--num-threads", least=0),
        say=lambda text: print(text, flush=True),
    )
    question, run = EXPERIMENTS[name]
    print(f"{name}: {question}", flush=True)
    outcome = run(bench)
    from sparkgrpo.trainer.experiments.result_page import write_outcome

    for check in outcome.checks:
        print(f"expected: {check.expected}\n   found: {check.found}\n          {check.verdict}")
    for remark in outcome.remarks:
        print(f"note: {remark}")
    print(f"outcome: {outcome.verdict}; {write_outcome(bench, outcome, question)}")
    return EXIT_CODES[outcome.verdict]


def _parser() -> OptionParser:
    parser = new_parser("experiment", "Repeat an experiment of the lessons on the CPU.", arguments="NAME")
    parser.add_argument(
        "name", metavar="NAME", help="; ".join(f"{n}: {q}" for n, (q, _) in EXPERIMENTS.items()).replace("%", "%%")
    )
    parser.add_argument("--out", metavar="FOLDER", help="where runs and pages go. Default: runs/experiments.")
    parser.add_argument("--seeds", metavar="INT", help="training runs of each variant. Default: 3.")
    parser.add_argument("--num-threads", metavar="INT", help="CPU threads of PyTorch. Default: its own choice.")
    return parser


def _count(text: object, option: str, *, least: int) -> int:
    try:
        value = int(str(text))
    except ValueError:
        value = least - 1
    if value < least:
        raise UserError(f"{option}: expected an integer of at least {least}, got {text!r}")
    return value
