"""What a rollout is asked for and what it gives.

Letters: S = N G rows (row s = n G + g), T packed completion tokens.
"""

from dataclasses import dataclass

import torch

from sparkgrpo.kernels.sampling import LENGTH, check_filters

MIN_TEMPERATURE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn. Filters are for evaluation: training scores under the full softmax, and refuses them."""

    temperature: float = 1.0
    """0 is greedy; else 0.05 or more."""
    max_new_tokens: int = 512
    """Completion tokens, the stop token included."""
    ignore_eos: bool = False
    """Go on to the limit: for benchmarks with forced lengths."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this share of the probability."""
    min_p: float = 0.0
    """Draw from tokens at least this share as likely as the likeliest."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"expected temperature 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens of 1 or more, got {self.max_new_tokens}")
        check_filters(self.top_k, self.top_p, self.min_p)

    @property
    def is_filtered(self) -> bool:
        """Some tokens may not be drawn, so log-probs are not those of the model's full softmax."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


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
    num_decode_bytes: int
    """What the decode steps have to read and write: weights and fp32 logits each, the keys and values of live rows."""
    graph_coverage: float | None
    """Decode steps that replayed a captured graph / all; None where there are no graphs (a CPU)."""
    t_capture_s: float
    """Making graphs, while decoding; on the host's clock, so that on a GPU it can pass t_decode_s."""

    @property
    def decode_gbps(self) -> float | None:
        """1e9 bytes a second of the decode steps; None without any."""
        return self.num_decode_bytes / self.t_decode_s / 1e9 if self.num_steps else None


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
