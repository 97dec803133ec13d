"""The GRPO step: sample, score, grade each answer against its group, update.

    problems -> prompt ids -> G completions each -> rewards -> advantages -> packed tokens -> one weight change

Every random number is keyed by (seed, step, problem, completion, position), so a step depends on the weights, the step
and the place in the stream of problems, and on nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.advantages import advantages
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import PURPOSE_ROLLOUT, Dialogue, derived_key
from sparkgrpo.trainer.evaluate import Evaluation, evaluate
from sparkgrpo.trainer.metrics import Batch, MetricValue, batch_metrics
from sparkgrpo.trainer.model.lora import Lora
from sparkgrpo.trainer.optim import learning_rate
from sparkgrpo.trainer.problem_stream import Drawn, ProblemStream
from sparkgrpo.trainer.reference import move_reference
from sparkgrpo.trainer.reward_check import RewardCheck
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Rollout, Sampling
from sparkgrpo.trainer.sampling_rounds import Round, Sampled, sample_batch
from sparkgrpo.trainer.shaping import shaped_rewards
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score, StepObserver, StepReport, Task
from sparkgrpo.trainer.update import Updater


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves: its metrics, and the batch for people to look at; one entry a completion, in one order.

    With dynamic sampling these are the completions of every round, groups that were not trained on included.
    """

    metrics: dict[str, MetricValue]
    num_prompt_tokens: int
    """Every prompt once."""
    problems: Sequence[Problem]
    completions: Sequence[Completion]
    scores: Sequence[Score]
    advantages: Sequence[float]
    """0 for completions that were not trained on."""
    warnings: Sequence[str]
    """What went wrong on the way and did not stop the step, a sentence each."""
    tracebacks: Sequence[str]
    """The whole of what users' functions raised, for events.jsonl alone."""
    extras: Mapping[str, Sequence[object]]
    """What reward functions keep beside the samples, by column."""


