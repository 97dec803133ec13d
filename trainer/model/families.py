"""What a Hugging Face config says about a decoder: its family, its flags, and what is refused.

Whatever is refused would be computed wrongly by `decoder.py`, in silence: hence a list of what is known, never a guess.
"""

from collections.abc import Mapping

from transformers import PreTrainedConfig

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.decoder import FAMILIES, DecoderConfig

SUPPORTED = (
    "expected a dense Llama (SmolLM2 too), Qwen2/2.5, Qwen3 or Mistral model for text, unquantised "
    f"(model_type {', '.join(FAMILIES)})"
)
ARCHITECTURE = {family: f"{family.capitalize()}ForCausalLM" for family in FAMILIES}
"""Class of transformers that loads what we save, per family."""
ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Parameters of each rotary scaling that `decoder.rope_inverse_frequency` knows."""


def check_family(raw_config: Mapping[str, object]) -> None:
    """Refuse what is no dense text model of a known family. Takes the config.json itself: transformers may not know it.

    Raises:
        UserError: names the model_type or the quantisation, and the families that work.
    """
    model_type = str(raw_config.get("model_type"))
    if model_type not in FAMILIES:
        kind = ""
        if "moe" in model_type or "num_experts" in raw_config or "num_local_experts" in raw_config:
            kind = " (a mixture of experts)"
        elif "vision_config" in raw_config:
            kind = " (a model of pictures and text)"
        raise UserError(f"{SUPPORTED}, got model_type {model_type!r}{kind}: choose a model of one of these families")
    quantisation = raw_config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, Mapping) else "unknown"
        raise UserError(
            f"{SUPPORTED}, got weights quantised by {method!r}: training needs full weights, use the original"
        )


def decoder_config(hf_config: PreTrainedConfig) -> DecoderConfig:
    """The decoder that a config of transformers describes.

    Args:
        hf_config: of model_type llama, qwen2, qwen3 or mistral. Transformers has already merged the two spellings of
            the rotary parameters (`rope_theta` with `rope_scaling`, and `rope_parameters`) into the latter.

    Raises:
        UserError: for another family, a quantised checkpoint, an unknown rotary scaling, activation or layer type, or
            head counts that do not fit together.
    """
    check_family(hf_config.to_dict())
    family = hf_config.model_type
    num_heads, num_kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    head_width = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
    if num_heads % num_kv_heads or head_width % 2:
        raise UserError(
            "expected num_attention_heads to be a multiple of num_key_value_heads and an even head_dim, "
            f"got {num_heads}, {num_kv_heads} and {head_width}: check config.json"
        )
    if hf_config.hidden_act != "silu":
        raise UserError(f"expected hidden_act 'silu', got {hf_config.hidden_act!r}: {SUPPORTED}")
    has_attention_bias = family in ("llama", "qwen3") and bool(hf_config.attention_bias)
    rope_theta, rope_scaling = _rope(hf_config.rope_parameters)
    return DecoderConfig(
        family=family,
        vocab_size=hf_config.vocab_size,
        width=hf_config.hidden_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        ffn_width=hf_config.intermediate_size,
        rms_eps=hf_config.rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=bool(hf_config.tie_word_embeddings),
        qkv_bias=family == "qwen2" or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=family == "llama" and bool(hf_config.mlp_bias),
        qk_norm=family == "qwen3",
        max_position=hf_config.max_position_embeddings,
        sliding_window=_sliding_window(hf_config),
    )


def check_length(config: DecoderConfig, num_tokens: int) -> None:
    """Refuse sequences (prompt and completion together) that the model would compute otherwise than it was trained to.

    Raises:
        UserError: `num_tokens` exceeds the model's sliding window or its longest position.
    """
    if config.sliding_window is not None and num_tokens > config.sliding_window:
        raise UserError(
            f"expected prompt and completion within the model's sliding window of {config.sliding_window} tokens, got "
            f"{num_tokens}: only full attention is computed here; shorten max_new_tokens or the prompts"
        )
    if num_tokens > config.max_position:
        raise UserError(
            f"expected prompt and completion within the model's {config.max_position} positions, got {num_tokens}: "
            "shorten max_new_tokens or the prompts"
        )


def _rope(parameters: Mapping[str, float | str] | None) -> tuple[float, dict[str, float | str] | None]:
    """Base and scaling of the rotary embedding, the scaling None where there is none."""
    parameters = parameters or {}
    kind = str(parameters.get("rope_type", "default"))
    if kind not in ROPE_PARAMETERS:
        known = ", ".join(ROPE_PARAMETERS)
        raise UserError(f"expected a rotary scaling of type {known}, got {kind!r}: choose another model")
    part = float(parameters.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise UserError(f"expected rotary embeddings over whole heads, got partial_rotary_factor {part}: {SUPPORTED}")
    missing = [name for name in ("rope_theta", *ROPE_PARAMETERS[kind]) if parameters.get(name) is None]
    if missing:
        raise UserError(f"expected rotary parameters {', '.join(missing)} for rope_type {kind!r}: check config.json")
    scaling = {"rope_type": kind} | {name: parameters[name] for name in ROPE_PARAMETERS[kind]}
    return float(parameters["rope_theta"]), None if kind == "default" else scaling


def _sliding_window(hf_config: PreTrainedConfig) -> int | None:
    """Shortest window of any layer. Mistral puts it on all layers, Qwen on those of type sliding_attention."""
    layer_types = set(getattr(hf_config, "layer_types", None) or ())
    unknown = sorted(layer_types - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(f"expected layers of full or sliding attention, got {', '.join(unknown)}: {SUPPORTED}")
    if hf_config.model_type == "mistral" or "sliding_attention" in layer_types:
        return hf_config.sliding_window
    return None
