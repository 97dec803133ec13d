"""Follows a run folder on the terminal: the frame of `live_view.py` redrawn in place, or one plain line a step.

Reads what was appended, never writes, and works before the first line, on a run that goes, and on one that ended.
"""

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from sparkgrpo.trainer.dashboard import Eta, PlainView, number
from sparkgrpo.trainer.diagnose import diagnose
from sparkgrpo.trainer.liveness import liveness
from sparkgrpo.trainer.run_reader import RunFollower, RunRecord

POLL_S = 0.25
_DIAGNOSE_EVERY_S = 1.0


def watch(folder: Path, *, is_plain: bool, is_once: bool = False, stream: TextIO | None = None) -> None:
    """Show a run until it is over, q or Ctrl-C. `UserError` for a folder that is no run.

    Args:
        is_plain: One line a step and no control characters.
        is_once: Show what is there and return.
        stream: Where to write; standard output by default.
    """
    follower = RunFollower(folder)
    follower.poll()
    if is_plain:
        _watch_plain(follower, is_once, stream or sys.stdout)
    else:
        _watch_live(follower, is_once)


def facts_of(record: RunRecord) -> dict[str, object]:
    """What a view wants to know at the start, from run.json."""
    model = record.run.get("model")
    described = model if isinstance(model, Mapping) else {}
    config = record.config
    return {
        "run_dir": str(record.folder.resolve()),
        "model": described.get("name") or config.get("model", ""),
        "num_params": described.get("num_params"),
        **{name: config.get(name, "") for name in ("device", "precision", "steps", "eval_every")},
        "first_step": 1,
    }


def eta_of(record: RunRecord) -> Eta:
    """The time left, from the last 20 steps and evaluations."""
    config = record.config
    eta = Eta(num_steps=int(number(config.get("steps")) or 0), eval_every=int(number(config.get("eval_every")) or 0))
    eval_every = int(number(config.get("eval_every")) or 0)
    recent = record.steps[-max(20, 3 * eval_every) :]
    for row in recent:
        eta.add(row)
    return eta


def _watch_plain(follower: RunFollower, is_once: bool, stream: TextIO) -> None:
    record = follower.record
    view = PlainView(stream)
    view.start(facts_of(record))
    shown_step, shown_eval = 0.0, -1.0
    said = ""
    while True:
        steps = [row for row in record.steps if (number(row.get("step")) or 0.0) > shown_step]
        evals = [row for row in record.evals if (number(row.get("step")) or 0.0) > shown_eval]
        lines = [(number(row.get("step")) or 0.0, True, row) for row in steps]
        lines += [(number(row.get("step")) or 0.0, False, row) for row in evals]
        for step, is_step, row in sorted(lines, key=lambda line: line[:2]):
            if is_step:
                view.step(row)
                shown_step = step
            else:
                view.evaluation(row)
                shown_eval = step
        alive = liveness(record)
        if alive.text and alive.is_over:
            for verdict in diagnose(record).counting("info"):
                view.note(f"{verdict.severity} {verdict.id} since step {verdict.first_step}: {verdict.text}")
        if alive.is_over and alive.text != said:
            view.note(alive.text)
            said = alive.text
        if is_once or alive.is_over:
            return
        time.sleep(POLL_S)
        follower.poll()


def _watch_live(follower: RunFollower, is_once: bool) -> None:
    from rich.live import Live

    from sparkgrpo.trainer.live_view import LiveView, PipeSafeConsole, draw

    console = PipeSafeConsole(highlight=False, emoji=False, markup=False)
    state = LiveView(console).state
    scene = _Scene(follower, state)
    with (
        _keys() as pressed,
        Live(
            console=console,
            auto_refresh=False,
            get_renderable=lambda: draw(state, width=console.width, height=console.height - 1),
        ) as live,
    ):
        while True:
            is_over = scene.update()
            live.refresh()
            if is_over or is_once or pressed(POLL_S) == "q":
                return
            follower.poll()


class _Scene:
    """Keeps the state of the frame up to the record."""

    def __init__(self, follower: RunFollower, state: object) -> None:
        from sparkgrpo.trainer.live_view import ViewState

        assert isinstance(state, ViewState)
        self.follower, self.state = follower, state
        self._judged = (-1, -1)
        self._judged_s = 0.0

    def update(self) -> bool:
        """Take over what the folder holds; whether the run is over."""
        record, state = self.follower.record, self.state
        alive = liveness(record)
        state.facts = facts_of(record)
        state.steps = deque(record.steps[-60:], maxlen=60)
        state.evaluations = list(record.evals)
        state.group = newest_training_group(record)
        state.eta = eta_of(record)
        state.now_unix_s = time.time()
        state.status = alive.text
        now = (len(record.steps), len(record.evals))
        if now != self._judged and (alive.is_over or time.monotonic() - self._judged_s >= _DIAGNOSE_EVERY_S):
            state.diagnosis = diagnose(record)
            self._judged, self._judged_s = now, time.monotonic()
        return alive.is_over


def newest_training_group(record: RunRecord) -> list[Mapping[str, object]]:
    """The completions of the newest training group among the samples."""
    group: list[Mapping[str, object]] = []
    for row in reversed(record.samples):
        if row.get("split") != "train":
            continue
        if group and (row.get("step"), row.get("problem")) != (group[0].get("step"), group[0].get("problem")):
            break
        group.append(row)
    return group[::-1]


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Waits for a key up to so many seconds; single keys come at once, and the terminal is left as it was."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        return os.read(descriptor, 1).decode("ascii", "replace")

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
