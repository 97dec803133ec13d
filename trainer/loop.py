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
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Rollout, Sampling
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score, Task
from sparkgrpo.trainer.update import Updater


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves: its metrics, and the batch for people to look at; one entry a completion, in one order."""

    metrics: dict[str, MetricValue]
    num_prompt_tokens: int
    """Every prompt once."""
    problems: Sequence[Problem]
    completions: Sequence[Completion]
    scores: Sequence[Score]
    advantages: Sequence[float]


class GrpoLoop:
    """One training step after another.

    Args:
        task: Gives problems and judges answers. heldout: The problems of every evaluation.
        dialogue: Problems to ids and back.
        engine: Samples with the policy's weights. updater: Changes them.
        clock: Times the phases; a step is begun and ended by the caller.
    """

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        heldout: Sequence[Problem],
        dialogue: Dialogue,
        engine: RolloutEngine,
        updater: Updater,
        clock: PhaseClock,
    ) -> None:
        self.config, self.task, self.heldout, self.dialogue = config, task, heldout, dialogue
        self.engine, self.updater, self.clock = engine, updater, clock
        self.seen_reasons: set[str] = set()

    def step(self, step: int) -> StepResult:
        """Step 1, 2, ...: the batch is problems (step - 1) N .. step N - 1 of the run's stream.

        Raises:
            UserError: A prompt that is too long for the model, by name.
            FloatingPointError: The policy's logits are not finite.
        """
        config, clock = self.config, self.clock
        cursor = (step - 1) * config.prompts_per_step
        problems = self.task.problems(config.seed, cursor, config.prompts_per_step)
        prompts = self.dialogue.prompts(problems, self.engine.model.config, config.max_new_tokens)
        with clock.phase("t_gen"):
            rollout = self._sample(prompts, step, cursor)
        group_S = rollout.prompt_of_row_S.tolist()
        with clock.phase("t_reward"):
            asked = [problems[n] for n in group_S]
            completions = self.dialogue.completions(rollout)
            scores = self.task.reward(asked, completions)
            verdicts = [self.task.verify(problem, answer) for problem, answer in zip(asked, completions, strict=True)]
        graded = advantages([score.reward for score in scores], group_S, config.advantage)
        takes_part_S = graded.is_scored_S
        if config.mask_truncated:
            takes_part_S = takes_part_S & ~torch.tensor(rollout.is_truncated())
        batch = TrainBatch.of(prompts, rollout, graded.advantage_S)
        learned = self.updater.update(batch, takes_part_S, learning_rate(config, step))
        return StepResult(
            metrics={"step": step, **self._batch_metrics(rollout, completions, scores, verdicts), **learned},
            num_prompt_tokens=rollout.stats.num_prompt_tokens,
            problems=asked,
            completions=completions,
            scores=scores,
            advantages=graded.advantage_S.tolist(),
        )

    def evaluate(self) -> Evaluation:
        """Held-out accuracy of the weights as they are."""
        with self.clock.phase("t_eval"):
            return evaluate(self.engine, self.dialogue, self.task, self.heldout, self.config)

    def _sample(self, prompts: Sequence[Sequence[int]], step: int, cursor: int) -> Rollout:
        """G completions of every prompt; a problem's randomness is called by its place in the run's stream."""
        config = self.config
        return self.engine.generate(
            prompts,
            config.group_size,
            Sampling(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
            derived_key(config.seed, PURPOSE_ROLLOUT, step),
            streams=range(cursor, cursor + len(prompts)),
        )

    def _batch_metrics(
        self,
        rollout: Rollout,
        completions: Sequence[Completion],
        scores: Sequence[Score],
        verdicts: Sequence[Score],
    ) -> dict[str, MetricValue]:
        """What is known before the update."""
        reasons = [score.reason for score in scores]
        self.seen_reasons |= set(reasons)
        batch = Batch(
            group_ids=rollout.prompt_of_row_S.tolist(),
            rewards=[score.reward for score in scores],
            is_right=[score.is_right for score in scores],
            is_right_strict=[verdict.is_right for verdict in verdicts],
            reasons=reasons,
            parts=[score.parts for score in scores],
            lengths=rollout.length_S.tolist(),
            is_truncated=rollout.is_truncated(),
            texts=[completion.token_ids for completion in completions],
        )
        return {
            "num_prompts": len(completions) // self.config.group_size,
            "group_size": self.config.group_size,
            "num_tokens": rollout.stats.num_new_tokens,
            "t_gen_prefill": rollout.stats.t_prefill_s,
            "t_gen_decode": rollout.stats.t_decode_s,
            "frac_slots_alive": rollout.stats.frac_slots_alive,
            "decode_gbps": rollout.stats.decode_gbps,
            "graph_coverage": rollout.stats.graph_coverage,
            **batch_metrics(batch, seen_reasons=self.seen_reasons),
        }
