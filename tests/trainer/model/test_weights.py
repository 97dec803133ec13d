"""Checkpoints in and out: views on the fused storage, round trips bit for bit, transformers reads what we write."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model import weights
from sparkgrpo.trainer.model.chat import encode_chat
from sparkgrpo.trainer.model.families import decoder_config
from sparkgrpo.trainer.model.weights import (
    LoadedModel,
    load_model,
    random_model,
    save_model,
    state_dict_hf,
    stop_ids,
)

DTYPES = [torch.float32, torch.bfloat16]
MakeHF = Callable[[PreTrainedConfig], PreTrainedModel]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


def load(source: Path | str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(str(source), dtype=dtype, device="cpu")


def small_config(*, is_tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=272,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=is_tied,
    )


@pytest.fixture
def folder(tmp_path: Path, make_hf_model: MakeHF, make_tokenizer: MakeTokenizer) -> Path:
    """A small untied Llama as transformers writes it."""
    make_hf_model(small_config()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder: Path, file: str = "config.json", **values: object) -> None:
    content = json.loads((folder / file).read_text()) | values
    (folder / file).write_text(json.dumps(content))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def test_views_are_the_model(hf_config: PreTrainedConfig) -> None:
    model = random_model(decoder_config(hf_config), seed=0)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    views = state_dict_hf(model)
    assert {view.untyped_storage().data_ptr() for view in views.values()} == storages
    assert sum(view.numel() for view in views.values()) == sum(parameter.numel() for parameter in model.parameters())
    for idx, view in enumerate(views.values()):
        view.fill_(float(idx))
    E, layer = model.config.head_width, model.layers[1]
    order = list(views)
    expected = [
        order.index(f"model.layers.1.self_attn.{part}_proj.weight")
        for part, num_heads in zip("qkv", (model.config.num_heads, *[model.config.num_kv_heads] * 2), strict=True)
        for _ in range(num_heads * E)
    ]
    assert layer.qkv_weight[:, 0].tolist() == expected
    ffn = model.config.ffn_width
    gate, up = (float(order.index(f"model.layers.1.mlp.{part}_proj.weight")) for part in ("gate", "up"))
    assert layer.gate_up_weight[:, 0].tolist() == [gate] * ffn + [up] * ffn
    assert layer.qkv_weight.requires_grad and not views["model.norm.weight"].requires_grad


@pytest.mark.parametrize("shard_size", ["50GB", "20KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_transformers_wrote_is_read(
    dtype: torch.dtype,
    shard_size: str,
    hf_config: PreTrainedConfig,
    make_hf_model: MakeHF,
    make_tokenizer: MakeTokenizer,
    tmp_path: Path,
) -> None:
    hf_model = make_hf_model(hf_config).to(dtype)  # pyright: ignore[reportArgumentType]
    hf_model.save_pretrained(tmp_path, max_shard_size=shard_size)
    make_tokenizer().save_pretrained(tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    expected = hf_model.state_dict()
    if hf_config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for asked in (torch.float32, torch.bfloat16, torch.float64):
        loaded = load(tmp_path, asked)
        assert_same(state_dict_hf(loaded.model), {name: tensor.to(asked) for name, tensor in expected.items()})
        assert loaded.model.dtype == asked and loaded.model.config == decoder_config(hf_config)
    assert (loaded.source, loaded.num_valid) == (str(tmp_path), 259)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_we_write_gives_transformers_the_same_logits(
    dtype: torch.dtype,
    hf_config: PreTrainedConfig,
    make_hf_model: MakeHF,
    make_tokenizer: MakeTokenizer,
    tmp_path: Path,
) -> None:
    make_hf_model(hf_config).to(dtype).save_pretrained(tmp_path / "theirs")  # pyright: ignore[reportArgumentType]
    make_tokenizer().save_pretrained(tmp_path / "theirs")
    save_model(tmp_path / "new" / "ours", load(tmp_path / "theirs", dtype))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "ours", output_loading_info=True)
    ours, info = found  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(info.values()), info
    assert ours.dtype == dtype
    token_1T = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(ours(token_1T).logits, theirs(token_1T).logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_save_then_load_is_bitwise(
    dtype: torch.dtype, hf_config: PreTrainedConfig, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    loaded = LoadedModel(
        model=random_model(decoder_config(hf_config), seed=7, dtype=dtype),
        tokenizer=make_tokenizer(),
        hf_config=hf_config,
        generation_config=GenerationConfig(eos_token_id=[257, 258], temperature=0.7, do_sample=True),
        source="made here",
    )
    save_model(tmp_path, loaded)
    again = load(tmp_path, dtype)
    assert_same(state_dict_hf(again.model), state_dict_hf(loaded.model))
    assert again.model.config == loaded.model.config
    assert (again.generation_config.eos_token_id, again.generation_config.temperature) == ([257, 258], 0.7)
    assert again.hf_config.dtype == dtype
    messages = [{"role": "user", "content": "hi"}]
    assert encode_chat(again.tokenizer, messages) == encode_chat(loaded.tokenizer, messages)
    assert again.tokenizer.chat_template == loaded.tokenizer.chat_template
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != hf_config.tie_word_embeddings
    assert loaded.hf_config.dtype != dtype or dtype == torch.float32  # saving leaves the caller's config as it was


def test_sampling_options_that_contradict_each_other_are_saved_as_they_came(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": 257}')
    save_model(folder / "saved", load(folder))
    assert json.loads((folder / "saved" / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_checkpoint_without_generation_config_gets_one(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    found = load(folder).generation_config
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (256, 257, None)


def test_a_tied_head_may_be_stored_twice(make_hf_model: MakeHF, make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    make_hf_model(small_config(is_tied=True)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    once = state_dict_hf(load(tmp_path).model)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    loaded = load(tmp_path)
    assert_same(state_dict_hf(loaded.model), once)
    assert loaded.model.head_VD is loaded.model.embed_VD
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1.0))
    with pytest.raises(UserError, match=r"lm_head\.weight to equal .* set tie_word_embeddings to false"):
        load(tmp_path)


def test_rotary_buffers_of_old_files_are_passed_over(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(folder)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"got 1 missing: model\.norm\.weight$"),
        (lambda tensors: tensors.pop("lm_head.weight"), r"got 1 missing: lm_head\.weight$"),
        (lambda tensors: tensors.update({"score.weight": torch.ones(1)}), r"got 1 not known: score\.weight$"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}),
            r"got 1 of another shape: model\.norm\.weight \[5\] for \[16\]$",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name],
            r"got 9 missing: model\.layers\.1\..* and 5 more$",
        ),
        (
            lambda tensors: tensors.update({f"transformer.{name}": tensors.pop(name) for name in list(tensors)}),
            r"got 21 missing: .* and 17 more; 21 not known: transformer\..* and 17 more$",
        ),
    ],
    ids=["missing", "head", "unknown", "shape", "layer", "prefix"],
)
def test_tensors_that_do_not_fit_are_named(
    edit: Callable[[dict[str, torch.Tensor]], object], what: str, folder: Path
) -> None:
    rewrite(folder, edit)
    with pytest.raises(UserError, match=what):
        load(folder)


def test_num_valid_is_the_vocabulary_of_the_tokenizer(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.num_valid == len(loaded.tokenizer) == 259
    assert loaded.model.config.vocab_size == 272


def test_a_tokenizer_larger_than_the_head_is_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra{idx:02}>" for idx in range(14)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"got 272 rows \(vocab_size\) and 1 tokens beyond them \(<extra13>\)"):
        load(folder)


def test_a_missing_or_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="a tokenizer that transformers reads in"):
        load(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"copy the model's tokenizer\.json and tokenizer_config\.json there"):
        load(folder)


@pytest.mark.parametrize("class_name", ["Qwen2Tokenizer", "LlamaTokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_without_its_vocabulary_is_refused(folder: Path, class_name: str) -> None:
    """transformers fills in an empty one, and a run would train on prompts of no token."""
    reconfigure(folder, "tokenizer_config.json", tokenizer_class=class_name, unk_token="<unk>")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json\); copy the model's tokenizer\.json there") as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_vocabulary_may_come_in_other_files(folder: Path) -> None:
    reconfigure(folder, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    assert len(load(folder).tokenizer("1 2 + a")["input_ids"]) == 7


def test_a_tokenizer_of_ones_own_stays_as_it_is_in_every_family(
    hf_config: PreTrainedConfig, make_hf_model: MakeHF, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    make_hf_model(hf_config).save_pretrained(tmp_path)
    tokenizer = make_tokenizer(adds="<s> $A")
    tokenizer.save_pretrained(tmp_path)
    found = load(tmp_path).tokenizer
    assert found.get_vocab() == tokenizer.get_vocab()
    for text in ("x <|endoftext|> 123", "e\u0301"):
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_tokenizer_with_a_class_of_its_own_gets_it(folder: Path) -> None:
    reconfigure(folder, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert type(load(folder).tokenizer).__name__ == "Qwen2Tokenizer"


def test_configs_that_do_not_work_are_refused(folder: Path) -> None:
    reconfigure(folder, hidden_size="wide")
    with pytest.raises(UserError, match="a config that transformers reads in"):
        load(folder)
    reconfigure(folder, hidden_size=16, model_type="never_heard_of")
    with pytest.raises(UserError, match="got model_type 'never_heard_of'"):
        load(folder)
    reconfigure(folder, model_type="llama", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="weights quantised by 'fp8'"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"a model's folder, got .* without config\.json"):
        load(folder)


def test_a_broken_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"a generation_config\.json that transformers reads"):
        load(folder)


def test_notes_tell_what_is_unusual(folder: Path) -> None:
    assert load(folder).notes == ()
    reconfigure(folder, attention_dropout=0.1, resid_pdrop=0.25, hidden_dropout=0.0, eos_token_id=None)
    reconfigure(folder, "generation_config.json", eos_token_id=None)
    reconfigure(folder, "tokenizer_config.json", eos_token=None)
    (folder / "chat_template.jinja").unlink()
    template, stop, dropout = load(folder).notes
    assert "no chat template: prompts are given as plain text" in template
    assert "completions end at max_new_tokens only" in stop
    assert "attention_dropout of 0.1 and resid_pdrop of 0.25 is not applied" in dropout


@pytest.mark.parametrize("source", ["no/such/folder", "/no/such/folder", "./nowhere", "two words"])
def test_what_is_neither_folder_nor_hub_name_is_refused(source: str) -> None:
    with pytest.raises(UserError, match="expected a folder, a hub name"):
        load(source)


@pytest.mark.parametrize("error", [LocalEntryNotFoundError, HfHubHTTPError, GatedRepoError, ConnectionError])
def test_an_unreachable_hub_is_one_message(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        raise error.__new__(error, "the reason\nand more")

    monkeypatch.setattr(weights, "snapshot_download", unreachable)
    with pytest.raises(
        UserError, match=r"got 'Qwen/Qwen3-0\.6B': no such folder, and the hub .*check the name and"
    ) as caught:
        load("Qwen/Qwen3-0.6B")
    assert "\n" not in str(caught.value)


def test_a_hub_name_is_loaded_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cached(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.safetensors" in allow_patterns and "*/*" in ignore_patterns
        return str(folder)

    monkeypatch.setattr(weights, "snapshot_download", cached)
    loaded = load("owner/name")
    assert asked == [loaded.source] == ["owner/name"]
    assert_same(state_dict_hf(loaded.model), state_dict_hf(load(folder).model))


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([151645, 151643], 151645, "</s>", (257, 151643, 151645)),
        (151643, [151645], None, (151643, 151645)),
        (None, 258, "</s>", (257, 258)),
        (None, None, "</s>", (257,)),
        (None, None, None, ()),
        (0, None, None, (0,)),
    ],
)
def test_stop_ids_are_the_union_of_three(
    generation: int | list[int] | None,
    config: int | list[int] | None,
    tokenizer: str | None,
    expected: tuple[int, ...],
    make_tokenizer: MakeTokenizer,
) -> None:
    made = make_tokenizer()
    made.eos_token = tokenizer
    assert stop_ids(GenerationConfig(eos_token_id=generation), Qwen2Config(eos_token_id=config), made) == expected
    without = stop_ids(None, Qwen2Config(eos_token_id=config), made)
    assert set(without) <= set(expected)
