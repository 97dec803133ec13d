"""What a run needs in memory, reckoned before it starts: refused with the numbers where it cannot fit.

The terms are upper bounds from the shapes. Activations are the saved tensors of one packed token through the decoder;
they decide how many tokens a micro-batch has, so a longer batch costs time and not memory.
"""

from dataclasses import dataclass

import torch

from sparkgrpo.profiling.memory import usable_bytes
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig

MAX_ACTIVATION_BYTES = 1 << 30
"""Activations of an automatic micro-batch: beyond this a larger one is no faster."""
FRAC_ACTIVATIONS = 0.25
MIN_MICRO_BATCH_TOKENS = 256
MAX_MICRO_BATCH_TOKENS = 1 << 14
HEAD_BYTES = 3 << 26
"""Chunk of logits and its buffers in `linear_grpo`."""
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Sizes that a run takes from the memory there is."""

    max_rows: int
    """Completions that decode together."""
    tokens_per_micro_batch: int
    terms: dict[str, int]
    """Bytes by name."""


def activation_bytes_per_token(config: DecoderConfig, itemsize: int) -> int:
    """Saved for backward by one token: per block two norms, fused projections, rotation, attention and the gated MLP."""
    heads = (2 * config.num_heads + 4 * config.num_kv_heads) * config.head_width
    saved = 6 * config.width + 3 * heads + 5 * config.ffn_width
    return itemsize * config.num_layers * saved + 4 * 8 * config.width


def plan_memory(
    config: Config, model: Decoder, *, num_valid: int, longest_prompt: int, usable: int | None = None
) -> MemoryPlan:
    """Choose what is automatic and refuse what cannot fit.

    Args:
        longest_prompt: Tokens of the longest prompt seen at start.
        usable: Bytes that the run may plan with, before the model's own; from the machine where None.

    Raises:
        UserError: The largest terms, and the options that shrink them.
    """
    usable = usable_bytes(model.device) if usable is None else usable
    itemsize = torch.finfo(model.dtype).bits // 8
    num_params = sum(p.numel() for p in model.parameters())
    shape = model.config
    row_bytes = (
        2
        * shape.num_layers
        * shape.num_kv_heads
        * shape.head_width
        * itemsize
        * (longest_prompt + config.max_new_tokens)
        + 4 * 4 * num_valid
    )
    wanted_rows = max(config.prompts_per_step * config.group_size, config.eval_problems)
    terms = {
        "gradients, moments and masters": num_params * (12 + (4 if itemsize < 4 else 0)),
        "reference (beta above 0)": num_params * itemsize if config.beta > 0 else 0,
        "head": HEAD_BYTES + 4 * num_valid * shape.width,
    }
    rest = float("inf") if usable is None else usable - sum(terms.values())
    token_bytes = activation_bytes_per_token(shape, itemsize)
    tokens = config.tokens_per_micro_batch or int(
        min(MAX_ACTIVATION_BYTES, max(rest, 0) * FRAC_ACTIVATIONS) // token_bytes
    )
    if not config.tokens_per_micro_batch:
        tokens = min(MAX_MICRO_BATCH_TOKENS, max(MIN_MICRO_BATCH_TOKENS, tokens))
    # One prompt with one completion is the least that a micro-batch can hold, whatever was asked for.
    terms["activations of a micro-batch"] = token_bytes * max(tokens, longest_prompt + config.max_new_tokens)
    rest = float("inf") if usable is None else usable - sum(terms.values())
    max_rows = int(min(wanted_rows, max(rest, 0) // row_bytes))
    terms["keys and values while decoding"] = row_bytes * max(max_rows, config.group_size)
    if max_rows < config.group_size:
        _refuse(terms, usable or 0)
    return MemoryPlan(max_rows=max_rows, tokens_per_micro_batch=tokens, terms=terms)


def _refuse(terms: dict[str, int], usable: int) -> None:
    largest = sorted(terms.items(), key=lambda term: -term[1])[:3]
    listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in largest)
    raise UserError(
        f"the run needs {sum(terms.values()) / GIB:.2f} GiB and {usable / GIB:.2f} GiB can be used; largest: {listed}. "
        "Lower --max-new-tokens, --group-size or --tokens-per-micro-batch, set --beta 0, or take a smaller model"
    )
