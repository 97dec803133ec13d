"""What "auto" comes to, with and without a CUDA device."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparkgrpo.trainer import machine
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.runlog import RunLog

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def hub(*, cached: bool, reachable: bool) -> SimpleNamespace:
    def model_info(name: str, timeout: float) -> object:
        assert timeout < 30
        if not reachable:
            raise ConnectionError("no network")
        return object()

    return SimpleNamespace(
        try_to_load_from_cache=lambda name, file: "cache/model.safetensors" if cached else None,
        HfApi=lambda: SimpleNamespace(model_info=model_info),
    )


@pytest.mark.usefixtures("no_cuda")
def test_cuda_without_cuda_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"device: expected a CUDA device, but .* --device cpu"):
        machine.choose_device("cuda")
    assert machine.choose_device("auto") == machine.choose_device("cpu") == CPU


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.choose_device("auto") == machine.choose_device("cuda") == CUDA
    assert machine.choose_device("cpu") == CPU


def test_precision() -> None:
    assert [machine.choose_precision(p, CPU) for p in ("auto", "fp32", "bf16")] == ["fp32", "fp32", "bf16"]
    assert machine.choose_precision("auto", CUDA) == "bf16"


@pytest.mark.parametrize(
    ("device", "cached", "reachable", "model", "why"),
    [
        (CPU, True, True, "embedded", "no CUDA device"),
        (CUDA, True, False, machine.DEFAULT_CUDA_MODEL, "cached"),
        (CUDA, False, True, machine.DEFAULT_CUDA_MODEL, "will be downloaded"),
        (CUDA, False, False, "embedded", "neither cached nor can it be reached"),
    ],
)
def test_model(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, cached: bool, reachable: bool, model: str, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(cached=cached, reachable=reachable))
    found, reason = machine.choose_model(Config(), device)
    assert found == model and why in reason


def test_a_named_model_is_taken() -> None:
    assert machine.choose_model(Config(model="some/model"), CUDA)[0] == "some/model"


def test_recipe_of_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_EMBEDDED_FOLDER", tmp_path / "model")
    (tmp_path / "train.yaml").write_text("lr: 3e-4\n")
    assert machine.model_recipe("embedded") == {"lr": 3e-4}
    assert machine.model_source("embedded") == str(tmp_path / "model")
    assert machine.model_source("some/model") == "some/model"


def test_a_checkpoint_is_judged_as_in_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = Config(run_dir=str(folder), numbers="4", max_new_tokens=9, lr=0.5, eval_problems=7, seed=3)
    config = replace(config, max_prompt_tokens=50, long_prompts="drop")
    RunLog.create(config, user_set={}, environment={}).close()
    checkpoint = folder / "checkpoints" / "step_000003"
    recipe = machine.model_recipe(str(checkpoint))
    lengths = {
        "max_new_tokens": 9,
        "eval_problems": 7,
        "eval_temperature": 0.0,
        "max_prompt_tokens": 50,
        "long_prompts": "drop",
    }
    assert recipe.items() >= {"task": "countdown", "numbers": "4", "data": "", "heldout_frac": None, **lengths}.items()
    assert not recipe.keys() & {"lr", "seed", "run_dir", "reward"}
    assert machine.model_recipe("some/model") == machine.model_recipe(str(folder / "other" / "step")) == {}
