"""Set up .venv: create it, install the torch that fits this machine, then sparkgrpo in editable mode.

``python3 install.py [EXTRA ...]`` needs the standard library alone; ``make`` calls it. Which torch is decided by
:func:`choose_torch` from facts about the machine, and printed in one line. PyTorch's own indexes are preferred, since
the default index serves x86-64 Linux a CUDA build of several gigabytes whether or not there is a GPU.
"""

import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before the imports below fail; this file parses from Python 3.6 on
    sys.exit(
        f"sparkgrpo needs Python 3.11 or newer, but {sys.executable} is {platform.python_version()}.\n"
        "Name another one: make install PYTHON=python3.12"
    )

import importlib.util
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"

MIN_TORCH = (2, 11)
FALLBACK_TORCH = "torch==2.13.0"
"""What the default index is asked for: the release the tests were run with, so that a newer one is no surprise."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
CUDA_MAJOR = 13
MIN_DRIVER = 580
"""First NVIDIA driver branch that runs CUDA 13.0 (CUDA 13.0 release notes, table of driver versions)."""
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What is known of the machine's NVIDIA GPU."""

    name: str
    driver: int | None = None
    """Driver branch, e.g. 580; None where it cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """A torch that the virtual environment imports."""

    version: str
    cuda: str | None
    """CUDA version that it was built for, None for a CPU build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that the choice of torch depends on, besides whether an index answers."""

    system: str
    """As platform.system() has it: Linux, Darwin, Windows."""
    machine: str
    """As platform.machine() has it: x86_64, aarch64, arm64."""
    gpu: Gpu | None = None
    torch: Torch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which torch to install and why."""

    reason: str
    pip_args: tuple[str, ...] = ()
    """Arguments for ``pip install``; empty where the torch that is there stays."""


def is_suitable(facts: Facts) -> bool:
    """Tell whether the installed torch serves this machine: new enough, and a CUDA build where there is a GPU."""
    if facts.torch is None or release(facts.torch.version) < MIN_TORCH:
        return False
    if facts.gpu is None:
        return True
    # aarch64 builds for CUDA 12 lack libraries on a Spark; on x86-64 they run.
    lowest = CUDA_MAJOR if facts.machine == "aarch64" else 1
    return facts.torch.cuda is not None and release(facts.torch.cuda)[0] >= lowest


def choose_torch(facts: Facts, is_reachable: Callable[[str], bool]) -> Choice:
    """Decide from ``facts`` which torch to install; ``is_reachable`` tells whether the index at a URL answers."""
    if facts.torch is not None and is_suitable(facts):
        build = f"CUDA {facts.torch.cuda}" if facts.torch.cuda else "CPU"
        return Choice(reason=f"{facts.torch.version} ({build} build) is installed and fits: kept")
    requirement = f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"
    if facts.gpu is not None:
        index, why = CUDA_INDEX, f"CUDA 13.0 build, since there is an NVIDIA GPU ({facts.gpu.name})"
        if facts.gpu.driver is not None and facts.gpu.driver < MIN_DRIVER:
            why += f"; it needs driver {MIN_DRIVER} or newer and finds {facts.gpu.driver}: update the driver"
    elif facts.system == "Linux":
        index, why = CPU_INDEX, "CPU build, since there is no NVIDIA GPU"
    else:
        return Choice(
            reason=f"CPU build from the default index, which serves {facts.system} no other", pip_args=(requirement,)
        )
    replace = () if facts.torch is None else ("--force-reinstall",)
    if is_reachable(index):
        return Choice(reason=f"{why}, from {index}", pip_args=(*replace, requirement, "--index-url", index))
    size = "" if facts.gpu else " (on x86-64 that may be a CUDA build of several GB; it works without a GPU)"
    return Choice(
        reason=f"{why}; but {index} does not answer, so {FALLBACK_TORCH} from the default index{size}",
        pip_args=(*replace, FALLBACK_TORCH),
    )


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as ``2.13.0+cpu``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_nvidia_smi(output: str) -> Gpu | None:
    """Read the first line of ``nvidia-smi --query-gpu=name,driver_version --format=csv,noheader``."""
    name, _, driver = output.strip().partition("\n")[0].partition(",")
    if not name:
        return None
    branch = re.match(r"\s*(\d+)\.", driver)
    return Gpu(name=name.strip(), driver=int(branch[1]) if branch else None)


