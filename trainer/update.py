"""The policy update: one batch of completions -> optimiser steps, and what they measured.

With one update a batch the old log-probs are the new ones detached, so the first ratio is exactly 1 and costs nothing;
with several they are scored once, before the first. Reference, old policy and policy run on the same micro-batches, so
before any update their log-probs agree bit for bit and the KL is exactly 0.

Sampler and trainer compute the same log-probs in different precision or order. `importance_cap` weights each token by
min(trainer / sampler probability, cap), at the weights that sampled; `old_logprobs` "rollout" puts the sampler's
log-probs into the ratio itself instead. Never both: the mismatch would count twice.

Letters: S completions, R completion tokens.
"""

from dataclasses import replace

import torch

from sparkgrpo.kernels.linear_grpo import GrpoLoss, linear_grpo
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import MicroBatch, TrainBatch, micro_batches, rows_with_gradient
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.objectives import objective_of, token_weights
from sparkgrpo.trainer.optim import MasterAdamW, OptimStats
from sparkgrpo.trainer.rates import micro_batch_flops, model_shape
from sparkgrpo.trainer.score import ForwardOptions, head_hidden, score
from sparkgrpo.trainer.token_stats import TokenStats


class Updater:
    """Turns graded batches into weight changes.

    Args:
        model: The policy. reference: The frozen start, or None with beta 0. optim: The policy's optimiser.
        num_valid: len(tokenizer); head rows from there on do not exist.
        tokens_per_micro_batch: Packed tokens of one forward and backward.
        clock: Gets t_old, t_ref, t_train and t_opt.
        forward: How the decoder runs; changes no result.

    Raises:
        ValueError: beta above 0 and no reference.
    """

    def __init__(
        self,
        model: Decoder,
        reference: Decoder | None,
        optim: MasterAdamW,
        config: Config,
        *,
        num_valid: int,
        tokens_per_micro_batch: int,
        clock: PhaseClock,
        forward: ForwardOptions | None = None,
    ) -> None:
        if config.beta > 0 and reference is None:
            raise ValueError(f"expected a reference for beta {config.beta:g}, got none: pass one, or set beta to 0")
        self.model, self.reference, self.optim, self.config = model, reference, optim, config
        self.objective = objective_of(config)
        self.num_valid = num_valid
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.clock = clock
        self.forward = forward or ForwardOptions(recomputes=config.activation_checkpointing)
        self.shape = model_shape(model, num_valid)
        self.num_flops = 0
        """Forward and backward of the last update, by the shapes."""

    def update(self, batch: TrainBatch, takes_part_S: torch.Tensor, lr: float) -> dict[str, float | int | None]:
        """Run every pass over the batch.

        Args:
            batch: The completions; their weights are settled here, over each optimiser batch.
            takes_part_S: bool; completions in the normalisers and the loss.

        Returns:
            The metrics of the update, by their names in metrics.jsonl.
        """
        config, clock = self.config, self.clock
        minis = [self._mini_batch(batch, takes_part_S, index) for index in range(config.mini_batches)]
        self.num_flops = config.inner_epochs * sum(
            micro_batch_flops(self.shape, mini, is_frozen=config.lora_rank > 0) for mini in minis
        )
        refs = self._score_all("t_ref", self.reference, minis)
        olds = self._score_all("t_old", self.model if self._needs_old() else None, minis)
        tokens, steps = TokenStats(), []
        if config.importance_cap is not None:
            minis = [
                [self._corrected(micro, old, config.importance_cap, tokens) for micro, old in zip(*pair, strict=True)]
                for pair in zip(minis, olds, strict=True)
            ]
        for epoch in range(config.inner_epochs):
            for mini, mini_refs, mini_olds in zip(minis, refs, olds, strict=True):
                if not mini:
                    continue  # nothing in it has a gradient: no update, and Adam's moments stay as they are
                with clock.phase("t_train"):
                    for micro, ref, old in zip(mini, mini_refs, mini_olds, strict=True):
                        start = micro.rollout_logprob_R if config.old_logprobs == "rollout" else old
                        loss = self._forward_backward(micro, ref, start)
                        at_start = old if old is not None else None if steps else loss.logprob_T
                        tokens.add(micro, loss, ref, at_start, is_first_pass=epoch == 0)
                with clock.phase("t_opt"):
                    steps.append(self.optim.step(lr))
        metrics = tokens.metrics(num_tokens=sum(batch.length_S), mini_batches=config.mini_batches)
        return metrics | _step_metrics(steps, lr) | {"skipped_steps": self.optim.skipped_steps}

    def _needs_old(self) -> bool:
        """Whether the log-probs before the first update are scored: not where the first forward has them anyway."""
        config = self.config
        has_one_update = config.mini_batches == config.inner_epochs == 1
        return config.importance_cap is not None or (config.old_logprobs == "trainer" and not has_one_update)

    def _mini_batch(self, batch: TrainBatch, takes_part_S: torch.Tensor, index: int) -> list[MicroBatch]:
        """Pack the prompts of one optimiser batch, with the normalisers of that batch.

        Prompts are shared out in order; counts differ by one where dynamic sampling left a number that does not divide.
        """
        config = self.config
        mini_of_row_S = torch.tensor(batch.prompt_of_row_S) * config.mini_batches // max(len(batch.prompts), 1)
        is_member_S = takes_part_S & (mini_of_row_S == index)
        weight_S = token_weights(config.normaliser, torch.tensor(batch.length_S), is_member_S, config.max_new_tokens)
        rows = rows_with_gradient(batch, weight_S, has_penalty=config.beta > 0 or config.entropy_coef > 0)
        return micro_batches(
            batch, weight_S, rows, tokens_per_micro_batch=self.tokens_per_micro_batch, device=self.model.device
        )

    def _score_all(
        self, phase: str, model: Decoder | None, minis: list[list[MicroBatch]]
    ) -> list[list[torch.Tensor | None]]:
        """Log-probs of every micro-batch under a model, before any update; None throughout without a model."""
        if model is None:
            return [[None] * len(mini) for mini in minis]
        temperature, num_valid = self.config.temperature, self.num_valid
        with self.clock.phase(phase):
            return [
                [score(model, m, temperature=temperature, num_valid=num_valid, options=self.forward) for m in mini]
                for mini in minis
            ]

    @staticmethod
    def _corrected(micro: MicroBatch, old_R: torch.Tensor | None, cap: float, tokens: TokenStats) -> MicroBatch:
        """The micro-batch with its token weights times the capped importance ratio of trainer to sampler."""
        assert old_R is not None
        ratio_R = (old_R - micro.rollout_logprob_R).exp()
        factor_R = ratio_R.clamp(max=cap)
        tokens.add_importance(factor_R, ratio_R > cap)
        return replace(micro, weight_R=micro.weight_R * factor_R)

    def _forward_backward(
        self, micro: MicroBatch, ref_logprob_R: torch.Tensor | None, old_logprob_R: torch.Tensor | None
    ) -> GrpoLoss:
        loss = linear_grpo(
            head_hidden(self.model, micro, self.forward),
            self.model.head_VD,
            micro.target_R,
            micro.advantage_R,
            micro.weight_R,
            objective=self.objective,
            temperature=self.config.temperature,
            num_valid=self.num_valid,
            old_logprob_T=old_logprob_R,
            ref_logprob_T=ref_logprob_R,
            anchor_logprob_T=micro.rollout_logprob_R,
            cu_seqlens_S1=micro.cu_seqlens_S1,
            active_idx_N=self._all_rows(micro),
            grad_weight_VD=self.optim.gradient_sum(self.model.head_VD),
        )
        with self.clock.span("t_train_backward"):
            loss.loss.backward()
        return loss

    @staticmethod
    def _all_rows(micro: MicroBatch) -> torch.Tensor:
        """A micro-batch holds rows with a gradient alone; said beforehand, nobody waits for a device to find out."""
        return torch.arange(len(micro.target_R), dtype=torch.int32, device=micro.target_R.device)


def _step_metrics(steps: list[OptimStats], lr: float) -> dict[str, float | int | None]:
    done = [step for step in steps if not step.is_skipped]
    return {
        "num_updates": len(done),
        "lr": lr,
        "grad_norm": sum(step.grad_norm for step in done) / len(done) if done else None,
        "frac_params_changed": sum(step.frac_params_changed for step in done) / len(done) if done else 0.0,
    }