class GrpoLoop:
    """One training step after another.

    Args:
        task: Gives problems and judges answers. heldout: The problems of every evaluation.
        dialogue: Problems to ids and back.
        engine: Samples with the policy's weights. updater: Changes them.
        clock: Times the phases; a step is begun and ended by the caller.
        lora: Adapters that are merged into the engine's weights before every rollout; None where the engine samples
            with the policy's own storage.
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
        lora: Lora | None = None,
    ) -> None:
        self.config, self.task, self.heldout, self.dialogue = config, task, heldout, dialogue
        self.engine, self.updater, self.clock = engine, updater, clock
        self.lora = lora
        self.stream = ProblemStream(config, task, dialogue, engine.model.config)
        self.reward_check = RewardCheck(task, truncated_reward=config.truncated_reward)
        self.seen_reasons: set[str] = set()
        self.num_extra_problems = 0
        """Problems of the stream that were taken beyond prompts_per_step a step: replaced, or passed over."""
        self.num_prompts_dropped = 0
        """Of these, passed over because their prompts were too long."""
        self.unscored_in_a_row = 0
        """Newest steps without one scored completion."""

    def step(self, step: int) -> StepResult:
        """Step 1, 2, ...: takes the next problems of the run's stream.

        Raises:
            UserError: A prompt that is too long for the model, by index and name.
            FloatingPointError: The policy's logits are not finite.
        """
        config = self.config
        if isinstance(self.task, StepObserver):
            self.task.begin_step(step, config.prompts_per_step)
        start = (step - 1) * config.prompts_per_step + self.num_extra_problems
        sampled = sample_batch(config, self.stream, start, lambda drawn: self._round(drawn, step))
        self.num_extra_problems += sampled.end - start - config.prompts_per_step
        self.num_prompts_dropped += sampled.num_dropped
        is_scored = any(score.reward is not None for score in sampled.scores)
        self.unscored_in_a_row = 0 if is_scored else self.unscored_in_a_row + 1
        rewards = shaped_rewards([score.reward for score in sampled.scores], sampled.rollout.length_S.tolist(), config)
        batch, takes_part_S, advantage_S = self._graded(sampled, rewards)
        report = self.task.take_report() if isinstance(self.task, StepObserver) else StepReport()
        learned = self.updater.update(batch, takes_part_S, learning_rate(config, step))
        reference = self.updater.reference
        if reference is not None and config.sync_every and step % config.sync_every == 0:
            with self.clock.phase("t_opt"):
                move_reference(reference, self.updater.model, config.sync_mix)
        return StepResult(
            metrics={"step": step, **self._batch_metrics(sampled, rewards), **report.metrics, **learned},
            num_prompt_tokens=sampled.rollout.stats.num_prompt_tokens,
            problems=sampled.asked,
            completions=sampled.completions,
            scores=sampled.scores,
            advantages=advantage_S.tolist(),
            warnings=list(dict.fromkeys([*self.reward_check.take_faults(), *report.warnings])),  # each once
            tracebacks=list(dict.fromkeys(report.tracebacks)),
            extras=report.extras,
        )

    def evaluate(self) -> Evaluation:
        """Held-out accuracy of the weights as they are."""
        with self.clock.phase("t_eval"):
            self._merge()
            return evaluate(self.engine, self.dialogue, self.reward_check, self.heldout, self.config)

    def _round(self, drawn: Drawn, step: int) -> Round:
        """G completions of every problem, and what they are worth."""
        with self.clock.phase("t_gen"):
            rollout = self._sample(drawn, step)
        with self.clock.phase("t_reward"):
            asked = [drawn.problems[n] for n in rollout.prompt_of_row_S.tolist()]
            completions = self.dialogue.completions(rollout)
            self.reward_check.start_scoring(asked, completions)
            scores = self.reward_check.scores(asked, completions)
            verdicts = self.reward_check.verdicts(asked, completions)
        return Round(
            drawn=drawn, rollout=rollout, asked=asked, completions=completions, scores=scores, verdicts=verdicts
        )

    def _sample(self, drawn: Drawn, step: int) -> Rollout:
        """A problem's randomness is called by its place in the run's stream."""
        config = self.config
        self._merge()
        return self.engine.generate(
            drawn.prompts,
            config.group_size,
            Sampling(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
            derived_key(config.seed, PURPOSE_ROLLOUT, step),
            streams=drawn.places,
        )

    def _merge(self) -> None:
        if self.lora is not None:
            self.lora.merge()

    def _graded(
        self, sampled: Sampled, rewards: Sequence[float | None]
    ) -> tuple[TrainBatch, torch.Tensor, torch.Tensor]:
        """The batch of the groups that are kept, who takes part in it, and the advantage of every sampled completion.

        Advantages are made of the kept groups alone, so that a spread over the batch is that of the batch.
        """
        config, rollout = self.config, sampled.rollout
        is_kept_S = torch.tensor(sampled.is_kept_N)[rollout.prompt_of_row_S.long()]
        kept = is_kept_S.nonzero()[:, 0].tolist()
        group_of_row = rollout.prompt_of_row_S.tolist()
        graded = advantages(
            [rewards[s] for s in kept], [group_of_row[s] for s in kept], config.advantage, ddof=config.ddof
        )
        advantage_S = torch.zeros(len(rewards), dtype=torch.float64)
        advantage_S[is_kept_S] = graded.advantage_S
        takes_part_S = graded.is_scored_S
        if config.mask_truncated:
            takes_part_S = takes_part_S & ~torch.tensor(rollout.is_truncated())[is_kept_S]
        batch = TrainBatch.of(sampled.prompts, rollout, advantage_S).of_prompts(sampled.is_kept_N)
        return batch, takes_part_S, advantage_S

    def _batch_metrics(self, sampled: Sampled, rewards: Sequence[float | None]) -> dict[str, MetricValue]:
        """What is known before the update, of everything that was sampled."""
        rollout, completions = sampled.rollout, sampled.completions
        reasons = [score.reason for score in sampled.scores]
        self.seen_reasons |= set(reasons)
        batch = Batch(
            group_ids=rollout.prompt_of_row_S.tolist(),
            rewards=rewards,
            is_right=[score.is_right for score in sampled.scores],
            is_right_strict=[None if v.reward is None else v.is_right for v in sampled.verdicts],
            reasons=reasons,
            parts=[score.parts for score in sampled.scores],
            lengths=rollout.length_S.tolist(),
            is_truncated=rollout.is_truncated(),
            texts=[completion.token_ids for completion in completions],
        )
        return {
            "num_prompts": len(sampled.prompts),
            "group_size": self.config.group_size,
            "num_rounds": sampled.num_rounds,
            "num_prompts_trained": sum(sampled.is_kept_N),
            "num_prompts_dropped": self.num_prompts_dropped,
            "num_reward_restarts": 0,
            "num_tokens": rollout.stats.num_new_tokens,
            "t_gen_prefill": rollout.stats.t_prefill_s,
            "t_gen_decode": rollout.stats.t_decode_s,
            "frac_slots_alive": rollout.stats.frac_slots_alive,
            "decode_gbps": rollout.stats.decode_gbps,
            "graph_coverage": rollout.stats.graph_coverage,
            **batch_metrics(batch, seen_reasons=self.seen_reasons),
        }
