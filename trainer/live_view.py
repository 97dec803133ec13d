"""The live view of a run on a terminal: a frame of the last 60 steps, redrawn in place at most 4 times a second.

`draw` is pure: state and size in, renderable out. Whatever comes from the model or from file names goes through
`visible_text` into `Text` objects: no terminal command and no markup of theirs ever takes effect.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from sparkgrpo.trainer.dashboard import Eta, duration, number, percent, short
from sparkgrpo.trainer.diagnosis.curves import direction
from sparkgrpo.trainer.diagnosis.live import ThrottledDiagnosis
from sparkgrpo.trainer.diagnosis.rule import Diagnosis
from sparkgrpo.trainer.hostile_text import visible_text
from sparkgrpo.trainer.metrics import PHASES

NUM_STEPS_SHOWN = 60
_MIN_REDRAW_S = 0.25
_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = ("cyan", "yellow", "magenta", "blue", "green", "red", "bright_black", "white")
_PHASE_GLYPHS = "█▓▒░▞▚▤▪"  # tell the phases apart without colour
_NAME_WIDTH, _NUMBER_WIDTH = 15, 9
_MAX_VERDICTS = 3
_SEVERITY_STYLES = {"error": ("✕", "bold red"), "warn": ("!", "bold yellow"), "info": ("i", "bold blue")}
_ARROWS = {1: "↑", 0: " ", -1: "↓"}

Row = Mapping[str, object]

_ROWS: tuple[tuple[str, str, Callable[[object], str]], ...] = (
    ("right", "frac_right", percent),
    ("reward", "reward_mean", short),
    ("dead groups", "frac_zero_std", percent),
    ("length, tokens", "len_mean", short),
    ("cut off", "frac_truncated", percent),
    ("KL to start", "kl_mean", short),
    ("entropy", "entropy_mean", short),
    ("clipped", "clip_frac", percent),
    ("gradient norm", "grad_norm", short),
    ("log-prob gap", "logprob_gap_max", short),
    ("tokens/s", "tok_per_s", short),
    ("step time", "t_step", lambda value: duration(number(value))),
)


@dataclass(slots=True)
class ViewState:
    """All that a frame shows."""

    facts: Row = field(default_factory=dict)
    steps: deque[Row] = field(default_factory=lambda: deque(maxlen=NUM_STEPS_SHOWN))
    evaluations: list[Row] = field(default_factory=list)
    group: list[Row] = field(default_factory=list)
    """The newest training group among the samples."""
    eta: Eta = field(default_factory=lambda: Eta(num_steps=0, eval_every=0))
    now_unix_s: float = 0.0
    diagnosis: Diagnosis | None = None
    status: str = ""
    """How the run ended, or that it is silent; empty while it goes."""


class LiveView:
    """A `RunView` that redraws one frame in place. Notes and foreign prints scroll past above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or PipeSafeConsole(highlight=False, emoji=False, markup=False)
        self.state = ViewState()
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._frame)
        self._drawn_s = 0.0
        self._all_steps: list[Row] = []
        self._throttled = ThrottledDiagnosis()

    def start(self, facts: Row) -> None:
        """Take over the lower part of the terminal."""
        num_steps, eval_every = int(number(facts.get("steps")) or 0), int(number(facts.get("eval_every")) or 0)
        self.state.facts = facts
        self.state.eta = Eta(num_steps=num_steps, eval_every=eval_every)
        self._live.start(refresh=True)

    def step(self, metrics: Row) -> None:
        """Count a step and redraw."""
        self.state.steps.append(metrics)
        self._all_steps.append(metrics)
        self.state.eta.add(metrics)
        self._redraw()

    def evaluation(self, row: Row) -> None:
        """Show the accuracy and redraw."""
        self.state.evaluations.append(row)
        self._redraw()

    def sample(self, row: Row) -> None:
        """Keep the newest training group."""
        if row.get("split") != "train":
            return
        group = self.state.group
        if group and (group[0].get("step"), group[0].get("problem")) != (row.get("step"), row.get("problem")):
            group.clear()
        group.append(row)

    def note(self, text: str) -> None:
        """Print a sentence above the frame."""
        self._console.print(Text(visible_text(text, 2000)))

    def close(self) -> None:
        """Draw the last frame, leave it on the terminal and give the terminal back."""
        self._live.stop()

    def _redraw(self) -> None:
        if time.monotonic() - self._drawn_s >= _MIN_REDRAW_S:
            config = self.state.facts.get("config")
            if isinstance(config, Mapping):
                self._throttled.ask(self._all_steps, self.state.evaluations, config)
                self.state.diagnosis = self._throttled.latest
            self._live.refresh()
            self._drawn_s = time.monotonic()

    def _frame(self) -> RenderableType:
        self.state.now_unix_s = time.time()
        return draw(self.state, width=self._console.width, height=self._console.height - 1)


