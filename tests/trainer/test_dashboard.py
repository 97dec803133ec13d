"""Plain lines, the choice of the view, and the guard around it."""

import io
import sys
from collections.abc import Mapping

import pytest

from sparkgrpo.trainer.dashboard import (
    Eta,
    GuardedView,
    PlainView,
    duration,
    is_live_terminal,
    make_view,
    percent,
    short,
)

FACTS = {"run_dir": "runs/a", "model": "embedded", "device": "cpu", "precision": "fp32", "steps": 200, "eval_every": 20}
STEP = {"step": 7, "reward_mean": 0.3125, "frac_right": 0.3, "frac_zero_std": 0.5, "len_mean": 88.12, "t_step": 1.5}


class Terminal(io.StringIO):
    """A stream that says it is a terminal, with UTF-8."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def plain_lines(*rows: Mapping[str, object]) -> list[str]:
    stream = io.StringIO()
    view = PlainView(stream)
    view.start(FACTS)
    for row in rows:
        view.step(row)
    return stream.getvalue().split("\n")[1:-1]


def test_one_plain_line_a_step() -> None:
    (line,) = plain_lines(STEP)
    assert line.startswith("step   7/200  reward  0.312  right  30%  dead  50%  len 88.1  cut    -  kl       -")
    assert line.endswith("eta    4:50")
    assert line.isascii() and line.isprintable() and len(line) < 160


def test_plain_lines_are_aligned() -> None:
    other = {"step": 200, "reward_mean": -12.5, "frac_right": 1.0, "kl_mean": 1.25e-7, "grad_norm": 123456.0}
    lines = plain_lines(STEP, {**STEP, **other, "tok_per_s": 123456, "t_step": 3700, "len_mean": 1234.5}, {"step": 8})
    assert len({line.index("  ent ") for line in lines}) == 1
    assert len({line.index("  eta ") for line in lines}) == 1


def test_plain_evaluation_and_hostile_note() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    view.evaluation({"step": 20, "accuracy": 0.4, "accuracy_se": 0.034, "num_problems": 200})
    view.note("saved \x1b[2J\nü")
    view.sample({"completion": "never printed"})
    view.close()
    assert stream.getvalue() == (
        "eval after step 20: accuracy 40.0% +- 3.4% of 200 held-out problems\nsaved \\x1b[2J\\n\\xfc\n"
    )


def test_eta_counts_steps_and_evaluations_apart() -> None:
    eta = Eta(num_steps=50, eval_every=20)
    assert eta.seconds(0) is None
    for step_s in (2.0, 2.0, 2.0, 90.0):  # one slow step is not the median
        eta.add({"t_step": step_s, "t_eval": 0.0})
    assert eta.seconds(4) == 46 * 2.0
    for _ in range(9):
        eta.add({"t_step": 12.0, "t_eval": 10.0})
    assert eta.seconds(13) == 37 * 2.0 + 3 * 10.0  # evaluations after 20, 40 and 50
    assert eta.seconds(50) == 0.0


@pytest.mark.parametrize(
    ("environ", "is_live"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "CI": "true"}, False), ({}, True)],
)
def test_where_the_live_view_runs(environ: dict[str, str], is_live: bool) -> None:
    assert is_live_terminal(Terminal(), environ=environ) is is_live


def test_no_live_view_in_a_pipe_or_without_utf8() -> None:
    assert not is_live_terminal(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), environ={"TERM": "xterm"})
    terminal = Terminal()
    terminal.encoding = "latin-1"  # type: ignore[misc]
    assert not is_live_terminal(terminal, environ={"TERM": "xterm"})


def test_plain_is_obeyed_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    view = make_view(True)
    view.start(FACTS)
    view.step(STEP)
    view.close()
    assert "\x1b" not in terminal.getvalue() and terminal.getvalue().count("\n") == 2


class BrokenView(PlainView):
    """Raises as a terminal does that is gone."""

    num_calls = 0

    def step(self, metrics: Mapping[str, object]) -> None:
        self.num_calls += 1
        raise OSError(5, "Input/output error")


def test_a_view_that_raises_is_switched_off_with_one_note(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    broken = BrokenView(stream)
    view = GuardedView(broken)
    view.start(FACTS)
    for _ in range(3):
        view.step(STEP)
    view.note("not shown")
    view.close()
    assert broken.num_calls == 1
    assert stream.getvalue().count("\n") == 1  # the start line, and nothing after the failure
    note = capsys.readouterr().err
    assert note.count("\n") == 1 and "the run goes on" in note and "Input/output error" in note


def test_nobody_left_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    view = GuardedView(PlainView(closed))
    view.start(FACTS)  # raises nothing
    view.close()


def test_numbers() -> None:
    shown = [short(v) for v in (None, 0, 0.0012345, 0.25, 1.0, 12.345, 1234.5, 12345, 1.2e6, -3.2e-7, float("nan"))]
    assert shown == ["-", "0", "0.0012", "0.250", "1.00", "12.3", "1234", "12k", "1.2e+06", "-3.2e-07", "nan"]
    assert [percent(v) for v in (None, 0.0, 0.125, 1)] == ["-", "0.0%", "12.5%", "100.0%"]
    assert [duration(v) for v in (None, 0.04, 9.9, 59.7, 187.0, 7387.0)] == [
        "-",
        "0.0s",
        "9.9s",
        "1:00",
        "3:07",
        "2:03:07",
    ]
