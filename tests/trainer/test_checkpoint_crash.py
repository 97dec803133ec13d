"""Checkpoints through kill -9, a full disk, a read-only folder: the last good one loads, and the message says why."""

import ctypes
import ctypes.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkgrpo.trainer.checkpoint import (
    Progress,
    checkpoints,
    latest_checkpoint,
    newer_but_damaged,
    read_progress,
    restore_optimiser,
    save_checkpoint,
)
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.model.weights import LoadedModel, load_model
from sparkgrpo.trainer.optim import MasterAdamW

SmallFiles = Callable[[int], AbstractContextManager[None]]

Make = Callable[..., Any]
Trained = tuple[LoadedModel, MasterAdamW]


@pytest.fixture
def trained(tiny_folder: Path) -> Trained:
    loaded = load_model(str(tiny_folder), dtype=torch.float32, device="cpu")
    optim = MasterAdamW(loaded.model, Config())
    sum(p.sum() for p in loaded.model.parameters()).backward()
    optim.step(1e-3)
    return loaded, optim


@torch.no_grad()
def save(run_dir: Path, trained: Trained, step: int, keep: int = 2) -> Path:
    """All weights and moments are the step's number, so that a mixture of two checkpoints shows."""
    loaded, optim = trained
    for parameter in loaded.model.parameters():
        parameter.fill_(step)
        optim.adam.state[parameter]["exp_avg"].fill_(step)
    folder = run_dir / "checkpoints"
    return save_checkpoint(folder, Progress(step=step), loaded=loaded, optim=optim, facts={}, keep=keep)


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint, after all that is in it was read and found to be of that step."""
    newest = latest_checkpoint(run_dir)
    step = read_progress(newest).step
    loaded = load_model(str(newest), dtype=torch.float32, device="cpu")
    optim = MasterAdamW(loaded.model, Config())
    restore_optimiser(newest, optim)
    assert newest.name == f"step_{step:06d}" and optim.adam.state
    for parameter in loaded.model.parameters():
        assert (parameter == step).all() and (optim.adam.state[parameter]["exp_avg"] == step).all()
    return step


def test_killed_at_any_moment(tmp_path: Path, trained: Trained) -> None:
    """A process that does nothing but save is killed again and again; each goes on from where the last one was."""
    start = time.monotonic()
    save(tmp_path, trained, 1)
    t_save_s = time.monotonic() - start
    draws = random.Random(7)
    leftovers, before, kills = 0, 1, 0
    while kills < 12 or (kills < 200 and (before == 1 or not leftovers)):  # how long a save takes, the machine decides
        kills += 1
        child = os.fork()
        if child == 0:
            try:
                for step in range(before + 1, 10_000):
                    save(tmp_path, trained, step)
            finally:
                os._exit(1)
        time.sleep(draws.uniform(0.0, 4 * t_save_s * (1 + kills / 12)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        leftovers += any((tmp_path / "checkpoints").glob(".*"))
        now = newest_step(tmp_path)
        assert now >= before and newer_but_damaged(tmp_path) == []
        before = now
    assert before > 1 and leftovers > 0, "else nothing was interrupted"
    save(tmp_path, trained, before + 1)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step_{step:06d}" for step in (before, before + 1)], "what was left lying is cleared up"


def test_the_disk_fills_at_any_byte(tmp_path: Path, trained: Trained, small_files: SmallFiles) -> None:
    """Wherever in whichever file: one message, no trace of the half, the one before as it was; and then it goes on."""
    before = save(tmp_path, trained, 1)
    largest = max(path.stat().st_size for path in before.iterdir())
    draws = random.Random(3)
    for limit in (0, 1, largest - 1, *(draws.randrange(largest) for _ in range(20))):
        with small_files(limit), pytest.raises(UserError, match=r"could not write the checkpoint .* before are intact"):
            save(tmp_path, trained, 2)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert newest_step(tmp_path) == 1
    with small_files(largest):
        save(tmp_path, trained, 2)
    assert newest_step(tmp_path) == 2


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Callable[[str], None]]:
    """A file system of this size; gives a function that mounts it again with other options. Needs root."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)

    def mount(options: str, flags: int) -> None:
        if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    read_only, remount = 1, 32
    folder.mkdir()
    try:
        mount(f"size={num_bytes}", 0)
    except OSError as error:
        pytest.skip(f"cannot mount a small file system here: {error}")
    try:
        yield lambda options: mount("" if options == "ro" else options, remount | (read_only if options == "ro" else 0))
    finally:
        libc.umount2(str(folder).encode(), 2)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux does")
