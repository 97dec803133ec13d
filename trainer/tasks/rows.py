"""Rows of any data set as a task: a prompt column, perhaps an answer column, and a checker that compares.

    number   the number in the place of the answer equals that of the answer column (`number_text.py`)
    exact    the text in the place of the answer is the answer column's, white space around it aside
    math     math-verify finds them equal, in a confined process
    file.py:name   a function, called like a reward function; right is what it gives at least 1.0

The place of the answer is the last <answer> block, else the line after ####, else \\boxed{}: the prompt has to ask for
one. Without an answer column there is no strict check, and reward functions judge alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.metrics import MANY_ANSWERS, SCORED
from sparkgrpo.trainer.tasks.answer_block import has_many_answers
from sparkgrpo.trainer.tasks.base import (
    OK,
    UNVERIFIED,
    Completion,
    Message,
    Problem,
    Score,
)
from sparkgrpo.trainer.tasks.number_text import NUMBER_REASONS, answer_field, judge_number, read_answer, read_number
from sparkgrpo.trainer.tasks.records import Record, Splits, check_json, split_by_identity, text_digest

DEFAULT_HELDOUT_FRAC = 0.05
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOptions:
    """Which columns hold what, and how answers are compared."""

    prompt_column: str = "prompt"
    """The prompt: text, or a list of chat messages."""
    answer_column: str = ""
    """The right answer; empty: there is no strict check."""
    checker: str = "number"
    """number or exact; others are given to `Rows` as a function."""
    heldout_frac: float | None = None
    """Share of the rows kept out of training where the data have no test split; None: 0.05, at least one row."""
    is_for_process: bool = False
    """A function in a process of its own gets the columns, so they must hold what JSON can."""


Check = Callable[[str, object], str]
"""From the text of a completion and the answer of its row to a reason code; `ok` is right."""


class Rows:
    """The task. See `Task` for the contract of its methods.

    Args:
        splits: The rows.
        check: The comparison of a checker that is not in this file.
        reasons: Its codes.
    """

    name: str = "rows"

    def __init__(
        self, options: RowsOptions, splits: Splits, check: Check | None = None, reasons: Sequence[str] = ()
    ) -> None:
        self.options = options
        self._check, self.reasons = self._chosen_check(check, reasons)
        self.columns: frozenset[str] = frozenset(splits.train[0].fields) - {options.prompt_column}
        self.has_text_prompts = isinstance(splits.train[0].fields.get(options.prompt_column), str)
        """Prompts are text and not chat messages: reward functions get prompts and completions as text too."""
        problems = [self._problem(record) for record in splits.train]
        test = None if splits.test is None else [self._problem(record) for record in splits.test]
        split = split_by_identity(problems, test, options.heldout_frac, DEFAULT_HELDOUT_FRAC, splits.source)
        self._split, self.notes = split, split.notes
        self.num_problems: int | None = len(split.train)

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Training rows start .. start + count - 1 of this seed's stream, which walks all of them once an epoch."""
        return self._split.training_problems(self.name, seed, start, count)

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out rows of a fixed order, or all there are."""
        return self._split.heldout_problems(self.name, count)

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """1.0 if the checker finds the answer right, else 0.0; `UNVERIFIED` without an answer column."""
        if not self.options.answer_column:
            return UNVERIFIED
        reason = self._check(completion.text, problem.columns[self.options.answer_column])
        parts = {"correct": float(reason == OK), MANY_ANSWERS: float(has_many_answers(completion.text))}
        return Score(reward=float(reason == OK), parts=parts, reason=reason)

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """The strict check is what training pays where no functions are given."""
        return [self.verify(problem, completion) for problem, completion in zip(problems, completions, strict=True)]

    def _chosen_check(self, check: Check | None, reasons: Sequence[str]) -> tuple[Check, tuple[str, ...]]:
        if not self.options.answer_column:
            return _exact, (SCORED,)
        if check is not None:
            return check, tuple(reasons)
        if self.options.checker == "number":
            return _same_number, NUMBER_REASONS
        return _exact, ("no_answer", "empty", "wrong_value", OK)

    def _problem(self, record: Record) -> Problem:
        """One row. `UserError` with its place for a column that is missing or of the wrong kind."""
        options = self.options
        prompt = record.fields.get(options.prompt_column)
        if prompt is None:
            raise UserError(
                f"{record.place}: no column {options.prompt_column!r}; there are {', '.join(map(str, record.fields))}: "
                "name it with --prompt-column"
            )
        columns = {name: value for name, value in record.fields.items() if name != options.prompt_column}
        if columns.keys() != self.columns:
            odd = sorted(columns.keys() ^ self.columns)[0]
            raise UserError(
                f"{record.place}: expected the columns of the first row, but {odd!r} is in one and not both"
            )
        if isinstance(prompt, str) != self.has_text_prompts:
            raise UserError(f"{record.place}: expected a prompt like the first row's: all text, or all chat messages")
        messages = _messages(prompt, record.place)
        if options.is_for_process:
            check_json(columns, record.place)
        if options.answer_column:
            self._check_answer(columns, record)
        text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return Problem(prompt=messages, columns=columns, identity=f"rows:{text_digest(text)}")

    def _check_answer(self, columns: Mapping[str, object], record: Record) -> None:
        name = self.options.answer_column
        answer = columns.get(name)
        if answer is None:
            raise UserError(f"{record.place}: no answer in the column {name!r}; name another with --answer-column")
        if self._check is _same_number and _gold(answer) is None:
            raise UserError(
                f"{record.place}: expected one number in {name!r}, got {str(answer)[:60]!r}; "
                "for answers that are text use --checker exact"
            )


def _messages(prompt: object, place: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, (list, tuple)) and prompt:
        messages = []
        for message in prompt:
            is_message = isinstance(message, Mapping) and isinstance(message.get("content"), str)
            if not is_message or message.get("role") not in ROLES:
                raise UserError(
                    f"{place}: expected chat messages with a role ({', '.join(ROLES)}) and a content, "
                    f"got {str(message)[:60]!r}"
                )
            messages.append({"role": str(message["role"]), "content": str(message["content"])})
        return tuple(messages)
    raise UserError(f"{place}: expected a prompt that is text or a list of chat messages, got {str(prompt)[:60]!r}")


def _gold(answer: object) -> Fraction | None:
    """The number of an answer column: a number, text that reads as one, or GSM8K's form, in which #### precedes it."""
    if isinstance(answer, bool):
        return None
    return read_number(str(answer).rpartition("####")[2]).value


def _same_number(text: str, answer: object) -> str:
    gold = _gold(answer)
    assert gold is not None, "an unreadable answer is an error of the data, found when they are loaded"
    return judge_number(read_answer(text), gold)


def _exact(text: str, answer: object) -> str:
    field = answer_field(text)
    if field is None:
        return "no_answer"
    if not field.strip():
        return "empty"
    return OK if field.strip() == str(answer).strip() else "wrong_value"
