"""The decoder against transformers: logits and gradients of packed ragged sequences, in fp64, bf16 and on real weights.

Letters: T packed tokens, V vocabulary, H query heads, K key heads, E head width.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sparkgrpo.trainer.model.chat import encode_chat
from sparkgrpo.trainer.model.decoder import (
    Decoder,
    DecoderConfig,
    Rope,
    decoder_hidden,
    rope_inverse_frequency,
    rotated,
)
from sparkgrpo.trainer.model.families import decoder_config
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, random_model, save_model, state_dict_hf

LENGTHS = (1, 7, 12)  # odd, and one token alone
MakeHF = Callable[[PreTrainedConfig], PreTrainedModel]


def causal_per_sequence(lengths: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """The plainest `attend`: PyTorch's attention on one sequence after the other."""

    def attend(layer_idx: int, qk_TJE: torch.Tensor, v_TKE: torch.Tensor, rope: Rope) -> torch.Tensor:
        q_THE, k_TKE = rotated(qk_TJE, rope, qk_TJE.shape[1] - v_TKE.shape[1])
        outs = []
        for qkv in zip(q_THE.split(lengths), k_TKE.split(lengths), v_TKE.split(lengths), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in qkv)
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(outs)

    return attend


def packed(lengths: tuple[int, ...], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    token_T = torch.randint(vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return token_T, torch.cat([torch.arange(length) for length in lengths])


def our_logits(
    model: Decoder, token_T: torch.Tensor, position_T: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    return F.linear(decoder_hidden(model, token_T, position_T, causal_per_sequence(lengths)), model.head_VD)


def with_exact_norms(hf_model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64 with norms in fp64 too: transformers computes them in fp32 whatever the model's dtype."""
    hf_model = hf_model.double()
    for module in list(hf_model.modules()):
        child: Any
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                exact = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                exact.weight = child.weight
                setattr(module, name, exact)
    return hf_model


def twin(hf_model: PreTrainedModel) -> Decoder:
    """Our decoder with the weights of a transformers model."""
    model = Decoder(decoder_config(hf_model.config), dtype=hf_model.dtype)
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)  # whatever is not copied below shows
    source = hf_model.state_dict()
    for name, view in state_dict_hf(model).items():
        view.copy_(source[name])
    return model


def test_logits_and_gradients_equal_transformers_in_fp64(hf_config: PreTrainedConfig, make_hf_model: MakeHF) -> None:
    hf_model = with_exact_norms(make_hf_model(hf_config))
    model = twin(hf_model)
    token_T, position_T = packed(LENGTHS, hf_config.vocab_size)
    logits_TV = our_logits(model, token_T, position_T, LENGTHS)
    expected_TV = torch.cat([hf_model(part[None]).logits[0] for part in token_T.split(LENGTHS)])
    # fp64 sums of fewer than 100 terms of order 1 carry errors of about 1e-14; a wrong formula is off by 1e-3 and more
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=1e-9)

    weight_TV = torch.randn(expected_TV.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits_TV * weight_TV).sum().backward()
    (expected_TV * weight_TV).sum().backward()
    for parameter in model.parameters():  # to see the gradients under their Hugging Face names
        assert parameter.grad is not None
        parameter.data = parameter.grad
    expected = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    gradients = state_dict_hf(model)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_sequence_does_not_see_its_neighbours(
    order: tuple[int, ...], hf_config: PreTrainedConfig, make_hf_model: MakeHF
) -> None:
    model = twin(make_hf_model(hf_config).double())
    token_T, position_T = packed(LENGTHS, hf_config.vocab_size)
    tokens, positions = token_T.split(LENGTHS), position_T.split(LENGTHS)
    lengths = tuple(LENGTHS[idx] for idx in order)
    with torch.no_grad():
        logits_TV = our_logits(
            model, torch.cat([tokens[idx] for idx in order]), torch.cat([positions[idx] for idx in order]), lengths
        )
        for idx, part_TV in zip(order, logits_TV.split(lengths), strict=True):
            alone_TV = our_logits(model, tokens[idx], positions[idx], (LENGTHS[idx],))
            torch.testing.assert_close(part_TV, alone_TV, rtol=0, atol=1e-10)


def test_bf16_is_no_farther_from_the_truth_than_transformers(
    hf_config: PreTrainedConfig, make_hf_model: MakeHF
) -> None:
    rounded = make_hf_model(hf_config).bfloat16()
    token_T, position_T = packed(LENGTHS, hf_config.vocab_size)
    with torch.no_grad():
        ours_TV = our_logits(twin(rounded), token_T, position_T, LENGTHS)
        theirs_TV = torch.cat([rounded(part[None]).logits[0] for part in token_T.split(LENGTHS)])
        exact = twin(rounded.double())
        truth_TV = our_logits(exact, token_T, position_T, LENGTHS)
    assert ours_TV.dtype == torch.bfloat16
    our_error, their_error = ((logits - truth_TV).square().mean().sqrt() for logits in (ours_TV, theirs_TV))
    # both round at about the same places, at random: their root mean squares over 5,440 logits lie close together
    assert our_error < 1.3 * their_error
    assert our_error < 0.02 * truth_TV.square().mean().sqrt()  # bf16 keeps 8 bits, a few roundings in a row


@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize("head_width", [64, 128])
def test_scaled_rotary_frequencies_are_those_of_transformers_bit_for_bit(kind: str, head_width: int) -> None:
    parameters = {"rope_type": kind, "rope_theta": 500000.0, "factor": 32.0}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    hf_config = LlamaConfig(head_dim=head_width, max_position_embeddings=131072, rope_parameters=parameters)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf_config)
    assert attention_factor == 1.0
    assert torch.equal(rope_inverse_frequency(decoder_config(hf_config)), expected)


def test_unknown_family_and_unknown_scaling_are_refused() -> None:
    shape = dict.fromkeys(
        ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_width", "ffn_width"), 2
    )
    with pytest.raises(ValueError, match="llama, qwen2, qwen3, mistral, got 'gpt2'"):
        Decoder(DecoderConfig(**shape, family="gpt2", rms_eps=1e-6, rope_theta=1e4))
    config = DecoderConfig(
        **shape, family="llama", rms_eps=1e-6, rope_theta=1e4, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    )
    with pytest.raises(ValueError, match="default, linear or llama3, got 'yarn'"):
        rope_inverse_frequency(config)


def test_random_model_is_decided_by_its_seed(hf_config: PreTrainedConfig) -> None:
    config = decoder_config(hf_config)
    first, again, other = (state_dict_hf(random_model(config, seed=seed)) for seed in (3, 3, 4))
    rounded = state_dict_hf(random_model(config, seed=3, dtype=torch.bfloat16))
    for name, view in first.items():
        assert torch.equal(view, again[name])
        assert torch.equal(view.bfloat16(), rounded[name])
        if name.endswith("_proj.weight"):
            assert not torch.equal(view, other[name])
            assert view.std().item() == pytest.approx(0.02, rel=0.2)  # 300 draws and more: std within 4 % each sigma
        elif "norm" in name:
            assert torch.equal(view, torch.ones_like(view))
        elif name.endswith("bias"):
            assert torch.equal(view, torch.zeros_like(view))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> LoadedModel:
    return load_model(str(smollm2_gguf), dtype=torch.float32, device="cpu")


def real_logits(loaded: LoadedModel, prompts: list[list[int]]) -> torch.Tensor:
    lengths = tuple(len(ids) for ids in prompts)
    position_T = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        return our_logits(loaded.model, torch.tensor([token for ids in prompts for token in ids]), position_T, lengths)


def test_real_weights_equal_transformers_on_text(
    smollm2: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the products that transformers uses too, 1e-4; with the faster ones, whose sums carry half as much rounding
    error again (root mean square 2.0e-5 against 1.4e-5), 5e-6 of the largest logit from float64."""
    save_model(tmp_path, smollm2)
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    chat = [{"role": "user", "content": "Using the numbers 3, 7 and 4, write an expression that equals 40."}]
    plain_ids = smollm2.tokenizer("The capital of France is")["input_ids"]
    prompts = [encode_chat(smollm2.tokenizer, chat), plain_ids]
    fast_TV = real_logits(smollm2, prompts)
    monkeypatch.setattr("sparkgrpo.kernels.linear.SMALL_MULTIPLICATIONS", 1 << 60)
    logits_TV = real_logits(smollm2, prompts)
    with torch.no_grad():
        expected_TV = torch.cat([hf_model(torch.tensor([ids])).logits[0] for ids in prompts])
        exact_TV = torch.cat([hf_model.double()(torch.tensor([ids])).logits[0] for ids in prompts])
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=1e-4)  # fp32 through 30 layers
    torch.testing.assert_close(fast_TV.double(), exact_TV, rtol=0, atol=5e-6 * float(exact_TV.abs().max()))
    # a fault of de-quantisation would be in both: that the model knows what it knows says that there is none
    assert smollm2.tokenizer.decode([int(logits_TV[-1].argmax())]) == " Paris"


@pytest.mark.slow  # transformers parses a GGUF file three times: 15 s
def test_a_gguf_file_is_read_as_transformers_reads_it(smollm2: LoadedModel, smollm2_gguf: Path) -> None:
    folder, file = smollm2_gguf.parent, smollm2_gguf.name
    hf_model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    expected = hf_model.state_dict()
    views = state_dict_hf(smollm2.model)
    assert views.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(view, expected[name]) for name, view in views.items())
    ours, theirs = smollm2.hf_config.to_dict(), hf_model.config.to_dict()
    for name in ours.keys() - {"architectures", "dtype", "_name_or_path"}:  # these say how it was loaded
        assert ours[name] == theirs[name], name

    hf_tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    assert smollm2.tokenizer.chat_template == hf_tokenizer.chat_template
    assert smollm2.tokenizer.get_vocab() == hf_tokenizer.get_vocab()
    assert smollm2.tokenizer.special_tokens_map == hf_tokenizer.special_tokens_map
    for text in ("The capital of France is", "  Zwölf 1234567\n\n\tcôté <|im_start|>user", ""):
        assert smollm2.tokenizer(text)["input_ids"] == hf_tokenizer(text)["input_ids"]
    for generation_prompt in (False, True):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=generation_prompt
            )
            for tokenizer in (smollm2.tokenizer, hf_tokenizer)
        ]
        assert texts[0] == texts[1]
