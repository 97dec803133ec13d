"""Which torch install.py chooses: facts about a machine in, pip's arguments out."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"


def load_install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sparkgrpo_install", ROOT / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


install = load_install()
GB10 = install.Gpu(name="NVIDIA GB10", driver=580)


def facts(system: str = "Linux", machine: str = "x86_64", gpu: Any = None) -> Any:
    return install.Facts(system=system, machine=machine, gpu=gpu)


def never_asked(index: str) -> bool:
    raise AssertionError(f"{index} was probed for nothing")


@pytest.mark.parametrize(
    ("machine", "index"),
    [
        (facts(), CPU_INDEX),
        (facts(machine="aarch64"), CPU_INDEX),
        (facts(gpu=install.Gpu(name="NVIDIA H200", driver=580)), CUDA_INDEX),
        (facts(machine="aarch64", gpu=GB10), CUDA_INDEX),
        (facts(system="Windows", machine="AMD64", gpu=GB10), CUDA_INDEX),
    ],
)
def test_index_fits_the_machine(machine: Any, index: str) -> None:
    choice = install.choose_torch(machine, lambda asked: asked == index)
    assert choice.pip_args == ("torch>=2.11", "--index-url", index)
    assert index in choice.reason and "\n" not in choice.reason


@pytest.mark.parametrize("machine", [facts(), facts(machine="aarch64", gpu=GB10)])
def test_default_index_is_pinned_where_pytorch_does_not_answer(machine: Any) -> None:
    choice = install.choose_torch(machine, lambda _: False)
    assert choice.pip_args == ("torch==2.13.0",)
    assert "does not answer" in choice.reason


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_default_index_where_it_has_only_cpu_builds(system: str) -> None:
    assert install.choose_torch(facts(system=system), never_asked).pip_args == ("torch>=2.11",)


@pytest.mark.parametrize(
    ("machine", "version", "cuda", "is_kept"),
    [
        (facts(), "2.13.0+cpu", None, True),
        (facts(), "2.11.0", "12.8", True),  # gigabytes, but they are there already
        (facts(), "2.14.0a0+git1a2b3c4", None, True),
        (facts(), "3.0.0", None, True),
        (facts(), "2.10.1", None, False),
        (facts(gpu=GB10), "2.13.0+cu126", "12.6", True),
        (facts(gpu=GB10), "2.13.0+cpu", None, False),
        (facts(machine="aarch64", gpu=GB10), "2.13.0+cu130", "13.0", True),
        (facts(machine="aarch64", gpu=GB10), "2.13.0+cu126", "12.6", False),
    ],
)
def test_installed_torch_is_kept_where_it_fits(machine: Any, version: str, cuda: str | None, is_kept: bool) -> None:
    known = dataclasses.replace(machine, torch=install.Torch(version=version, cuda=cuda))
    choice = install.choose_torch(known, never_asked if is_kept else lambda _: True)
    assert (choice.pip_args == ()) == is_kept
    assert ("kept" in choice.reason) == is_kept
    # pip would call an unsuitable build of the right version satisfied.
    assert ("--force-reinstall" in choice.pip_args) == (not is_kept)


@pytest.mark.parametrize(("driver", "is_warned"), [(550, True), (579, True), (580, False), (None, False)])
def test_old_driver_is_named(driver: int | None, is_warned: bool) -> None:
    choice = install.choose_torch(facts(gpu=install.Gpu(name="NVIDIA L4", driver=driver)), lambda _: True)
    assert ("update the driver" in choice.reason) == is_warned


@pytest.mark.parametrize(
    ("output", "gpu"),
    [
        ("NVIDIA GB10, 580.173.02\n", GB10),
        ("NVIDIA H200, 575.57.08\nNVIDIA H200, 575.57.08\n", install.Gpu(name="NVIDIA H200", driver=575)),
        ("NVIDIA GB10, [N/A]\n", install.Gpu(name="NVIDIA GB10")),
        ("", None),
        ("\n", None),
    ],
)
def test_reads_nvidia_smi(output: str, gpu: Any) -> None:
    assert install.parse_nvidia_smi(output) == gpu


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("echo 'NVIDIA GB10, 580.95.05'", "NVIDIA GB10"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None),
        ("echo", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("has_driver_folder", [False, True])
def test_finds_a_gpu_by_tool_or_driver(
    script: str | None, name: str | None, has_driver_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    driver_folder = tmp_path / "nvidia"
    if has_driver_folder:
        driver_folder.mkdir()
        name = name or f"{driver_folder} exists"
    gpu = install.find_gpu(driver_folder)
    assert (gpu and gpu.name) == name


def test_dead_index_does_not_answer() -> None:
    assert not install.answers("http://127.0.0.1:1/whl")


def test_bounds_equal_those_of_pyproject() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [requirement for requirement in requirements if re.match(r"torch\b", requirement)]
    assert torch == "torch>={}.{}".format(*install.MIN_TORCH)
    assert install.release(install.FALLBACK_TORCH.removeprefix("torch==")) >= install.MIN_TORCH


def test_failed_command_ends_without_traceback() -> None:
    with pytest.raises(SystemExit, match="pip could not install torch"):
        install.run([sys.executable, "-c", "raise SystemExit(3)"], "pip could not install torch")


def test_missing_venv_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "VENV_PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name)
    with pytest.raises(SystemExit, match=r"apt install python3\.\d+-venv"):
        install.create_venv()


def test_old_python_is_told_what_to_do() -> None:
    """The check precedes everything that an older interpreter lacks; sys.version_info is faked in a child."""
    program = (
        "import sys; sys.version_info = (3, 9, 1, 'final', 0); sys.modules['dataclasses'] = None; "
        f"exec(compile(open({str(ROOT / 'install.py')!r}).read(), 'install.py', 'exec'))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs Python 3.11 or newer" in result.stderr and "PYTHON=" in result.stderr
    assert "Traceback" not in result.stderr
