"""Everything that lives between two decode steps: one allocation each, for the whole process.

A **slot** is where a row computes now, a **row** is where its results go, a **stream** is what its randomness is
called. Only the slot ever changes. `context_len == 0` marks a finished row or an empty slot; there is no done flag that
could disagree with it.

Letters: B slots, N groups (one prompt each), S result rows of a wave, C most new tokens, K key heads, E head width, P
longest prompt of the wave, V vocabulary.
"""

from dataclasses import dataclass, fields

import torch

from sparkgrpo.kernels.grouped_attention import grouped_attention
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig, Rope, rotated

MAX_STOP_IDS = 8
FIRST_CAPACITY = 32
"""Tokens for which a wave's own keys are laid out at first."""
SLOT_FIELDS = ("token_B", "context_len_B", "prompt_len_B", "row_id_B", "stream_B")
"""What moves when slots are compacted."""


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
        self.is_filler_NP: torch.Tensor | None = None
        self.group_B = self.rank_B = torch.zeros(0, dtype=torch.int64, device=device)
        self.num_ranks = 0
        self.num_rows = self.capacity = 0
        """B and the tokens a row has room for, as the buffers are laid out."""
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
        self.num_rows, self.capacity = N * G, min(FIRST_CAPACITY, self.max_new_tokens)

    def write_prompt(self, k_NPKE: torch.Tensor, v_NPKE: torch.Tensor) -> None:
        """Append the next layer's prompt keys and values, each prompt at the front of its row and zeros behind it."""
        self.k_prompt.append(k_NPKE.permute(2, 0, 3, 1).contiguous())
        self.v_prompt.append(v_NPKE.permute(2, 0, 1, 3).contiguous())

    def extend(self) -> None:
        """Make room for one more token of every row; once a step, before its `attend`."""
        if self.own_len == self.capacity:
            every_slot_B = torch.arange(self.num_rows, device=self.group_B.device)
            self._lay_out(every_slot_B, min(2 * self.capacity, self.max_new_tokens))
        self.own_len += 1

    def attend(self, layer_idx: int, qk_BJE: torch.Tensor, v_BKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Write this step's key and value, then attend: the `attend` of a decode step."""
        q_BHE, k_BKE = rotated(qk_BJE, rope, qk_BJE.shape[1] - self.num_kv_heads)
        k_own, v_own = self._own(layer_idx, self.num_rows, self.capacity)
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

    def _own(self, layer_idx: int, num_rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The part in use of a layer's own keys [K, B, E, own_len] and values [K, B, own_len, E], so laid out."""
        K, B, E = self.num_kv_heads, num_rows, self.head_width
        k_own = self.k_buffers[layer_idx][: K * B * E * capacity].view(K, B, E, capacity)
        v_own = self.v_buffers[layer_idx][: K * B * E * capacity].view(K, B, capacity, E)
        return k_own[..., : self.own_len], v_own[:, :, : self.own_len]

    def _lay_out(self, slot_B: torch.Tensor, capacity: int) -> None:
        """Bring the own keys and values of these slots to the front of the buffers, with this room for each."""
        for layer_idx in range(len(self.k_buffers)):
            old = self._own(layer_idx, self.num_rows, self.capacity)
            kept = [x.index_select(1, slot_B) for x in old]  # copies: the old layout is overwritten
            for target, x in zip(self._own(layer_idx, len(slot_B), capacity), kept, strict=True):
                target.copy_(x)
        self.num_rows, self.capacity = len(slot_B), capacity


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


def allocate_state(model: Decoder, *, max_rows: int, max_new_tokens: int, num_valid: int) -> DecodeState:
    """All buffers of the decode loop, for at most max_rows rows of max_new_tokens tokens."""
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
        eos_ids_8=zeros(MAX_STOP_IDS),
        max_new_1=zeros(1),
        logits_BV=zeros(max_rows, num_valid, dtype=torch.float32),
        cache=GroupedCache(
            model.config, max_rows=max_rows, max_new_tokens=max_new_tokens, dtype=model.dtype, device=device
        ),
    )
