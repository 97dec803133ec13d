"""What a cache of keys and values offers to prefill and decode step; two kinds exist.

A CPU's grows and drops rows as the host sees fit: `grouped_cache.py`, and for the few rows of a small model
`row_cache.py`, between which `shrinking_cache.py` changes over. `paged_cache.py` serves the GPU: nothing in it moves,
allocates or is read on the host while a wave decodes, so that a step can be captured in a graph.

Letters: B slots, T packed prompt tokens, H query heads, K key heads, J = H + K, E head width.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from sparkgrpo.kernels.prefix_attention import TreeLayout
from sparkgrpo.trainer.model.decoder import Rope


class Cache(Protocol):
    """Keys and values of one wave."""

    def begin(self, prompt_len_N: Sequence[int], G: int, max_new_tokens: int) -> None:
        """Start a wave of G siblings for each prompt, with room for so many new tokens of each."""
        ...

    def write_prompt(
        self, layer_idx: int, prompts: range, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout
    ) -> None:
        """A layer's rotated keys and its values of these prompts, packed as in `layout`; prompts come in order."""
        ...

    def end_prompts(self) -> None:
        """All prompts of the wave are written."""
        ...

    def extend(self) -> None:
        """Make room for one more token of every row; once a step, before its `attend`."""
        ...

    def attend(self, layer_idx: int, qk_BJE: torch.Tensor, v_BKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Write this step's key and value, then attend, [B, H, E]: the `attend` of a decode step."""
        ...

    def keep(self, slot_B: torch.Tensor) -> None:
        """The slots behind the first len(slot_B) are empty; these, ascending, move to the front."""
        ...

    def end_wave(self) -> None:
        """The wave's results are packed: its memory is free."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, what a decode step reads and writes."""
        ...
