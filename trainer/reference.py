"""The reference of the KL leash: the weights in memory at the start, never reloaded by name, and moved only on request.

Under LoRA it is the base without its adapters (`model/lora.py`), and no copy is made.
"""

import copy

import torch

from sparkgrpo.trainer.model.decoder import Decoder


def frozen_copy(model: Decoder) -> Decoder:
    """A copy of the policy as it is now, in its dtype, that takes no gradient."""
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def move_reference(reference: Decoder, policy: Decoder, mix: float) -> None:
    """reference <- (1 - mix) reference + mix policy, in place; mixed in float32, and exactly the policy with mix 1.

    Source: Gorbatovski et al., "Learn your reference model for real good alignment" (arXiv:2404.09656).
    """
    for ours, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
        if mix == 1:
            ours.copy_(theirs)
        else:
            ours.copy_(torch.lerp(ours.float(), theirs.float(), mix))
