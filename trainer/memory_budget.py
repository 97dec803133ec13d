"""The memory of a run reckoned before a weight is loaded: printed term by term, refused where it cannot fit.

On a machine whose CPU and GPU share one memory (DGX Spark) asking for too much does not raise, it hangs the machine. So
bytes are budgeted from the shapes in config.json and held against what is available less a reserve. What is automatic
(rows that decode together, tokens of a micro-batch) counts with its least size here; `budget.py` gives it the rest once
the model is there.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from sparkgrpo.profiling.memory import MemoryLimits, memory_limits
from sparkgrpo.trainer.budget import (
    HOST_BYTES_PER_TOKEN,
    MIN_MICRO_BATCH_TOKENS,
    activation_bytes_per_token,
    head_bytes,
    row_bytes_while_decoding,
)
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.contradictions import lora_targets
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig
from sparkgrpo.trainer.model.lora import CONFIG_FILE, is_adapter_folder
from sparkgrpo.trainer.model.stored import read_json
from sparkgrpo.trainer.model.weights import decoder_shape

GIB = 1 << 30
PROMPT_TOKENS = 64
"""A prompt's share of a sequence before the tokenizer is there; the plan after loading knows the longest prompt."""
GRAPH_BYTES = 256 << 20
"""Allowance for the captured graphs of a CUDA device: no figure of a device at hand yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A part of the budget."""

    name: str
    num_bytes: int
    cure: str
    """The option that makes it smaller."""


def checked_budget(config: Config, source: str, dtype: torch.dtype, device: torch.device) -> str:
    """The budget of a run with the model of this name, in one line; `UserError` where it cannot fit."""
    if is_adapter_folder(source):  # they are merged into the base that they name
        source = str(read_json(Path(source).expanduser() / CONFIG_FILE).get("base_model_name_or_path"))
    terms, limits = training_terms(config, decoder_shape(source), dtype, device), memory_limits(device)
    check_budget(terms, limits)
    return budget_note(terms, limits)


def training_terms(config: Config, shape: DecoderConfig, dtype: torch.dtype, device: torch.device) -> list[Term]:
    """What training must have at least, largest first."""
    model = Decoder(shape, dtype=dtype, device="meta")
    num_params = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    num_trained, num_copied = num_params, 0
    if config.lora_rank:
        num_trained, num_copied = _adapter_params(config, shape)
    is_fp32 = dtype.itemsize == 4
    tokens = PROMPT_TOKENS + config.max_new_tokens
    micro = max(config.tokens_per_micro_batch or MIN_MICRO_BATCH_TOKENS, tokens)
    row = row_bytes_while_decoding(shape, dtype, tokens, shape.vocab_size)
    head = head_bytes(
        config,
        shape.width,
        dtype,
        device,
        num_valid=shape.vocab_size,
        num_rows=config.max_new_tokens,
        needs_dweight=not config.lora_rank,
    )
    has_reference = config.beta > 0 and not config.lora_rank
    smaller = "a smaller --model"
    precision = smaller if not is_fp32 else "--precision bf16, or a smaller --model"
    terms = [
        Term(name="weights", num_bytes=num_params * dtype.itemsize, cure=precision),
        Term(name="fp32 masters", num_bytes=0 if is_fp32 else 4 * num_trained, cure="--lora-rank"),
        Term(name="optimiser moments", num_bytes=8 * num_trained, cure="--lora-rank, or a smaller --model"),
        Term(name="gradients", num_bytes=4 * num_trained, cure="--lora-rank, or a smaller --model"),
        Term(name="reference", num_bytes=num_params * dtype.itemsize if has_reference else 0, cure="--beta 0"),
        Term(name="merged copies", num_bytes=num_copied * dtype.itemsize, cure="fewer --lora-targets"),
        Term(name="keys and values", num_bytes=row * config.group_size, cure="--group-size, --max-new-tokens"),
        Term(
            name="activations of a micro-batch",
            num_bytes=micro
            * activation_bytes_per_token(shape, dtype.itemsize, recomputes=config.activation_checkpointing),
            cure="--tokens-per-micro-batch, --max-new-tokens, --activation-checkpointing",
        ),
        Term(name="head chunk", num_bytes=head, cure="--max-new-tokens"),
        Term(
            name="completions of a batch",
            num_bytes=HOST_BYTES_PER_TOKEN * config.prompts_per_step * config.group_size * config.max_new_tokens,
            cure="--prompts-per-step, --group-size, --max-new-tokens",
        ),
        Term(name="graphs", num_bytes=GRAPH_BYTES if device.type == "cuda" else 0, cure="--device cpu"),
        # One stored tensor at a time stands beside its place in the model.
        Term(name="loader peak", num_bytes=4 * largest, cure=smaller),
    ]
    return sorted((term for term in terms if term.num_bytes), key=lambda term: -term.num_bytes)


def _adapter_params(config: Config, shape: DecoderConfig) -> tuple[int, int]:
    """Weights of the adapters, and of the projections they are merged into for decoding."""
    D, ffn = shape.width, shape.ffn_width
    q, kv = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    sizes = {"q_proj": (D, q), "k_proj": (D, kv), "v_proj": (D, kv), "o_proj": (q, D)}
    sizes |= {"gate_proj": (D, ffn), "up_proj": (D, ffn), "down_proj": (ffn, D)}
    chosen = [sizes[name] for name in lora_targets(config.lora_targets)]
    adapters = config.lora_rank * sum(wide + out for wide, out in chosen)
    return shape.num_layers * adapters, shape.num_layers * sum(wide * out for wide, out in chosen)


def budget_note(terms: list[Term], limits: MemoryLimits) -> str:
    """The budget in one line."""
    listed = ", ".join(f"{term.name} {_size(term.num_bytes)}" for term in terms)
    if limits.available_bytes is None or limits.usable_bytes is None:
        room = "this system does not say how much there is"
    else:
        room = (
            f"{_size(limits.usable_bytes)} can be used ({_size(limits.available_bytes)} available less a reserve of "
            f"{_size(limits.reserve_bytes)})"
        )
    return f"memory: at least {_size(sum(term.num_bytes for term in terms))} needed, {room}: {listed}"


def check_budget(terms: list[Term], limits: MemoryLimits) -> None:
    """Raise `UserError` where the least that is needed exceeds what can be used: the largest terms and their cures."""
    needed, usable = sum(term.num_bytes for term in terms), limits.usable_bytes
    if usable is None or needed <= usable:
        return
    largest = "; ".join(f"{term.name} {_size(term.num_bytes)} (less with {term.cure})" for term in terms[:3])
    raise UserError(
        f"memory: the run needs at least {_size(needed)} and {_size(usable)} can be used "
        f"({_size(limits.available_bytes or 0)} available less a reserve of {_size(limits.reserve_bytes)}); "
        f"nothing was loaded. The three largest terms: {largest}"
    )


def _size(num_bytes: int) -> str:
    """Bytes for people, and exactly."""
    unit, size = ("GiB", GIB) if num_bytes >= GIB else ("MiB", 1 << 20)
    return f"{num_bytes / size:.2f} {unit}"
