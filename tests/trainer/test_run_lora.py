"""Whole runs with adapters: what is in their folders, resumed bit for bit, and used by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparkgrpo.trainer import cli
from sparkgrpo.trainer.checkpoint import checkpoints
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.weights import load_model, save_model, state_dict_hf
from sparkgrpo.trainer.run import evaluate_command
from sparkgrpo.trainer.runlog import read_run

Make = Callable[..., Any]
pytest.importorskip("peft", reason="the extra lora is not installed")
TIMES = ("t_", "tok_per_s", "decode_gbps", "mem_", "train_tflops", "frac_train_roofline", "frac_decode_roofline")


def numbers(recorded: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in recorded.rows("metrics")]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "adapter_model.safetensors")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_and_its_resume(configured: Make, record: Make, tmp_path: Path, precision: str) -> None:
    """Files in PEFT's format, no copy of the base; two steps, a resume and two more are four, bit for bit."""
    values = {"lora_rank": 4, "lr": 2e-2, "checkpoint_every": 2, "keep_checkpoints": 9, "precision": precision}
    whole = record(tmp_path / "whole").train(configured(tmp_path / "whole", steps=4, **values))
    folder = whole.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000002", "step_000004"], "the reference is the base"
    names = {path.name for path in (folder / "step_000004").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer_state.safetensors", "state.json"} <= names
    assert "model.safetensors" not in names and "config.json" not in names
    rows = numbers(whole)
    assert rows[0]["kl_mean"] == rows[0]["kl_max"] == 0.0 and (rows[-1]["kl_mean"] or 0) > 0
    assert all(0 < row["frac_params_changed"] <= 1 for row in rows)
    assert rows[0]["logprob_gap_max"] < (1e-4 if precision == "fp32" else 0.2)

    split = record(tmp_path / "split").train(configured(tmp_path / "split", steps=2, **values))
    split.resume(steps=4)
    assert numbers(split) == rows
    ours, expected = (weights(r.folder / "checkpoints" / "step_000004") for r in (split, whole))
    assert ours.keys() == expected.keys() and all(ours[name].equal(tensor) for name, tensor in expected.items())
    earlier = weights(folder / "step_000002")
    assert not all(earlier[name].equal(tensor) for name, tensor in expected.items())
    if precision == "fp32":  # the accuracy of the run is that of the adapters by their folder's name
        config = configured("", model=str(folder / "step_000004"), max_new_tokens=16)
        assert evaluate_command(config)["accuracy"] == whole.result.eval_after


def test_a_base_that_became_another_is_refused(
    configured: Make, record: Make, tmp_path: Path, tiny_folder: Path
) -> None:
    """Adapters mean nothing on other weights, and a name does not say which weights it stands for."""
    base = tmp_path / "base"
    shutil.copytree(tiny_folder, base)
    values = {"model": str(base), "lora_rank": 2, "steps": 1}
    one = record(tmp_path / "run").train(configured(tmp_path / "run", **values))
    loaded = load_model(str(base), dtype=torch.float32, device="cpu")
    state_dict_hf(loaded.model)["model.norm.weight"][0] += 1
    save_model(base, loaded)
    with pytest.raises(UserError, match=r"expected the weights that the adapters of .* were trained on, got others"):
        one.resume(steps=2)
    assert read_run(one.folder)["steps"] == 1


def test_from_the_command_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = (
        "--device cpu --run-dir r --steps 1 --numbers 2 --reward sloppy --prompts-per-step 2 --group-size 2 "
        "--max-new-tokens 4 --eval-problems 3 --lora-rank 2 --lora-targets q_proj,v_proj"
    )
    assert cli.main(["train", "--model", str(tiny_folder), *options.split()]) == 0
    assert cli.main(["train", "--resume", "r", "--steps", "2"]) == 0
    (last, *_) = reversed(checkpoints(tmp_path / "r" / "checkpoints"))
    assert last.name == "step_000002" and len(weights(last)) == 8
    capsys.readouterr()
    assert cli.main(["eval", "--model", str(last), "--eval-problems", "3"]) == 0
    assert '"accuracy"' in capsys.readouterr().out
