"""One decoder for Llama (also SmolLM2), Qwen2/2.5, Qwen3 and Mistral, for training, prefill and decoding alike.

The forward runs on packed tokens: no padding, no mask, every position given. What differs between training and
decoding is `attend` alone: the caller says how a token's query meets the keys.

Letters: T packed tokens, V vocabulary, D width, H query heads, K key heads, E head width, F width of the feed-forward.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparkgrpo.kernels.linear import linear
from sparkgrpo.kernels.rms_norm import rms_norm
from sparkgrpo.kernels.rotary import rotary
from sparkgrpo.kernels.swiglu import swiglu

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")

Projection = Literal["qkv", "o", "gate_up", "down"]
"""The four products of a block."""
Rope = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of every token's angles, float32 [T, 1, E/2]."""
Attend = Callable[[int, torch.Tensor, torch.Tensor, Rope], torch.Tensor]
"""attend(layer_idx, qk_TJE, v_TKE, rope) -> out_THE: queries and keys side by side (J = H + K), not rotated yet, since
decoding turns them while it writes the cache; `rotated` does it for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Shape of a decoder; families differ in these flags alone."""

    family: str
    """One of FAMILIES."""
    vocab_size: int
    """Rows of the embedding and the head; the tokenizer may have fewer."""
    width: int
    """D, the residual stream."""
    num_layers: int
    num_heads: int
    """H."""
    num_kv_heads: int
    """K; H is a multiple of it."""
    head_width: int
    """E."""
    ffn_width: int
    """F."""
    rms_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, float | str] | None = None
    """Parameters of a scaled rotary embedding (`rope_type` default, linear or llama3), or None."""
    tie_embeddings: bool = False
    """The head is the embedding, one storage."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on every query and key head before the rotation (Qwen3)."""
    max_position: int = 2**20
    """Longest sequence the checkpoint was made for, tokens."""
    sliding_window: int | None = None
    """Tokens that a query of some layer sees, itself included; None: all. Attention here is always full, so longer
    sequences are refused (`families.check_length`)."""


class Adapters(nn.Module):
    """What is added to a block's fused projections; `lora.py` implements it."""

    def delta(self, name: Projection, x_TI: torch.Tensor) -> torch.Tensor | None:
        """[T, rows of the fused weight] to add to the product of this projection with x; None for nothing."""
        raise NotImplementedError


class DecoderLayer(nn.Module):
    """Weights of one block. Q/K/V and gate/up are stored fused: one product instead of three, and instead of two."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        H, K, E, D, ffn = config.num_heads, config.num_kv_heads, config.head_width, config.width, config.ffn_width

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        self.attn_norm_D = empty(D)
        self.qkv_weight = empty((H + 2 * K) * E, D)
        self.qkv_bias = empty((H + 2 * K) * E) if config.qkv_bias else None
        self.q_norm_E = empty(E) if config.qk_norm else None
        self.k_norm_E = empty(E) if config.qk_norm else None
        self.o_weight = empty(D, H * E)
        self.o_bias = empty(D) if config.o_bias else None
        self.mlp_norm_D = empty(D)
        self.gate_up_weight = empty(2 * ffn, D)
        self.gate_up_bias = empty(2 * ffn) if config.mlp_bias else None
        self.down_weight = empty(D, ffn)
        self.down_bias = empty(D) if config.mlp_bias else None
        self.adapters: Adapters | None = None
        """What LoRA adds to the projections (`lora.py`); None: nothing."""


class Decoder(nn.Module):
    """The weights of a decoder, uninitialised: `weights.py` fills them, `decoder_hidden` computes with them."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        if config.family not in FAMILIES:
            raise ValueError(f"expected a model family of {', '.join(FAMILIES)}, got {config.family!r}")
        self.config = config
        V, D = config.vocab_size, config.width
        self.embed_VD = nn.Parameter(torch.empty(V, D, dtype=dtype, device=device))
        layers = nn.ModuleList(DecoderLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers))
        self.layers = cast(Sequence[DecoderLayer], layers)  # ModuleList does not tell a type checker what it holds
        self.final_norm_D = nn.Parameter(torch.empty(D, dtype=dtype, device=device))
        self.rope_frequency_E = rope_inverse_frequency(config).to(device)
        """Angle per position of each pair of channels, float32 [E/2]: no weight, and never in another dtype."""
        self.lm_head_VD = None if config.tie_embeddings else nn.Parameter(torch.empty(V, D, dtype=dtype, device=device))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Decoder":
        """A move or a cast of the weights: the angles follow to the device and stay float32."""
        super()._apply(fn, recurse)
        self.rope_frequency_E = rope_inverse_frequency(self.config).to(self.device)
        return self

    @property
    def head_VD(self) -> nn.Parameter:
        """The LM head [V, D]: the embedding itself where the checkpoint ties them."""
        return self.embed_VD if self.lm_head_VD is None else self.lm_head_VD

    @property
    def device(self) -> torch.device:
        """Where the weights lie, all of them."""
        return self.embed_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the weights, all of them."""
        return self.embed_VD.dtype


def rope_inverse_frequency(config: DecoderConfig) -> torch.Tensor:
    """Angle per position of each pair of channels, float32 [E/2], with the checkpoint's scaling applied.

    Source: Su et al., RoFormer (arXiv:2104.09864); `llama3` is the wavelength rule of the Llama 3.1 release.
    """
    exponent = torch.arange(0, config.head_width, 2, dtype=torch.int64).float() / config.head_width
    inv_freq = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    if kind == "default":
        return inv_freq
    factor = float(scaling["factor"])
    if kind == "linear":
        return inv_freq / factor
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        trained = float(scaling["original_max_position_embeddings"])
        wavelength = 2 * math.pi / inv_freq
        smooth = ((trained / wavelength - low) / (high - low)).clamp(0.0, 1.0)  # 0: slowed down, 1: untouched
        return (1 - smooth) * inv_freq / factor + smooth * inv_freq
    raise ValueError(f"expected a rotary scaling of type default, linear or llama3, got {kind!r}")


def rope_table(model: Decoder, position_T: torch.Tensor) -> Rope:
    """cos and sin of every token's angles; exact positions, computed, never cached."""
    angle_T1E = position_T.float()[:, None, None] * model.rope_frequency_E
    return angle_T1E.cos(), angle_T1E.sin()


