"""What "auto" comes to on this machine: device, precision and model; and where the embedded model lies."""

from collections.abc import Mapping
from pathlib import Path

import torch

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.runlog import read_run
from sparkgrpo.trainer.settings import check_layer, read_yaml

EMBEDDED = "embedded"
DEFAULT_CUDA_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_EMBEDDED_FOLDER = Path(__file__).parent / "embedded" / "model"
_HUB_TIMEOUT_S = 5.0
_OF_A_RUN = (
    *("task", "numbers", "max_number", "max_target", "data", "prompt_column", "answer_column", "checker"),
    *("heldout_frac", "max_new_tokens", "max_prompt_tokens", "long_prompts", "eval_problems", "eval_temperature"),
)


def choose_device(device: str) -> torch.device:
    """The device of ``--device``. `UserError` for "cuda" where PyTorch sees no CUDA device."""
    if device == "cuda" and not torch.cuda.is_available():
        cause = "this PyTorch is a CPU build" if torch.version.cuda is None else "PyTorch sees no CUDA device"
        raise UserError(f"device: expected a CUDA device, but {cause}: use --device cpu, or install PyTorch for CUDA")
    is_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if is_cuda else "cpu")


def choose_precision(precision: str, device: torch.device) -> str:
    """ "fp32" or "bf16": what was asked for, else bf16 on CUDA and fp32 on the CPU."""
    return precision if precision != "auto" else "bf16" if device.type == "cuda" else "fp32"


def choose_model(config: Config, device: torch.device) -> tuple[str, str]:
    """The model to load and a sentence why: on CUDA `DEFAULT_CUDA_MODEL` if it can be had, else the embedded."""
    if config.model != "auto":
        return config.model, f"model {config.model}"
    if device.type != "cuda":
        return EMBEDDED, f"model {EMBEDDED}: there is no CUDA device for {DEFAULT_CUDA_MODEL} (--model chooses another)"
    found = _where_is(DEFAULT_CUDA_MODEL)
    if found is None:
        return EMBEDDED, f"model {EMBEDDED}: {DEFAULT_CUDA_MODEL} is neither cached nor can it be reached"
    return DEFAULT_CUDA_MODEL, f"model {DEFAULT_CUDA_MODEL}: {found}"


def model_source(model: str) -> str:
    """What `weights.load_model` reads for a settled ``Config.model``: the folder of the embedded model, else itself."""
    return str(_EMBEDDED_FOLDER) if model == EMBEDDED else model


def model_recipe(model: str) -> dict[str, object]:
    """The settings that belong to a model, checked; they rank above the defaults and below all that a person sets.

    For the embedded model its ``train.yaml``; for a checkpoint in a run folder, task and lengths of that run, so that
    ``sparkgrpo eval`` of it gives the accuracy that the run reported; empty for any other model.
    """
    if model == EMBEDDED:
        return read_yaml(_EMBEDDED_FOLDER.parent / "train.yaml")
    run_folder = Path(model).absolute().parent.parent
    if Path(model).absolute().parent.name != "checkpoints" or not (run_folder / "run.json").is_file():
        return {}
    recorded = read_run(run_folder).get("config")
    if not isinstance(recorded, Mapping):
        return {}
    return check_layer(str(run_folder / "run.json"), {name: recorded[name] for name in _OF_A_RUN if name in recorded})


def _where_is(hub_name: str) -> str | None:
    """ "cached" or "reachable", or None. Only asks for the file list: a download starts when the model is loaded."""
    import huggingface_hub  # here, not above: half a second that only a CUDA machine without --model needs

    if isinstance(huggingface_hub.try_to_load_from_cache(hub_name, "model.safetensors"), str):
        return "cached"
    try:
        huggingface_hub.HfApi().model_info(hub_name, timeout=_HUB_TIMEOUT_S)
    except Exception:
        return None  # offline, blocked, or gone: many kinds of error, one meaning, and the caller says what it chose
    return "not cached, it will be downloaded"
