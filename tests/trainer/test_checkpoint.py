"""Checkpoints: what comes back, and what a failure at any point leaves."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from sparkgrpo.trainer import checkpoint
from sparkgrpo.trainer.checkpoint import (
    Progress,
    checkpoints,
    latest_checkpoint,
    read_progress,
    restore_optimiser,
    restore_reference,
    save_checkpoint,
    save_reference,
    weights_sha256,
)
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.model.weights import LoadedModel, load_model
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy

SmallFiles = Callable[[int], AbstractContextManager[None]]

FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "trainer_state.safetensors",
    "state.json",
}
PROGRESS = {
    "eval_before": 0.25, "eval_after": 0.5, "eval_step": 2, "num_tokens_total": 77, "skipped_steps": 1,
    "seen_reasons": ["no_answer", "ok"],
}  # fmt: skip


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def trained(request: pytest.FixtureRequest, tiny_folder: Path) -> tuple[LoadedModel, MasterAdamW]:
    return load_and_update(tiny_folder, request.param, num_updates=3)


def load_and_update(folder: Path, dtype: torch.dtype, num_updates: int) -> tuple[LoadedModel, MasterAdamW]:
    loaded = load_model(str(folder), dtype=dtype, device="cpu")
    optim = MasterAdamW(loaded.model, Config())
    update(optim, loaded, range(num_updates))
    return loaded, optim


def update(optim: MasterAdamW, loaded: LoadedModel, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        parameters = list(loaded.model.parameters())
        loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in parameters)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optim.step(1e-3)


def save(folder: Path, trained: tuple[LoadedModel, MasterAdamW], step: int, keep: int = 2) -> Path:
    loaded, optim = trained
    progress = Progress(step=step, **PROGRESS)  # pyright: ignore[reportArgumentType]
    return save_checkpoint(folder, progress, loaded=loaded, optim=optim, facts={"why": "test"}, keep=keep)


def test_everything_comes_back(tmp_path: Path, trained: tuple[LoadedModel, MasterAdamW]) -> None:
    """And the next updates are bit for bit those of the process that went on."""
    loaded, optim = trained
    path = save(tmp_path, trained, 40)
    assert path == tmp_path / "step_000040" and {file.name for file in path.iterdir()} == FILES
    assert [p.name for p in tmp_path.iterdir()] == ["step_000040"], "nothing temporary stays"
    again = load_model(str(path), dtype=loaded.model.dtype, device="cpu")
    assert weights_sha256(again.model) == weights_sha256(loaded.model)
    other = MasterAdamW(again.model, Config())
    restore_optimiser(path, other)
    assert read_progress(path) == Progress(step=40, **PROGRESS)  # pyright: ignore[reportArgumentType]
    assert json.loads((path / "state.json").read_text())["facts"] == {"why": "test"}
    update(optim, loaded, range(10, 13))
    update(other, again, range(10, 13))
    assert weights_sha256(again.model) == weights_sha256(loaded.model)
    assert all(other.masters[name].equal(master) for name, master in optim.masters.items())


def test_masters_keep_what_bf16_weights_cannot_show(tmp_path: Path, tiny_folder: Path) -> None:
    loaded, optim = load_and_update(tiny_folder, torch.bfloat16, 1)
    path = save(tmp_path, (loaded, optim), 1)
    again = load_model(str(path), dtype=torch.bfloat16, device="cpu")
    other = MasterAdamW(again.model, Config())
    assert not all(other.masters[name].equal(master) for name, master in optim.masters.items())
    restore_optimiser(path, other)
    assert all(other.masters[name].equal(master) for name, master in optim.masters.items())


def test_before_the_first_update(tmp_path: Path, tiny_folder: Path) -> None:
    """A run stopped at step 0 has no moments yet."""
    path = save(tmp_path, load_and_update(tiny_folder, torch.float32, 0), 0)
    _, optim = load_and_update(path, torch.float32, 0)
    restore_optimiser(path, optim)
    assert not optim.adam.state


def test_the_last_ones_are_kept(tmp_path: Path, tiny_folder: Path) -> None:
    trained, folder = load_and_update(tiny_folder, torch.float32, 1), tmp_path / "checkpoints"
    for step in (1, 2, 10, 9):
        save(folder, trained, step, keep=3)
    assert [path.name for path in checkpoints(folder)] == ["step_000002", "step_000009", "step_000010"]
    (folder / "step_000011").mkdir()  # incomplete: state.json is missing
    assert latest_checkpoint(tmp_path).name == "step_000010"


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete checkpoint to go on from"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("call", ["save_model", "save_file", "_sync"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("I/O error 28")])
def test_a_failure_leaves_the_one_before(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    """At whichever call it comes; the libraries raise kinds of their own. The next save clears up."""
    trained = load_and_update(tiny_folder, torch.float32, 1)
    before = save(tmp_path, trained, 1)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"could not write the checkpoint .* intact"):
        patch.setattr(checkpoint, call, fail)
        save(tmp_path, trained, 2)
    assert checkpoints(tmp_path) == [before]
    assert weights_sha256(load_model(str(before), dtype=torch.float32, device="cpu").model)
    after = save(tmp_path, trained, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [before.name, after.name]


@pytest.mark.parametrize("num_bytes", [0, 5_000, 30_000, 150_000])
def test_a_full_disk(tmp_path: Path, tiny_folder: Path, num_bytes: int, small_files: SmallFiles) -> None:
    """It fills at the config, the tokenizer, the weights or the optimiser's state; all end in one message."""
    trained = load_and_update(tiny_folder, torch.float32, 1)
    before = save(tmp_path, trained, 1)
    with small_files(num_bytes), pytest.raises(UserError, match="could not write the checkpoint"):
        save(tmp_path, trained, 2)
    assert checkpoints(tmp_path) == [before]


