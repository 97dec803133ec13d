"""Checkpoints: a Hugging Face folder that transformers loads, and beside it what a resume needs.

    checkpoints/step_000040/   config.json, generation_config.json, tokenizer, model.safetensors    the model
                               trainer_state.safetensors    masters (bf16 models), Adam's moments
                               state.json                   progress of the run, sizes of the files, hash of its
                                                            config, versions
    checkpoints/reference/     model.safetensors            the frozen start, once, when there is a KL leash

Under LoRA the model is adapter_config.json and adapter_model.safetensors as PEFT writes them, and the reference is the
base, of which nothing is stored; a reference that moves (`sync_every`) lies in every checkpoint.

A checkpoint is written into a temporary folder, synced and renamed, so a crash at any byte leaves the one before
usable; one whose files do not have the sizes in its state.json is passed over, and said to be. An old one is renamed
away before it is removed, so it is never half there. No random state is stored: problems and draws are keyed by seed,
step, place in the stream of problems, completion and position.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.lora import Lora
from sparkgrpo.trainer.model.weights import LoadedModel, save_model, state_dict_hf
from sparkgrpo.trainer.optim import MasterAdamW

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
REFERENCE_FILE = "reference.safetensors"
_SINCE_0_2 = ("num_extra_problems", "num_prompts_dropped")


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is: what a resume needs beside weights, optimiser and configuration. JSON values alone."""

    step: int = 0
    """Steps done."""
    eval_before: float | None = None
    """Held-out accuracy before step 1; None until it is known."""
    eval_after: float | None = None
    """Held-out accuracy of the newest evaluation."""
    eval_step: int = -1
    """Step after which that was; -1 before the first."""
    num_tokens_total: int = 0
    """Prompt and completion tokens since the start."""
    num_extra_problems: int = 0
    """Problems of the stream that steps have taken beyond prompts_per_step each."""
    num_prompts_dropped: int = 0
    """Of these, passed over for a too long prompt."""
    skipped_steps: int = 0
    """Updates skipped for a gradient that was not finite."""
    seen_reasons: list[str] = field(default_factory=list)
    """Reason codes that have occurred, sorted."""


def save_checkpoint(
    folder: Path,
    progress: Progress,
    *,
    loaded: LoadedModel,
    optim: MasterAdamW,
    facts: Mapping[str, object],
    keep: int,
    lora: Lora | None = None,
    moving_reference: Decoder | None = None,
) -> Path:
    """Write step_NNNNNN into the folder of checkpoints and drop the oldest beyond `keep`.

    Args:
        facts: JSON values for state.json that people may want to know.
        lora: Adapters to write in the model's place.
        moving_reference: A reference that is no longer the start.

    Returns:
        The checkpoint. A complete one of this step, which this step's weights came from, stays as it is.

    Raises:
        UserError: It could not be written; earlier checkpoints are untouched.
    """
    final = folder / f"step_{progress.step:06d}"
    if _is_complete(final):
        return final
    temporary = folder / f".{final.name}.writing"
    try:
        for leftover in (final, *folder.glob(".*.writing"), *folder.glob(".*.dropped")):
            shutil.rmtree(leftover, ignore_errors=True)
        if lora is None:
            save_model(temporary, loaded)
        else:
            lora.save(temporary)
            loaded.tokenizer.save_pretrained(temporary)
        save_file(_optimiser_tensors(optim), temporary / "trainer_state.safetensors")
        if moving_reference is not None:
            save_file(state_dict_hf(moving_reference), temporary / REFERENCE_FILE)
        sizes = {path.name: path.stat().st_size for path in temporary.iterdir()}
        state = {**dataclasses.asdict(progress), "files": sizes, "facts": facts}
        (temporary / "state.json").write_text(json.dumps(state, indent=1))
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        temporary.rename(final)
        _sync(folder)
    except Exception as error:  # OSError, or what safetensors and tokenizers raise in its place
        shutil.rmtree(temporary, ignore_errors=True)  # what did fit takes room that the log needs to say so
        raise UserError(
            f"{final}: could not write the checkpoint ({error}); those before are intact. "
            "Make room and go on with --resume, or choose another --run-dir"
        ) from error
    for old in checkpoints(folder)[:-keep]:
        _drop(old)
    return final


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint that is no longer wanted. That it stays hurts nobody, so a refusal ends no run."""
    dropped = checkpoint.with_name(f".{checkpoint.name}.dropped")
    with contextlib.suppress(OSError):
        checkpoint.rename(dropped)
        shutil.rmtree(dropped)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in the folder of checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step_*") if _is_complete(path))


def latest_checkpoint(run_dir: Path) -> Path:
    """The newest complete checkpoint of a run; `UserError` where there is none, with what is wrong with the newest."""
    found = checkpoints(run_dir / "checkpoints")
    if not found:
        why = "".join(f" ({fault})" for fault in newer_but_damaged(run_dir)[-1:])
        raise UserError(f"{run_dir}: holds no complete checkpoint to go on from{why}; start a new run")
    return found[-1]


def newer_but_damaged(run_dir: Path) -> list[str]:
    """What is wrong with each checkpoint of a run that is newer than the newest complete one, oldest first."""
    faults: list[str] = []
    for path in sorted((run_dir / "checkpoints").glob("step_*")):
        fault = _damage(path)
        faults = [] if fault is None else [*faults, f"{path.name} is damaged: {fault}"]
    return faults


def read_progress(checkpoint: Path) -> Progress:
    """How far the run was; `UserError` for a damaged state.json."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
        state = dict.fromkeys(_SINCE_0_2, 0) | state  # what an older checkpoint could not have
        return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path}: expected the state of a sparkgrpo run, got {error!r}; remove this checkpoint to go on from the "
            "one before"
        ) from error


def weights_sha256(model: Decoder) -> str:
    """Hash of every weight with its Hugging Face name: equal exactly when the models are, bit for bit."""
    digest = hashlib.sha256()
    for name, view in state_dict_hf(model).items():
        digest.update(name.encode())
        digest.update(view.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    """Keep the frozen start in the folder of checkpoints, once: a resume must not read it by name again."""
    path = folder / "reference" / "model.safetensors"
    if path.exists():
        return
    temporary = path.with_suffix(".writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state_dict_hf(reference), temporary)
        _sync(temporary)
        temporary.rename(path)
        _sync(path.parent)
    except Exception as error:  # OSError, or what safetensors raises in its place
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: could not write the reference ({error}); make room") from error


@torch.no_grad()
def restore_reference(folder: Path, reference: Decoder, checkpoint: Path | None = None) -> None:
    """Fill a model in place with the frozen start in the folder of checkpoints; `UserError` where it is missing.

    Args:
        checkpoint: Holds the reference in the start's place, where it moves.
    """
    path = folder / "reference" / "model.safetensors" if checkpoint is None else checkpoint / REFERENCE_FILE
    if not path.exists():
        raise UserError(f"{path}: missing, and a run with beta above 0 cannot go on without its reference")
    tensors = load_file(path)
    for name, view in state_dict_hf(reference).items():
        view.copy_(tensors[name])


def _is_complete(checkpoint: Path) -> bool:
    return _damage(checkpoint) is None


def _damage(checkpoint: Path) -> str | None:
    """What keeps a checkpoint from being used, or None: every file must be there and have its size."""
    try:
        sizes = json.loads((checkpoint / "state.json").read_text()).get("files", {})
        for name, size in sizes.items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found:,} of {size:,} bytes"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"state.json cannot be read ({error})"
    return None


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
