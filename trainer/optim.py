"""AdamW on float32 masters, whatever dtype the model computes in.

An fp32 model is its own master. For a bf16 model every parameter has a master, moments and an accumulated gradient in
fp32; after the update the bf16 weights are overwritten **in place**, so pointers never change and nobody holds stale
weights. At a learning rate of 1e-6 plain bf16 weights would absorb nearly every update.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv:1711.05101); torch's fused implementation.
"""

import math
from dataclasses import dataclass

import torch

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.decoder import Decoder

SAMPLED_WEIGHTS = 1 << 16
"""Weights of each tensor, evenly spread, that `frac_params_changed` looks at; smaller tensors are looked at whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStats:
    """One optimiser step."""

    grad_norm: float
    """Global L2 norm before clipping."""
    is_skipped: bool
    """The gradient was not finite: nothing was changed."""
    frac_params_changed: float
    """Share of the stored weights that moved, on an even sample."""


def learning_rate(config: Config, step: int) -> float:
    """Rate of step 1, 2, ...: linear warm-up, then constant, or falling so that it would be 0 after the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = (step - 1 - config.warmup_steps) / (config.steps - config.warmup_steps)
    if config.lr_schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


class MasterAdamW:
    """The optimiser of a run; `masters`, the state of `adam` and the counts are what a checkpoint keeps.

    An update whose gradient is not finite is skipped and counted: `skipped_steps` since the start of the run,
    `skipped_in_a_row` since the last update that was made.
    """

    def __init__(self, model: Decoder, config: Config) -> None:
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.has_masters = any(p.dtype != torch.float32 for p in self.params.values())
        self.masters = {
            name: torch.nn.Parameter(p.detach().float()) if self.has_masters else p for name, p in self.params.items()
        }
        if self.has_masters:
            for name, param in self.params.items():
                param.register_post_accumulate_grad_hook(self._accumulate_into(self.masters[name]))
        self.max_grad_norm = config.max_grad_norm
        self.skipped_steps = self.skipped_in_a_row = 0
        self.adam = torch.optim.AdamW(
            self.masters.values(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @staticmethod
    def _accumulate_into(master: torch.nn.Parameter):  # noqa: ANN205  the hook's type is torch's
        def hook(param: torch.Tensor) -> None:
            assert param.grad is not None
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad += param.grad
            param.grad = None

        return hook

    @torch.no_grad()
    def step(self, lr: float) -> OptimStats:
        """Clip, update the masters, write the model's weights in place and drop the gradients."""
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.masters.values(), self.max_grad_norm))
        if not math.isfinite(grad_norm):
            self.adam.zero_grad(set_to_none=True)
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            return OptimStats(grad_norm=grad_norm, is_skipped=True, frac_params_changed=0.0)
        self.skipped_in_a_row = 0
        before = [_even_sample(p).clone() for p in self.params.values()]
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        if self.has_masters:
            for name, param in self.params.items():
                param.copy_(self.masters[name])
        self.adam.zero_grad(set_to_none=True)
        num_changed = sum(
            int((_even_sample(p) != old).sum()) for p, old in zip(self.params.values(), before, strict=True)
        )
        return OptimStats(
            grad_norm=grad_norm, is_skipped=False, frac_params_changed=num_changed / sum(x.numel() for x in before)
        )


def _even_sample(param: torch.Tensor) -> torch.Tensor:
    flat = param.detach().view(-1)
    return flat[:: -(-len(flat) // SAMPLED_WEIGHTS)]
