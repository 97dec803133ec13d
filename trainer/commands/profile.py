"""``sparkgrpo profile -- train ...``: a few recorded steps of a run, and the report of where their time went.

On CUDA with nsys two passes of it (graph mode for the phases, one step of node mode for the kernels inside graphs);
without nsys torch.profiler, and the commands for a machine that has it. On a CPU torch.profiler. One report for all.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from sparkgrpo.profiling.nsys_command import GraphMode, find_nsys, record_command, run_pass
from sparkgrpo.profiling.recorder import StepRecorder, Tool
from sparkgrpo.profiling.report import sections, text_report
from sparkgrpo.profiling.report_page import html_page
from sparkgrpo.profiling.suggestions import suggestions
from sparkgrpo.profiling.summarise import summarise
from sparkgrpo.profiling.summary import TraceSummary
from sparkgrpo.profiling.timeline import TraceError
from sparkgrpo.profiling.trace_file import FACTS_FILE, read_trace
from sparkgrpo.trainer.cli import train_config
from sparkgrpo.trainer.commands.profile_facts import recorded_facts
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dashboard import make_view
from sparkgrpo.trainer.machine import choose_device
from sparkgrpo.trainer.option_parser import OptionParser, new_parser, parse_options
from sparkgrpo.trainer.run import train
from sparkgrpo.trainer.runlog import check_new_folder, read_jsonl
from sparkgrpo.trainer.settings import nearest

SUMMARY = "Record a few steps of a run and report where the time goes."
WARM_UP, STEPS = 3, 3
NODE_STEPS = 1
DEADLINE_S = 900.0
EVAL_PROBLEMS = 8
"""An evaluation comes before the first step; it is not what is recorded."""
TOOLS = ("auto", "nsys", "torch")
TORCH_TRACE, NODE_RUN = "trace.json.gz", "node_run"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What is recorded, and how."""

    steps: int
    warm_up: int
    deadline_s: float
    tool: str
    is_inside_nsys: bool
    """This process was started by nsys, and only runs and marks."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    own, program = _split(arguments)
    plan = _plan(parse_options(_parser(), own))
    config = _recorded_config(program, plan.steps + plan.warm_up)
    check_new_folder(Path(config.run_dir))
    if plan.is_inside_nsys:
        _record(config, "nsys", plan.warm_up, plan.steps)
        return 0
    device = choose_device(config.device)
    nsys = find_nsys() if plan.tool == "nsys" or (plan.tool == "auto" and device.type == "cuda") else None
    if plan.tool == "nsys" and nsys is None:
        raise UserError("tool: expected nsys on PATH or in the usual folders, found none; --tool torch does without it")
    try:
        if nsys is not None:
            summary = _joined(*_record_with_nsys(nsys, config, program, plan))
        else:
            if device.type == "cuda" and plan.tool == "auto":
                _print_commands(config, program, plan)
            timeline, facts = read_trace(_record(config, "torch", plan.warm_up, plan.steps) / TORCH_TRACE)
            summary = summarise(timeline, facts=facts)
    except TraceError as error:
        raise UserError(f"profile: {error}") from None
    _report(summary, Path(config.run_dir) / "profile")
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command after "--"."""
    if "--help" in arguments[:1] or "-h" in arguments[:1]:
        return arguments, []
    if "--" not in arguments:
        raise UserError('expected "--" and a command to record: sparkgrpo profile -- train --steps 10')
    place = arguments.index("--")
    own, program = arguments[:place], arguments[place + 1 :]
    if program[:1] != ["train"]:
        found = repr(program[0]) if program else "nothing"
        raise UserError(f'expected the command train after "--", got {found}: sparkgrpo profile -- train ...')
    return own, program[1:]


def _recorded_config(program: list[str], num_steps: int) -> Config:
    """The run's configuration, with one step more than is recorded (so that no last step is evaluated and saved)."""
    config, _, notes = train_config(program)
    if config.resume:
        raise UserError(
            "profile: expected a new run, got --resume; name a checkpoint: -- train --model RUN/checkpoints/..."
        )
    print("\n".join(notes), file=sys.stderr)
    return replace(
        config, steps=num_steps + 1, eval_every=0, checkpoint_every=0, num_samples=1,
        eval_problems=min(config.eval_problems, EVAL_PROBLEMS),
    )  # fmt: skip


def _record(config: Config, tool: Tool, warm_up: int, steps: int) -> Path:
    """Run in this process; returns the folder with the trace (of torch) and the facts of the recorded steps."""
    folder = Path(config.run_dir) / "profile"
    recorder = StepRecorder(
        choose_device(config.device), tool=tool, path=folder / TORCH_TRACE, warm_up=warm_up, steps=steps
    )
    view = make_view(True)
    try:
        train(config, user_set={}, view=view, recorder=recorder)
    finally:
        recorder.close()
        view.close()
    lines = read_jsonl(Path(config.run_dir) / "metrics.jsonl")
    facts = recorded_facts(Path(config.run_dir), warm=lines[:warm_up], recorded=lines[warm_up:], memory=recorder.memory)
    folder.mkdir(exist_ok=True)
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return folder