def rotated(qk_TJE: torch.Tensor, rope: Rope, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, E] and keys [T, K, E], turned by their positions."""
    qk_TJE = rotary(qk_TJE, *rope)
    return qk_TJE[:, :num_heads], qk_TJE[:, num_heads:]


def _project(
    layer: DecoderLayer, name: Projection, x_TI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out_TO = linear(x_TI, weight, bias)
    delta_TO = None if layer.adapters is None else layer.adapters.delta(name, x_TI)
    return out_TO if delta_TO is None else out_TO + delta_TO


def decoder_layer(
    layer: DecoderLayer,
    config: DecoderConfig,
    layer_idx: int,
    hidden_TD: torch.Tensor,
    rope: Rope,
    attend: Attend,
) -> torch.Tensor:
    """One pre-norm block on packed tokens: hidden [T, D] -> hidden [T, D]."""
    H, K, E = config.num_heads, config.num_kv_heads, config.head_width
    normed_TD, hidden_TD = rms_norm(hidden_TD, layer.attn_norm_D, eps=config.rms_eps)
    qkv = _project(layer, "qkv", normed_TD, layer.qkv_weight, layer.qkv_bias).unflatten(-1, (H + 2 * K, E))
    qk_TJE, v_TKE = qkv.split((H + K, K), dim=1)
    if layer.q_norm_E is not None and layer.k_norm_E is not None:
        q_THE = rms_norm(qk_TJE[:, :H], layer.q_norm_E, eps=config.rms_eps).y_TD
        k_TKE = rms_norm(qk_TJE[:, H:], layer.k_norm_E, eps=config.rms_eps).y_TD
        qk_TJE = torch.cat((q_THE, k_TKE), dim=1)
    out_THE = attend(layer_idx, qk_TJE, v_TKE, rope)
    out_TD = _project(layer, "o", out_THE.flatten(1), layer.o_weight, layer.o_bias)
    normed_TD, hidden_TD = rms_norm(out_TD, layer.mlp_norm_D, eps=config.rms_eps, residual_TD=hidden_TD)
    gate_up_T2F = _project(layer, "gate_up", normed_TD, layer.gate_up_weight, layer.gate_up_bias)
    return hidden_TD + _project(layer, "down", swiglu(gate_up_T2F), layer.down_weight, layer.down_bias)


def decoder_hidden(
    model: Decoder, token_T: torch.Tensor, position_T: torch.Tensor, attend: Attend, *, recomputes: bool = False
) -> torch.Tensor:
    """Hidden states after the final norm, ready for the head.

    Args:
        token_T: int32 or int64 [T], packed token ids. position_T: integer [T], each token's place in its sequence.
        attend: How queries meet keys, see `Attend`.
        recomputes: Activation checkpointing: of a block only its input is kept, and the backward pass computes the
            block again. There is no dropout, so it computes the same.

    Returns:
        hidden_TD in the model's dtype.
    """
    config = model.config
    hidden_TD = F.embedding(token_T, model.embed_VD)
    rope = rope_table(model, position_T)
    for layer_idx, layer in enumerate(model.layers):
        arguments = (layer, config, layer_idx, hidden_TD, rope, attend)
        if recomputes and torch.is_grad_enabled():
            hidden_TD = checkpoint(decoder_layer, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden_TD = decoder_layer(*arguments)
    return rms_norm(hidden_TD, model.final_norm_D, eps=config.rms_eps).y_TD
