"""The GRPO step: sample, score, grade each answer against its group, update.

    problems -> prompt ids -> G completions each -> rewards -> advantages -> packed tokens -> one weight change

Every random number is keyed by (seed, step, problem, completion, position), so a step depends on the weights, the step
and the data cursor, and on nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.advantages import advantages
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import PURPOSE_ROLLOUT, Dialogue, derived_key
from sparkgrpo.trainer.evaluate import Evaluation, evaluate
from sparkgrpo.trainer.metrics import Batch, MetricValue, batch_metrics
from sparkgrpo.trainer.optim import learning_rate
from sparkgrpo.trainer.rollout.engine import Rollout, RolloutEngine, Sampling
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score, Task
from sparkgrpo.trainer.update import Updater


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves: its metrics, and the batch for people to look at."""

    metrics: dict[str, MetricValue]
    problems: Sequence[Problem]
    completions: Sequence[Completion]
    scores: Sequence[Score]
    advantages: Sequence[float]


class GrpoLoop:
    """One training step after another.

    Args:
        task: Gives problems and judges answers. dialogue: Problems to ids and back.
        engine: Samples with the policy's weights. updater: Changes them.
        clock: Times the phases; a step is begun and ended by the caller.
    """

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        dialogue: Dialogue,
        engine: RolloutEngine,
        updater: Updater,
        clock: PhaseClock,
    ) -> None:
        self.config, self.task, self.dialogue = config, task, dialogue
        self.engine, self.updater, self.clock = engine, updater, clock
        self.heldout = task.heldout(config.eval_problems)
        self.seen_reasons: set[str] = set()

    def step(self, step: int) -> StepResult:
        """Step 1, 2, ...: the batch is problems (step - 1) N .. step N - 1 of the run's stream."""
        config, clock = self.config, self.clock
        cursor = (step - 1) * config.prompts_per_step
        problems = self.task.problems(config.seed, cursor, config.prompts_per_step)
        prompts = [self.dialogue.prompt_ids(problem) for problem in problems]
        with clock.phase("t_gen"):
            rollout = self.engine.generate(
                prompts,
                config.group_size,
                Sampling(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
                derived_key(config.seed, PURPOSE_ROLLOUT, step),
                streams=range(cursor, cursor + len(problems)),
            )
        with clock.phase("t_reward"):
            completions = self.dialogue.completions(rollout)
            problem_S = [problems[n] for n in rollout.prompt_of_row_S.tolist()]
            scores = self.task.reward(problem_S, completions)
            verdicts = [self.task.verify(p, c).is_right for p, c in zip(problem_S, completions, strict=True)]
        group_S = rollout.prompt_of_row_S.tolist()
        graded = advantages([score.reward for score in scores], group_S, config.advantage)
        takes_part_S = graded.is_scored_S.clone()
        if config.mask_truncated:
            takes_part_S &= ~torch.tensor(rollout.is_truncated())
        batch = _train_batch(prompts, rollout, graded.advantage_S)
        metrics: dict[str, MetricValue] = {"step": step, "num_prompts": len(prompts), "group_size": config.group_size}
        metrics |= self._batch_metrics(rollout, completions, scores, verdicts)
        metrics |= _rollout_metrics(rollout)
        metrics |= self.updater.update(batch, takes_part_S, learning_rate(config, step))
        return StepResult(
            metrics=metrics,
            problems=problem_S,
            completions=completions,
            scores=scores,
            advantages=graded.advantage_S.tolist(),
        )

    def evaluate(self) -> Evaluation:
        """Held-out accuracy of the weights as they are."""
        config = self.config
        with self.clock.phase("t_eval"):
            sampling = Sampling(temperature=config.eval_temperature, max_new_tokens=config.max_new_tokens)
            return evaluate(self.engine, self.dialogue, self.task, self.heldout, sampling=sampling, seed=config.seed)

    def _batch_metrics(
        self,
        rollout: Rollout,
        completions: Sequence[Completion],
        scores: Sequence[Score],
        verdicts: Sequence[bool],
    ) -> dict[str, MetricValue]:
        reasons = [score.reason for score in scores]
        self.seen_reasons |= set(reasons)
        return batch_metrics(
            Batch(
                group_ids=rollout.prompt_of_row_S.tolist(),
                rewards=[score.reward for score in scores],
                is_right=[score.is_right for score in scores],
                is_right_strict=verdicts,
                reasons=reasons,
                parts=[score.parts for score in scores],
                lengths=rollout.length_S.tolist(),
                is_truncated=rollout.is_truncated(),
                texts=[completion.token_ids for completion in completions],
            ),
            seen_reasons=self.seen_reasons,
        )


def _train_batch(prompts: Sequence[Sequence[int]], rollout: Rollout, advantage_S: torch.Tensor) -> TrainBatch:
    return TrainBatch(
        prompts=prompts,
        token_R=rollout.token_T.cpu(),
        logprob_R=rollout.logprob_T.cpu(),
        length_S=tuple(rollout.length_S.tolist()),
        prompt_of_row_S=tuple(rollout.prompt_of_row_S.tolist()),
        advantage_S=advantage_S,
    )


def _rollout_metrics(rollout: Rollout) -> dict[str, MetricValue]:
    stats = rollout.stats
    return {
        "num_tokens": stats.num_new_tokens,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "t_gen_prefill": stats.t_prefill_s,
        "t_gen_decode": stats.t_decode_s,
        "frac_slots_alive": stats.frac_slots_alive,
    }
