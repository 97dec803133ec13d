"""What gpu_check's groups are made of: findings, and what a group's process is told."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.head_case import HeadShape
from sparkgrpo.kernels.head_plan import Design

PROCESS = "process"
"""The item of a finding about the group itself: wrong if it did not come to its end, None if it was not started."""
NOT_STARTED = "not started: out of time"
LEFT_OUT = "left out: out of time"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    group: str
    item: str
    ok: bool | None
    """None: a figure, or something that could not be run here."""
    text: str
    figures: Mapping[str, object] = field(default_factory=dict)
    detail: str = ""
    """A traceback."""

    def line(self) -> str:
        mark = {True: "ok   ", False: "WRONG", None: "     "}[self.ok]
        return f"{mark} {self.item}: {self.text}"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """What a group's process was told."""

    device: torch.device
    is_quick: bool
    results: Path
    lines: Path
    deadline_s: float
    """On time.monotonic's clock."""

    @property
    def designs(self) -> tuple[Design, ...]:
        return ("anchored", "chunked", "recompute") if self.device.type == "cuda" else ("auto", "recompute")

    def shape(self, T: int, V: int, D: int, dtype: torch.dtype, frac_active: float = 1.0) -> HeadShape:
        """The shape, or a tiny one in its place."""
        if self.is_quick:
            T, V, D = min(T, 64), min(V, 301), min(D, 48)
        return HeadShape(T=T, V=V, D=D, dtype=dtype, frac_active=frac_active, seq_tokens=16 if self.is_quick else 64)


Found = tuple[str, bool | None, str, Mapping[str, object]]
Item = Callable[[CheckContext], Iterator[Found]]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Items that share a process."""

    items: tuple[Item, ...]
    limit_s: float
