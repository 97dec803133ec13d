"""Folders of safetensors: one file, shards, and every way in which they can be incomplete."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.stored import read_json, safetensors_tensors

TENSORS = {name: torch.randn(3, 2, generator=torch.Generator().manual_seed(idx)) for idx, name in enumerate("abcd")}
INDEX = "model.safetensors.index.json"


def write_shards(folder: Path) -> None:
    for idx, names in enumerate(("ab", "cd"), 1):
        save_file({name: TENSORS[name] for name in names}, folder / f"model-{idx:05}-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 + (name > 'b')}-of-00002.safetensors" for name in TENSORS}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_and_one_file_are_the_same(tmp_path: Path) -> None:
    write_shards(tmp_path)
    stored = safetensors_tensors(tmp_path)
    assert stored.keys() == TENSORS.keys()
    assert all(torch.equal(stored[name].read(), TENSORS[name]) for name in TENSORS)
    assert all(stored[name].shape == (3, 2) for name in TENSORS)
    other = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    save_file(other, tmp_path / "model.safetensors")  # preferred, as transformers prefers it
    stored = safetensors_tensors(tmp_path)
    assert all(torch.equal(stored[name].read(), other[name]) for name in TENSORS)


def test_a_tensor_counts_only_in_the_file_that_the_index_names(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(
        {"a": torch.zeros(1), "b": TENSORS["b"], "e": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors"
    )
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["a"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert safetensors_tensors(tmp_path).keys() == {"b", "c", "d"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"2 shards .* 1 are missing \(model-00002-of-00002\.safetensors\): download"):
        safetensors_tensors(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 60, -1])
def test_a_damaged_file_is_named(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(
        UserError, match=r"complete safetensors file, got .*model\.safetensors \(.*\): download it again"
    ):
        safetensors_tensors(tmp_path)


def test_an_index_without_its_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(UserError, match="expected a weight_map in"):
        safetensors_tensors(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"expected weights of F64, F32, F16, BF16, got .* for w in model"):
        safetensors_tensors(tmp_path)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("pytorch_model.bin", r"pickle format.*from_pretrained\(FOLDER\)\.save_pretrained\(NEW_FOLDER\)"),
        ("pytorch_model-00001-of-00002.bin", "pickle format"),
        ("consolidated.00.pth", "pickle format"),
        ("model.gguf", r"a GGUF file: name the file itself, .*model\.gguf"),
        ("adapter_config.json", r"a LoRA adapter: merge it .*merge_and_unload"),
        ("config.json", "none: is it the folder of a model, completely downloaded"),
    ],
)
def test_folders_without_safetensors_say_what_they_have(file: str, what: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=what):
        safetensors_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"{", "expected JSON in"), (b"\xff", "expected JSON in"), (b"[]", "a JSON object in")],
)
def test_broken_json_is_named(content: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=f"{what}.*config"):
        read_json(tmp_path / "config.json")


def test_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a model's folder, got .* without config\.json"):
        read_json(tmp_path / "config.json")
