"""A CPU's cache for small models: prompts shared while many rows live, each row in one piece once few are left.

What a step costs is keys while there are many rows, and torch calls when there are few. Measured, two cores, the
embedded model, groups of 8, at most 96 new tokens, a third of them used; milliseconds of a rollout, `row_cache.py`
against `grouped_cache.py`:

    rows      8     32    64    128   256   384
    row       93    132   170   281   430   629
    grouped   108   146   176   212   294   413

Letters: B slots, T packed prompt tokens, H query heads, K key heads, J = H + K, E head width.
"""

from collections.abc import Sequence

import torch

from sparkgrpo.kernels.prefix_attention import TreeLayout
from sparkgrpo.trainer.model.decoder import DecoderConfig, Rope
from sparkgrpo.trainer.rollout.grouped_cache import GroupedCache
from sparkgrpo.trainer.rollout.row_cache import RowCache

ROWS_AT_MOST = 48
"""Live rows up to which each has its context in one piece."""


class ShrinkingCache:
    """Two caches that take over from one another; see `Cache` for the contract. Not for bf16, like `RowCache`."""

    def __init__(
        self, config: DecoderConfig, *, max_rows: int, max_new_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rows = RowCache(config, dtype=dtype, device=device)
        self._grouped = GroupedCache(
            config, max_rows=max_rows, max_new_tokens=max_new_tokens, dtype=dtype, device=device
        )
        self._active: RowCache | GroupedCache = self._rows
        self._max_new_tokens = 0

    def begin(self, prompt_len_N: Sequence[int], G: int, max_new_tokens: int) -> None:
        """Start a wave of G siblings for each prompt, with room for so many new tokens of each."""
        self._active = self._rows if len(prompt_len_N) * G <= ROWS_AT_MOST else self._grouped
        self._max_new_tokens = max_new_tokens
        self._active.begin(prompt_len_N, G, max_new_tokens)

    def write_prompt(
        self, layer_idx: int, prompts: range, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout
    ) -> None:
        """A layer's rotated keys and its values of these prompts, packed one after the other."""
        self._active.write_prompt(layer_idx, prompts, k_TKE, v_TKE, layout)

    def end_prompts(self) -> None:
        """All prompts of the wave are written."""
        self._active.end_prompts()

    def extend(self) -> None:
        """Make room for one more token of every row; once a step, before its `attend`."""
        self._active.extend()

    def attend(self, layer_idx: int, qk_BJE: torch.Tensor, v_BKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Write this step's key and value, then attend: the `attend` of a decode step."""
        return self._active.attend(layer_idx, qk_BJE, v_BKE, rope)

    def keep(self, slot_B: torch.Tensor) -> None:
        """Forget all rows but those in these slots, ascending."""
        self._active.keep(slot_B)
        if self._active is self._grouped and len(slot_B) <= ROWS_AT_MOST:
            self._rows.take_over(self._grouped, self._max_new_tokens)
            self._grouped.end_wave()
            self._active = self._rows

    def end_wave(self) -> None:
        """The wave's results are packed."""
        self._active.end_wave()

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, the buffers that outlive a wave."""
        return self._grouped.tensors()
