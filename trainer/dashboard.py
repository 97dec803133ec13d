"""What a person sees while a run goes: the view's contract, one plain line a step, and the choice between the views.

A view is driven by the loop's calls: it has no thread that would compete for the cores, and none can slow or end a run.
Numbers come as the rows of the run folder (``metrics.py``, ``runlog.py``); a missing or null one is shown as "-".
"""

import os
import sys
from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol, TextIO

from sparkgrpo.trainer.hostile_text import encodable, visible_text

_NOTE_CHARS = 2000


class RunView(Protocol):
    """What the loop tells about a run, in this order: start, then steps, evaluations, samples and notes, then close."""

    def start(self, facts: Mapping[str, object]) -> None:
        """It begins. Facts: run_dir, model, device, precision, steps, first_step, eval_every, num_params, config."""
        ...

    def step(self, metrics: Mapping[str, object]) -> None:
        """A step is done; its line of metrics.jsonl."""
        ...

    def evaluation(self, row: Mapping[str, object]) -> None:
        """An evaluation is done; its line of evals.jsonl."""
        ...

    def sample(self, row: Mapping[str, object]) -> None:
        """A completion for people; its line of samples.jsonl."""
        ...

    def note(self, text: str) -> None:
        """One sentence; allowed at any time before close."""
        ...

    def close(self) -> None:
        """The run is over: leave the terminal as it was."""
        ...


def make_view(is_plain: bool) -> RunView:
    """The live view on a terminal, plain lines elsewhere (pipe, ``TERM=dumb``, ``CI``, no UTF-8) or when asked for.

    A view that raises is switched off with one note: the run goes on.
    """
    if is_plain or not is_live_terminal(sys.stdout, environ=os.environ):
        return GuardedView(PlainView(sys.stdout))
    from sparkgrpo.trainer.live_view import LiveView  # rich is only loaded where it draws

    return GuardedView(LiveView())


def is_live_terminal(stream: TextIO, *, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is a terminal that can redraw and show block characters."""
    is_utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return stream.isatty() and is_utf8 and environ.get("TERM") not in ("dumb", "") and not environ.get("CI")


class Eta:
    """Seconds left: median step without its evaluation over 20 steps, and evaluations at their own median."""

    def __init__(self, *, num_steps: int, eval_every: int) -> None:
        self._num_steps, self._eval_every = num_steps, eval_every
        self._step_s: list[float] = []
        self._eval_s: list[float] = []

    def add(self, metrics: Mapping[str, object]) -> None:
        """Count the times of a step."""
        eval_s = number(metrics.get("t_eval")) or 0.0
        step_s = number(metrics.get("t_step"))
        if step_s is not None:
            self._step_s = [*self._step_s[-19:], step_s - eval_s]
        if eval_s > 0:
            self._eval_s = [*self._eval_s[-19:], eval_s]

    def seconds(self, step: int) -> float | None:
        """Seconds left after ``step``, or None before the first one."""
        if not self._step_s:
            return None
        ahead = range(step + 1, self._num_steps + 1)
        evals = sum(s == self._num_steps or (self._eval_every > 0 and s % self._eval_every == 0) for s in ahead)
        return len(ahead) * median(self._step_s) + (evals * median(self._eval_s) if self._eval_s else 0.0)


class PlainView:
    """One aligned line a step, ASCII only, no control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._eta = Eta(num_steps=0, eval_every=0)
        self._num_steps = 0

    def start(self, facts: Mapping[str, object]) -> None:
        """Print what runs and where."""
        self._num_steps = int(number(facts.get("steps")) or 0)
        self._eta = Eta(num_steps=self._num_steps, eval_every=int(number(facts.get("eval_every")) or 0))
        named = ((name, facts.get(name)) for name in ("run_dir", "model", "device", "precision", "steps"))
        self._print("  ".join(f"{name} {value}" for name, value in named if value is not None))

    def step(self, metrics: Mapping[str, object]) -> None:
        """Print the line of a step."""
        self._eta.add(metrics)
        step = int(number(metrics.get("step")) or 0)
        width = len(str(self._num_steps))
        columns = (
            f"step {step:>{width}}/{self._num_steps}",
            *(f"{label} {show(metrics.get(key)):>{size}}" for label, key, show, size in _PLAIN_COLUMNS),
            f"eta {duration(self._eta.seconds(step)):>7}",
        )
        self._print("  ".join(columns))

    def evaluation(self, row: Mapping[str, object]) -> None:
        """Print the accuracy with its standard error."""
        self._print(
            f"eval after step {row.get('step')}: accuracy {percent(row.get('accuracy'))} "
            f"+- {percent(row.get('accuracy_se'))} of {row.get('num_problems')} held-out problems"
        )

    def sample(self, row: Mapping[str, object]) -> None:
        """Nothing: samples are for samples.jsonl, a log has one line a step."""

    def note(self, text: str) -> None:
        """Print a sentence."""
        self._print(text)

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, text: str) -> None:
        shown = encodable(visible_text(text, _NOTE_CHARS), self._stream.encoding)
        self._stream.write(shown + "\n")
        self._stream.flush()