def find_gpu(driver_folder: Path = Path("/proc/driver/nvidia")) -> Gpu | None:
    """Ask nvidia-smi, then the kernel, for an NVIDIA GPU."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            result = None  # a tool that cannot run says nothing; the kernel is asked next
        gpu = parse_nvidia_smi(result.stdout) if result is not None and result.returncode == 0 else None
        if gpu is not None:
            return gpu
    return Gpu(name=f"{driver_folder} exists") if driver_folder.is_dir() else None


def find_torch() -> Torch | None:
    """Import torch in the virtual environment; None where that fails."""
    program = "import torch; print(torch.__version__, torch.version.cuda)"
    result = subprocess.run([VENV_PYTHON, "-c", program], capture_output=True, text=True)
    if result.returncode != 0:
        return None
    version, cuda = result.stdout.split()[-2:]
    return Torch(version=version, cuda=None if cuda == "None" else cuda)


def answers(index: str) -> bool:
    """Tell whether a package index serves torch within ``PROBE_TIMEOUT_S``; pip itself would retry for minutes."""
    outcome: list[bool] = []

    def probe() -> None:
        request = urllib.request.Request(f"{index}/torch/", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S):
                outcome.append(True)
        except (urllib.error.URLError, OSError, ValueError):
            outcome.append(False)

    # In a thread, since the time-out of urlopen does not cover the look-up of the name.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S + 1)
    return outcome == [True]


def create_venv() -> None:
    """Create .venv unless it is there and its pip runs.

    Raises:
        SystemExit: this Python lacks the venv module, as Debian's and Ubuntu's do without python3-venv.
    """
    if VENV_PYTHON.exists():
        if subprocess.run([VENV_PYTHON, "-m", "pip", "--version"], capture_output=True).returncode != 0:
            # The creation was interrupted, or another tool made a .venv without pip, whose packages shall stay.
            run([VENV_PYTHON, "-m", "ensurepip"], f"could not add pip to {VENV}: remove that folder and run this again")
        return
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        major, minor = sys.version_info[:2]
        sys.exit(
            f"{sys.executable} cannot create a virtual environment: its modules venv and ensurepip are a package of "
            f"their own on Debian and Ubuntu.\nInstall it: sudo apt install python{major}.{minor}-venv"
        )
    run([sys.executable, "-m", "venv", VENV], "could not create the virtual environment")


def run(command: Sequence[str | Path], failure: str) -> None:
    """Run ``command`` with its output shown.

    Raises:
        SystemExit: the command failed; the message is ``failure``.
    """
    status = subprocess.run(command, cwd=ROOT).returncode
    if status != 0:
        sys.exit(f"install.py: {failure} (exit status {status}; its own message stands above)")


def main(extras: list[str]) -> None:
    """Set up .venv with sparkgrpo and ``extras``, which are keys of [project.optional-dependencies]."""
    create_venv()
    facts = Facts(system=platform.system(), machine=platform.machine(), gpu=find_gpu(), torch=find_torch())
    choice = choose_torch(facts, answers)
    print(f"torch: {choice.reason}", flush=True)
    pip_install = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install"]
    if choice.pip_args:
        run([*pip_install, *choice.pip_args], "pip could not install torch")
    target = f".[{','.join(extras)}]" if extras else "."
    run([*pip_install, "--editable", target], f"pip could not install sparkgrpo as {target}")
    print(f"sparkgrpo is installed in {VENV}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
