"""What a rollout is asked for and what it gives.

Letters: S = N G rows (row s = n G + g), T packed completion tokens.
"""

from dataclasses import dataclass

import torch

from sparkgrpo.kernels.sampling import LENGTH

MIN_TEMPERATURE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn. Training needs the full softmax: there is no top-k or top-p here."""

    temperature: float = 1.0
    """0 is greedy; else 0.05 or more."""
    max_new_tokens: int = 512
    """Completion tokens, the stop token included."""
    ignore_eos: bool = False
    """Go on to the limit: for benchmarks with forced lengths."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"expected temperature 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens of 1 or more, got {self.max_new_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """What a rollout measured; times in seconds."""

    t_prefill_s: float
    t_decode_s: float
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    num_compactions: int
    num_waves: int
    frac_slots_alive: float
    """Live rows per slot computed, over all decode steps; 1 when no work was wasted on finished rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Completions, packed row after row; the stop token counts, so every length is at least 1."""

    token_T: torch.Tensor
    """i32."""
    logprob_T: torch.Tensor
    """f32, nats, under the distribution sampled from."""
    length_S: torch.Tensor
    """i32."""
    finish_S: torch.Tensor
    """i8: STOP or LENGTH of `kernels/sampling.py`."""
    prompt_of_row_S: torch.Tensor
    """i32."""
    sampling: Sampling
    stats: RolloutStats

    def rows(self) -> list[tuple[int, ...]]:
        """Token ids of each completion, on the host."""
        lengths = self.length_S.tolist()
        return [tuple(piece.tolist()) for piece in self.token_T.cpu().split(lengths)]

    def is_truncated(self) -> list[bool]:
        """Which completions ran into the token limit."""
        return (self.finish_S == LENGTH).tolist()