class GuardedView:
    """Another view, switched off with one note on stderr as soon as it raises (a closed terminal, a bug in drawing)."""

    def __init__(self, view: RunView) -> None:
        self._view: RunView | None = view

    def start(self, facts: Mapping[str, object]) -> None:
        """Pass on, guarded."""
        self._guard(lambda view: view.start(facts))

    def step(self, metrics: Mapping[str, object]) -> None:
        """Pass on, guarded."""
        self._guard(lambda view: view.step(metrics))

    def evaluation(self, row: Mapping[str, object]) -> None:
        """Pass on, guarded."""
        self._guard(lambda view: view.evaluation(row))

    def sample(self, row: Mapping[str, object]) -> None:
        """Pass on, guarded."""
        self._guard(lambda view: view.sample(row))

    def note(self, text: str) -> None:
        """Pass on, guarded."""
        self._guard(lambda view: view.note(text))

    def close(self) -> None:
        """Pass on, guarded; a second close does nothing."""
        self._guard(lambda view: view.close())
        self._view = None

    def _guard(self, call: Callable[[RunView], None]) -> None:
        if self._view is None:
            return
        view, self._view = self._view, None  # off while it is called: a view that raises stays off
        try:
            call(view)
        except Exception as error:
            _say_switched_off(view, error)
        else:
            self._view = view


def _say_switched_off(view: RunView, error: Exception) -> None:
    try:
        view.close()
    except Exception as second:
        error.add_note(f"closing it failed too: {second}")
    try:
        reason = visible_text(f"{type(error).__name__}: {error}", 300)
        print(f"the view is switched off ({reason}); the run goes on, see its metrics.jsonl", file=sys.stderr)
    except (OSError, ValueError):
        return  # stderr is gone as well: nobody is left to tell, and the run folder has everything


def number(value: object) -> float | None:
    """A number from a row, else None."""
    return float(value) if isinstance(value, (int, float)) else None


def percent(value: object) -> str:
    """A fraction as percent."""
    known = number(value)
    return "-" if known is None else f"{100 * known:.1f}%"


def whole_percent(value: object) -> str:
    """A fraction as percent, rounded."""
    known = number(value)
    return "-" if known is None else f"{100 * known:.0f}%"


def short(value: object) -> str:
    """A number with three significant digits, in at most 8 characters."""
    known = number(value)
    if known is None:
        return "-"
    if known == 0:
        return "0"
    if 1e-3 <= abs(known) < 1e4:
        digits = max(0, 3 - len(str(int(abs(known))))) if abs(known) >= 1 else 3 if abs(known) >= 0.1 else 4
        return f"{known:.{digits}f}"
    return f"{known / 1000:.0f}k" if 1e4 <= abs(known) < 1e6 else f"{known:.1e}"


def duration(seconds: float | None) -> str:
    """Seconds as 8.1s, 3:07 or 2:03:07."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


_PLAIN_COLUMNS: tuple[tuple[str, str, Callable[[object], str], int], ...] = (
    ("reward", "reward_mean", short, 6),
    ("right", "frac_right", whole_percent, 4),
    ("dead", "frac_zero_std", whole_percent, 4),
    ("len", "len_mean", short, 4),
    ("cut", "frac_truncated", whole_percent, 4),
    ("kl", "kl_mean", short, 7),
    ("ent", "entropy_mean", short, 6),
    ("grad", "grad_norm", short, 6),
    ("tok/s", "tok_per_s", short, 5),
    ("t", "t_step", lambda value: duration(number(value)), 7),
)
