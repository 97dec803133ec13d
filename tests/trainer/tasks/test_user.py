"""Reward functions of users: the contract, and the whole table of what may go wrong, in bounded time."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks import user
from sparkgrpo.trainer.tasks.base import UNVERIFIED, Completion, Problem, Score
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions, make_problem
from sparkgrpo.trainer.tasks.user import RewardFunctions, TrainerState, UserScores

FILE = Path(__file__).with_name("reward_functions.py")
COLUMNS = frozenset({"nums", "target"})
NUM_ROWS = 128
BAD_ROW = 77
LATER = TrainerState(global_step=4, max_steps=9)
FIRST = TrainerState(global_step=0, max_steps=9)
OK = Score(reward=1.0, parts={}, reason="wrong_value")

Open = Callable[..., RewardFunctions]


@pytest.fixture
def functions() -> Iterator[Open]:
    """Opens functions of the file beside this one by name, or Python objects; closes them in the end."""
    opened: list[RewardFunctions] = []

    def make(*names: Any, **options: Any) -> RewardFunctions:
        chosen: dict[str, Any] = {"columns": COLUMNS, "is_plain": False, "timeout_s": 30.0, "warn": lambda text: None}
        references = [f"{FILE}:{name}" if isinstance(name, str) else name for name in names]
        opened.append(RewardFunctions(references, **(chosen | options)))
        return opened[-1]

    yield make
    for found in opened:
        found.close()


def problems(count: int = NUM_ROWS) -> list[Problem]:
    """Eight completions a problem, as in a run."""
    made = [make_problem([n % 9 + 1, 2, 3], n + 1) for n in range(-(-count // 8))]
    return [made[row // 8] for row in range(count)]


def completions(count: int = NUM_ROWS, bad_row: int | None = None) -> list[Completion]:
    texts = [f"text {row}" for row in range(count)]
    if bad_row is not None:
        texts[bad_row] = "bad"
    return [
        Completion(text=text, token_ids=tuple(range(row % 5 + 1)), is_truncated=False) for row, text in enumerate(texts)
    ]


def scored(
    found: RewardFunctions, state: TrainerState = LATER, *, count: int = NUM_ROWS, bad_row: int | None = None
) -> UserScores:
    return found.score(problems(count), completions(count, bad_row), [OK] * count, state)


def rewards(result: UserScores) -> list[float | None]:
    return [score.reward for score in result.scores]


def test_everything_is_given_by_keyword(functions: Open) -> None:
    result = scored(functions("sees"))
    assert rewards(result) == [float(sum(range(row % 5 + 1))) for row in range(NUM_ROWS)]
    assert {score.reason for score in result.scores} == {"wrong_value"}, "the strict check's reason"
    assert (result.num_restarts, list(result.warnings)) == (0, [])


def test_without_kwargs_a_function_gets_what_it_names(functions: Open) -> None:
    result = scored(functions("named_only"), count=8)
    assert rewards(result) == [float(sum((1, 2, 3)) == 1)] * 8


def test_plain_prompts_and_completions_are_text(functions: Open) -> None:
    assert rewards(scored(functions("sees_text", is_plain=True))) == [1.0] * NUM_ROWS


def test_a_function_may_change_what_it_gets(functions: Open) -> None:
    """Siblings share a problem, and two functions share a batch: neither sees what the other did."""
    asked = problems(16)
    for names in (("changes_what_it_gets", "sees"), (_object("changes_what_it_gets"), _object("sees"))):
        result = functions(*names).score(asked, completions(16), [OK] * 16, LATER)
        assert [score.parts["changes_what_it_gets"] for score in result.scores] == [3.0] * 16
    assert all(problem.columns["nums"] for problem in asked)


def _object(name: str) -> Callable[..., Any]:
    from sparkgrpo.trainer.tasks.reward_call import load_reference

    found = load_reference(f"{FILE}:{name}")
    assert callable(found)
    return found


def test_every_kind_of_number(functions: Open) -> None:
    result = scored(functions("every_kind"), count=8)
    assert rewards(result) == [1.5, 2.0, 1.0, 0.5, 3.0, 1.0, 0.25, None]
    assert result.scores[-1].reason == "not_applicable"
    for name in ("as_array", "as_tensor", "as_generator"):
        assert rewards(scored(functions(name), count=8)) == [float(row) for row in range(8)]


def test_weights_and_parts(functions: Open) -> None:
    """The weighted sum over the functions that did not return None; raw values as parts; equal names are told apart."""
    found = functions("fast", "none_for_short", "always_none", "fast", weights=(1.0, 10.0, 100.0, 0.5))
    asked = [Completion(text=text, token_ids=(), is_truncated=False) for text in ("long text", "s")]
    result = found.score(problems(2), asked, [OK] * 2, LATER)
    assert rewards(result) == [11.5, 1.5]
    assert result.scores[0].parts == {"fast": 1.0, "none_for_short": 1.0, "fast_2": 1.0}
    assert result.scores[1].parts == {"fast": 1.0, "fast_2": 1.0}
    nobody = scored(functions("always_none", "always_none"), count=4)
    assert rewards(nobody) == [None] * 4 and {score.reason for score in nobody.scores} == {"not_applicable"}
    with pytest.raises(UserError, match="reward_weights: expected one for each of 2 reward functions, got 1"):
        functions("fast", "length", weights=(1.0,))


def test_async_functions_run_together(functions: Open) -> None:
    for names in (("waits", "is_waited_for"), (_object("waits"), _object("is_waited_for"))):
        result = scored(functions(*names, "fast"), count=8)
        assert rewards(result) == [6.0] * 8, result.warnings


def test_logs(functions: Open) -> None:
    result = scored(functions("logs"), count=8)
    assert rewards(result) == [4009.0] * 8
    assert result.metrics == {"mean_length": 6.0}
    assert result.extras == {"upper": [f"TEXT {row}" for row in range(8)]}
    wrong = scored(functions("logs_too_few"), count=8)
    assert rewards(wrong) == [1.0] * 8 and wrong.extras == {"column": [1] * 8}, "one value is right for a single row"


def test_the_reason_is_that_of_the_strict_check(functions: Open) -> None:
    task = Countdown(CountdownOptions())
    problem = make_problem([3, 7, 4], 40)
    asked = [
        Completion(text=f"<answer>{answer}</answer>", token_ids=(), is_truncated=False)
        for answer in ("(3+7)*4", "3+7+4", "lol")
    ]
    verdicts = [task.verify(problem, answer) for answer in asked]
    result = functions("countdown_reward_func").score([problem] * 3, asked, verdicts, LATER)
    assert [(score.reward, score.reason) for score in result.scores] == [
        (1.0, "ok"),
        (0.0, "wrong_value"),
        (0.0, "bad_char"),
    ]
    unverified = functions("fast").score([problem] * 3, asked, [UNVERIFIED] * 3, LATER)
    assert {score.reason for score in unverified.scores} == {"scored"}


# The table: what happens, the row, the counts, the run.


@pytest.mark.parametrize("as_object", [False, True])
def test_values_that_are_no_numbers_leave_their_rows_unscored(functions: Open, as_object: bool) -> None:
    result = scored(functions(_object("wrong_kinds") if as_object else "wrong_kinds"), FIRST)
    assert rewards(result) == [None] * 11 + [1.0] * (NUM_ROWS - 11)
    assert [score.reason for score in result.scores] == ["reward_error"] * 11 + ["wrong_value"] * (NUM_ROWS - 11)
    assert "no value for 11 of 128 completions" in result.warnings[0]


@pytest.mark.parametrize("as_object", [False, True])
def test_an_exception_costs_the_rows_that_raise_again(functions: Open, as_object: bool) -> None:
    result = scored(functions(_object("raises_on_bad") if as_object else "raises_on_bad"), bad_row=BAD_ROW)
    only_bad_is_lost(result)
    assert result.num_restarts == 0 and "it raised KeyError: 'a bad row' (reward_" in result.warnings[0]
    assert "\n" not in result.warnings[0] and "\n    raise KeyError" in result.tracebacks[0]


@pytest.mark.parametrize("name", ["raises", "exits_politely"])
def test_an_exception_everywhere_costs_every_row(functions: Open, name: str) -> None:
    result = scored(functions(name), count=8)
    assert rewards(result) == [None] * 8 and {score.reason for score in result.scores} == {"reward_error"}


@pytest.mark.parametrize("as_object", [False, True])
def test_an_exception_in_step_1_stops_with_its_place(functions: Open, as_object: bool) -> None:
    found = functions(_object("raises_on_bad") if as_object else "raises_on_bad")
    sentence = (
        r"^reward: raises_on_bad raised KeyError: 'a bad row' \(reward_functions.py line \d+\) in step 1; .*again$"
    )
    with pytest.raises(UserError, match=sentence) as caught:
        scored(found, FIRST, bad_row=BAD_ROW)
    assert "Traceback" in caught.value.details and "\n    raise KeyError" in caught.value.details


@pytest.mark.parametrize(("name", "why"), [("sleeps_on_bad", "no answer within"), ("dies_on_bad", "exit code 7")])
@pytest.mark.parametrize("state", [FIRST, LATER])
def test_a_lost_process_costs_the_row_that_lost_it(functions: Open, name: str, why: str, state: TrainerState) -> None:
    """The batch, then the row itself: two processes are replaced, and the run goes on, in step 1 too."""
    found = functions(name, timeout_s=1.0)
    start_s = time.monotonic()
    result = scored(found, state, bad_row=BAD_ROW)
    took_s = time.monotonic() - start_s
    only_bad_is_lost(result)
    assert result.num_restarts == 2 and why in result.warnings[0]
    if name == "sleeps_on_bad":
        both = "all 128 together: no answer within 1 s; one alone: no answer within 0.25 s"
        assert result.warnings == [f"reward sleeps_on_bad: no value for 1 of 128 completions; {both}"]
    assert took_s < 25, "1 s for the batch, 0.25 for the row, and two starts of a process"
    assert rewards(scored(found)) == [1.0] * NUM_ROWS, "the next batch has a process"


def only_bad_is_lost(result: UserScores) -> None:
    assert [row for row, reward in enumerate(rewards(result)) if reward is None] == [BAD_ROW]
    assert result.scores[BAD_ROW].reason == "reward_error" and result.scores[0].reason == "wrong_value"


def test_a_function_that_always_hangs_costs_bounded_time(functions: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the deadline and a grace, whatever the number of rows."""
    monkeypatch.setattr(user, "RERUN_GRACE_S", 1.0)
    found = functions("spins", timeout_s=0.5)
    start_s = time.monotonic()
    result = scored(found)
    took_s = time.monotonic() - start_s
    assert rewards(result) == [None] * NUM_ROWS and took_s < 0.5 + 2 * 0.5 + 1 + 10


