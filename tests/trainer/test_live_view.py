"""The frame at several sizes, hostile text in it, and the view on a real terminal."""

import io
import os
import pty
import subprocess
import sys
import time
from collections import deque

import pytest
from rich.console import Console

from sparkgrpo.trainer.dashboard import Eta
from sparkgrpo.trainer.live_view import LiveView, ViewState, draw, sparkline

FACTS = {
    "run_dir": "runs/2026-11-29_1412_countdown_grpo_s0",
    "model": "embedded",
    "device": "cpu",
    "precision": "fp32",
    "steps": 200,
    "eval_every": 20,
    "num_params": 1.3e6,
}
HOSTILE = "\x1b[31m[bold red]boo[/] \u202e\x9b2J"


def step_row(step: int) -> dict[str, object]:
    times = {"t_step": 2.0, "t_gen": 1.0, "t_train": 0.75, "t_opt": 0.25}
    names = ("reward_mean", "frac_right", "frac_zero_std", "len_mean", "frac_truncated", "kl_mean", "entropy_mean")
    more = ("clip_frac", "grad_norm", "logprob_gap_max", "tok_per_s")
    return {"step": step, **times, **{name: 0.1 + step / 1000 for name in (*names, *more)}}


def state(num_steps: int = 47) -> ViewState:
    found = ViewState(facts=FACTS, eta=Eta(num_steps=200, eval_every=20), now_unix_s=0.0)
    for step in range(1, num_steps + 1):
        found.steps.append(step_row(step))
        found.eta.add(step_row(step))
    found.evaluations = [{"step": 0, "accuracy": 0.31}, {"step": 40, "accuracy": 0.47, "accuracy_se": 0.035}]
    found.group = [
        {"step": 40, "problem": "countdown:3,4,7=40", "reward": reward, "reason": reason, "completion": text}
        for reward, reason, text in ((0.0, "wrong_value", HOSTILE), (1.0, "ok", "(3+7)*4"), (None, "x", "unscored"))
    ]
    return found


def shown(what: ViewState, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True, force_terminal=True)
    console.print(draw(what, width=width, height=height - 1))
    return console.export_text().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(120, 24), (80, 24), (200, 60), (60, 14), (40, 8), (10, 3), (1, 1)])
@pytest.mark.parametrize("num_steps", [0, 1, 47, 150])
def test_frame_fits_the_terminal(width: int, height: int, num_steps: int) -> None:
    lines = shown(state(num_steps), width, height)
    assert len(lines) <= max(height - 1, 1)
    assert all(len(line) <= width for line in lines)


def test_frame_at_80x24_has_everything() -> None:
    text = "\n".join(shown(state(), 80, 24))
    assert "2026-11-29_1412_countdown_grpo_s0  embedded  1.3M  cpu  fp32" in text
    assert "step  47 of 200  5:06 left" in text
    assert "held-out 31.0% -> 47.0% ±3.5% at step 40" in text
    assert "dead groups" in text and "mean 10" in text
    assert "gen 50%" in text and "train 38%" in text and "opt 12%" in text
    assert "best  1.00 ok (3+7)*4" in text and "unscored" not in text


def test_model_text_is_inert_and_not_markup() -> None:
    text = "\n".join(shown(state(), 120, 24))
    assert "worst 0 wrong_value \\x1b[31m[bold red]boo[/] \\u202e\\x9b2J" in text
    assert not set("\x1b\u202e\x9b") & set(text)


def test_metric_that_the_run_lacks_takes_no_room() -> None:
    without = state()
    without.steps = deque({**row, "kl_mean": None} for row in without.steps)
    assert "KL to start" in "\n".join(shown(state(), 80, 24))
    assert "KL to start" not in "\n".join(shown(without, 80, 24))


def test_redraw_is_cheap() -> None:
    what = state(60)
    times = []
    for _ in range(9):
        begin = time.process_time()
        shown(what, 120, 24)
        times.append(time.process_time() - begin)
    assert min(times) < 0.020  # CPU seconds: a busy machine must not turn this red


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0], 60) == "▁▅█"
    assert sparkline([2.0, 2.0, None, 2.0], 60) == "▁▁ ▁"
    assert sparkline([], 60) == sparkline([None], 60) == sparkline([1.0], 0) == ""
    spike = [0.0] * 60
    spike[31] = 1.0
    assert "█" in sparkline(spike, 20) and len(sparkline(spike, 20)) == 20


def test_newest_training_group_is_kept() -> None:
    view = LiveView(Console(file=io.StringIO(), force_terminal=True))
    rows = [("train", 20, "a"), ("train", 20, "a"), ("heldout", 20, "b"), ("train", 40, "a"), ("train", 40, "a")]
    for i, (split, step, problem) in enumerate(rows):
        view.sample({"split": split, "step": step, "problem": problem, "reward": i})
    assert [row["reward"] for row in view.state.group] == [3, 4]


RUN_ON_TERMINAL = """
import contextlib
import sys
import time
from sparkgrpo.trainer.dashboard import make_view
sys.path.insert(0, {here!r})
from test_live_view import FACTS, HOSTILE, step_row
view = make_view(False)
view.note("before the start")
time.sleep({pause_s})
view.start(FACTS)
for step in range(1, 4):
    view.step(step_row(step))
    with contextlib.suppress(OSError):
        print("a foreign print")
view.note("note " + HOSTILE)
view.close()
with contextlib.suppress(OSError):
    print('{{"last": "line"}}', flush=True)
print("the run is over", file=sys.stderr)
"""


def on_terminal(environ: dict[str, str], *, is_closed_early: bool = False) -> tuple[int, str, str]:
    """Run the program on a pseudo-terminal; its exit code, what the terminal got, and stderr."""
    leader, follower = pty.openpty()
    program = RUN_ON_TERMINAL.format(here=os.path.dirname(__file__), pause_s=0.5 if is_closed_early else 0)
    clean = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=subprocess.PIPE,
        env={**clean, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ},
        start_new_session=True,
    )
    os.close(follower)
    output = b""
    while not (is_closed_early and b"before the start" in output):
        try:
            part = os.read(leader, 65536)
        except OSError:  # how a pseudo-terminal says that the other side is closed
            break
        if not part:
            break
        output += part
    os.close(leader)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, output.decode(), stderr.decode()


def test_on_a_terminal_the_last_line_survives() -> None:
    code, output, stderr = on_terminal({})
    assert code == 0, stderr
    assert "\x1b[?25l" in output and output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is back
    assert output.rstrip().endswith('{"last": "line"}')
    assert output.count("a foreign print") == 3 and "before the start" in output
    assert "\\x1b[31m[bold red]boo[/] \\u202e\\x9b2J" in output
    assert "\x1b[31m[bold" not in output and "\u202e" not in output


def test_no_color_is_obeyed() -> None:
    code, output, _ = on_terminal({"NO_COLOR": "1"})
    assert code == 0 and "step" in output
    assert "\x1b[36m" not in output and "\x1b[38" not in output
    assert "\x1b[36m" in on_terminal({})[1]


def test_dumb_terminal_gets_plain_lines() -> None:
    code, output, _ = on_terminal({"TERM": "dumb"})
    assert code == 0 and "\x1b" not in output
    assert output.count("\r\nstep ") == 3


def test_a_terminal_that_is_gone_does_not_end_the_run() -> None:
    _, output, stderr = on_terminal({}, is_closed_early=True)
    assert "before the start" in output
    assert stderr.count("the view is switched off (OSError: [Errno 5] Input/output error); the run goes on") == 1
    assert "the run is over" in stderr
