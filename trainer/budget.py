"""What a run needs in memory, reckoned before it starts: refused with the numbers where it cannot fit.

The terms are upper bounds from the shapes, beside the weights, which are loaded by then. Activations are the saved
tensors of one packed token through the decoder; they decide how many tokens a micro-batch has, so a longer batch costs
time and not memory. The rows that decode together take what is left.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sparkgrpo.kernels.head_plan import plan_linear_grpo
from sparkgrpo.profiling.memory import usable_bytes
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig
from sparkgrpo.trainer.objectives import objective_of

MAX_ACTIVATION_BYTES = 5 << 29
"""Activations of an automatic micro-batch. With 1 GiB a 135M model took 1.2 times as long: prompts were repeated."""
FRAC_ACTIVATIONS = 0.25
MIN_MICRO_BATCH_TOKENS = 256
MAX_MICRO_BATCH_TOKENS = 1 << 13
"""A model of 1M weights took 1.15 times as long with twice as many: its activations no longer fit the caches."""
HOST_BYTES_PER_TOKEN = 64
"""Of a sampled token: tensors of ids, log-probs and targets, the id as a Python integer, and its text."""
UNKNOWN_BYTES = 1 << 62
"""Stands for the memory of a machine that does not say: nothing is refused there."""
GIB = 1 << 30
KV_TERM = "keys and values while decoding"

TRAINING_CURE = (
    "lower --prompts-per-step, --group-size, --max-new-tokens or --tokens-per-micro-batch, set --beta 0, turn on "
    "--activation-checkpointing, or take a smaller model"
)
EVALUATION_CURE = "lower --max-new-tokens, or take a smaller model"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Sizes that a run takes from the memory there is."""

    max_rows: int
    """Completions that decode together."""
    tokens_per_micro_batch: int
    """0 where nothing is trained."""
    terms: Mapping[str, int]
    """Bytes by name."""


def plan_training(
    config: Config, model: Decoder, *, num_valid: int, longest_prompt: int, usable: int | None = None
) -> MemoryPlan:
    """Choose what is automatic and refuse what cannot fit.

    Args:
        num_valid: len(tokenizer).
        longest_prompt: Tokens of the longest prompt seen at start.
        usable: Bytes that there are beside the loaded model; asked of the machine where None.

    Raises:
        UserError: What is needed, what there is, the largest terms and the options that shrink them.
    """
    usable = _usable(model, usable)
    has_copy = config.beta > 0 and not config.lora_rank  # under LoRA the reference is the base, which is there
    # under LoRA: the adapters alone
    num_params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    terms = {
        # an fp32 model is its own master
        "gradients, moments and masters": num_params * (12 if model.dtype.itemsize == 4 else 16),
        "reference (beta above 0)": num_params * model.dtype.itemsize if has_copy else 0,
        "head": head_bytes(
            config,
            model.config.width,
            model.dtype,
            model.device,
            num_valid=num_valid,
            num_rows=config.tokens_per_micro_batch or MAX_MICRO_BATCH_TOKENS,
            needs_dweight=model.head_VD.requires_grad,
        ),
        "completions of a batch": batch_bytes(config),
    }
    token_bytes = activation_bytes_per_token(
        model.config, model.dtype.itemsize, recomputes=config.activation_checkpointing
    )
    tokens = config.tokens_per_micro_batch
    if not tokens:
        rest = max(usable - sum(terms.values()), 0)
        tokens = int(min(MAX_ACTIVATION_BYTES, rest * FRAC_ACTIVATIONS)) // token_bytes
        tokens = min(MAX_MICRO_BATCH_TOKENS, max(MIN_MICRO_BATCH_TOKENS, tokens))
    # One prompt with one completion is the least that a micro-batch can hold, whatever was asked for.
    terms["activations of a micro-batch"] = token_bytes * max(tokens, longest_prompt + config.max_new_tokens)
    row_bytes = row_bytes_while_decoding(model.config, model.dtype, longest_prompt + config.max_new_tokens, num_valid)
    wanted_rows = max(config.prompts_per_step * config.group_size, config.eval_problems)
    max_rows = _rows(usable, terms, row_bytes, wanted=wanted_rows, least=config.group_size, cure=TRAINING_CURE)
    return MemoryPlan(max_rows=max_rows, tokens_per_micro_batch=tokens, terms=terms)


def plan_evaluation(
    config: Config, model: Decoder, *, num_valid: int, longest_prompt: int, usable: int | None = None
) -> MemoryPlan:
    """The same for an evaluation alone: nothing but rows that decode.

    Raises:
        UserError: One row does not fit.
    """
    terms: dict[str, int] = {}
    row_bytes = row_bytes_while_decoding(model.config, model.dtype, longest_prompt + config.max_new_tokens, num_valid)
    usable = _usable(model, usable)
    max_rows = _rows(usable, terms, row_bytes, wanted=config.eval_problems, least=1, cure=EVALUATION_CURE)
    return MemoryPlan(max_rows=max_rows, tokens_per_micro_batch=0, terms=terms)


def activation_bytes_per_token(config: DecoderConfig, itemsize: int, *, recomputes: bool = False) -> int:
    """Saved for backward by one token: a block's two norms, fused projections, rotation, attention and gated MLP.

    With activation checkpointing: one hidden state a block, and all of one block.
    """
    heads = (2 * config.num_heads + 4 * config.num_kv_heads) * config.head_width
    saved = 6 * config.width + 3 * heads + 5 * config.ffn_width
    if recomputes:
        return itemsize * (config.num_layers * config.width + saved) + 4 * 8 * config.width
    return itemsize * config.num_layers * saved + 4 * 8 * config.width


def head_bytes(
    config: Config,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_valid: int,
    num_rows: int,
    needs_dweight: bool = True,
) -> int:
    """What `linear_grpo` takes for this many completion tokens: a chunk of logits, its rows, both gradients."""
    plan = plan_linear_grpo(
        num_rows,
        num_valid,
        width,
        objective=objective_of(config),
        dtype=dtype,
        device=device,
        needs_dweight=needs_dweight,
        longest_sequence=config.max_new_tokens,
    )
    return plan.num_bytes


def row_bytes_while_decoding(shape: DecoderConfig, dtype: torch.dtype, num_tokens: int, num_valid: int) -> int:
    """Keys and values of so many tokens and four fp32 values for each logit; siblings, who share, need less."""
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_width * dtype.itemsize
    return token_bytes * num_tokens + 4 * 4 * num_valid


def batch_bytes(config: Config) -> int:
    """A batch of full-length completions on the host, however many waves decode it: ids, log-probs and text."""
    return HOST_BYTES_PER_TOKEN * config.prompts_per_step * config.group_size * config.max_new_tokens


def _usable(model: Decoder, usable: int | None) -> int:
    found = usable_bytes(model.device) if usable is None else usable
    return UNKNOWN_BYTES if found is None else found


def _rows(usable: int, terms: dict[str, int], row_bytes: int, *, wanted: int, least: int, cure: str) -> int:
    """Rows that fit beside the other terms, their own term added; refuses fewer than `least`."""
    rows = min(wanted, (usable - sum(terms.values())) // row_bytes)
    terms[KV_TERM] = row_bytes * max(rows, least)
    if rows < least:
        largest = sorted(terms.items(), key=lambda term: -term[1])[:3]
        listed = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in largest)
        raise UserError(
            f"the run needs {sum(terms.values()) / GIB:.2f} GiB and {usable / GIB:.2f} GiB can be used; largest: "
            f"{listed}; {cure}"
        )
    return rows