class PipeSafeConsole(Console):
    """Rich ends the process when its pipe breaks; a view may not end a run, so the error goes to `GuardedView`."""

    def on_broken_pipe(self) -> None:
        """Raise, so that the view is switched off."""
        raise BrokenPipeError("nobody reads the output any more")


def draw(state: ViewState, *, width: int, height: int) -> RenderableType:
    """The frame: head, table, phases, samples; at most ``height`` lines of ``width`` cells, the samples give way."""
    head, phases = [*_head(state, width), *_verdicts(state)], _phases(state, width)
    table = _table(state, width)[: max(height - len(head) - len(phases), 0)]
    samples = _samples(state, width, height - len(head) - len(table) - len(phases))
    parts = [part for part in (head, table, phases, samples) if part]
    is_airy = sum(len(part) + 1 for part in parts) <= height + 1
    lines = [line for part in parts for line in (*part, *([Text("")] if is_airy else []))][:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _head(state: ViewState, width: int) -> list[Text]:
    facts = state.facts
    run = PurePath(str(facts.get("run_dir", ""))).name
    num_params = number(facts.get("num_params"))
    what = [visible_text(str(facts.get(name, "")), 60) for name in ("model", "device", "precision")]
    size = [f"{num_params / 1e6:.3g}M"] if num_params else []
    title = Text.assemble(
        ("sparkgrpo ", "bold"), (visible_text(run, 60), "bold cyan"), "  ", "  ".join([what[0], *size, *what[1:]])
    )
    last = state.steps[-1].get("step") if state.steps else facts.get("first_step")
    step, num_steps = int(number(last) or 0), int(number(facts.get("steps")) or 0)
    left_s = state.eta.seconds(step)
    progress = Text(f"step {step:>{len(str(num_steps))}} of {num_steps} ")
    if width >= 100 and num_steps:
        done = min(round(20 * step / num_steps), 20)
        progress.append("━" * done, style="green").append("─" * (20 - done), style="dim").append(" ")
    if left_s is not None and step < num_steps:
        end = time.strftime("%H:%M", time.localtime(state.now_unix_s + left_s))
        progress.append(f" {duration(left_s)} left, ends {end}")
    if state.status:
        progress.append("  ").append(visible_text(state.status, 200), style="bold")
    return [title, progress.append("  ").append_text(_accuracy(state))]


def _verdicts(state: ViewState) -> list[Text]:
    """A line for each active verdict of its own, the worst first."""
    if state.diagnosis is None:
        return []
    found = state.diagnosis.counting("info")
    lines = []
    for verdict in found[:_MAX_VERDICTS]:
        sign, style = _SEVERITY_STYLES[verdict.severity]
        text = f" since step {verdict.first_step}: {visible_text(verdict.text, 200)}"
        lines.append(Text().append(f"{sign} {verdict.id}", style=style).append(text))
    if len(found) > _MAX_VERDICTS:
        lines[-1].append(f" (and {len(found) - _MAX_VERDICTS} more)", style="dim")
    return lines


def _accuracy(state: ViewState) -> Text:
    if not state.evaluations:
        return Text("")
    first, last = state.evaluations[0], state.evaluations[-1]
    text = Text("held-out ").append(percent(first.get("accuracy")))
    if len(state.evaluations) > 1:
        text.append(" -> ").append(percent(last.get("accuracy")), style="bold")
    return text.append(f" ±{percent(last.get('accuracy_se'))} at step {last.get('step')}", style="dim")


def _table(state: ViewState, width: int) -> list[Text]:
    spark_width = min(NUM_STEPS_SHOWN, width - _NAME_WIDTH - 2 * _NUMBER_WIDTH - 3)
    span = f"last {len(state.steps)} steps" if len(state.steps) > 1 else ""
    header = f"{'':{_NAME_WIDTH}}{'now':>{_NUMBER_WIDTH}}{'mean 10':>{_NUMBER_WIDTH}}   {span}"
    lines = [Text(header, style="dim")]
    for name, key, show in _ROWS:
        values = [number(row.get(key)) for row in state.steps]
        known = [value for value in values if value is not None]
        if not known:
            continue  # a metric that this run does not have (KL with beta 0) takes no room
        last10 = [value for value in values[-10:] if value is not None]
        mean10 = sum(last10) / len(last10) if last10 else None
        line = Text(f"{name:{_NAME_WIDTH}}")
        line.append(f"{show(values[-1]):>{_NUMBER_WIDTH}}", style="bold").append(f"{show(mean10):>{_NUMBER_WIDTH}} ")
        line.append(f"{_ARROWS[direction(values)]} ")
        lines.append(line.append(sparkline(values, spark_width), style="cyan"))
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """One line of block letters. More values than ``width``: minimum and maximum of each bucket, in order of time."""
    values = _thinned(values, width) if len(values) > width else values
    known = [value for value in values if value is not None]
    if width < 2 or not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[round(top * (value - low) / span) if span > 0 else 0] for value in values
    )


