"""Reward functions of users: each in a scoring process that can be killed, and nothing they do is ever turned into 0.

    what happens                       the row                                      the run
    NaN, infinity, wrong type          unscored, `reward_error`                     goes on
    exception                          the batch runs again row by row;             step 1: stops with its place,
                                       rows that fail again are unscored            later: goes on
    deadline, death of the process     the same, in fresh processes                 goes on
    another number of values           -                                            stops

An error of one of several functions leaves the row unscored: a partial sum is another reward. A reference
("file.py:name") runs in a process; a Python object runs in a thread of the trainer, where a deadline can only report.
Functions that are `async` run together in one event loop. The calls themselves are made by `reward_call.py`.
"""

import difflib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.metrics import REWARD_ERROR, SCORED
from sparkgrpo.trainer.tasks.base import NOT_APPLICABLE, Completion, Problem, Score
from sparkgrpo.trainer.tasks.reward_call import GIVEN, Reply, RewardFunction, describe, packed_ids
from sparkgrpo.trainer.tasks.reward_channels import Channel, ProcessChannel, ThreadChannel, last_line
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Level
from sparkgrpo.trainer.tasks.verl import PREFIX as VERL
from sparkgrpo.trainer.tasks.verl import VerlChannel

MIN_ROW_S, LOOP_GRACE_S, RERUN_GRACE_S = 0.25, 2.0, 10.0
ROW_PART = 0.25
"""Of the batch's deadline, what a row alone gets while there is time: a call may cost the same for one as for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """What a function sees as `trainer_state`, by the names that TRL's has."""

    global_step: int
    """Steps done before this one."""
    max_steps: int
    """Steps of the run."""
    epoch: float | None = None
    """How often the data have been walked through; None for an endless stream."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a function gave no value for a row."""

    text: str
    traceback: str = ""
    """What the function raised; empty where it raised nothing."""


Value = float | Failure | None


@dataclass(frozen=True, kw_only=True, slots=True)
class UserScores:
    """What the functions of a run gave to one batch."""

    scores: Sequence[Score]
    metrics: Mapping[str, float]
    """What functions logged, each the mean over the batch."""
    extras: Mapping[str, Sequence[object]]
    """Values by column, one for each completion."""
    num_restarts: int
    """Processes that were replaced meanwhile."""
    warnings: Sequence[str]
    """The first error of each function that had any, a sentence each."""
    tracebacks: Sequence[str] = ()
    """The whole of these, where functions raised."""


@dataclass(slots=True)
class _Batch:
    """What one batch came to so far."""

    values: dict[str, list[Value]] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[object]] = field(default_factory=dict)
    parts: dict[int, dict[str, float]] = field(default_factory=dict)
    """More parts of a row, by its number."""
    num_rows: int = 0

    def take(self, name: str, reply: Reply, rows: Sequence[int]) -> None:
        """Keep the values of a function for some rows, and what it logged."""
        kept = self.values.setdefault(name, [None] * self.num_rows)
        for row, value in zip(rows, reply["values"], strict=True):
            kept[row] = Failure(value["bad"]) if isinstance(value, dict) else value
        for row, more in zip(rows, reply.get("parts", ()), strict=False):
            self.parts.setdefault(row, {}).update(more)
        for metric, number in reply["metrics"]:
            self.logged.setdefault(metric, []).append(number)
        for column, values in reply["extras"].items():
            column_values = self.extras.setdefault(column, [None] * self.num_rows)
            for row, value in zip(rows, values, strict=True):
                column_values[row] = value


