"""What a task is: problems in, judgements out; and the two things that every task shares, keyed draws and the split.

A task makes problems, says what the model sees, and judges what it wrote. There are two judgements, never one: `verify`
is the strict check that accuracy and evaluation rest on, `reward` is what training pays. Their difference is the gauge
of reward hacking.

Model output is hostile: nothing here or in a task may evaluate, compile, unpickle it or match it with a backtracking
pattern.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sparkgrpo.kernels.philox import philox_words
from sparkgrpo.trainer.metrics import SCORED

NUM_FEISTEL_ROUNDS = 6

Message = Mapping[str, str]
"""One chat message: {"role": ..., "content": ...}."""

OK = "ok"
"""The reason code of a right answer, in every task. All other codes are the task's own (`Task.reasons`)."""
NOT_APPLICABLE = "not_applicable"
"""The code of a completion that no reward function judged: its reward is None. `metrics.py` has what it counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing to solve."""

    prompt: tuple[Message, ...] | tuple[int, ...]
    """Chat messages; ready token ids only in tasks that have no tokenizer (`echo`)."""
    columns: Mapping[str, object]
    """JSON values that a reward function may see, such as nums, target, answer."""
    identity: str
    """Canonical text of the problem, "countdown:3,4,7=40": equal exactly when the problems are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the model wrote for one problem."""

    text: str
    """Decoded from the completion's ids only, special tokens skipped: an example in the prompt is never graded."""
    token_ids: tuple[int, ...]
    """The sampled ids."""
    is_truncated: bool
    """True when the completion ended at the token limit and not at a stop token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The judgement on one completion."""

    reward: float | None
    """What is paid; None when the completion could not be scored (its row then carries no gradient)."""
    parts: Mapping[str, float]
    """Named components, logged as `part/<name>`; they need not add up to the reward."""
    reason: str
    """One code of the task's `reasons`, the first that applies; `ok` when the answer is right."""
    detail: str = ""
    """More about it for people, kept with samples: which tests passed. Never raw text of the model's."""

    @property
    def is_right(self) -> bool:
        """Whether this judgement calls the answer right, whatever it pays for it."""
        return self.reason == OK


UNVERIFIED = Score(reward=None, parts={}, reason=SCORED)
"""What `verify` gives in a task that has no strict check: accuracy is then not known."""