def test_a_complete_checkpoint_of_this_step_stays(tmp_path: Path, tiny_folder: Path) -> None:
    """The weights came from it: to write it again could only lose it."""
    trained = load_and_update(tiny_folder, torch.float32, 1)
    path = save(tmp_path, trained, 1)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert save(tmp_path, trained, 1) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"step": 3'])
def test_damaged_state(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match="remove this checkpoint to go on from the one before"):
        read_progress(tmp_path)


def test_reference_is_kept_once(tmp_path: Path, trained: tuple[LoadedModel, MasterAdamW]) -> None:
    loaded, optim = trained
    reference = frozen_copy(loaded.model)
    save_reference(tmp_path, reference)
    update(optim, loaded, range(10, 12))
    save_reference(tmp_path, loaded.model)  # a later one is not the start
    other = frozen_copy(loaded.model)
    assert weights_sha256(other) != weights_sha256(reference)
    restore_reference(tmp_path, other)
    assert weights_sha256(other) == weights_sha256(reference)
    assert [p.name for p in (tmp_path / "reference").iterdir()] == ["model.safetensors"]


def test_reference_is_missing(tmp_path: Path, trained: tuple[LoadedModel, MasterAdamW]) -> None:
    with pytest.raises(UserError, match="cannot go on without its reference"):
        restore_reference(tmp_path, trained[0].model)


def test_reference_is_frozen_and_independent(make_decoder: Callable[..., torch.nn.Module]) -> None:
    model = make_decoder()
    reference = frozen_copy(model)  # pyright: ignore[reportArgumentType]
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in model.parameters())
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(a.equal(b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_hash_is_of_every_bit(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder), dtype=torch.float32, device="cpu")
    before = weights_sha256(loaded.model)
    with torch.no_grad():
        weight = loaded.model.layers[1].down_weight
        weight[3, 5] = weight[3, 5].nextafter(torch.tensor(1.0))
    assert weights_sha256(loaded.model) != before
