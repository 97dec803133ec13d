"""GSM8K: grade-school word problems from a file or the hub, and the rewards for answers that are numbers.

A row has `question` and `answer`; the gold is what follows the last #### of the answer. The data do not ship: they come
from `--data` (a JSONL file, a folder with train.jsonl and test.jsonl, or a hub name such as openai/gsm8k).

`NumberGrader` is what the tasks with numeric answers share: the strict check, and what training pays, which is either
right answers alone or the lesson's five parts. The parts are linear scans where the lesson has lazy patterns.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Literal

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.metrics import MANY_ANSWERS
from sparkgrpo.trainer.tasks.answer_block import has_many_answers
from sparkgrpo.trainer.tasks.base import (
    OK,
    Completion,
    Message,
    Problem,
    Score,
)
from sparkgrpo.trainer.tasks.number_text import NUMBER_REASONS, judge_number, last_number, read_answer, read_number
from sparkgrpo.trainer.tasks.records import Record, load_splits, split_by_identity, text_digest

SYSTEM_PROMPT = (
    "Answer in this form, with every tag on a line of its own:\n"
    "<reasoning>\nyour steps\n</reasoning>\n<answer>\nthe number\n</answer>"
)
DEFAULT_HELDOUT_FRAC = 0.05
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberRewardOptions:
    """What training pays for an answer that is a number. Nothing here changes what `verify` calls right."""

    reward: Literal["five", "correct"] = "five"
    """five: the sum of the lesson's five parts, at most 4.0; correct: 1.0 for the right number."""
    xmlcount_floor: float | None = None
    """Least that the part xmlcount pays, at most 0; None: no floor, as in the lesson."""

    def __post_init__(self) -> None:
        if self.reward not in ("five", "correct"):
            raise ValueError(f"reward must be 'five' or 'correct', got {self.reward!r}")
        if self.xmlcount_floor is not None and not self.xmlcount_floor <= 0:
            raise ValueError(f"xmlcount_floor must be at most 0, got {self.xmlcount_floor}")
        if self.xmlcount_floor is not None and self.reward != "five":
            raise ValueError("xmlcount_floor needs reward 'five': the other pays no xmlcount")


def xmlcount(text: str) -> float:
    """0.125 for each of four tags in its place, less 0.001 for each character after the closing tag.

    The lesson's arithmetic to the letter: without a line `</answer>` that a line break ends, the third term subtracts
    0.001 for every character of the text, so the part has no floor.
    """
    paid = 0.0
    if text.count("<reasoning>\n") == 1:
        paid += 0.125
    if text.count("\n</reasoning>\n") == 1:
        paid += 0.125
    if text.count("\n<answer>\n") == 1:
        paid += 0.125 - 0.001 * _num_chars_behind(text, "\n</answer>\n")
    if text.count("\n</answer>") == 1:
        paid += 0.125 - 0.001 * (_num_chars_behind(text, "\n</answer>") - 1)
    return paid


def _num_chars_behind(text: str, mark: str) -> int:
    """Characters behind the last mark as `split` finds it (from the left, without overlap); all of them without it."""
    return len(text) if mark not in text else len(text.split(mark)[-1])


def soft_format(text: str) -> float:
    """0.5 where `</reasoning>`, white space and `<answer>` stand in a row, opened before and closed after."""
    start = text.find("<reasoning>")
    close = text.find("</reasoning>", start + len("<reasoning>")) if start >= 0 else -1
    last_end = text.rfind("</answer>")
    while 0 <= close < last_end:
        behind = close + len("</reasoning>")
        opening = text.find("<answer>", behind)
        if opening < 0 or opening + len("<answer>") > last_end:
            return 0.0
        following = text.find("</reasoning>", behind, opening)
        if following < 0:
            if not text[behind:opening].strip():
                return 0.5
            following = text.find("</reasoning>", opening)
        close = following
    return 0.0


def strict_format(text: str) -> float:
    """0.5 for the four tags, each once and alone on its line, with nothing outside; a last line break may follow."""
    is_once = all(text.count(tag) == 1 for tag in TAGS)
    has_middle = "\n</reasoning>\n<answer>\n" in text
    has_ends = text.startswith("<reasoning>\n") and text.removesuffix("\n").endswith("\n</answer>")
    return 0.5 if is_once and has_middle and has_ends else 0.0


@dataclass(frozen=True, slots=True)
class NumberGrader:
    """The two judgements of answers that are numbers: the strict check, and what training pays."""

    options: NumberRewardOptions = field(default_factory=NumberRewardOptions)

    def verify(self, text: str, gold: Fraction) -> Score:
        """1.0 for the gold number in the place of the answer, else 0.0."""
        reason = judge_number(read_answer(text), gold)
        return Score(reward=float(reason == OK), parts=self._plain_parts(text, reason), reason=reason)

    def reward(self, completion: Completion, gold: Fraction) -> Score:
        """What the options pay; the reason is the strict check's."""
        text = completion.text
        reading = read_answer(text)
        reason = judge_number(reading, gold)
        if self.options.reward == "five":
            floor = self.options.xmlcount_floor
            five = {
                "xmlcount": xmlcount(text) if floor is None else max(floor, xmlcount(text)),
                "soft_format": soft_format(text),
                "strict_format": strict_format(text),
                "int": 0.5 if reading.value is not None and reading.value.denominator == 1 else 0.0,
                "correctness": 2.0 if reason == OK else 0.0,
            }
            paid, parts = sum(five.values()), {**five, MANY_ANSWERS: float(has_many_answers(text))}
        else:
            paid, parts = float(reason == OK), self._plain_parts(text, reason)
        return Score(reward=paid, parts=parts, reason=reason)

    @staticmethod
    def _plain_parts(text: str, reason: str) -> Mapping[str, float]:
        return {"correct": float(reason == OK), MANY_ANSWERS: float(has_many_answers(text))}


