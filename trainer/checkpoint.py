"""Checkpoints: a Hugging Face folder that transformers loads, and beside it what a resume needs.

    checkpoints/step_000040/   config.json, generation_config.json, tokenizer, model.safetensors    the model
                               trainer_state.safetensors    masters (bf16 models), Adam's moments
                               state.json                   step, counters; written last
    checkpoints/reference/     model.safetensors            the frozen start, once, when there is a KL leash

A checkpoint is written into a temporary folder, synced and renamed, so a crash at any byte leaves the one before usable.
Random numbers need no state: they are keyed by seed, step, problem, completion and position.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.weights import LoadedModel, save_model, state_dict_hf
from sparkgrpo.trainer.optim import MasterAdamW

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    folder: Path, *, step: int, loaded: LoadedModel, optim: MasterAdamW, state: Mapping[str, object], keep: int
) -> Path:
    """Write checkpoints/step_NNNNNN under the run folder and drop the oldest beyond `keep`.

    Args:
        state: JSON values that a resume needs besides the weights.

    Raises:
        UserError: The disk refused; earlier checkpoints are untouched.
    """
    final = folder / "checkpoints" / f"step_{step:06d}"
    temporary = final.with_name(f".{final.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        save_model(temporary, loaded)
        save_file(_optimiser_tensors(optim), temporary / "trainer_state.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise UserError(
            f"{final}: could not write the checkpoint ({error.strerror}); the one before is intact. "
            "Make room or choose another --run-dir"
        ) from None
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob("step_*") if (path / "state.json").is_file())


def latest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run; `UserError` where there is none."""
    found = checkpoints(folder)
    if not found:
        raise UserError(f"{folder}: holds no complete checkpoint to go on from; start a new run")
    return found[-1]


def read_state(checkpoint: Path) -> dict[str, object]:
    """The JSON values given to `save_checkpoint`, with `step`."""
    return json.loads((checkpoint / "state.json").read_text())


@torch.no_grad()
def restore_optimiser(checkpoint: Path, optim: MasterAdamW) -> None:
    """Fill masters and moments in place from trainer_state.safetensors."""
    tensors = load_file(checkpoint / "trainer_state.safetensors")
    for name, master in optim.masters.items():
        if optim.has_masters:
            master.copy_(tensors[f"master/{name}"])
        if f"exp_avg/{name}" in tensors:
            optim.adam.state[master] = {
                key: tensors[f"{key}/{name}"].to(master.device if key != "step" else "cpu") for key in MOMENTS
            }


def save_reference(folder: Path, reference: Decoder) -> None:
    """Keep the frozen start beside the checkpoints, once: a resume must not read it by name again."""
    path = folder / "checkpoints" / "reference" / "model.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".writing")
        save_file(state_dict_hf(reference), temporary)
        _sync(temporary)
        temporary.rename(path)


@torch.no_grad()
def restore_reference(folder: Path, reference: Decoder) -> None:
    """Fill a model in place with the frozen start of a run."""
    tensors = load_file(folder / "checkpoints" / "reference" / "model.safetensors")
    for name, view in state_dict_hf(reference).items():
        view.copy_(tensors[name])


def _optimiser_tensors(optim: MasterAdamW) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, master in optim.masters.items():
        if optim.has_masters:
            tensors[f"master/{name}"] = master.detach()
        for key in MOMENTS if master in optim.adam.state else ():
            tensors[f"{key}/{name}"] = optim.adam.state[master][key]
    return tensors


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