def _record_with_nsys(nsys: Path, config: Config, program: list[str], plan: _Plan) -> tuple[Path, Path | None]:
    """Both passes; returns the exports in graph and in node mode (None where that pass failed, which is told).

    Raises:
        UserError: The first pass gave nothing.
    """
    folder = Path(config.run_dir) / "profile"
    exports: dict[GraphMode, Path | None] = {}
    with tempfile.TemporaryDirectory(prefix="sparkgrpo-nsys-") as scratch:
        for mode in ("graph", "node"):
            run_dir = Path(config.run_dir) if mode == "graph" else folder / NODE_RUN
            output = Path(scratch) / mode
            command = record_command(nsys, mode, output, _child(program, run_dir, plan, mode))
            print(f"recording in {mode} mode: {shlex.join(command)}", file=sys.stderr, flush=True)
            result = run_pass(command, output, plan.deadline_s)
            if result.problem is not None:
                print(f"sparkgrpo: the {mode} mode pass: {result.problem}", file=sys.stderr)
            exports[mode] = None if result.export is None else _moved(result.export, folder)
    if exports["graph"] is None:
        raise UserError("profile: nsys recorded nothing (its messages stand above); --tool torch records without it")
    return exports["graph"], exports["node"]


def _child(program: list[str], run_dir: Path, plan: _Plan, mode: GraphMode) -> list[str]:
    """The command line of the process inside nsys."""
    steps = plan.steps if mode == "graph" else NODE_STEPS
    own = ["profile", "--inside-nsys", "--steps", str(steps), "--warm-up", str(plan.warm_up)]
    return [sys.executable, "-m", "sparkgrpo.trainer", *own, "--", "train", *program, "--run-dir", str(run_dir)]


def _moved(export: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in (export, export.with_suffix(".nsys-rep")):
        if path.is_file():
            shutil.move(path, folder / path.name)
    return folder / export.name


def _print_commands(config: Config, program: list[str], plan: _Plan) -> None:
    """What to run where nsys is."""
    print(
        "nsys was not found (PATH and the usual folders): torch.profiler records. With nsys it would be:",
        file=sys.stderr,
    )
    for mode in ("graph", "node"):
        child = _child(program, Path(f"{config.run_dir}_{mode}"), plan, mode)
        print(f"  {shlex.join(record_command('nsys', mode, Path(mode), child))}", file=sys.stderr)
    print("and then: python -m sparkgrpo.profiling graph.sqlite", file=sys.stderr)


def _joined(graph: Path, node: Path | None) -> TraceSummary:
    """Times of the one pass, kernels inside the graphs of the other."""
    timeline, facts = read_trace(graph)
    summary = summarise(timeline, facts=facts)
    if node is None:
        return summary
    inside = summarise(read_trace(node)[0])
    slow = _step_ns(inside) / _step_ns(summary) if _step_ns(summary) and _step_ns(inside) else None
    graphs = summary.graphs
    if graphs is not None and inside.graphs is not None:
        graphs = replace(graphs, num_opaque=0, nodes_per_replay=inside.graphs.nodes_per_replay)
    note = f"kernels are those of {NODE_STEPS} step recorded in node mode; all times else are of the graph mode"
    joined = replace(
        summary, kernels=inside.kernels, graphs=graphs, notes=(*summary.notes, note),
        facts={**summary.facts, "node_mode_inflation": slow},
    )  # fmt: skip
    return replace(joined, suggestions=suggestions(joined))


def _step_ns(summary: TraceSummary) -> float:
    return (summary.step_ns or 0) / max(summary.num_steps or 1, 1)


def _report(summary: TraceSummary, folder: Path) -> None:
    """Text on stdout, a page in the folder."""
    page = folder / "report.html"
    page.write_text(html_page("Where the time goes", sections(summary)), encoding="utf-8")
    print(f"\n{text_report(summary)}\n{folder}: traces, {FACTS_FILE} and {page.name}", flush=True)


def _plan(options: dict[str, object]) -> _Plan:
    numbers = {"steps": STEPS, "warm-up": WARM_UP, "deadline": DEADLINE_S}
    for name in numbers:
        text = str(options.get(name.replace("-", "_"), numbers[name]))
        try:
            numbers[name] = float(text) if name == "deadline" else int(text)
        except ValueError:
            raise UserError(f"{name}: expected a number, got {text!r}") from None
        if numbers[name] < 1:
            raise UserError(f"{name}: expected 1 or more, got {text}")
    tool = str(options.get("tool", "auto"))
    if tool not in TOOLS:
        raise UserError(f"tool: expected one of {', '.join(TOOLS)}, got {tool!r}{nearest(tool, TOOLS)}")
    return _Plan(
        steps=int(numbers["steps"]), warm_up=int(numbers["warm-up"]), deadline_s=numbers["deadline"], tool=tool,
        is_inside_nsys=bool(options.get("inside_nsys")),
    )  # fmt: skip


def _parser() -> OptionParser:
    parser = new_parser("profile", SUMMARY, arguments="[OPTIONS] -- train")
    parser.add_argument("--steps", metavar="INT", help=f"Steps to record. Default: {STEPS}.")
    parser.add_argument("--warm-up", metavar="INT", help=f"Steps before, unrecorded. Default: {WARM_UP}.")
    parser.add_argument("--tool", metavar="{auto,nsys,torch}", help="Recorder; auto: nsys on CUDA where it is found.")
    parser.add_argument("--deadline", metavar="SECONDS", help=f"Of a pass of nsys. Default: {DEADLINE_S:.0f}.")
    parser.add_argument("--inside-nsys", action="store_true", help=argparse.SUPPRESS)
    return parser