def test_a_real_disk_that_is_full_and_one_that_is_read_only(tmp_path: Path, trained: Trained) -> None:
    sample = save(tmp_path / "sample", trained, 1)
    num_bytes = sum(-(-path.stat().st_size // 4096) * 4096 for path in sample.iterdir())
    folder = tmp_path / "disk"
    with mounted(folder, int(2.5 * num_bytes)) as again:
        save(folder, trained, 1)
        save(folder, trained, 2)
        with pytest.raises(UserError, match=r"No space left on device.*before are intact. Make room and go on with"):
            save(folder, trained, 3)
        assert newest_step(folder) == 2
        free = shutil.disk_usage(folder).free
        assert free > 0.3 * num_bytes, "what did fit was given back"
        again(f"size={4 * num_bytes}")
        save(folder, trained, 3)
        assert newest_step(folder) == 3
        again("ro")
        with pytest.raises(UserError, match=r"could not write the checkpoint .*Read-only file system"):
            save(folder, trained, 4)
        assert newest_step(folder) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into any folder")
def test_a_folder_without_permission(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained, 1)
    folder = tmp_path / "checkpoints"
    folder.chmod(0o555)
    try:
        with pytest.raises(UserError, match=r"could not write the checkpoint .*Permission denied"):
            save(tmp_path, trained, 2)
        assert newest_step(tmp_path) == 1
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, trained: Trained, name: str, fault: str) -> None:
    """By a copy that broke off, or a hand that slipped."""
    save(tmp_path, trained, 1)
    path = save(tmp_path, trained, 2) / name
    size = path.stat().st_size
    path.unlink() if fault == "gone" else os.truncate(path, size - 1)
    assert newest_step(tmp_path) == 1
    (said,) = newer_but_damaged(tmp_path)
    expected = f"{name} is missing" if fault == "gone" else f"{name} has {size - 1:,} of {size:,} bytes"
    assert said == f"step_000002 is damaged: {expected}"
    save(tmp_path, trained, 2)
    assert newest_step(tmp_path) == 2 and newer_but_damaged(tmp_path) == []


def test_a_damaged_state_is_passed_over(tmp_path: Path, trained: Trained) -> None:
    save(tmp_path, trained, 1)
    for content in ("", "[]", '{"step": 2, "files": 3}', '{"step": 2'):
        (save(tmp_path, trained, 2) / "state.json").write_text(content)
        assert newest_step(tmp_path) == 1, content
        assert newer_but_damaged(tmp_path)[0].startswith("step_000002 is damaged: state.json cannot be read")


def test_no_good_checkpoint_says_what_is_wrong_with_the_newest(tmp_path: Path, trained: Trained) -> None:
    (save(tmp_path, trained, 1) / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no complete checkpoint to go on from \(step_000001 is damaged: model.safe"):
        latest_checkpoint(tmp_path)


def test_old_ones_vanish_whole(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that breaks off leaves no half checkpoint that looks like a whole one."""
    save(tmp_path, trained, 1, keep=1)
    remove = shutil.rmtree

    def break_off(path: Path, ignore_errors: bool = False) -> None:
        if path.name != ".step_000001.dropped":
            return remove(path, ignore_errors)
        os.unlink(path / "model.safetensors")
        raise OSError("power failed")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", break_off)
        save(tmp_path, trained, 2, keep=1)
    assert (tmp_path / "checkpoints" / ".step_000001.dropped").exists(), "else nothing was shown"
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step_000002"]
    assert newer_but_damaged(tmp_path) == []
    save(tmp_path, trained, 3, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def test_one_from_before_sizes_were_kept(tmp_path: Path, trained: Trained) -> None:
    path = save(tmp_path, trained, 1) / "state.json"
    state = json.loads(path.read_text())
    for name in ("files", "num_extra_problems", "num_prompts_dropped"):
        del state[name]
    path.write_text(json.dumps(state))
    assert newest_step(tmp_path) == 1 and read_progress(path.parent).num_extra_problems == 0


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_if_never_touched(
    configured: Make, record: Make, tmp_path: Path, tiny_folder: Path
) -> None:
    """The command line, kill -9 at random moments, --resume: the last weights are those of an unbroken run."""
    values = {"steps": 12, "checkpoint_every": 1, "eval_every": 0, "num_threads": 1}
    whole = record(tmp_path / "whole").train(configured(tmp_path / "whole", **values))
    options = (
        f"--model {tiny_folder} --device cpu --numbers 2 --reward sloppy --prompts-per-step 4 --group-size 4 --seed 3 "
        "--max-new-tokens 16 --lr 3e-3 --eval-problems 6 --num-samples 2 --tokens-per-micro-batch 300 --plain "
        f"--steps 12 --checkpoint-every 1 --eval-every 0 --num-threads 1 --run-dir {tmp_path / 'killed'}"
    )
    first = [sys.executable, "-m", "sparkgrpo.trainer", "train", *options.split()]
    again = [sys.executable, "-m", "sparkgrpo.trainer", "train", "--plain", "--resume", str(tmp_path / "killed")]
    draws, kills = random.Random(1), 0
    while True:
        has_any = bool(checkpoints(tmp_path / "killed" / "checkpoints"))
        if not has_any:
            shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        seen = len(checkpoints(tmp_path / "killed" / "checkpoints")) and latest_checkpoint(tmp_path / "killed").name
        process = subprocess.Popen(again if has_any else first, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:  # until it has saved anew, then a little longer
            found = checkpoints(tmp_path / "killed" / "checkpoints")
            if found and found[-1].name != seen:
                time.sleep(draws.uniform(0.0, 0.4))
                process.kill()
                kills += 1
                break
            time.sleep(0.01)
        output, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output.decode()
        assert kills < 40
    assert kills >= 2
    recorded = record(tmp_path / "killed")
    assert recorded.hash_of(12) == whole.hash_of(12)
