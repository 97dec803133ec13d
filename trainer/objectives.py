"""The objective: which loss a token has, and what it weighs.

    loss = sum over completion tokens of w_it l_it       and nothing else

Every normaliser is data in w, computed over the whole optimiser batch before any of it is run. So the gradient does not
depend on how the batch is cut into micro-batches.

| normaliser | w_it                      | used by                                   |
|------------|---------------------------|-------------------------------------------|
| sequence   | 1 / (S len_i)             | GRPO: a mean over tokens, then over answers |
| token      | 1 / sum_i len_i           | DAPO, CISPO                               |
| constant   | 1 / (S max_new_tokens)    | Dr. GRPO                                  |

S and the sums count the completions that take part. `kernels/linear_grpo.py` computes l_it.
"""

from typing import Literal

import torch

from sparkgrpo.kernels.linear_grpo import GrpoObjective
from sparkgrpo.trainer.config import Config

Normaliser = Literal["sequence", "token", "constant"]


def objective_of(config: Config) -> GrpoObjective:
    """The token loss that a configuration asks for."""
    return GrpoObjective(
        surrogate=config.surrogate,
        ratio=config.ratio,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        delta=config.delta,
        beta=config.beta,
        kl=config.kl,
        entropy_coef=config.entropy_coef,
    )


def token_weights(
    normaliser: Normaliser, length_S: torch.Tensor, takes_part_S: torch.Tensor, max_new_tokens: int
) -> torch.Tensor:
    """Weight of each token of each completion: float64 [S]; 0 for completions that do not take part.

    Args:
        length_S: Tokens of each completion. takes_part_S: bool.

    Raises:
        ValueError: An unknown normaliser.
    """
    length = length_S.double()
    num_parts = takes_part_S.sum().clamp(min=1)
    if normaliser == "sequence":
        weight_S = 1 / (num_parts * length)
    elif normaliser == "token":
        weight_S = (1 / (length * takes_part_S).sum().clamp(min=1)).expand(len(length))
    elif normaliser == "constant":
        weight_S = (1 / (num_parts.double() * max_new_tokens)).expand(len(length))
    else:
        raise ValueError(f"expected a normaliser of sequence, token or constant, got {normaliser!r}")
    return torch.where(takes_part_S, weight_S, 0.0)
