"""Rows of samples.jsonl: completions for people to read."""

from collections.abc import Iterator, Mapping, Sequence

from sparkgrpo.trainer.evaluate import Evaluation
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score


def sample_row(
    problem: Problem,
    completion: Completion,
    score: Score,
    *,
    step: int,
    split: str,
    index: int,
    advantage: float | None = None,
    extra: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """One completion with its judgement; `advantage` is null outside training, `extra` is what functions kept of it."""
    prompt = problem.prompt[-1]
    return {
        "sample_id": f"{step}-{split}-{index}",
        "step": step,
        "split": split,
        "problem": problem.identity,
        "prompt": str(problem.prompt) if isinstance(prompt, int) else prompt["content"],
        "completion": completion.text,
        "num_tokens": len(completion.token_ids),
        "reward": score.reward,
        "parts": dict(score.parts),
        "reason": score.reason,
        **({"detail": score.detail} if score.detail else {}),
        "finish": "length" if completion.is_truncated else "stop",
        "advantage": advantage,
        **({"extra": dict(extra)} if extra else {}),
    }


def heldout_samples(evaluation: Evaluation, step: int, count: int) -> Iterator[dict[str, object]]:
    """The first completions of an evaluation: the same problems every time, so that steps compare."""
    rows = zip(evaluation.problems, evaluation.completions, evaluation.scores, strict=True)
    for index, (problem, completion, score) in enumerate(rows):
        if index < count:
            yield sample_row(problem, completion, score, step=step, split="heldout", index=index)


def group_samples(
    problem: Problem,
    completions: Sequence[Completion],
    scores: Sequence[Score],
    advantages: Sequence[float],
    step: int,
    extras: Mapping[str, Sequence[object]] | None = None,
) -> Iterator[dict[str, object]]:
    """One whole training group; extras hold a value for each of its completions, by column."""
    for index, (completion, score) in enumerate(zip(completions, scores, strict=True)):
        extra = {column: values[index] for column, values in (extras or {}).items()}
        yield sample_row(
            problem, completion, score, step=step, split="train", index=index, advantage=advantages[index], extra=extra
        )
