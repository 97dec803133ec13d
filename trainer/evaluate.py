"""Held-out accuracy: one completion a problem, greedy by default, judged by the task's strict check alone."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import PURPOSE_EVAL, Dialogue, derived_key
from sparkgrpo.trainer.metrics import SCORED
from sparkgrpo.trainer.reward_check import RewardCheck
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Sampling
from sparkgrpo.trainer.tasks.base import Completion, EvaluationReport, Problem, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One pass over the held-out problems."""

    report: Mapping[str, float | None] = field(default_factory=dict)
    """What the task adds to the line: a constant guess, say."""

    problems: Sequence[Problem]
    completions: Sequence[Completion]
    scores: Sequence[Score]

    @property
    def accuracy(self) -> float | None:
        """Share of right answers; None for a task without a strict check. What could not be judged is left out."""
        judged = self._judged
        return fmean(judged) if judged else None

    @property
    def _judged(self) -> list[bool]:
        return [score.is_right for score in self.scores if score.reward is not None and score.reason != SCORED]

    def row(self, step: int) -> dict[str, object]:
        """The line of evals.jsonl."""
        n, p = len(self.scores), self.accuracy
        bits = "".join(str(int(score.is_right)) for score in self.scores)
        counts = Counter(score.reason for score in self.scores)
        rewards = [score.reward for score in self.scores if score.reward is not None]
        return {
            "step": step,
            "num_problems": n,
            "accuracy": p,
            "accuracy_se": None if p is None else math.sqrt(p * (1 - p) / len(self._judged)),
            "right_bits": f"{int(bits, 2):0{-(-n // 4)}x}",
            "reward_mean": fmean(rewards) if rewards else None,
            "len_mean": fmean(len(completion.token_ids) for completion in self.completions),
            "frac_truncated": fmean(completion.is_truncated for completion in self.completions),
            **self.report,
            **{f"reason/{reason}": count / n for reason, count in sorted(counts.items())},
        }


def evaluate(
    engine: RolloutEngine,
    dialogue: Dialogue,
    check: RewardCheck,
    problems: Sequence[Problem],
    config: Config,
) -> Evaluation:
    """Answer every problem once with the engine's weights as they are now; streams are problem indices.

    Args:
        check: Asks the task for verdicts; one that could not be had is a fault of `check.take_faults`.

    The key is the same at every step, so that with a temperature too evaluations differ by the weights alone.

    Raises:
        UserError: A prompt that is too long for the model, by name.
        FloatingPointError: The logits are not finite.
    """
    prompts = dialogue.prompts(problems, engine.model.config, config.max_new_tokens)
    sampling = Sampling(temperature=config.eval_temperature, max_new_tokens=config.max_new_tokens)
    rollout = engine.generate(prompts, 1, sampling, derived_key(config.seed, PURPOSE_EVAL, 0))
    completions = dialogue.completions(rollout)
    task = check.task
    check.start_scoring(problems, completions)
    scores = check.verdicts(problems, completions)
    if all(score.reward is None and score.reason == SCORED for score in scores):
        # No strict check: what training pays is all there is to see. Verdicts that failed are another matter.
        scores = check.scores(problems, completions)
    has_report = isinstance(task, EvaluationReport)
    report = task.evaluation_report(problems, completions, scores) if has_report else {}
    return Evaluation(problems=problems, completions=completions, scores=scores, report=report)
