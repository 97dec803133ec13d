"""The policy update: one batch of completions -> optimiser steps, and what they measured.

With one update a batch the old log-probs are the new ones detached, so the first ratio is exactly 1 and costs nothing;
with several they are scored once, before the first. Reference, old policy and policy run on the same micro-batches, so
before any update their log-probs agree bit for bit and the KL is exactly 0.

Letters: S completions, R completion tokens.
"""

import math

import torch

from sparkgrpo.kernels.linear_grpo import GrpoLoss, linear_grpo
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import MicroBatch, TrainBatch, micro_batches, rows_with_gradient
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.objectives import objective_of, token_weights
from sparkgrpo.trainer.optim import MasterAdamW, OptimStats
from sparkgrpo.trainer.score import head_hidden, score


class Updater:
    """Turns graded batches into weight changes.

    Args:
        model: The policy. reference: The frozen start, or None with beta 0. optim: The policy's optimiser.
        num_valid: len(tokenizer); head rows from there on do not exist.
        tokens_per_micro_batch: Packed tokens of one forward and backward.
        clock: Gets t_old, t_ref, t_train and t_opt.
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
    ) -> None:
        self.model, self.reference, self.optim, self.config = model, reference, optim, config
        self.objective = objective_of(config)
        self.num_valid = num_valid
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.clock = clock

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
        has_one_update = config.mini_batches == config.inner_epochs == 1
        refs = self._score_all("t_ref", self.reference, minis)
        olds = self._score_all("t_old", None if has_one_update else self.model, minis)
        tokens, steps = TokenStats(), []
        for epoch in range(config.inner_epochs):
            for mini, mini_refs, mini_olds in zip(minis, refs, olds, strict=True):
                if not mini:
                    continue  # nothing in it has a gradient: no update, and Adam's moments stay as they are
                with clock.phase("t_train"):
                    for micro, ref, old in zip(mini, mini_refs, mini_olds, strict=True):
                        loss = self._forward_backward(micro, ref, old)
                        tokens.add(micro, loss, ref, old, is_first_pass=epoch == 0)
                with clock.phase("t_opt"):
                    steps.append(self.optim.step(lr))
        metrics = tokens.metrics(num_tokens=sum(batch.length_S), mini_batches=config.mini_batches)
        return metrics | _step_metrics(steps, lr) | {"skipped_steps": self.optim.skipped_steps}

    def _mini_batch(self, batch: TrainBatch, takes_part_S: torch.Tensor, index: int) -> list[MicroBatch]:
        """Pack the prompts of one optimiser batch, with the normalisers of that batch."""
        config = self.config
        prompts_each = len(batch.prompts) // config.mini_batches
        prompt_of_row_S = torch.tensor(batch.prompt_of_row_S)
        is_member_S = takes_part_S & (prompt_of_row_S // prompts_each == index)
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
        with self.clock.phase(phase):
            return [
                [score(model, m, temperature=self.config.temperature, num_valid=self.num_valid) for m in mini]
                for mini in minis
            ]

    def _forward_backward(
        self, micro: MicroBatch, ref_logprob_R: torch.Tensor | None, old_logprob_R: torch.Tensor | None
    ) -> GrpoLoss:
        loss = linear_grpo(
            head_hidden(self.model, micro),
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
        loss.loss.backward()
        return loss

    @staticmethod
    def _all_rows(micro: MicroBatch) -> torch.Tensor:
        """A micro-batch holds rows with a gradient alone; said beforehand, nobody waits for a device to find out."""
        return torch.arange(len(micro.target_R), dtype=torch.int32, device=micro.target_R.device)


class TokenStats:
    """What each token did; kept on the device, and not looked at, until a step is over.

    A micro-batch holds rows with a gradient alone, so that every token of it takes part.
    """

    def __init__(self) -> None:
        self.loss: list[torch.Tensor] = []
        self.clip_side: list[torch.Tensor] = []
        self.ratio: list[torch.Tensor] = []
        self.kl: list[torch.Tensor] = []
        self.entropy: list[torch.Tensor] = []
        self.gap: list[torch.Tensor] = []

    def add(
        self,
        micro: MicroBatch,
        loss: GrpoLoss,
        ref_logprob_R: torch.Tensor | None,
        old_logprob_R: torch.Tensor | None,
        *,
        is_first_pass: bool,
    ) -> None:
        """Remember one micro-batch. Clip and ratio count in every pass, the rest in the first."""
        self.clip_side.append(loss.clip_side_T)
        self.ratio.append(loss.ratio_T)
        if not is_first_pass:
            return
        self.loss.append(loss.loss.detach())
        at_start_R = loss.logprob_T if old_logprob_R is None else old_logprob_R
        self.gap.append(micro.rollout_logprob_R - at_start_R)
        if ref_logprob_R is not None:  # k3, whichever estimator the loss has: runs with different ones compare
            log_ratio = ref_logprob_R - loss.logprob_T
            self.kl.append(torch.expm1(log_ratio) - log_ratio)
        if loss.entropy_T is not None:
            self.entropy.append(loss.entropy_T)

    def metrics(self, *, num_tokens: int, mini_batches: int) -> dict[str, float | int | None]:
        """Means over tokens. Where nothing was trained most are not known, and a key that is left out reads as null."""
        if not self.loss:
            return {"frac_tokens_trained": 0.0}
        gap, side = torch.cat(self.gap), torch.cat(self.clip_side)
        kl = torch.cat(self.kl) if self.kl else None
        return {
            "loss": float(torch.stack(self.loss).sum()) / mini_batches,
            "frac_tokens_trained": len(gap) / num_tokens,
            "logprob_gap_mean": float(gap.abs().mean()),
            "logprob_gap_p99": _percentile(gap.abs(), 0.99),
            "logprob_gap_max": float(gap.abs().max()),
            "logprob_gap_signed": float(gap.mean()),
            "kl_mean": None if kl is None else float(kl.mean()),
            "kl_max": None if kl is None else float(kl.max()),
            "entropy_mean": float(torch.cat(self.entropy).mean()) if self.entropy else None,
            "clip_frac": float((side != 0).float().mean()),
            "clip_frac_low": float((side < 0).float().mean()),
            "clip_frac_high": float((side > 0).float().mean()),
            "ratio_max": float(torch.cat(self.ratio).max()),
        }


def _percentile(values: torch.Tensor, frac: float) -> float:
    """The value that this share of them does not exceed (nearest rank)."""
    return float(values.kthvalue(max(1, math.ceil(frac * len(values)))).values)


def _step_metrics(steps: list[OptimStats], lr: float) -> dict[str, float | int | None]:
    done = [step for step in steps if not step.is_skipped]
    return {
        "num_updates": len(done),
        "lr": lr,
        "grad_norm": sum(step.grad_norm for step in done) / len(done) if done else None,
        "frac_params_changed": sum(step.frac_params_changed for step in done) / len(done) if done else 0.0,
    }
