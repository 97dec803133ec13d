"""What is read from a Hugging Face config, in both spellings, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.families import ARCHITECTURE, check_family, check_length, decoder_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def from_json(folder: Path, values: Mapping[str, object]) -> PreTrainedConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"type" if key == "rope_type" else key: LLAMA3[key] for key in LLAMA3},
        },
        {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    ],
    ids=["rope_type", "type", "rope_parameters"],
)
def test_rotary_parameters_in_every_spelling(rope: Mapping[str, object], tmp_path: Path) -> None:
    config = decoder_config(from_json(tmp_path, {"model_type": "llama", **rope}))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == LLAMA3


@pytest.mark.parametrize("rope", [{"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e6}}])
def test_no_scaling_in_either_spelling(rope: Mapping[str, object], tmp_path: Path) -> None:
    config = decoder_config(from_json(tmp_path, {"model_type": "qwen2", **rope}))
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)


def test_flags_of_the_families() -> None:
    def flags(config: PreTrainedConfig) -> tuple[bool, ...]:
        found = decoder_config(config)
        return found.qkv_bias, found.o_bias, found.mlp_bias, found.qk_norm, found.tie_embeddings

    assert flags(LlamaConfig()) == (False, False, False, False, False)
    assert flags(LlamaConfig(attention_bias=True)) == (True, True, False, False, False)
    assert flags(LlamaConfig(mlp_bias=True, tie_word_embeddings=True)) == (False, False, True, False, True)
    assert flags(Qwen2Config()) == (True, False, False, False, False)
    assert flags(Qwen3Config()) == (False, False, False, True, False)
    assert flags(Qwen3Config(attention_bias=True)) == (True, True, False, True, False)
    assert flags(MistralConfig()) == (False, False, False, False, False)


def test_head_width_given_or_derived() -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert decoder_config(Qwen2Config(**shape)).head_width == 16
    assert decoder_config(LlamaConfig(**shape)).head_width == 16
    assert decoder_config(MistralConfig(**shape, head_dim=40)).head_width == 40
    assert decoder_config(Qwen3Config(**shape)).head_width == 128  # that family's default is no quotient


def test_sliding_windows_are_recorded_and_hold_for_the_length() -> None:
    assert decoder_config(MistralConfig(sliding_window=4096)).sliding_window == 4096
    assert decoder_config(MistralConfig(sliding_window=None)).sliding_window is None
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
    assert decoder_config(Qwen2Config(**window, max_window_layers=2)).sliding_window == 64
    assert decoder_config(Qwen2Config(**window, max_window_layers=4)).sliding_window is None  # no layer has it
    assert decoder_config(Qwen3Config(sliding_window=64)).sliding_window is None  # switched off
    config = decoder_config(Qwen3Config(**window, max_window_layers=0))
    check_length(config, 64)
    with pytest.raises(UserError, match=r"sliding window of 64 tokens, got 65: .* shorten max_new_tokens"):
        check_length(config, 65)


def test_no_position_beyond_the_last() -> None:
    config = decoder_config(LlamaConfig(max_position_embeddings=128))
    check_length(config, 128)
    with pytest.raises(UserError, match="128 positions, got 129: shorten max_new_tokens"):
        check_length(config, 129)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        ({"model_type": "gpt2"}, "got model_type 'gpt2': choose"),
        ({}, "got model_type 'None'"),
        ({"model_type": "qwen3_moe"}, r"'qwen3_moe' \(a mixture of experts\)"),
        ({"model_type": "mixtral", "num_local_experts": 8}, r"'mixtral' \(a mixture of experts\)"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, r"'qwen2_vl' \(a model of pictures and text\)"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, "weights quantised by 'awq'"),
        ({"model_type": "llama", "quantization_config": "odd"}, "weights quantised by 'unknown'"),
    ],
)
def test_other_models_are_refused_with_the_families_that_work(raw: Mapping[str, object], what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        check_family(raw)
    assert "Llama (SmolLM2 too), Qwen2/2.5, Qwen3 or Mistral" in str(caught.value)


def test_a_config_object_of_another_family_is_refused() -> None:
    with pytest.raises(UserError, match="got model_type 'gpt2'"):
        decoder_config(AutoConfig.for_model("gpt2"))
    config = LlamaConfig()
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UserError, match="weights quantised by 'gptq'"):
        decoder_config(config)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (Qwen2Config(rope_parameters=YARN), "scaling of type default, linear, llama3, got 'yarn'"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "got 'dynamic'"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act 'silu', got 'gelu'"),
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=5), "num_key_value_heads .* got 32, 5 and 128"),
        (LlamaConfig(head_dim=3), "even head_dim, got 32, 32 and 3"),
        (Qwen2Config(layer_types=["chunked_attention"] * 32), "full or sliding attention, got chunked_attention"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config: PreTrainedConfig, what: str) -> None:
    with pytest.raises(UserError, match=what):
        decoder_config(config)


def test_broken_rotary_parameters_are_refused() -> None:
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
    with pytest.raises(UserError, match="low_freq_factor, high_freq_factor, original_max_position_embeddings"):
        decoder_config(config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(UserError, match=r"whole heads, got partial_rotary_factor 0\.5"):
        decoder_config(config)
    config.rope_parameters = None
    with pytest.raises(UserError, match="expected rotary parameters rope_theta for rope_type 'default'"):
        decoder_config(config)


def test_architectures_are_those_of_transformers(hf_config: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(hf_config)
    assert type(model).__name__ == ARCHITECTURE[hf_config.model_type]