def test_deadlines_of_async_functions(functions: Open) -> None:
    """One that waits is cut off alone; one that blocks the loop is killed with it. The others keep their values."""
    found = functions("sleeps_in_the_loop", "is_waited_for", timeout_s=0.5)
    result = scored(found, count=8, bad_row=5)
    assert [score.reward for score in result.scores] == [4.0] * 5 + [None] + [4.0] * 2
    assert result.scores[5].parts == {"is_waited_for": 3.0} and result.num_restarts == 0
    blocked = functions("blocks_the_loop", timeout_s=0.5)
    result = scored(blocked, count=4, bad_row=2)
    assert rewards(result) == [1.0, 1.0, None, 1.0] and result.num_restarts == 2


def test_an_error_in_one_of_several_leaves_the_row_unscored(functions: Open) -> None:
    """A partial sum would be another reward; the parts that are known stay."""
    result = scored(functions("fast", "raises_on_bad"), bad_row=BAD_ROW)
    only_bad_is_lost(result)
    assert result.scores[BAD_ROW].parts == {"fast": 1.0} and result.scores[0].reward == 2.0


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("too_few", "1 values"),
        ("too_many", "129 values"),
        ("one_number", "one float"),
        ("nothing", "one NoneType"),
        ("a_text", "one str"),
    ],
)
@pytest.mark.parametrize("as_object", [False, True])
def test_another_number_of_values_stops(functions: Open, name: str, got: str, as_object: bool) -> None:
    found = functions(_object(name) if as_object else name)
    with pytest.raises(ValueError, match=f"{name} returned {got}, expected a list of 128 values"):
        scored(found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_a_column", "needs_a_column requires the parameter 'targte', .* the nearest is 'target'"),
        ("by_place_only", "the parameter 'completions' cannot be given by keyword"),
        ("lenght", "has no 'lenght'; did you mean 'length'"),
        ("BAD", "expected a function, got str"),
    ],
)
def test_what_cannot_be_called_is_refused_at_start(functions: Open, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        functions(name)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py:f", r"there is no file /\S+/nowhere.py; expected file.py:name"),
        ("no_such_module_here:f", "No module named 'no_such_module_here'"),
    ],
)
def test_references_that_lead_nowhere(reference: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardFunctions([reference], columns=COLUMNS, is_plain=False, timeout_s=5, warn=print)


def test_a_file_that_raises_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(completions):\n    return []\n1 / 0\n")
    sentence = r"^reward: \S+broken.py:f cannot be loaded: ZeroDivisionError: [\w ]+ \(broken.py line 3\)$"
    with pytest.raises(UserError, match=sentence) as caught:
        RewardFunctions([f"{path}:f"], columns=COLUMNS, is_plain=False, timeout_s=5, warn=print)
    assert "Traceback" in caught.value.details


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 0.5\n")
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_rewards import VALUE\n"
        "@dataclass\nclass Pay:\n    value: float\n"
        "def f(completions):\n    return [Pay(VALUE).value for _ in completions]\n"
    )
    found = RewardFunctions([f"{path}:f"], columns=COLUMNS, is_plain=False, timeout_s=5, warn=print)
    assert rewards(scored(found, count=4)) == [0.5] * 4
    found.close()


