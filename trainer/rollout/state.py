"""Everything that lives between two decode steps: one allocation each, for the whole process.

A **slot** is where a row computes now, a **row** is where its results go, a **stream** is what its randomness is
called. Only the slot ever changes. `context_len == 0` marks a finished row or an empty slot; there is no done flag that
could disagree with it.

Letters: B slots, S result rows of a wave, C most new tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.sampling import BLOCK_V
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.rollout.cache import Cache

MAX_STOP_IDS = 8
LOGIT_COLUMNS = 16
"""Logits of a row are padded to a multiple: wide loads, and sizes that cuBLAS likes."""
SLOT_FIELDS = ("token_B", "context_len_B", "prompt_len_B", "row_id_B", "stream_B")
"""What moves when slots are compacted."""


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
    uniform_2SC: torch.Tensor | None
    """f32 [2, S + 1, C]: the draws of every result place, made as a wave begins; None where the kernels draw."""
    eos_ids_8: torch.Tensor
    """i32, padded with -1."""
    max_new_1: torch.Tensor
    """i32."""
    logits_BV: torch.Tensor
    """f32: never rounded to bf16. Columns from num_valid on are padding, which keeps rows at 64 bytes."""
    num_valid: int
    """Vocabulary rows that exist."""
    top_BN: torch.Tensor
    """f32: largest logit of each block of 1,024, a kernel's scratch."""
    sum_BN: torch.Tensor
    """f32: its sum of exponentials."""
    cache: Cache

    def view(self, num_slots: int) -> "DecodeState":
        """The first slots of every tensor that has slots."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in (*SLOT_FIELDS, "logits_BV", "top_BN", "sum_BN"):
            values[name] = values[name][:num_slots]
        return DecodeState(**values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, all that a decode step reads and writes beside the weights."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in own.items() if isinstance(x, torch.Tensor)} | self.cache.tensors()

    def compact(self, num_slots: int, num_kept: int) -> None:
        """Bring the live rows of the first slots, at most num_kept, to the front in order; nothing is read on the host.

        Slots from num_kept on are parked, and so are kept ones that no live row fills.
        """
        is_parked_B = self.context_len_B[:num_slots] == 0
        order_B = torch.argsort(is_parked_B.to(torch.int8), stable=True)[:num_kept]
        for name in SLOT_FIELDS:
            slots_B = getattr(self, name)
            slots_B[:num_kept] = slots_B[order_B]
        self.context_len_B[num_kept:num_slots] = 0
        self.cache.keep(order_B)


def allocate_state(
    model: Decoder, make_cache: Callable[[torch.Tensor], Cache], *, max_rows: int, max_new_tokens: int, num_valid: int
) -> DecodeState:
    """All buffers of the decode loop, for at most max_rows rows of max_new_tokens tokens.

    Args:
        make_cache: Makes the cache from context_len_B, which a paged one reads at every step.
    """
    device = model.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    context_len_B = zeros(max_rows)
    return DecodeState(
        token_B=zeros(max_rows),
        context_len_B=context_len_B,
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
        uniform_2SC=None
        if dispatch.runs_triton(device)
        else zeros(2, max_rows + 1, max_new_tokens, dtype=torch.float32),
        eos_ids_8=zeros(MAX_STOP_IDS),
        max_new_1=zeros(1),
        logits_BV=zeros(max_rows, -(-num_valid // LOGIT_COLUMNS) * LOGIT_COLUMNS, dtype=torch.float32),
        num_valid=num_valid,
        top_BN=zeros(max_rows, -(-num_valid // BLOCK_V), dtype=torch.float32),
        sum_BN=zeros(max_rows, -(-num_valid // BLOCK_V), dtype=torch.float32),
        cache=make_cache(context_len_B),
    )
