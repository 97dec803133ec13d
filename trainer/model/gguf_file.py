"""Models in GGUF files (llama.cpp's format) of the families that `decoder.py` knows, de-quantised.

The package `gguf` reads and de-quantises, as it does for transformers. The config is made here: transformers parses the
file anew for each question, seconds for a large vocabulary, and leaves out Qwen3's head width.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.import_utils import is_gguf_available

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.decoder import DecoderConfig
from sparkgrpo.trainer.model.families import check_family
from sparkgrpo.trainer.model.stored import StoredTensor

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

CONFIG_NAMES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path) -> "GGUFReader":
    """The reader of a GGUF file, checked for what a config could not say.

    Raises:
        UserError: the package `gguf` is missing, the file is damaged or one part of several, or it scales its rotary
            embedding by a table that no Hugging Face config can express.
    """
    if not is_gguf_available():
        raise UserError(f"expected the package gguf to read {path.name}: pip install 'sparkgrpo[gguf]'")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"expected a complete GGUF file, got {path} ({error}): download it again") from error
    if gguf_field(reader, "split.count") not in (None, 0, 1):
        raise UserError("expected a GGUF file in one piece, got a part: join them with llama.cpp's gguf-split --merge")
    scaling = gguf_field(reader, f"{gguf_field(reader, 'general.architecture')}.rope.scaling.type")
    if scaling not in (None, "none") or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise UserError(
            f"expected a GGUF file without rotary scaling, got one with scaling in {path.name}: "
            "use the model's safetensors, whose config says how"
        )
    return reader


def gguf_field(reader: "GGUFReader", name: str) -> object:
    """A metadata value of a GGUF file, None where it has none."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


def gguf_config(reader: "GGUFReader") -> PreTrainedConfig:
    """The Hugging Face config of the model in a GGUF file.

    Raises:
        UserError: another family, or a value is missing.
    """
    family = str(gguf_field(reader, "general.architecture"))
    check_family({"model_type": family})
    found: dict[str, Any] = {name: gguf_field(reader, f"{family}.{key}") for name, key in CONFIG_NAMES.items()}
    shape = {tensor.name: tensor.shape for tensor in reader.tensors}
    missing = [f"{family}.{CONFIG_NAMES[name]}" for name, value in found.items() if value is None]
    missing += ["token_embd.weight"] if "token_embd.weight" not in shape else []
    if missing:
        raise UserError(f"expected {', '.join(missing)} in the GGUF file, got none: it was not made from a whole model")
    head_width = gguf_field(reader, f"{family}.attention.key_length") or gguf_field(
        reader, f"{family}.rope.dimension_count"
    )
    rope_theta = gguf_field(reader, f"{family}.rope.freq_base") or 10000.0
    return AutoConfig.for_model(
        family,
        **found,
        num_key_value_heads=gguf_field(reader, f"{family}.attention.head_count_kv") or found["num_attention_heads"],
        head_dim=head_width or found["hidden_size"] // found["num_attention_heads"],
        vocab_size=int(shape["token_embd.weight"][1]),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings="output.weight" not in shape,
        bos_token_id=gguf_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=gguf_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=gguf_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def gguf_tensors(reader: "GGUFReader", config: DecoderConfig) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file under their Hugging Face names, de-quantised by the package `gguf` when read.

    A name that is not known stays as it is, so that the caller reports it.
    """
    is_interleaved = gguf_field(reader, "general.architecture") == "llama"
    tensors = {}
    for tensor in reader.tensors:
        *block, kind, suffix = tensor.name.split(".")
        name = f"{TENSOR_NAMES[kind]}.{suffix}" if kind in TENSOR_NAMES else tensor.name
        if block and kind in TENSOR_NAMES:
            name = f"model.layers.{block[-1]}.{name}"
        num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(kind) if is_interleaved else None
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts the fastest axis first
        tensors[name] = StoredTensor(shape=shape, read=functools.partial(_dequantise, tensor, num_heads))
    return tensors


def _dequantise(tensor: "ReaderTensor", num_interleaved_heads: int | None) -> torch.Tensor:
    """float32 values of a GGUF tensor.

    llama.cpp rotates neighbouring channels of a Llama head, transformers channel i with i + E/2: its converter
    interleaves the rows of Q and K, which is undone here.
    """
    from gguf import dequantize

    try:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # a copy: float32 data are the file itself
    except NotImplementedError as error:
        raise UserError(
            f"expected a quantisation that the package gguf undoes, got {tensor.tensor_type.name} for {tensor.name}: "
            "choose another GGUF file of this model, or its safetensors"
        ) from error
    if num_interleaved_heads is None:
        return weight
    return weight.unflatten(0, (num_interleaved_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