def test_columns_must_not_hide_what_every_function_gets(functions: Open) -> None:
    with pytest.raises(
        UserError, match="the column 'prompts' has the name of an argument that reward functions get anyway"
    ):
        functions("fast", columns=COLUMNS | {"prompts"})


def test_python_objects_run_in_a_thread_and_say_so(functions: Open) -> None:
    """Closures, partial objects and objects with state; a deadline can only report."""
    found = functions(
        lambda completions, **kwargs: [0.5] * len(completions),
        functools.partial(lambda bonus, completions: [bonus] * len(completions), 2.0),
        _object("stateful"),
    )
    assert "a Python object runs in a thread, where its deadline can only report" in found.notes[0]
    assert found.names == ("lambda", "lambda_2", "Stateful")
    first, second = scored(found, count=4), scored(found, count=4)
    assert rewards(second) == [(reward or 0.0) + 1 for reward in rewards(first)], "the state stays"
    assert not functions("fast").notes


def test_a_late_python_object_is_waited_for_and_reported(functions: Open) -> None:
    told: list[str] = []
    found = functions(_object("sleeps_a_little"), timeout_s=0.1, warn=told.append)
    assert rewards(scored(found, count=4)) == [1.0] * 4
    assert len(told) == 1 and "no answer within 0.1 s; a Python object cannot be stopped" in told[0]


