"""AdamW on float32 masters, whatever dtype the model computes in.

An fp32 model is its own master. For a bf16 model every parameter has a master, moments and an accumulated gradient in
fp32; after the update the bf16 weights are overwritten **in place**, so pointers never change and nobody holds stale
weights. At a learning rate of 1e-6 plain bf16 weights would absorb nearly every update.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv:1711.05101); clipping as torch's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkgrpo.kernels.adamw import AdamwTables, adamw
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStats:
    """One optimiser step."""

    grad_norm: float
    """Global L2 norm before clipping."""
    is_skipped: bool
    """The gradient was not finite: nothing was changed."""
    frac_params_changed: float
    """Share of the stored weights that moved; all of them are looked at."""


def learning_rate(config: Config, step: int) -> float:
    """Rate of step 1, 2, ...: linear warm-up, then constant, or falling so that it would be 0 after the last step."""
    highest = config.lr * config.lr_factor
    if step <= config.warmup_steps:
        return highest * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return highest
    progress = (step - 1 - config.warmup_steps) / (config.steps - config.warmup_steps)
    if config.lr_schedule == "linear":
        return highest * (1 - progress)
    return highest * 0.5 * (1 + math.cos(math.pi * progress))


class Adam:
    """Moments and step counts, `state[master]` = {exp_avg, exp_avg_sq, step (fp32 scalar, on the host)}."""

    def __init__(self, config: Config) -> None:
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        self.beta1, self.beta2, self.eps = config.adam_beta1, config.adam_beta2, config.adam_eps
        self.weight_decay = config.weight_decay
        self.tables = AdamwTables()

    def update(
        self,
        masters: Sequence[torch.nn.Parameter],
        bf16_copies: Sequence[torch.Tensor] | None,
        *,
        lr: float,
        grad_scale: torch.Tensor,
    ) -> torch.Tensor:
        """Move masters, which have gradients, and copies; int64 scalar on the device: stored weights that changed.

        Step counts stay: whether the update was made is known when the caller has read grad_scale, see `count_step`.
        """
        by_step: dict[int, list[int]] = {}  # one entry, unless a master went without a gradient for some steps
        for i, master in enumerate(masters):
            if master not in self.state:
                moments = {key: torch.zeros_like(master.detach()) for key in ("exp_avg", "exp_avg_sq")}
                self.state[master] = moments | {"step": torch.zeros(())}
            by_step.setdefault(int(self.state[master]["step"]) + 1, []).append(i)
        num_changed = torch.zeros((), dtype=torch.int64, device=grad_scale.device)
        for step, indices in by_step.items():
            chosen = [masters[i] for i in indices]
            num_changed += adamw(
                [master.detach() for master in chosen],
                [master.grad.contiguous() for master in chosen if master.grad is not None],
                [self.state[master]["exp_avg"] for master in chosen],
                [self.state[master]["exp_avg_sq"] for master in chosen],
                None if bf16_copies is None else [bf16_copies[i].detach() for i in indices],
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                step=step,
                grad_scale=grad_scale,
                tables=self.tables,
            )
        return num_changed

    def count_step(self, masters: Sequence[torch.nn.Parameter]) -> None:
        """The update of these masters was made."""
        for master in masters:
            self.state[master]["step"] += 1


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
        self.adam = Adam(config)

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

    def gradient_sum(self, param: torch.Tensor) -> torch.Tensor | None:
        """The fp32 sum that a kernel may add the parameter's gradient to, unrounded and without a buffer of its own.

        None for a parameter that is not trained, or that is its own master and gets its gradient from autograd.
        """
        name = next((name for name, own in self.params.items() if own is param), None)
        if name is None or not self.has_masters:
            return None
        master = self.masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    @torch.no_grad()
    def step(self, lr: float) -> OptimStats:
        """Clip, update the masters, write the model's weights in place and drop the gradients.

        On a device everything is queued before the one host read, which fetches norm and count together.
        """
        names = [name for name, master in self.masters.items() if master.grad is not None]
        masters = [self.masters[name] for name in names]
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        clip = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        grad_scale = torch.where(norm.isfinite(), clip, math.nan)  # an infinite norm would clip to 0, which is finite
        bf16_copies = [self.params[name] for name in names] if self.has_masters else None
        num_changed = self.adam.update(masters, bf16_copies, lr=lr, grad_scale=grad_scale)
        for master in masters:
            master.grad = None
        grad_norm, num_changed = torch.stack((norm.double(), num_changed.double())).tolist()
        if not math.isfinite(grad_norm):
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            return OptimStats(grad_norm=grad_norm, is_skipped=True, frac_params_changed=0.0)
        self.skipped_in_a_row = 0
        self.adam.count_step(masters)
        num_weights = sum(param.numel() for param in self.params.values())
        return OptimStats(grad_norm=grad_norm, is_skipped=False, frac_params_changed=num_changed / num_weights)