def gold_of(problem: Problem) -> Fraction:
    """The number in the column `answer`, which was readable when the problem was made."""
    value = read_number(str(problem.columns["answer"])).value
    assert value is not None, "an unreadable gold is an error of the data, found when they are loaded"
    return value


def number_text(value: Fraction) -> str:
    """A gold as its column holds it: digits alone for an integer, a decimal fraction where it ends, else a quotient."""
    return str(value.numerator) if value.denominator == 1 else str(float(value))


def question_prompt(question: str) -> tuple[Message, ...]:
    """What the model sees: the request for the four tags, then the question."""
    return ({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question})


def numeric_report(
    problems: Sequence[Problem], completions: Sequence[Completion], constant_guess: str | None, *, is_flexible: bool
) -> dict[str, float | None]:
    """What stands beside the accuracy of numeric answers.

    Args:
        constant_guess: The most frequent gold in training. is_flexible: Whether the last number anywhere counts too.
    """
    golds = [gold_of(problem) for problem in problems]
    guess = None if constant_guess is None else read_number(constant_guess).value
    report: dict[str, float | None] = {"constant_guess": sum(gold == guess for gold in golds) / max(len(golds), 1)}
    if is_flexible:
        hits = [last_number(answer.text) == gold for answer, gold in zip(completions, golds, strict=True)]
        report["accuracy_flexible"] = sum(hits) / max(len(hits), 1)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class Gsm8kOptions:
    """Where the rows come from, and what training pays."""

    data: str = ""
    """JSONL file, folder with train.jsonl and test.jsonl, or hub name; must be given."""
    heldout_frac: float | None = None
    """Share of questions kept out of training where the data have no test split; None: 0.05."""
    grading: NumberRewardOptions = field(default_factory=NumberRewardOptions)
    """What training pays."""
    is_flexible: bool = False
    """Whether an evaluation also reports the last number in the text."""


class Gsm8k:
    """The task. See `Task` for the contract of its methods."""

    name: str = "gsm8k"
    columns: frozenset[str] = frozenset({"question", "answer"})
    reasons: tuple[str, ...] = NUMBER_REASONS

    def __init__(self, options: Gsm8kOptions) -> None:
        if not options.data:
            raise UserError(
                "data: GSM8K does not ship with sparkgrpo; expected --data train.jsonl (a file with question and "
                "answer in each line) or --data openai/gsm8k (from the hub, with the extra: pip install "
                "'sparkgrpo[data]')"
            )
        self.options = options
        self.grader = NumberGrader(options.grading)
        splits = load_splits(options.data, default_config="main")
        train = [_problem(record) for record in splits.train]
        test = None if splits.test is None else [_problem(record) for record in splits.test]
        split = split_by_identity(train, test, options.heldout_frac, DEFAULT_HELDOUT_FRAC, splits.source)
        self._split, self.notes = split, split.notes
        self.num_dropped = split.num_dropped
        self.num_problems: int | None = len(split.train)

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Training rows start .. start + count - 1 of this seed's stream, which walks all of them once an epoch."""
        return self._split.training_problems(self.name, seed, start, count)

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` held-out rows of a fixed order, or all there are."""
        return self._split.heldout_problems(self.name, count)

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """1.0 if the answer is the gold number, else 0.0."""
        return self.grader.verify(completion.text, gold_of(problem))

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """What the options pay for each completion."""
        pairs = zip(problems, completions, strict=True)
        return [self.grader.reward(completion, gold_of(problem)) for problem, completion in pairs]

    @cached_property
    def constant_guess(self) -> str:
        """The most frequent gold of the training rows: what a model that knows nothing could always say."""
        return Counter(str(problem.columns["answer"]) for problem in self._split.train).most_common(1)[0][0]

    def evaluation_report(
        self, problems: Sequence[Problem], completions: Sequence[Completion], verdicts: Sequence[Score]
    ) -> Mapping[str, float | None]:
        """The accuracy of the constant guess, and that of the last number where asked for."""
        return numeric_report(problems, completions, self.constant_guess, is_flexible=self.options.is_flexible)


def _problem(record: Record) -> Problem:
    """One row. `UserError` with its place when a field is missing or the gold cannot be read."""
    question, answer = record.text("question"), record.text("answer")
    _, mark, behind = answer.rpartition("####")
    value = read_number(behind).value if mark else None
    if value is None:
        raise UserError(
            f"{record.place}: expected an answer whose last line is #### and a number, got {answer[-60:]!r}; "
            "for rows with plain answers use --task rows"
        )
    return Problem(
        prompt=question_prompt(question),
        columns={"question": question, "answer": number_text(value)},
        identity=f"gsm8k:{text_digest(question)}",
    )
