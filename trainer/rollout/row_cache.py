"""A CPU's cache of small waves: every row has its whole context in one piece, and one fused call attends to it.

Where a step is short, the calls of `grouped_cache.py` cost more than the keys that they save: there the prompt is
copied to each of its siblings. Prompts end in the same column, so that new tokens of all rows share one: rows are
equally old.

Letters: B slots, N groups (one prompt each), H query heads, K key heads (J = H + K), R = H / K, E head width, L columns
(P of prompts, then new tokens), C own tokens, T packed prompt tokens, Y layers; 2: keys, then values.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sparkgrpo.kernels.prefix_attention import TreeLayout
from sparkgrpo.trainer.model.decoder import DecoderConfig, Rope, rotated
from sparkgrpo.trainer.rollout.grouped_cache import GroupedCache


class RowCache:
    """Keys and values of a wave, all layers in one tensor. Not for bf16, in which the fused call is ten times as slow.

    A drop of finished rows copies the columns in use to a second buffer, and the two take turns: a fresh one at each
    drop cost more than the copies, in page faults.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.num_layers, self.num_kv_heads, self.head_width = config.num_layers, config.num_kv_heads, config.head_width
        self.device = device
        self.kv_Y2BKLE = torch.empty(0, dtype=dtype, device=device)
        self.other = torch.empty(0, dtype=dtype, device=device)
        """The buffer that the next drop writes, flat."""
        self.in_use: tuple[torch.Tensor, ...] = ()
        """[B, K, columns in use, E]: keys of layer 0, its values, keys of layer 1, ..."""
        self.newest: tuple[torch.Tensor, ...] = ()
        """The last of those columns, [B, K, E], in the same order."""
        self.bias_B11L: torch.Tensor | None = None
        """0, or -inf in the columns before a row's prompt; None where all prompts are equally long."""
        self.prompt_len_N: Sequence[int] = ()
        self.num_siblings = self.num_columns = 0
        """num_columns: those in use, this step's included."""

    def begin(self, prompt_len_N: Sequence[int], G: int, max_new_tokens: int) -> None:
        """Start a wave of G siblings for each prompt, with room for so many new tokens of each."""
        longest = max(prompt_len_N)
        is_filler_BP = None
        if min(prompt_len_N) < longest:
            first_B = longest - torch.tensor(prompt_len_N, device=self.device).repeat_interleave(G)
            is_filler_BP = torch.arange(longest, device=self.device) < first_B[:, None]
        self._allocate(len(prompt_len_N) * G, longest, max_new_tokens, is_filler_BP)
        self.prompt_len_N, self.num_siblings = prompt_len_N, G
        if is_filler_BP is not None:
            self.kv_Y2BKLE[..., :longest, :] = 0  # what is masked still has to be a number

    def take_over(self, grouped: GroupedCache, max_new_tokens: int) -> None:
        """Go on with the live rows of another cache, whose prompts end in filler, which is masked here too."""
        group_B, P = grouped.group_B, grouped.longest_prompt
        is_filler_BP = None if grouped.is_filler_NP is None else grouped.is_filler_NP[group_B]
        self._allocate(len(group_B), P, max_new_tokens, is_filler_BP)
        self.num_columns = P + grouped.own_len
        for layer_idx, kv_2BKLE in enumerate(self.kv_Y2BKLE[..., : self.num_columns, :]):
            k_own_KBEC, v_own_KBCE = grouped.own(layer_idx)
            k_KBEL = torch.cat((grouped.k_prompt[layer_idx][:, group_B], k_own_KBEC), -1)
            v_KBLE = torch.cat((grouped.v_prompt[layer_idx][:, group_B], v_own_KBCE), 2)
            kv_2BKLE[0] = k_KBEL.permute(1, 0, 3, 2)
            kv_2BKLE[1] = v_KBLE.transpose(0, 1)

    def _allocate(self, B: int, P: int, max_new_tokens: int, is_filler_BP: torch.Tensor | None) -> None:
        """Room for so many rows, and the mask of columns that are no row's own."""
        shape = (self.num_layers, 2, B, self.num_kv_heads, P + max_new_tokens, self.head_width)
        self.kv_Y2BKLE = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.other = torch.empty_like(self.kv_Y2BKLE).flatten()
        self.num_columns = P
        self.bias_B11L = None
        if is_filler_BP is not None:
            bias_BL = torch.zeros(B, P + max_new_tokens, dtype=self.dtype, device=self.device)
            bias_BL[:, :P].masked_fill_(is_filler_BP, -torch.inf)
            self.bias_B11L = bias_BL[:, None, None]

    def write_prompt(
        self, layer_idx: int, prompts: range, k_TKE: torch.Tensor, v_TKE: torch.Tensor, layout: TreeLayout
    ) -> None:
        """A layer's rotated keys and its values of these prompts, packed one after the other."""
        lengths = [self.prompt_len_N[n] for n in prompts]
        for rows, x_TKE in zip(self.kv_Y2BKLE[layer_idx], (k_TKE, v_TKE), strict=True):
            for n, x_PKE in zip(prompts, x_TKE.split(lengths), strict=True):
                siblings = slice(n * self.num_siblings, (n + 1) * self.num_siblings)
                rows[siblings, :, self.num_columns - len(x_PKE) : self.num_columns] = x_PKE.transpose(0, 1)

    def end_prompts(self) -> None:
        """All prompts of the wave are written."""

    def extend(self) -> None:
        """The next column is in use; once a step, before its `attend`."""
        self.num_columns += 1
        kv = self.kv_Y2BKLE.flatten(0, 1)
        self.in_use = kv[..., : self.num_columns, :].unbind()
        self.newest = kv[..., self.num_columns - 1, :].unbind()

    def attend(self, layer_idx: int, qk_BJE: torch.Tensor, v_BKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Write this step's key and value, then attend: the `attend` of a decode step."""
        q_BHE, k_BKE = rotated(qk_BJE, rope, qk_BJE.shape[1] - self.num_kv_heads)
        layer = slice(2 * layer_idx, 2 * layer_idx + 2)
        for column_BKE, x_BKE in zip(self.newest[layer], (k_BKE, v_BKE), strict=True):
            column_BKE.copy_(x_BKE)
        k_BKLE, v_BKLE = self.in_use[layer]
        bias = None if self.bias_B11L is None else self.bias_B11L[..., : self.num_columns]
        # A key head's queries stand where other callers have query positions: nothing is repeated for them.
        q_BKRE = q_BHE.unflatten(1, (self.num_kv_heads, -1))
        return F.scaled_dot_product_attention(q_BKRE, k_BKLE, v_BKLE, attn_mask=bias).flatten(1, 2)

    def keep(self, slot_B: torch.Tensor) -> None:
        """Forget all rows but those in these slots, ascending."""
        Y, two, _, K, L, E = self.kv_Y2BKLE.shape
        kept_Y2BKLE = self.other[: Y * two * len(slot_B) * K * L * E].view(Y, two, len(slot_B), K, L, E)
        columns = slice(0, self.num_columns)
        torch.index_select(self.kv_Y2BKLE[..., columns, :], 2, slot_B, out=kept_Y2BKLE[..., columns, :])
        self.kv_Y2BKLE, self.other = kept_Y2BKLE, self.kv_Y2BKLE.flatten()
        if self.bias_B11L is not None:
            self.bias_B11L = self.bias_B11L.index_select(0, slot_B)

    def end_wave(self) -> None:
        """The wave's memory is free."""
        self.kv_Y2BKLE, self.other, self.bias_B11L = self.kv_Y2BKLE.new_empty(0), self.other.new_empty(0), None
        self.in_use = self.newest = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """None: they live as long as a wave."""
        return {}