class RewardFunctions:
    """The reward functions of a run and their weights.

    Args:
        functions: References ("file.py:name", "package.module:name") or Python objects.
        weights: One for each function; none: 1.0 each.
        columns: What the data set has beside the prompt.
        is_plain: Prompts and completions are given as text, not as chat messages.
        timeout_s: Deadline of a batch, for each function.
        warn: Told at once what cannot wait for the end of the step.
        sandbox, is_unsafe_allowed: The walls around functions in verl's contract.

    Raises:
        UserError: A function that cannot be loaded or called with these columns; the nearest column is named.
    """

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any]],
        *,
        weights: Sequence[float] = (),
        columns: frozenset[str],
        is_plain: bool,
        timeout_s: float,
        warn: Callable[[str], None],
        sandbox: Level = "strict",
        is_unsafe_allowed: bool = False,
    ) -> None:
        if weights and len(weights) != len(functions):
            raise UserError(
                f"reward_weights: expected one for each of {len(functions)} reward functions, got {len(weights)}"
            )
        taken = sorted(columns & set(GIVEN))
        if taken:
            raise UserError(
                f"data: the column {taken[0]!r} has the name of an argument that reward functions get anyway"
            )
        self._is_plain, self._timeout_s = is_plain, timeout_s
        self._sandbox: Level = sandbox
        self._is_unsafe_allowed = is_unsafe_allowed
        named = _with_names(functions)
        self.names: tuple[str, ...] = tuple(name for name, _ in named)
        self.weights = dict(zip(self.names, weights or [1.0] * len(named), strict=True))
        self._channels: list[Channel] = []
        try:
            self._is_async: dict[str, bool] = self._open(named, columns, warn)
        except BaseException:
            self.close()
            raise
        in_thread = [name for name, function in named if not isinstance(function, str)]
        self.notes: tuple[str, ...] = ()
        if in_thread:
            self.notes = (
                f"reward {', '.join(in_thread)}: a Python object runs in a thread, where its deadline can only report",
            )

    def _open(
        self, named: Sequence[tuple[str, object]], columns: frozenset[str], warn: Callable[[str], None]
    ) -> dict[str, bool]:
        """A channel for each function, and one for all that are async. Returns which are."""
        is_async: dict[str, bool] = {}
        references = [(name, function) for name, function in named if isinstance(function, str)]
        objects = [RewardFunction.of(function, name) for name, function in named if not isinstance(function, str)]
        opened: list[tuple[Channel, tuple[str, str]]] = []
        for name, reference in references:
            if reference.startswith(VERL):
                channel: Channel = VerlChannel(
                    name,
                    reference.removeprefix(VERL),
                    self._timeout_s,
                    sandbox=self._sandbox,
                    is_unsafe_allowed=self._is_unsafe_allowed,
                )
            else:
                channel = ProcessChannel([(name, reference)], self._timeout_s)
            self._channels.append(channel)
            opened.append((channel, (name, reference)))
        for channel, (name, _) in opened:
            is_async[name] = _checked(name, channel.describe()[0], columns)
        together = [(channel, pair) for channel, pair in opened if is_async[pair[0]]]
        if len(together) > 1:
            for channel, _ in together:
                channel.close()
                self._channels.remove(channel)
            self._channels.append(ProcessChannel([pair for _, pair in together], self._timeout_s))
        for function, facts in zip(objects, describe(objects), strict=True):
            is_async[function.name] = _checked(function.name, facts, columns)
        groups = [[f] for f in objects if not f.is_async] + [[f for f in objects if f.is_async]]
        self._channels += [ThreadChannel(group, self._timeout_s, warn) for group in groups if group]
        return is_async

    def score(
        self,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        verdicts: Sequence[Score],
        state: TrainerState,
    ) -> UserScores:
        """Call every function on a batch.

        Args:
            problems, completions: A problem for each completion.
            verdicts: The strict check's, whose reason a scored row gets.
            state: `trainer_state`; at `global_step` 0 an exception ends the run.

        Raises:
            UserError: A function raised in step 1, or returned another number of values.
        """
        restarts_before = sum(channel.num_restarts for channel in self._channels)
        batch = _Batch(num_rows=len(completions))
        all_rows = range(len(completions))
        pending = []
        for channel in self._channels:
            job = self._job(problems, completions, all_rows, channel.names, state)
            pending.append((channel, channel.submit(job, self._timeout_s)))
        for channel, future in pending:
            replies = channel.wait(future)
            failed: dict[str, Failure] = {}
            for name, reply in zip(channel.names, replies, strict=True):
                if "values" in reply:
                    batch.take(name, reply, all_rows)
                else:
                    failed[name] = _why_failed(name, reply, len(completions), is_first=state.global_step == 0)
            if failed:
                self._row_by_row(channel, failed, batch, problems, completions, state)
        return self._summed(batch, verdicts, sum(channel.num_restarts for channel in self._channels) - restarts_before)

    def close(self) -> None:
        """End processes and threads."""
        for channel in self._channels:
            channel.close()

    def _job(
        self,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        rows: Sequence[int],
        names: Sequence[str],
        state: TrainerState,
    ) -> dict[str, Any]:
        """A call for some rows; a problem travels once, however many completions it has."""
        place_of: dict[int, int] = {}
        unique: list[dict[str, Any]] = []
        problem_of_row = []
        for row in rows:
            problem = problems[row]
            if id(problem) not in place_of:
                place_of[id(problem)] = len(unique)
                unique.append({"prompt": _prompt(problem, is_plain=self._is_plain), "columns": problem.columns})
            problem_of_row.append(place_of[id(problem)])
        return {
            "do": "score",
            "only": list(names),
            "problems": unique,
            "problem_of_row": problem_of_row,
            "texts": [completions[row].text for row in rows],
            "ids": packed_ids([completions[row].token_ids for row in rows]),
            "lengths": [len(completions[row].token_ids) for row in rows],
            "state": {"global_step": state.global_step, "max_steps": state.max_steps, "epoch": state.epoch},
            "is_plain": self._is_plain,
            "grace_s": LOOP_GRACE_S if any(self._is_async[name] for name in names) else 0.0,
        }

    def _row_by_row(
        self,
        channel: Channel,
        failed: Mapping[str, Failure],
        batch: _Batch,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        state: TrainerState,
    ) -> None:
        """Find the rows that a function fails on. What is not reached in twice the deadline stays unscored."""
        num_rows = len(completions)
        end_s = time.monotonic() + 2 * self._timeout_s + RERUN_GRACE_S
        for name, why in failed.items():
            batch.values[name] = [why] * num_rows
        for row in range(num_rows):
            if time.monotonic() > end_s:
                return
            row_s = _row_s(self._timeout_s, num_rows, num_rows - row, end_s - time.monotonic())
            job = self._job(problems, completions, [row], list(failed), state)
            for name, reply in zip(failed, channel.wait(channel.submit(job, row_s)), strict=True):
                if "values" in reply:
                    batch.take(name, reply, [row])
                    continue
                why = _why_failed(name, reply, 1, is_first=False)
                if not why.traceback:  # two limits are in play: the one that people set, and that of the row
                    why = Failure(f"all {num_rows} together: {failed[name].text}; one alone: {why.text}")
                batch.values[name][row] = why

    def _summed(self, batch: _Batch, verdicts: Sequence[Score], num_restarts: int) -> UserScores:
        scores = []
        for row, verdict in enumerate(verdicts):
            values = {name: batch.values[name][row] for name in self.names}
            known = {name: value for name, value in values.items() if isinstance(value, float)}
            if any(isinstance(value, Failure) for value in values.values()):
                scores.append(Score(reward=None, parts=known, reason=REWARD_ERROR))
            elif not known:
                scores.append(Score(reward=None, parts={}, reason=NOT_APPLICABLE))
            else:
                total = sum(self.weights[name] * value for name, value in known.items())
                if not math.isfinite(total):  # finite values with weights that carry them out of range
                    scores.append(Score(reward=None, parts=known, reason=REWARD_ERROR))
                    continue
                parts = known | batch.parts.get(row, {})
                # A check that could not judge says nothing about a reward that is there.
                reason = SCORED if verdict.reward is None else verdict.reason
                scores.append(Score(reward=total, parts=parts, reason=reason))
        warnings, tracebacks = [], []
        for name in self.names:
            failures = [value for value in batch.values[name] if isinstance(value, Failure)]
            if failures:
                warnings.append(
                    f"reward {name}: no value for {len(failures)} of {len(verdicts)} completions; {failures[0].text}"
                )
                tracebacks += [failures[0].traceback] if failures[0].traceback else []
        metrics = {metric: sum(found) / len(found) for metric, found in batch.logged.items()}
        return UserScores(
            scores=scores,
            metrics=metrics,
            extras=batch.extras,
            num_restarts=num_restarts,
            warnings=warnings,
            tracebacks=tracebacks,
        )


