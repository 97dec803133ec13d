"""Word problems that need no data: made by rule, told in our own words, with a worked solution and a whole-number gold.

Eleven families occur in training (`word_families.py`); three never do, so that their accuracy tells whether something
was learnt beyond the families. Columns, prompt and rewards are those of GSM8K.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sparkgrpo.trainer.tasks.base import OK, Completion, KeyedDraws, Problem, Score, is_heldout, stream_key
from sparkgrpo.trainer.tasks.gsm8k import (
    DEFAULT_HELDOUT_FRAC,
    NumberGrader,
    NumberRewardOptions,
    gold_of,
    numeric_report,
    question_prompt,
)
from sparkgrpo.trainer.tasks.number_text import NUMBER_REASONS
from sparkgrpo.trainer.tasks.records import text_digest
from sparkgrpo.trainer.tasks.word_families import HELDOUT_FAMILIES, TRAINING_FAMILIES
from sparkgrpo.trainer.tasks.word_tale import MAX_STEPS, Tale, distractor

MAX_HELDOUT_FRAC, MAX_REDRAWS, MAX_STALE_DRAWS, NUM_GUESSED_FROM = 0.9, 10_000, 5_000, 1_000
DISTRACTOR_ONE_IN = 3
"""Every so many problems, on average, have a sentence that has nothing to do with the question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WordProblemsOptions:
    """How much is held out, and what training pays."""

    heldout_frac: float | None = None
    """Share of the training families' problems that is kept for evaluation, 0 to 0.9; None: 0.05."""
    grading: NumberRewardOptions = field(default_factory=NumberRewardOptions)
    """What training pays."""
    is_flexible: bool = False
    """Whether an evaluation also reports the last number in the text."""

    def __post_init__(self) -> None:
        if self.heldout_frac is not None and not 0 <= self.heldout_frac <= MAX_HELDOUT_FRAC:
            raise ValueError(f"heldout_frac must lie in 0..{MAX_HELDOUT_FRAC}, got {self.heldout_frac}")


class WordProblems:
    """The task. See `Task` for the contract of its methods."""

    name: str = "word_problems"
    columns: frozenset[str] = frozenset({"question", "answer", "solution", "family"})
    reasons: tuple[str, ...] = NUMBER_REASONS
    num_problems: int | None = None

    def __init__(self, options: WordProblemsOptions) -> None:
        self.options = options
        self.grader = NumberGrader(options.grading)
        self._heldout_frac = DEFAULT_HELDOUT_FRAC if options.heldout_frac is None else options.heldout_frac

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Problems start .. start + count - 1 of this seed's endless stream, from the training families."""
        key = stream_key(self.name, "train", seed)
        return [self._training_problem(key, index) for index in range(start, start + count)]

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out problems: each family of all fourteen is as likely as another.

        ValueError where nothing is held out.
        """
        key = stream_key(self.name, "heldout", 0)
        families = (*TRAINING_FAMILIES, *HELDOUT_FAMILIES)
        found: dict[str, Problem] = {}
        index = num_stale = 0
        while len(found) < count and num_stale < MAX_STALE_DRAWS:
            draws = KeyedDraws(key, index)
            family = families[draws.below(len(families))]
            problem = self._drawn(draws, family, on_heldout_side=True)
            num_stale = num_stale + 1 if problem.identity in found else 0
            found.setdefault(problem.identity, problem)
            index += 1
        if len(found) < count:
            raise ValueError(f"{count} held-out problems were asked for, but only {len(found)} turned up")
        return list(found.values())

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """1.0 if the answer is the gold number, else 0.0."""
        return self.grader.verify(completion.text, gold_of(problem))

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """What the options pay for each completion."""
        pairs = zip(problems, completions, strict=True)
        return [self.grader.reward(completion, gold_of(problem)) for problem, completion in pairs]

    @cached_property
    def constant_guess(self) -> str:
        """The most frequent gold of a thousand training problems."""
        golds = [str(problem.columns["answer"]) for problem in self.problems(0, 0, NUM_GUESSED_FROM)]
        return Counter(golds).most_common(1)[0][0]

    def evaluation_report(
        self, problems: Sequence[Problem], completions: Sequence[Completion], verdicts: Sequence[Score]
    ) -> Mapping[str, float | None]:
        """Accuracy on the families that training never has, the constant guess, and the last number if asked for."""
        unseen = [
            verdict.reason == OK
            for problem, verdict in zip(problems, verdicts, strict=True)
            if problem.columns["family"] in HELDOUT_FAMILIES
        ]
        report = numeric_report(problems, completions, self.constant_guess, is_flexible=self.options.is_flexible)
        return {"heldout_family_accuracy": sum(unseen) / len(unseen) if unseen else None, **report}

    def _training_problem(self, key: int, index: int) -> Problem:
        draws = KeyedDraws(key, index)
        families = tuple(TRAINING_FAMILIES)
        return self._drawn(draws, families[draws.below(len(families))], on_heldout_side=False)

    def _drawn(self, draws: KeyedDraws, family: str, *, on_heldout_side: bool) -> Problem:
        """The next problem of a family on this side of the split; the whole of a held-out family is held out."""
        for _ in range(MAX_REDRAWS):
            problem = make_problem(draws, family)
            if family in HELDOUT_FAMILIES or is_heldout(problem.identity, self._heldout_frac) == on_heldout_side:
                return problem
        raise ValueError(f"heldout_frac {self._heldout_frac} holds out no problem of the family {family}: raise it")


def make_problem(draws: KeyedDraws, family: str) -> Problem:
    """A problem of a family from the draws of its index."""
    tell = (TRAINING_FAMILIES | HELDOUT_FAMILIES)[family]
    tale = Tale(draws=draws, num_steps=1 + draws.below(MAX_STEPS))
    question = tell(tale)
    if draws.below(DISTRACTOR_ONE_IN) == 0:
        place = 1 + draws.below(len(tale.sentences))
        tale.sentences.insert(place, distractor(tale))
    text = " ".join([*tale.sentences, question])
    return Problem(
        prompt=question_prompt(text),
        columns={
            "question": text,
            "answer": str(tale.value),
            "solution": "\n".join([*tale.steps, f"#### {tale.value}"]),
            "family": family,
        },
        identity=f"word_problems:{family}:{text_digest(text)}",
    )