class Task(Protocol):
    """The contract between a task and the loop."""

    name: str
    """Name on the command line and first part of every identity."""
    columns: frozenset[str]
    """Keys of `Problem.columns`."""
    reasons: tuple[str, ...]
    """Every code that `verify` and `reward` can give."""
    num_problems: int | None
    """Size of a finite set of training problems; None: the stream is endless."""

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Training problems start .. start + count - 1 of the stream of this seed (start is the run's data cursor).

        Pure: the same arguments give the same problems on every machine, so a resumed run needs the cursor only.
        """
        ...

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out problems, independent of the run's seed."""
        ...

    def verify(self, problem: Problem, completion: Completion) -> Score:
        """The strict check: reward 0.0 or 1.0, and no option has a say in it. `UNVERIFIED` where there is none."""
        ...

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """What training pays for each completion; problems[i] is the problem of completions[i]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOpening:
    """A task that is ready to judge, and what it says of that."""

    task: Task
    facts: Mapping[str, object] = field(default_factory=dict)
    """JSON values for run.json."""
    notes: Sequence[str] = ()
    """Sentences for the person at the keyboard."""


@runtime_checkable
class JudgesAhead(Protocol):
    """A task that judges a batch better than one answer after the other."""

    def start_scoring(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        """Begin to judge; `verify` and `reward` of these then only wait for the rest. Earlier answers are forgotten."""
        ...


@runtime_checkable
class TaskWithProcesses(JudgesAhead, Protocol):
    """A task that judges in processes of its own: they are started once, work ahead, and are ended."""

    def open(self) -> TaskOpening:
        """Start what is needed; harmless when called twice. `UserError` where it cannot work on this machine."""
        ...

    def close(self) -> None:
        """End every process."""
        ...


@contextmanager
def opened(task: Task) -> Iterator[TaskOpening]:
    """The task with its processes, if it has any, which end with the block."""
    if not isinstance(task, TaskWithProcesses):
        yield TaskOpening(task=task)
        return
    try:
        yield task.open()
    finally:
        task.close()


def start_scoring(task: Task, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
    """Have a task that can judge ahead begin with these."""
    if isinstance(task, JudgesAhead):
        task.start_scoring(problems, completions)


@runtime_checkable
class EvaluationReport(Protocol):
    """What a task may add to the line of an evaluation, such as the accuracy of a constant guess."""

    def evaluation_report(
        self, problems: Sequence[Problem], completions: Sequence[Completion], verdicts: Sequence[Score]
    ) -> Mapping[str, float | None]:
        """Named numbers about one evaluation; None is "not known"."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What judging a step's completions left beside the scores."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the step's line, by their keys in metrics.jsonl."""
    extras: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """JSON values by column, one for each completion in the order of judging."""
    warnings: Sequence[str] = ()
    """What went wrong and did not stop the run, a sentence each."""
    tracebacks: Sequence[str] = ()
    """The whole of what users' functions raised, for events.jsonl."""


@runtime_checkable
class StepObserver(Protocol):
    """A task whose judgements know the step, or leave more than scores."""

    def begin_step(self, step: int, num_problems: int) -> None:
        """Step 1, 2, ... begins, with so many problems; it may be judged in several batches."""
        ...

    def take_report(self) -> StepReport:
        """What the batches since the last call left."""
        ...


def hash64(text: str) -> int:
    """BLAKE2b of the text as 64 bits, big-endian. `hash()` would differ from process to process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def stream_key(task_name: str, stream: str, seed: int) -> int:
    """The 64-bit Philox key of one of a task's streams, such as ("countdown", "train", 0)."""
    return hash64(f"{task_name}/{stream}/{seed}")


class KeyedDraws:
    """The random integers that belong to one index of a stream: Philox words at counter (index, block), in order.

    Depends on the key and the index only, so a problem can be made without making those before it. The methods of
    `random` are no substitute: what they draw for a seed may change with the Python version.
    """

    def __init__(self, key: int, index: int) -> None:
        self._key, self._index = key, index
        self._block_idx = 0
        self._words: list[int] = []

    def below(self, limit: int) -> int:
        """An integer in 0 .. limit - 1, uniform to one part in 2^32 / limit."""
        if not self._words:
            words = philox_words(self._key, self._index, self._index >> 32, self._block_idx)
            self._words = list(reversed(words))
            self._block_idx += 1
        return (self._words.pop() * limit) >> 32

    def shuffled(self, values: Sequence[int]) -> list[int]:
        """The values in a uniformly random order (Fisher-Yates)."""
        order = list(values)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


def place_in_order(key: int, index: int, num_items: int) -> int:
    """Which item of a finite set stands at `index` of an endless stream that walks the whole set, epoch after epoch.

    Each epoch is another permutation: a balanced Feistel network on the next power of four, walked along its cycle
    until it lands inside the set. It needs no memory and no epoch before it. Source: Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002.

    Args:
        key: Key of the stream (`stream_key`).
        index: 0, 1, ...; index // num_items is the epoch.
        num_items: Size of the set, at least 1.

    Returns:
        A number in 0 .. num_items - 1; the num_items indices of an epoch give each once.
    """
    epoch, place = divmod(index, num_items)
    num_half_bits = max(1, ((num_items - 1).bit_length() + 1) // 2)
    mask = (1 << num_half_bits) - 1
    while True:
        left, right = place >> num_half_bits, place & mask
        for round_idx in range(NUM_FEISTEL_ROUNDS):
            word = philox_words(key, right, epoch, epoch >> 32, round_idx)[0]
            left, right = right, left ^ (word & mask)
        place = left << num_half_bits | right
        if place < num_items:
            return place


def is_heldout(identity: str, heldout_frac: float) -> bool:
    """Whether a problem belongs to the held-out side of a split that holds out about `heldout_frac` of all problems.

    The identity alone decides, so training and evaluation cannot meet, whatever the seed and the order.
    """
    return hash64(identity) < heldout_frac * 2.0**64
