"""The frozen reference of the KL leash: a copy of the weights in memory at the start, never reloaded by name."""

import copy

from sparkgrpo.trainer.model.decoder import Decoder


def frozen_copy(model: Decoder) -> Decoder:
    """A copy of the policy as it is now, in its dtype, that takes no gradient."""
    return copy.deepcopy(model).requires_grad_(False)
