"""A CPU's cache of small waves: every row has its whole context in one piece, and one fused call attends to it.

Where a step is short, the calls of `grouped_cache.py` cost more than the keys that they save: there the prompt is
copied to each of its siblings. Prompts end in the same column, so that new tokens of all rows share one: rows are
equally old.

Letters: B slots, N groups (one prompt each), H query heads, K key heads (J = H + K), R = H / K, E head width, L columns
(longest prompt, then new tokens), T packed prompt tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sparkgrpo.kernels.prefix_attention import TreeLayout
from sparkgrpo.trainer.model.decoder import DecoderConfig, Rope, rotated


class RowCache:
    """Keys and values of a wave, [B, K, L, E] a layer. Not for bf16, in which the fused call is ten times as slow."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.num_layers, self.num_kv_heads, self.head_width = config.num_layers, config.num_kv_heads, config.head_width
        self.device = device
        self.k_rows: list[torch.Tensor] = []
        self.v_rows: list[torch.Tensor] = []
        self.bias_B11L: torch.Tensor | None = None
        """0, or -inf in the columns before a row's prompt; None where all prompts are equally long."""
        self.prompt_len_N: Sequence[int] = ()
        self.num_siblings = self.num_columns = 0
        """num_columns: those in use, this step's included."""

    def begin(self, prompt_len_N: Sequence[int], G: int, max_new_tokens: int) -> None:
        """Start a wave of G siblings for each prompt, with room for so many new tokens of each."""
        N, longest = len(prompt_len_N), max(prompt_len_N)
        shape = (N * G, self.num_kv_heads, longest + max_new_tokens, self.head_width)
        self.k_rows = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)]
        self.v_rows = [torch.zeros_like(x) for x in self.k_rows]
        self.prompt_len_N, self.num_siblings, self.num_columns = prompt_len_N, G, longest
        self.bias_B11L = None
        if min(prompt_len_N) < longest:
            first_B = longest - torch.tensor(prompt_len_N, device=self.device).repeat_interleave(G)
            is_filler_BL = torch.arange(shape[2], device=self.device) < first_B[:, None]
            bias_BL = torch.zeros(is_filler_BL.shape, dtype=self.dtype, device=self.device)
            self.bias_B11L = bias_BL.masked_fill_(is_filler_BL, -torch.inf)[:, None, None]

    def write_prompt(
        self, layer_idx: int, prompts: range, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout
    ) -> None:
        """A layer's rotated keys and its values of these prompts, packed one after the other."""
        lengths = [self.prompt_len_N[n] for n in prompts]
        for rows, x_TKE in ((self.k_rows[layer_idx], k_TKE), (self.v_rows[layer_idx], v_TKE)):
            for n, x_PKE in zip(prompts, x_TKE.split(lengths), strict=True):
                siblings = slice(n * self.num_siblings, (n + 1) * self.num_siblings)
                rows[siblings, :, self.num_columns - len(x_PKE) : self.num_columns] = x_PKE.transpose(0, 1)

    def end_prompts(self) -> None:
        """All prompts of the wave are written."""

    def extend(self) -> None:
        """The next column is in use; once a step, before its `attend`."""
        self.num_columns += 1

    def attend(self, layer_idx: int, qk_BJE: torch.Tensor, v_BKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Write this step's key and value, then attend: the `attend` of a decode step."""
        q_BHE, k_BKE = rotated(qk_BJE, rope, qk_BJE.shape[1] - self.num_kv_heads)
        k_BKLE, v_BKLE = (rows[:, :, : self.num_columns] for rows in (self.k_rows[layer_idx], self.v_rows[layer_idx]))
        k_BKLE[:, :, -1] = k_BKE
        v_BKLE[:, :, -1] = v_BKE
        bias = None if self.bias_B11L is None else self.bias_B11L[..., : self.num_columns]
        # A key head's queries stand where other callers have query positions: nothing is repeated for them.
        q_BKRE = q_BHE.unflatten(1, (self.num_kv_heads, -1))
        return F.scaled_dot_product_attention(q_BKRE, k_BKLE, v_BKLE, attn_mask=bias).flatten(1, 2)

    def keep(self, slot_B: torch.Tensor) -> None:
        """Forget all rows but those in these slots, ascending."""
        for rows in (self.k_rows, self.v_rows):
            rows[:] = [x.index_select(0, slot_B) for x in rows]
        if self.bias_B11L is not None:
            self.bias_B11L = self.bias_B11L.index_select(0, slot_B)

    def end_wave(self) -> None:
        """The wave's memory is free."""
        self.k_rows, self.v_rows, self.bias_B11L = [], [], None

    def tensors(self) -> dict[str, torch.Tensor]:
        """None: they live as long as a wave."""
        return {}
