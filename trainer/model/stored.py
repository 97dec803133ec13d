"""Tensors in a folder of safetensors (one file, or shards with an index), their shapes known before any is read."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sparkgrpo.trainer.config import UserError

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_SHARD_NAMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor on disk."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Reads it, in the dtype it is stored in (de-quantised GGUF tensors: float32), on the CPU."""


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file of a model's folder.

    Raises:
        UserError: no such file, or no JSON object in it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"expected a model's folder, got {path.parent} without {path.name}") from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"expected JSON in {path}, got: {error}; download it again") from error
    if not isinstance(found, dict):
        raise UserError(f"expected a JSON object in {path}, got {type(found).__name__}: download it again")
    return found


def safetensors_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face folder; model.safetensors is preferred to an index, as in transformers.

    Raises:
        UserError: no safetensors there (PyTorch's own format, a GGUF file or a LoRA adapter is named), a missing or
            damaged file, an integer or 8-bit dtype.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return _tensors_of_file(folder / "model.safetensors")
    if not index.is_file():
        raise UserError(_no_safetensors(folder))
    file_of_name = read_json(index).get("weight_map")
    if not isinstance(file_of_name, dict):
        raise UserError(f"expected a weight_map in {index}, got none: download it again")
    files = sorted(set(file_of_name.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        names = ", ".join(absent[:MAX_SHARD_NAMES])
        raise UserError(
            f"expected {len(files)} shards in {folder}, {len(absent)} are missing ({names}): download it again"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        stored = _tensors_of_file(folder / file)
        tensors |= {name: tensor for name, tensor in stored.items() if file_of_name.get(name) == file}
    return tensors


def _tensors_of_file(path: Path) -> dict[str, StoredTensor]:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(f"expected a complete safetensors file, got {path} ({error}): download it again") from error
    tensors = {}
    for name in file.keys():  # noqa: SIM118 a safe_open object is no mapping
        piece = file.get_slice(name)
        if piece.get_dtype() not in FLOAT_DTYPES:
            raise UserError(
                f"expected weights of {', '.join(FLOAT_DTYPES)}, got {piece.get_dtype()} for {name} in {path.name}: "
                "quantised checkpoints cannot be trained, use the original"
            )
        read = functools.partial(file.get_tensor, name)
        tensors[name] = StoredTensor(shape=tuple(piece.get_shape()), read=read)
    return tensors


def _no_safetensors(folder: Path) -> str:
    """What to say of a folder that has no safetensors: name what is there instead."""
    expected = f"expected model.safetensors or model.safetensors.index.json in {folder}, got"
    if (folder / "adapter_config.json").is_file():
        return f"{expected} a LoRA adapter: merge it into its base model first (peft's merge_and_unload), then save"
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"{expected} a GGUF file: name the file itself, {ggufs[0]}"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            f"{expected} PyTorch's pickle format, which can run code when loaded: convert it once with transformers, "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), and copy the tokenizer"
        )
    return f"{expected} none: is it the folder of a model, completely downloaded?"
