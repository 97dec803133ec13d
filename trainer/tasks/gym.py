"""Data sets of reasoning-gym (extra `gym`) as tasks: `--task gym:<dataset>`.

A problem is an entry's question; an answer is what stands in the last <answer> block, given to the data set's own
`score_answer`. Some of those evaluate the answer as Python, so they run behind walls, a fresh fork for each
(`confined_call.py`). Right is a full score; training pays the score itself.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.metrics import MANY_ANSWERS, REWARD_ERROR
from sparkgrpo.trainer.tasks.answer_block import find_answer, has_many_answers
from sparkgrpo.trainer.tasks.base import (
    OK,
    Completion,
    KeyedDraws,
    Problem,
    Score,
    StepReport,
    is_heldout,
    stream_key,
)
from sparkgrpo.trainer.tasks.confined_call import Answer, ConfinedFunctions
from sparkgrpo.trainer.tasks.records import text_digest
from sparkgrpo.trainer.tasks.sandbox.wire import Malformed, encode
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Level

PREFIX = "gym:"
SYSTEM_PROMPT = "Think step by step. Then put only the final answer inside <answer></answer>."
DEFAULT_HELDOUT_FRAC, MAX_REDRAWS, MAX_STALE_DRAWS = 0.05, 1_000, 200
MAX_ANSWER_CHARS = 1 << 16
CALL_S = 10.0
NUM_SEEDS = 1 << 31
EVALUATES_ANSWERS = {"countdown": "countdown (--task countdown)"}
"""Data sets whose score evaluates the answer, and what to take in their place."""
CHILD_FUNCTION = "gym_call:score_answer"


class Gym:
    """The task. See `Task` and `StepObserver` for the contracts of its methods; close it at the end of a run.

    Raises:
        UserError: reasoning-gym is missing, or has no such data set; its countdown is refused.
    """

    columns: frozenset[str] = frozenset({"question", "answer", "gym_seed"})
    reasons: tuple[str, ...] = ("no_answer", "empty", "too_long", REWARD_ERROR, "wrong_value", OK)
    num_problems: int | None = None

    def __init__(
        self,
        dataset: str,
        *,
        heldout_frac: float | None = None,
        sandbox: Level = "strict",
        is_unsafe_allowed: bool = False,
    ) -> None:
        if dataset in EVALUATES_ANSWERS:
            raise UserError(
                f"task: reasoning-gym's {dataset} evaluates answers as Python; use ours: {EVALUATES_ANSWERS[dataset]}"
            )
        create = _create_dataset(dataset)
        self.name: str = f"{PREFIX}{dataset}"
        self._dataset = dataset
        self._heldout_frac = DEFAULT_HELDOUT_FRAC if heldout_frac is None else heldout_frac
        self._entry: Callable[[int], dict[str, Any]] = lru_cache(1024)(
            lambda seed: create(dataset, size=1, seed=seed)[0]
        )
        self._sandbox: Level = sandbox
        self._is_unsafe_allowed = is_unsafe_allowed
        self._confined: ConfinedFunctions | None = None
        self._scored: dict[tuple[str, str], Score] = {}
        self._warnings: list[str] = []

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Entries start .. start + count - 1 of this seed's endless stream, none of them held out."""
        key = stream_key(self.name, "train", seed)
        return [self._drawn(key, index, on_heldout_side=False) for index in range(start, start + count)]

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out entries, or as many as turn up."""
        key = stream_key(self.name, "heldout", 0)
        found: dict[str, Problem] = {}
        index = num_stale = 0
        while len(found) < count and num_stale < MAX_STALE_DRAWS:
            problem = self._drawn(key, index, on_heldout_side=True)
            num_stale = num_stale + 1 if problem.identity in found else 0
            found.setdefault(problem.identity, problem)
            index += 1
        return list(found.values())

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """1.0 for a full score, else 0.0; unscored where the data set's own check failed."""
        score = self._scores([problem], [completion])[problem.identity, completion.text]
        return (
            score
            if score.reward is None
            else Score(reward=float(score.is_right), parts=score.parts, reason=score.reason)
        )

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """The data set's score, 0 to 1."""
        self.start_scoring(problems, completions)
        pairs = zip(problems, completions, strict=True)
        return [self._scored[problem.identity, answer.text] for problem, answer in pairs]

    def start_scoring(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        """Score these side by side, for `verify` and `reward` to read. Earlier ones not among them are forgotten."""
        self._scored = self._scores(problems, completions)

    def begin_step(self, step: int, num_problems: int) -> None:
        """The step has no say here; what an evaluation before it left is told with it."""

    def take_report(self) -> StepReport:
        """Why answers could not be scored."""
        warnings, self._warnings = self._warnings, []
        return StepReport(warnings=warnings)

    def close(self) -> None:
        """End the scoring processes."""
        if self._confined is not None:
            self._confined.close()
            self._confined = None

    def _scores(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> dict[tuple[str, str], Score]:
        """By identity and text; what the batch at hand has already is not asked for again."""
        keys = [(problem.identity, answer.text) for problem, answer in zip(problems, completions, strict=True)]
        found = {key: self._scored[key] for key in keys if key in self._scored}
        asked: dict[tuple[str, str], tuple[object, ...]] = {}
        for key, problem in zip(keys, problems, strict=True):
            if key in found or key in asked:
                continue
            block = find_answer(key[1])
            reason = _reason_unasked(block)
            if reason is not None:
                found[key] = _score(0.0, reason, key[1])
            else:
                assert block is not None
                asked[key] = self._arguments(problem, block.strip())
        if asked:
            if self._confined is None:  # not before it is needed: a resumed run that only asks for problems needs none
                folder = str(Path(__file__).parent)
                functions = [CHILD_FUNCTION, "reasoning_gym:create_dataset"]
                self._confined = ConfinedFunctions(
                    functions,
                    folders=[folder],
                    call_s=CALL_S,
                    sandbox=self._sandbox,
                    is_unsafe_allowed=self._is_unsafe_allowed,
                )
            answers = self._confined.call([(CHILD_FUNCTION, arguments) for arguments in asked.values()])
            for key, answer in zip(asked, answers, strict=True):
                found[key] = _of_answer(answer, key[1])
            failed = [answer for key, answer in zip(asked, answers, strict=True) if found[key].reward is None]
            if failed:
                self._warnings.append(
                    f"task {self.name}: no score for {len(failed)} of {len(answers)} answers; {_cause(failed[0])}"
                )
        return found

    def _arguments(self, problem: Problem, answer: str) -> tuple[object, ...]:
        seed = problem.columns["gym_seed"]
        assert isinstance(seed, int)
        entry = self._entry(seed)
        try:
            encode(entry)
        except Malformed:  # an entry with objects of the library: the fork makes it again
            return self._dataset, seed, None, answer
        return self._dataset, seed, entry, answer

    def _drawn(self, key: int, index: int, *, on_heldout_side: bool) -> Problem:
        draws = KeyedDraws(key, index)
        for _ in range(MAX_REDRAWS):
            problem = self._problem(draws.below(NUM_SEEDS))
            if is_heldout(problem.identity, self._heldout_frac) == on_heldout_side:
                return problem
        raise ValueError(f"heldout_frac {self._heldout_frac} leaves no entry of {self.name} on one side: change it")

    def _problem(self, seed: int) -> Problem:
        entry = self._entry(seed)
        question = str(entry["question"])
        return Problem(
            prompt=({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}),
            columns={"question": question, "answer": str(entry["answer"]), "gym_seed": seed},
            identity=f"{self.name}:{text_digest(question)}",
        )


def _create_dataset(dataset: str) -> Callable[..., Any]:
    try:
        import reasoning_gym  # the extra `gym`
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"task: gym:{dataset} needs the package reasoning-gym: pip install 'sparkgrpo[gym]' ({error})"
        ) from None
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=1)
        hint = f"; did you mean gym:{near[0]}?" if near else f"; there are {', '.join(sorted(DATASETS))}"
        raise UserError(f"task: reasoning-gym has no data set {dataset!r}{hint}")
    assert sys.modules["reasoning_gym"] is reasoning_gym
    return reasoning_gym.create_dataset


def _reason_unasked(block: str | None) -> str | None:
    if block is None:
        return "no_answer"
    if not block.strip():
        return "empty"
    return "too_long" if len(block) > MAX_ANSWER_CHARS else None


def _of_answer(answer: Answer, text: str) -> Score:
    if answer.status == "ok" and isinstance(answer.value, (int, float)) and 0 <= answer.value <= 1:
        paid = float(answer.value)
        return _score(paid, OK if paid == 1 else "wrong_value", text)
    return Score(reward=None, parts={}, reason=REWARD_ERROR)


def _cause(answer: Answer) -> str:
    """What went wrong, for people; the end of a traceback may quote what the model wrote."""
    if answer.status == "ok":
        return f"its score_answer gave {answer.value!r:.100}, expected a number from 0 to 1"
    lines = str(answer.value or "").strip().splitlines()
    return f"{answer.status}: {lines[-1]!r:.200}" if lines else answer.status


def _score(paid: float, reason: str, text: str) -> Score:
    parts = {"correct": float(reason == OK), MANY_ANSWERS: float(has_many_answers(text))}
    return Score(reward=paid, parts=parts, reason=reason)
