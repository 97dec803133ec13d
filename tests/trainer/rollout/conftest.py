"""Small models: random ones of every family with their transformers twins, and ones whose logits are known exactly."""

from collections.abc import Callable
from functools import partialmethod

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig
from sparkgrpo.trainer.model.families import decoder_config
from sparkgrpo.trainer.model.weights import state_dict_hf
from sparkgrpo.trainer.rollout import shrinking_cache
from sparkgrpo.trainer.rollout.engine import RolloutEngine

VOCAB_SIZE = 37
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE | {"num_key_value_heads": 1}, head_dim=16),
    "mistral": lambda: MistralConfig(**SHAPE | {"num_key_value_heads": 4}, sliding_window=None),
}
MakeModels = Callable[[torch.dtype], tuple[PreTrainedModel, Decoder]]


def run_as_captured(run: Callable[[], None]) -> Callable[[], None]:
    """In the place of a CUDA capture: two warm-ups and the recorded run, and a replay that runs again."""
    for _ in range(3):
        run()
    return run


@pytest.fixture(params=["grouped", "rows", "shrinking", "paged", "paged, captured"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which cache the engines of a test have, and whether their steps are replayed."""
    name = request.param.split(",")[0]
    monkeypatch.setattr(shrinking_cache, "ROWS_AT_MOST", 3)  # so that the rows of a test pass through both kinds
    capture = run_as_captured if request.param.endswith("captured") else None
    monkeypatch.setattr(RolloutEngine, "__init__", partialmethod(RolloutEngine.__init__, cache=name, capture=capture))
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_models(family: str) -> MakeModels:
    """Makes the transformers model of a family, every parameter random, and our decoder with the same weights."""

    def make(dtype: torch.dtype) -> tuple[PreTrainedModel, Decoder]:
        hf_model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="sdpa")
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in hf_model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
        hf_model = hf_model.to(dtype)
        model = Decoder(decoder_config(hf_model.config), dtype=dtype)
        source = hf_model.state_dict()
        for name, view in state_dict_hf(model).items():
            view.copy_(source[name])
        return hf_model, model

    return make


@pytest.fixture
def exact_model() -> Callable[..., Decoder]:
    """Makes a decoder whose logits are a function of the last token, in numbers that fp32 adds without rounding.

    Embeddings are +-1, so the norm is 1; attention and feed-forward run and add zero; the head holds small multiples of
    1/16. So the logits are the same bit for bit whatever shape the products have, and tokens may be compared for
    equality. With `is_chain` token t is followed by t + 1, with a probability of almost 1.
    """

    def make(*, vocab_size: int = 24, is_chain: bool = False, stop_bias: float = 0.0) -> Decoder:
        config = DecoderConfig(
            family="llama",
            vocab_size=vocab_size,
            width=32,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_width=8,
            ffn_width=16,
            rms_eps=0.0,
            rope_theta=1e4,
            max_position=128,
        )
        model = Decoder(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            for name in ("o_weight", "down_weight"):
                getattr(model.layers[0], name).zero_()
            model.embed_VD.sign_()
            model.embed_VD[:, 0] = 1.0
            model.final_norm_D.fill_(1.0)
            if is_chain:
                model.head_VD.copy_(4 * model.embed_VD.roll(1, 0))
            else:
                model.head_VD.mul_(4).round_().div_(16)
                model.head_VD[0, 0] += stop_bias
        return model

    return make
