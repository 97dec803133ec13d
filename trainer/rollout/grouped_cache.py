"""The CPU's cache: every prompt's keys once a group, every row's own beside them.

Letters: B slots, N groups (one prompt each), C most new tokens, H query heads, K key heads (J = H + K), E head width, P
longest prompt of the wave, T packed prompt tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sparkgrpo.kernels.grouped_attention import grouped_attention
from sparkgrpo.kernels.prefix_attention import TreeLayout, prompt_rectangle
from sparkgrpo.trainer.model.decoder import DecoderConfig, Rope, rotated

FIRST_CAPACITY = 32
"""Tokens for which a wave's own keys are laid out at first."""


class GroupedCache:
    """Keys and values of a wave: every prompt's once a group, every row's own beside them.

    A layer's own keys [K, B, E, capacity] and values [K, B, capacity, E] lie at the front of a buffer that is allocated
    once. All live rows are equally old, so the part in use is one slice; the capacity doubles with it, because a slice
    of few tokens in rows of many is read at a fraction of the memory's rate. The prompt part, [K, N, E, P] and [K, N,
    P, E], is made by the prefill of each wave and shared by the siblings.
    """

    def __init__(
        self, config: DecoderConfig, *, max_rows: int, max_new_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_kv_heads, self.head_width, self.max_new_tokens = config.num_kv_heads, config.head_width, max_new_tokens
        size = max_rows * config.num_kv_heads * config.head_width * max_new_tokens
        self.k_buffers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.v_buffers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.k_prompt: list[torch.Tensor] = []
        self.v_prompt: list[torch.Tensor] = []
        self.prompt_parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """While prompts are written: keys and values of each layer, [N, P, K, E] a piece."""
        self.longest_prompt = 0
        self.is_filler_NP: torch.Tensor | None = None
        self.group_B = self.rank_B = torch.zeros(0, dtype=torch.int64, device=device)
        self.num_ranks = 0
        self.num_rows = self.capacity = 0
        """B and the tokens a row has room for, as the buffers are laid out."""
        self.own_len = 0
        """Tokens of every live row in the cache, this step's included."""

    def begin(self, prompt_len_N: Sequence[int], G: int, max_new_tokens: int) -> None:
        """Start a wave of G siblings for each prompt; `write_prompt` then fills every layer, `end_prompts` closes."""
        device = self.group_B.device
        N, longest = len(prompt_len_N), max(prompt_len_N)
        length_N = torch.tensor(prompt_len_N, device=device)
        is_filler_NP = torch.arange(longest, device=device) >= length_N[:, None]
        self.is_filler_NP = is_filler_NP if min(prompt_len_N) < longest else None
        self.prompt_parts = [([], []) for _ in self.k_buffers]
        self.longest_prompt = longest
        self.group_B = torch.arange(N, device=device).repeat_interleave(G)
        self.rank_B = torch.arange(G, device=device).repeat(N)
        self.num_ranks, self.own_len = G, 0
        self.num_rows, self.capacity = N * G, min(FIRST_CAPACITY, self.max_new_tokens)

    def write_prompt(
        self, layer_idx: int, prompts: range, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout
    ) -> None:
        """A layer's keys and values of these prompts, packed as in `layout`; prompts come in order."""
        filler = (0, 0, 0, 0, 0, self.longest_prompt - layout.longest_prompt)
        for parts, x in zip(self.prompt_parts[layer_idx], (k_TKE, v_TKE), strict=True):
            parts.append(F.pad(prompt_rectangle(x, layout), filler))

    def end_prompts(self) -> None:
        """All prompts of the wave are written."""
        self.k_prompt = [torch.cat(keys).permute(2, 0, 3, 1).contiguous() for keys, _ in self.prompt_parts]
        self.v_prompt = [torch.cat(values).permute(2, 0, 1, 3).contiguous() for _, values in self.prompt_parts]
        self.prompt_parts = []

    def extend(self) -> None:
        """Make room for one more token of every row; once a step, before its `attend`."""
        if self.own_len == self.capacity:
            every_slot_B = torch.arange(self.num_rows, device=self.group_B.device)
            self._lay_out(every_slot_B, min(2 * self.capacity, self.max_new_tokens))
        self.own_len += 1

    def attend(self, layer_idx: int, qk_BJE: torch.Tensor, v_BKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Write this step's key and value, then attend: the `attend` of a decode step."""
        q_BHE, k_BKE = rotated(qk_BJE, rope, qk_BJE.shape[1] - self.num_kv_heads)
        k_own, v_own = self.own(layer_idx)
        k_own[..., -1] = k_BKE.transpose(0, 1)
        v_own[:, :, -1] = v_BKE.transpose(0, 1)
        return grouped_attention(
            q_BHE,
            self.k_prompt[layer_idx],
            self.v_prompt[layer_idx],
            self.is_filler_NP,
            k_own,
            v_own,
            self.group_B,
            self.rank_B,
            self.num_ranks,
        )

    def keep(self, slot_B: torch.Tensor) -> None:
        """Forget all rows but those in these slots (ascending), and the groups left without rows."""
        self._lay_out(slot_B, self.capacity)
        group_N, count_N = self.group_B[slot_B].unique_consecutive(return_counts=True)
        if len(group_N) < self.k_prompt[0].shape[1]:
            self.k_prompt = [k.index_select(1, group_N) for k in self.k_prompt]
            self.v_prompt = [v.index_select(1, group_N) for v in self.v_prompt]
            if self.is_filler_NP is not None:
                self.is_filler_NP = self.is_filler_NP[group_N]
        self.group_B = torch.arange(len(group_N), device=slot_B.device).repeat_interleave(count_N)
        first_N = count_N.cumsum(0) - count_N
        self.rank_B = torch.arange(len(slot_B), device=slot_B.device) - first_N.repeat_interleave(count_N)
        self.num_ranks = int(count_N.max())

    def own(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's own keys [K, B, E, own_len] and values [K, B, own_len, E], as they lie in the buffers."""
        return self._own(layer_idx, self.num_rows, self.capacity)

    def _own(self, layer_idx: int, num_rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The part in use of a layer's own keys [K, B, E, own_len] and values [K, B, own_len, E], so laid out."""
        K, B, E = self.num_kv_heads, num_rows, self.head_width
        k_own = self.k_buffers[layer_idx][: K * B * E * capacity].view(K, B, E, capacity)
        v_own = self.v_buffers[layer_idx][: K * B * E * capacity].view(K, B, capacity, E)
        return k_own[..., : self.own_len], v_own[:, :, : self.own_len]

    def _lay_out(self, slot_B: torch.Tensor, capacity: int) -> None:
        """Bring the own keys and values of these slots to the front of the buffers, with this room for each."""
        for layer_idx in range(len(self.k_buffers)):
            old = self.own(layer_idx)
            kept = [x.index_select(1, slot_B) for x in old]  # copies: the old layout is overwritten
            for target, x in zip(self._own(layer_idx, len(slot_B), capacity), kept, strict=True):
                target.copy_(x)
        self.num_rows, self.capacity = len(slot_B), capacity

    def end_wave(self) -> None:
        """Buffers stay as they are; the next wave lays them out anew."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, the buffers of own keys and values."""
        both = {"k_buffers": self.k_buffers, "v_buffers": self.v_buffers}
        return {f"{name}[{i}]": x for name, buffers in both.items() for i, x in enumerate(buffers)}
