"""What a check of the machine says: ok, problem or cannot say, what was found, and how to mend it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Verdict = Literal["ok", "problem", "cannot say"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    found: str
    """What was tried and what came of it."""
    cure: str = ""
    """What to do about a problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the checks run on."""

    device: torch.device
    """CUDA where PyTorch sees it, else the CPU."""
    capability: tuple[int, int] | None
    """Of the CUDA device."""
    is_integrated: bool
    """CPU and GPU share one memory."""
    has_nvidia_driver: bool
    run_folder: Path
    """Where runs would be written."""

    @property
    def has_cuda(self) -> bool:
        """PyTorch sees a CUDA device."""
        return self.device.type == "cuda"


Check = Callable[[Machine], Finding]


def this_machine(run_folder: Path) -> Machine:
    """The machine that the program runs on."""
    has_cuda = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if has_cuda else None
    return Machine(
        device=torch.device("cuda" if has_cuda else "cpu"),
        capability=None if properties is None else (properties.major, properties.minor),
        is_integrated=properties is not None and bool(properties.is_integrated),
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        run_folder=run_folder,
    )


def run_check(name: str, check: Check, machine: Machine) -> Finding:
    """A check never ends the others: what it raises is a problem with the exception's own words."""
    try:
        return check(machine)
    except Exception as error:  # the checks try whatever may be broken
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        cure = "report it with the output of sparkgrpo doctor --json, unless the words say what to do"
        return Finding(name=name, verdict="problem", found=f"it raised {type(error).__name__}: {text}", cure=cure)
