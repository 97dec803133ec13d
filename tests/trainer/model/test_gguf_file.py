"""GGUF files written here, of every family, against the weights that went in; what no config can express is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model import gguf_file
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.families import decoder_config
from sparkgrpo.trainer.model.gguf_file import TENSOR_NAMES, gguf_config, open_gguf
from sparkgrpo.trainer.model.weights import decoder_shape, load_model, random_model, state_dict_hf, stop_ids

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
CONFIGS = [
    LlamaConfig(**SHAPE, tie_word_embeddings=True),
    LlamaConfig(**SHAPE, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    Qwen2Config(**SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5),
    Qwen3Config(**SHAPE, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
]
Edit = Callable[[gguf.GGUFWriter], None]


def as_llama_cpp_stores_it(name: str, weight: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """llama.cpp's converter: LlamaModel.permute in convert_hf_to_gguf.py (Q and K of Llama, nothing else)."""
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def add_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig, begin: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    # transformers adds <|endoftext|> to every byte-level vocabulary that lacks it
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", begin, "</s>", "<pad>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 3)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(259)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")


def write(
    path: Path, config: PreTrainedConfig, model: Decoder, edit: Edit | None = None, *, begin: str = "<|endoftext|>"
) -> Path:
    """A GGUF file in float32; ``edit`` adds to it, ``begin`` is the token 257."""
    writer = gguf.GGUFWriter(path, config.model_type)
    add_metadata(writer, config, begin)
    short = {hf_name: name for name, hf_name in TENSOR_NAMES.items()}
    for hf_name, view in state_dict_hf(model).items():
        stem, _, suffix = hf_name.rpartition(".")
        block = stem.removeprefix("model.layers.").split(".", 1) if stem.startswith("model.layers.") else None
        name = f"blk.{block[0]}.{short[block[1]]}" if block else short[stem]
        writer.add_tensor(f"{name}.{suffix}", as_llama_cpp_stores_it(hf_name, view, config).contiguous().numpy())
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_weights_and_config_come_back(config: PreTrainedConfig, tmp_path: Path) -> None:
    model = random_model(decoder_config(config), seed=1)
    for view in state_dict_hf(model).values():
        view.add_(torch.randn(view.shape, generator=torch.Generator().manual_seed(2)))  # norms and biases count too
    path = write(tmp_path / "model.gguf", config, model)
    loaded = load_model(str(path), dtype=torch.float32, device="cpu")
    expected = state_dict_hf(model)
    found = state_dict_hf(loaded.model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name, value in SHAPE.items():
        assert getattr(loaded.hf_config, name) == value
    assert loaded.model.config.head_width == model.config.head_width
    assert loaded.model.config.rope_theta == model.config.rope_theta
    assert loaded.hf_config.rms_norm_eps == pytest.approx(config.rms_norm_eps)  # a float32 in the file
    assert loaded.hf_config.tie_word_embeddings == config.tie_word_embeddings
    assert (loaded.num_valid, loaded.notes, loaded.source) == (260, (), str(path))
    assert stop_ids(loaded.generation_config, loaded.hf_config, loaded.tokenizer) == (258,)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[3]], ids=lambda config: config.model_type)
def test_the_tokenizer_is_that_of_transformers(config: PreTrainedConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", config, random_model(decoder_config(config), seed=1))
    tokenizer = load_model(str(path), dtype=torch.float32, device="cpu").tokenizer
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ("hello there", "<|endoftext|>  12345\n\nhé e\u0301</s>", ""):
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert tokenizer.chat_template == expected.chat_template == "{{ bos_token }}{{ messages[0].content }}"


def test_values_that_old_files_leave_out(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", torch.zeros(7, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = gguf_config(open_gguf(tmp_path / "old.gguf"))
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (4, 8, 7)
    assert config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "without rotary scaling"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy()), "without rotary scaling"),
        (lambda writer: writer.add_uint16("split.count", 2), "in one piece, got a part: join them"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", torch.ones(32).numpy()), "not known: .*q_proj.bias"),
        (lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", torch.ones(4, 2).numpy()), "ffn_gate_exps"),
    ],
    ids=["scaling", "table", "split", "bias", "experts"],
)
def test_what_would_be_another_model_is_refused(edit: Edit, what: str, tmp_path: Path) -> None:
    config = CONFIGS[0]
    path = write(tmp_path / "model.gguf", config, random_model(decoder_config(config), seed=1), edit)
    with pytest.raises(UserError, match=what):
        load_model(str(path), dtype=torch.float32, device="cpu")


def test_another_family_and_an_incomplete_file_are_refused(tmp_path: Path) -> None:
    for name, family in (("other.gguf", "gpt2"), ("empty.gguf", "qwen3")):
        writer = gguf.GGUFWriter(tmp_path / name, family)
        writer.add_block_count(2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(UserError, match="got model_type 'gpt2'"):
        load_model(str(tmp_path / "other.gguf"), dtype=torch.float32, device="cpu")
    with pytest.raises(UserError, match=r"expected qwen3\.embedding_length, .*token_embd\.weight in the GGUF file"):
        load_model(str(tmp_path / "empty.gguf"), dtype=torch.float32, device="cpu")


def test_damage_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    config = CONFIGS[2]
    path = write(tmp_path / "model.gguf", config, random_model(decoder_config(config), seed=1))
    content = path.read_bytes()
    for damaged in (b"", b"GGUF", b"not a model at all, but longer", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"complete GGUF file, got .*model\.gguf .*download it again"):
            load_model(str(path), dtype=torch.float32, device="cpu")
    with pytest.raises(UserError, match=r"got nowhere\.gguf: no such file"):
        load_model("nowhere.gguf", dtype=torch.float32, device="cpu")
    with pytest.raises(UserError, match=r"got nowhere\.gguf: no such file"):
        decoder_shape("nowhere.gguf")  # the memory plan asks first


def test_without_the_package_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "is_gguf_available", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'sparkgrpo\[gguf\]'"):
        open_gguf(tmp_path / "model.gguf")


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    config = CONFIGS[0]
    path = tmp_path / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, value: None)
        write(path, config, random_model(decoder_config(config), seed=1))
    with pytest.raises(UserError, match=r"tokenizer that transformers reads in model\.gguf"):
        load_model(str(path), dtype=torch.float32, device="cpu")


def test_a_token_that_transformers_adds_has_no_row(tmp_path: Path) -> None:
    config = CONFIGS[0]
    path = write(tmp_path / "model.gguf", config, random_model(decoder_config(config), seed=1), begin="<s>")
    with pytest.raises(
        UserError, match=r"260 rows .* 1 tokens beyond them \(<\|endoftext\|>\).*the model's safetensors"
    ):
        load_model(str(path), dtype=torch.float32, device="cpu")