def _thinned(values: Sequence[float | None], width: int) -> list[float | None]:
    num_buckets = max(width // 2, 1)
    thinned: list[float | None] = []
    for bucket in range(num_buckets):
        part = values[len(values) * bucket // num_buckets : len(values) * (bucket + 1) // num_buckets]
        known = [(value, i) for i, value in enumerate(part) if value is not None]
        if not known:
            thinned += [None, None]
        else:
            ends = sorted((min(known), max(known)), key=lambda pair: pair[1])
            thinned += [value for value, _ in ends]
    return thinned


def _phases(state: ViewState, width: int) -> list[Text]:
    """Where the time of the last 10 steps went: a bar, and its legend with shares."""
    recent = list(state.steps)[-10:]
    seconds = [sum(number(row.get(phase)) or 0.0 for row in recent) for phase in PHASES]
    total = sum(seconds)
    if total <= 0:
        return []
    bar, legend, begin_s = Text(), Text(), 0.0
    for phase, part_s, style, glyph in zip(PHASES, seconds, _PHASE_STYLES, _PHASE_GLYPHS, strict=True):
        cells = round(width * (begin_s + part_s) / total) - round(width * begin_s / total)
        bar.append(glyph * cells, style=style)
        begin_s += part_s
        if part_s / total >= 0.005:
            legend.append(glyph, style=style).append(f" {phase.removeprefix('t_')} {100 * part_s / total:.0f}%  ")
    return [bar, legend]


def _samples(state: ViewState, width: int, height: int) -> list[Text]:
    """The best and the worst completion of the newest training group, each on its share of ``height`` lines."""
    scored = [row for row in state.group if number(row.get("reward")) is not None]
    if not scored or height < 3:
        return []
    first = scored[0]
    lines = [Text(f"step {first.get('step')}: {visible_text(str(first.get('problem', '')), 200)}", style="dim")]
    ordered = sorted(scored, key=lambda row: number(row.get("reward")) or 0.0)
    shown = [("best ", ordered[-1], "green"), ("worst", ordered[0], "red")][: 1 if len(ordered) == 1 else 2]
    lines_each = min((height - 1) // 2, 4)
    for label, row, style in shown:
        start = f"{label} {short(row.get('reward'))} {visible_text(str(row.get('reason', '')), 20)} "
        room = width * lines_each - len(start)
        text = Text(start, style=style).append(visible_text(str(row.get("completion", "")), room), style="default")
        lines += _folded(text, width)[:lines_each]
    return lines


def _folded(text: Text, width: int) -> list[Text]:
    """Cut a text into lines of ``width`` cells (wide letters count two)."""
    lines: list[Text] = []
    while text.cell_len > width and width >= 2:
        cut = width
        while text[:cut].cell_len > width:
            cut -= 1
        lines.append(text[:cut])
        text = text[cut:]
    return [*lines, text]
