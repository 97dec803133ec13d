"""The policy update: one batch of completions -> optimiser steps, and what they measured.

With one update a batch the old log-probs are the new ones detached, so the first ratio is exactly 1 and costs nothing;
with several they are scored once, before the first. Reference, old policy and policy run on the same micro-batches, so
before any update their log-probs agree bit for bit and the KL is exactly 0.

Letters: S completions, R completion tokens.
"""

from collections.abc import Iterable

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
        config = self.config
        minis = [self._mini_batch(batch, takes_part_S, index) for index in range(config.mini_batches)]
        has_one_update = config.mini_batches == config.inner_epochs == 1
        with self.clock.phase("t_ref"):
            refs = [[self._score(self.reference, micro) for micro in mini] for mini in minis]
        with self.clock.phase("t_old"):
            olds = [[None if has_one_update else self._score(self.model, micro) for micro in mini] for mini in minis]
        first_pass, clip, steps = TokenStats(), TokenStats(), []
        for epoch in range(config.inner_epochs):
            for mini, mini_refs, mini_olds in zip(minis, refs, olds, strict=True):
                with self.clock.phase("t_train"):
                    for micro, ref, old in zip(mini, mini_refs, mini_olds, strict=True):
                        loss = self._forward_backward(micro, ref, old)
                        clip.add(micro, loss, old)
                        if epoch == 0:
                            first_pass.add(micro, loss, old)
                if mini:
                    with self.clock.phase("t_opt"):
                        steps.append(self.optim.step(lr))
        num_tokens = sum(batch.length_S)
        return first_pass.metrics(num_tokens) | clip.clip_metrics() | _step_metrics(steps, lr)

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

    def _score(self, model: Decoder | None, micro: MicroBatch) -> torch.Tensor | None:
        if model is None:
            return None
        return score(model, micro, temperature=self.config.temperature, num_valid=self.num_valid)

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
        )
        loss.loss.backward()
        return loss


class TokenStats:
    """Sums over the tokens that take part, kept on the device until a step is over."""

    def __init__(self) -> None:
        self.losses: list[GrpoLoss] = []
        self.gaps: list[torch.Tensor] = []

    def add(self, micro: MicroBatch, loss: GrpoLoss, old_logprob_R: torch.Tensor | None) -> None:
        """Remember one micro-batch; the trainer's log-probs before any update are `old` where it was scored."""
        self.losses.append(loss._replace(loss=loss.loss.detach()))
        at_start = loss.logprob_T if old_logprob_R is None else old_logprob_R
        self.gaps.append((micro.rollout_logprob_R - at_start)[loss.is_active_T])

    def metrics(self, num_tokens: int) -> dict[str, float | int | None]:
        """Token means of the first pass; null where nothing was trained."""
        names = [
            "loss",
            "kl_mean",
            "kl_max",
            "entropy_mean",
            "frac_tokens_trained",
            "logprob_gap_mean",
            "logprob_gap_p99",
            "logprob_gap_max",
            "logprob_gap_signed",
        ]
        if not self.losses:
            return dict.fromkeys(names, None) | {"frac_tokens_trained": 0.0}
        gap = torch.cat(self.gaps)
        values = dict.fromkeys(names, None) | {
            "loss": float(sum(loss.loss for loss in self.losses)),
            "frac_tokens_trained": len(gap) / num_tokens,
            "logprob_gap_mean": float(gap.abs().mean()),
            "logprob_gap_p99": _percentile(gap.abs(), 0.99),
            "logprob_gap_max": float(gap.abs().max()),
            "logprob_gap_signed": float(gap.mean()),
        }
        kl = _active(self.losses, "kl_T")
        if kl is not None:
            values |= {"kl_mean": float(kl.mean()), "kl_max": float(kl.max())}
        entropy = _active(self.losses, "entropy_T")
        if entropy is not None:
            values["entropy_mean"] = float(entropy.mean())
        return values

    def clip_metrics(self) -> dict[str, float | None]:
        """How often the clip binds and the largest ratio, over all updates of the step."""
        names = ("clip_frac", "clip_frac_low", "clip_frac_high", "ratio_max")
        side, ratio = _active(self.losses, "clip_side_T"), _active(self.losses, "ratio_T")
        if side is None or ratio is None:
            return dict.fromkeys(names, None)
        binds = ((side != 0), (side == -1), (side > 0))
        return dict(zip(names, (*(float(b.float().mean()) for b in binds), float(ratio.max())), strict=True))


def _active(losses: Iterable[GrpoLoss], name: str) -> torch.Tensor | None:
    """One output of all micro-batches at the tokens that take part; None where it was not computed."""
    outputs = [(getattr(loss, name), loss.is_active_T) for loss in losses]
    pieces = [output[is_active] for output, is_active in outputs if output is not None]
    return torch.cat(pieces) if pieces else None


def _percentile(values: torch.Tensor, frac: float) -> float:
    """The value that this share of them does not exceed (nearest rank)."""
    return float(values.kthvalue(max(1, round(frac * len(values)))).values)


def _step_metrics(steps: list[OptimStats], lr: float) -> dict[str, float | int | None]:
    done = [step for step in steps if not step.is_skipped]
    return {
        "num_updates": len(done),
        "lr": lr,
        "grad_norm": sum(step.grad_norm for step in done) / len(done) if done else None,
        "frac_params_changed": sum(step.frac_params_changed for step in done) / len(done) if done else 0.0,
        "num_skipped": len(steps) - len(done),
    }
