"""Everything that lives between two decode steps: one allocation each, for the whole process.

A **slot** is where a row computes now, a **row** is where its results go, a **stream** is what its randomness is called.
Only the slot ever changes. `context_len == 0` marks a finished row or an empty slot; there is no done flag that could
disagree with it.

Letters: B slots, N groups (one prompt each), S result rows of a wave, C most new tokens, K key heads, E head width, P
longest prompt of the wave, V vocabulary.
"""

from dataclasses import dataclass, fields

import torch

from sparkgrpo.kernels.grouped_attention import grouped_attention
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig

MAX_STOP_IDS = 8
SLOT_FIELDS = ("token_B", "context_len_B", "prompt_len_B", "row_id_B", "stream_B")
"""What moves when slots are compacted."""


class GroupedCache:
    """Keys and values of a wave: every prompt's once a group, every row's own beside them.

    Own keys are [B K, E, C] and values [B K, C, E] a layer, allocated once; all live rows are equally old, so the part in
    use is one slice. The prompt part is made by the prefill of each wave and shared by the siblings.
    """

    def __init__(
        self, config: DecoderConfig, *, max_rows: int, max_new_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        K, E, L = config.num_kv_heads, config.head_width, config.num_layers
        self.num_kv_heads = K
        self.k_own = [torch.zeros(max_rows * K, E, max_new_tokens, dtype=dtype, device=device) for _ in range(L)]
        self.v_own = [torch.zeros(max_rows * K, max_new_tokens, E, dtype=dtype, device=device) for _ in range(L)]
        self.k_prompt: list[torch.Tensor] = []
        self.v_prompt: list[torch.Tensor] = []
        self.is_filler_NP: torch.Tensor | None = None
        self.group_B = self.rank_B = torch.zeros(0, dtype=torch.int64, device=device)
        self.num_ranks = 0
        self.own_len = 0
        """Tokens of every live row in the cache, this step's included."""

    def begin(self, prompt_len_N: list[int], G: int) -> None:
        """Start a wave of G siblings for each prompt; `write_prompt` then fills every layer."""
        device = self.group_B.device
        N, longest = len(prompt_len_N), max(prompt_len_N)
        length_N = torch.tensor(prompt_len_N, device=device)
        is_filler_NP = torch.arange(longest, device=device) >= length_N[:, None]
        self.is_filler_NP = is_filler_NP if min(prompt_len_N) < longest else None
        self.k_prompt, self.v_prompt = [], []
        self.group_B = torch.arange(N, device=device).repeat_interleave(G)
        self.rank_B = torch.arange(G, device=device).repeat(N)
        self.num_ranks, self.own_len = G, 0

    def write_prompt(self, k_NPKE: torch.Tensor, v_NPKE: torch.Tensor) -> None:
        """Append the next layer's prompt keys and values, each prompt at the front of its row."""
        self.k_prompt.append(k_NPKE.permute(0, 2, 3, 1).flatten(0, 1).contiguous())
        self.v_prompt.append(v_NPKE.permute(0, 2, 1, 3).flatten(0, 1).contiguous())

    def attend(self, layer_idx: int, q_BHE: torch.Tensor, k_BKE: torch.Tensor, v_BKE: torch.Tensor) -> torch.Tensor:
        """Write this step's key and value, then attend: the `attend` of a decode step."""
        num_kv_rows, own_len = len(q_BHE) * self.num_kv_heads, self.own_len
        k_own, v_own = self.k_own[layer_idx][:num_kv_rows], self.v_own[layer_idx][:num_kv_rows]
        k_own[..., own_len - 1] = k_BKE.flatten(0, 1)
        v_own[:, own_len - 1] = v_BKE.flatten(0, 1)
        return grouped_attention(
            q_BHE,
            self.k_prompt[layer_idx],
            self.v_prompt[layer_idx],
            self.is_filler_NP,
            k_own[..., :own_len],
            v_own[:, :own_len],
            self.group_B,
            self.rank_B,
            self.num_ranks,
        )

    def keep(self, slot_K: torch.Tensor) -> None:
        """Move the rows in these slots (ascending) to the front and forget the others, and groups left without rows."""
        K, own_len = self.num_kv_heads, self.own_len
        kv_row = (slot_K[:, None] * K + torch.arange(K, device=slot_K.device)).flatten()
        for k_own, v_own in zip(self.k_own, self.v_own, strict=True):
            k_own[: len(kv_row), :, :own_len] = k_own[kv_row, :, :own_len]
            v_own[: len(kv_row), :own_len] = v_own[kv_row, :own_len]
        group_K, count_N = self.group_B[slot_K].unique_consecutive(return_counts=True, return_inverse=True)[0:3:2]
        if len(group_K) * K < len(self.k_prompt[0]):
            prompt_row = (group_K[:, None] * K + torch.arange(K, device=slot_K.device)).flatten()
            self.k_prompt = [k.index_select(0, prompt_row) for k in self.k_prompt]
            self.v_prompt = [v.index_select(0, prompt_row) for v in self.v_prompt]
            if self.is_filler_NP is not None:
                self.is_filler_NP = self.is_filler_NP[group_K]
        self.group_B = torch.arange(len(group_K), device=slot_K.device).repeat_interleave(count_N)
        first_N = count_N.cumsum(0) - count_N
        self.rank_B = torch.arange(len(slot_K), device=slot_K.device) - first_N.repeat_interleave(count_N)
        self.num_ranks = int(count_N.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """The tensors a decode step reads and writes; `view(n)` is the same storage cut to the first n slots."""

    token_B: torch.Tensor
    """i32: the token whose key and value the next step writes."""
    context_len_B: torch.Tensor
    """i32: tokens in the cache once that token is written; 0: finished or empty."""
    prompt_len_B: torch.Tensor
    """i32."""
    row_id_B: torch.Tensor
    """i32: row of the result tensors."""
    stream_B: torch.Tensor
    """i64: (prompt's stream << 16) + sibling."""
    out_token_SC: torch.Tensor
    """i32 [S + 1, C]."""
    out_logprob_SC: torch.Tensor
    """f32 [S + 1, C]."""
    num_new_S: torch.Tensor
    """i32 [S + 1]."""
    finish_S: torch.Tensor
    """i8 [S + 1]: the finish reasons of `kernels/sampling.py`."""
    num_alive_1: torch.Tensor
    """i32."""
    seed_1: torch.Tensor
    """i64: the key of this rollout."""
    inv_temperature_1: torch.Tensor
    """f32: 1/T, 0 for greedy."""
    eos_ids_8: torch.Tensor
    """i32, padded with -1."""
    max_new_1: torch.Tensor
    """i32."""
    logits_BV: torch.Tensor
    """f32 [B, num_valid]: never rounded to bf16."""
    cache: GroupedCache

    def view(self, num_slots: int) -> "DecodeState":
        """The first slots of every tensor that has slots."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in (*SLOT_FIELDS, "logits_BV"):
            values[name] = values[name][:num_slots]
        return DecodeState(**values)

    def compact(self, num_slots: int) -> int:
        """Drop the finished rows among the first slots; returns how many live rows now stand at the front."""
        keep = (self.context_len_B[:num_slots] > 0).nonzero()[:, 0]
        for name in SLOT_FIELDS:
            slots = getattr(self, name)
            slots[: len(keep)] = slots[keep]
        self.context_len_B[len(keep) : num_slots] = 0
        self.cache.keep(keep)
        return len(keep)


def allocate_state(
    model: Decoder, *, max_rows: int, max_new_tokens: int, num_valid: int, stop_ids: tuple[int, ...]
) -> DecodeState:
    """All buffers of the decode loop, for at most max_rows rows of max_new_tokens tokens.

    Raises:
        ValueError: More stop ids than the state holds.
    """
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"expected at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}: {stop_ids}")
    device = model.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return DecodeState(
        token_B=zeros(max_rows),
        context_len_B=zeros(max_rows),
        prompt_len_B=zeros(max_rows),
        row_id_B=zeros(max_rows),
        stream_B=zeros(max_rows, dtype=torch.int64),
        out_token_SC=zeros(max_rows + 1, max_new_tokens),
        out_logprob_SC=zeros(max_rows + 1, max_new_tokens, dtype=torch.float32),
        num_new_S=zeros(max_rows + 1),
        finish_S=zeros(max_rows + 1, dtype=torch.int8),
        num_alive_1=zeros(1),
        seed_1=zeros(1, dtype=torch.int64),
        inv_temperature_1=zeros(1, dtype=torch.float32),
        eos_ids_8=torch.tensor([*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))], dtype=torch.int32, device=device),
        max_new_1=zeros(1),
        logits_BV=zeros(max_rows, num_valid, dtype=torch.float32),
        cache=GroupedCache(
            model.config, max_rows=max_rows, max_new_tokens=max_new_tokens, dtype=model.dtype, device=device
        ),
    )