def test_a_column_of_a_problem_that_no_process_can_get_is_named(functions: Open) -> None:
    problem = Problem(prompt=(1, 2), columns={"nums": [1], "target": {3}}, identity="mine:1")
    answers = completions(1)
    with pytest.raises(
        UserError, match=r"reward_functions.py:fast: problem '\[1, 2\]': the column 'target' holds a set"
    ):
        functions("fast").score([problem], answers, [OK], LATER)


def test_that_a_python_object_is_late_is_said_once(functions: Open) -> None:
    """A batch that fails late runs again row by row, and each row is late too."""

    def late_and_wrong(completions: list[str]) -> list[float]:
        time.sleep(0.05)
        raise OSError("no line")

    told: list[str] = []
    found = functions(late_and_wrong, timeout_s=0.01, warn=told.append)
    assert rewards(scored(found, count=4)) == [None] * 4
    scored(found, count=4)
    assert len(told) == 1


@pytest.mark.parametrize("text", ["\ud800", "\x00", "\U0001f600" * 9, "</answer>", "\u2028\r\n"])
def test_any_text_arrives_as_it_is(functions: Open, text: str) -> None:
    asked = [Completion(text=text, token_ids=(2**31 - 1, 0), is_truncated=False)]
    assert rewards(functions("length").score(problems(1), asked, [OK], LATER)) == [float(len(text))]
    assert rewards(functions("sees").score(problems(1), asked, [OK], LATER)) == [float(2**31 - 1)]


def test_little_time_beside_the_function_s_own(functions: Open, fastest_s: Callable[..., float]) -> None:
    """128 completions of 256 tokens: 1.3 to 2.2 ms were measured; the bound allows for a busy machine."""
    found = functions("fast")
    asked, ids = problems(), tuple(range(256))
    answers = [Completion(text="word " * 200, token_ids=ids, is_truncated=False) for _ in range(NUM_ROWS)]
    verdicts: Sequence[Score] = [OK] * NUM_ROWS
    assert fastest_s(lambda: found.score(asked, answers, verdicts, LATER), tries=20) < 0.02


def test_nothing_is_left_behind(functions: Open) -> None:
    found = functions("fast", "length")
    pids = [pid for channel in found._channels for pid in channel._pool.pids()]
    found.close()
    assert len(pids) == 2
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_sums_are_finite(functions: Open) -> None:
    """Weights can carry a finite value beyond the range of floats."""
    found = functions(lambda completions: [1e308] * len(completions), weights=(10.0,))
    result = scored(found, count=2)
    assert all(reward is None or math.isfinite(reward) for reward in rewards(result))


def test_a_strict_check_that_could_not_judge_does_not_call_a_reward_an_error(functions: Open) -> None:
    failed = Score(reward=None, parts={}, reason="reward_error")
    found = functions("fast").score(problems(3), completions(3), [OK, failed, UNVERIFIED], LATER)
    assert [(score.reward, score.reason) for score in found.scores] == [
        (1.0, "wrong_value"), (1.0, "scored"), (1.0, "scored"),
    ]  # fmt: skip
