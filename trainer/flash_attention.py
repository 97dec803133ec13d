"""Attention of packed trees by flash-attn's varlen kernel: the same function as `kernels/prefix_attention.py`.

Every prompt is a sequence of its own, every completion one whose queries are its own tokens and whose keys are its
prompt's and its own. The kernel's causal mask is aligned to the lower right, which is what a completion needs.
Sequences stand in packed order, so queries and results are the packed axis itself and only keys are gathered;
autograd's gradient of the gather sums over siblings.

Letters: T packed tokens, M gathered keys, H query heads, K key heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparkgrpo.kernels.prefix_attention import TreeLayout, packed_starts
from sparkgrpo.trainer.config import Config, UserError

Varlen = Callable[..., torch.Tensor]
"""`flash_attn.flash_attn_varlen_func`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashPlan:
    """Sequences of one micro-batch as the kernel wants them; built once, used by every block."""

    key_M: torch.Tensor
    """int64: the packed token of every key."""
    cu_queries: torch.Tensor
    """int32, bounds of the sequences on the packed axis."""
    cu_keys: torch.Tensor
    """int32, bounds of the sequences on the axis of keys."""
    longest_query: int
    longest_key: int


def flash_plan(layout: TreeLayout, device: torch.device) -> FlashPlan:
    """The sequences of these trees."""
    lens, trees = layout.completion_len_S, layout.tree_of_completion_S
    prompt_start_N, start_S, _ = packed_starts(layout.prompt_len_N, lens, trees)
    keys, query_lens = [], []
    row = 0
    for n, (start, length) in enumerate(zip(prompt_start_N, layout.prompt_len_N, strict=True)):
        prompt = torch.arange(start, start + length)
        keys.append(prompt)
        query_lens.append(length)
        while row < len(lens) and trees[row] == n:
            keys.append(torch.cat((prompt, torch.arange(start_S[row], start_S[row] + lens[row]))))
            query_lens.append(lens[row])
            row += 1

    def bounds(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)

    key_lens = [len(key) for key in keys]
    return FlashPlan(
        key_M=torch.cat(keys).to(device),
        cu_queries=bounds(query_lens),
        cu_keys=bounds(key_lens),
        longest_query=max(query_lens),
        longest_key=max(key_lens),
    )


def flash_prefix_attention(
    q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, plan: FlashPlan, varlen: Varlen
) -> torch.Tensor:
    """Attention of packed trees, differentiable in q, k and v.

    Args:
        q_THE: [T, H, E] rotated queries, bf16 on CUDA. k_TKE, v_TKE: [T, K, E]; H is a multiple of K.
        varlen: `flash_attn_varlen_func`.

    Returns:
        out_THE in q's dtype.
    """
    return varlen(
        q_THE.contiguous(),
        k_TKE.index_select(0, plan.key_M),
        v_TKE.index_select(0, plan.key_M),
        plan.cu_queries,
        plan.cu_keys,
        plan.longest_query,
        plan.longest_key,
        causal=True,
    )


def load_varlen(config: Config, device: torch.device, dtype: torch.dtype) -> Varlen | None:
    """flash-attn's kernel where `config.attention` asks for it, else None.

    Raises:
        UserError: It is not installed, or does not serve this device or precision.
    """
    if config.attention != "flash":
        return None
    if device.type != "cuda" or dtype != torch.bfloat16:
        raise UserError(
            f"attention: flash-attn serves CUDA and bf16 alone, and this run is on {device.type} in "
            f"{str(dtype).removeprefix('torch.')}: use --attention sdpa"
        )
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise UserError(
            f'attention: expected the package flash-attn ({error}): pip install "sparkgrpo[flash]", or use '
            "--attention sdpa"
        ) from None
    return flash_attn_varlen_func