def _row_s(timeout_s: float, num_rows: int, num_left: int, left_s: float) -> float:
    """Deadline of a row alone: a quarter of the batch's, less where rows that hang have eaten up the rerun's `left_s`.

    Every row that is left keeps its even share, so that those that hang take nothing from those behind them.
    """
    share_s = max(timeout_s / num_rows, min(timeout_s, MIN_ROW_S))
    spare_s = left_s - num_left * share_s
    return max(share_s, min(ROW_PART * timeout_s, share_s + ROW_PART * spare_s))


def _with_names(functions: Sequence[str | Callable[..., Any]]) -> list[tuple[str, object]]:
    """Each function with the name of its part; a name that comes again gets a number."""
    named: list[tuple[str, object]] = []
    for function in functions:
        name = function.rpartition(":")[2] if isinstance(function, str) else RewardFunction.of(function).name
        taken = [other for other, _ in named]
        number = next(n for n in range(1, len(taken) + 2) if (name if n == 1 else f"{name}_{n}") not in taken)
        named.append((name if number == 1 else f"{name}_{number}", function))
    return named


def _checked(name: str, facts: Mapping[str, Any], columns: frozenset[str]) -> bool:
    """Whether the function is async; `UserError` when it cannot be called with these columns."""
    if facts["problem"]:
        raise UserError(f"reward: {name}: {facts['problem']}")
    known = sorted({*GIVEN, *columns})
    for parameter in facts["required"]:
        if parameter not in known:
            near = difflib.get_close_matches(parameter, known, n=1, cutoff=0.0)[0]
            raise UserError(
                f"reward: {name} requires the parameter {parameter!r}, which is no column of the data; the nearest is "
                f"{near!r}; there are {', '.join(known)}"
            )
    return bool(facts["is_async"])


def _why_failed(name: str, reply: Reply, num_rows: int, *, is_first: bool) -> Failure:
    """What went wrong, for people. `UserError` where the run must not go on."""
    if "length" in reply:
        raise UserError(
            f"reward: {name} returned {reply['length']}, expected a list of {num_rows} values, one for each completion"
        )
    if "error" not in reply:
        return Failure(str(reply.get("late") or reply["lost"]))
    traceback = str(reply["error"])
    said = str(reply.get("said") or last_line(traceback))
    if is_first:
        raise UserError(f"reward: {name} raised {said} in step 1; mend it and start again", details=traceback)
    return Failure(f"it raised {said}", traceback)


def _prompt(problem: Problem, *, is_plain: bool) -> Any:  # noqa: ANN401
    """A prompt as functions see it: text, messages, or token ids."""
    if is_plain:
        return "\n".join(message["content"] for message in problem.prompt if not isinstance(message, int))
    return [message if isinstance(message, int) else dict(message) for message in problem.prompt]
