"""The meters of a run: rates against the machine's limits, memory and its floor, clock and temperature.

They watch; what follows from them (an event, an end that can be resumed) is the run's to do.
"""

from collections.abc import Mapping
from dataclasses import asdict

import torch

from sparkgrpo.profiling.device_state import DeviceMeter, DeviceState
from sparkgrpo.profiling.environment import device_name
from sparkgrpo.profiling.memory import memory_limits
from sparkgrpo.profiling.probe import Probe
from sparkgrpo.profiling.roofline import ModelShape
from sparkgrpo.profiling.watchdog import MemoryWatchdog
from sparkgrpo.trainer.rates import RateMeter, probe_notes, take_probe


class MemoryGuard:
    """Ends a step whose memory has run out, at a boundary where nothing is lost. Observes the run's clock.

    Until the first update of a step the weights are those of the last one, and the step can be dropped; from then on it
    is finished. A boundary is that of a phase, of a micro-batch's backward pass, or of a decode step.
    """

    def __init__(self, device: torch.device, watchdog: MemoryWatchdog) -> None:
        self.device, self.watchdog = device, watchdog
        self.num_warnings = 0
        self.lowest_bytes: int | None = None
        """Lowest MemAvailable of the step so far."""
        self._has_updated = False

    def step_started(self) -> None:
        """The weights are whole again."""
        self._has_updated = False
        self.lowest_bytes = None

    def entered(self, phase: str, span: str | None) -> None:
        """`MemoryFloorReached` where the step must be dropped."""
        if span is None:
            self._look()
        self._has_updated |= phase == "t_opt"
        self.between_steps()

    def step_ended(self) -> None:
        """The last look at memory of this step."""
        self._look()

    def between_steps(self) -> None:
        """Between two decode steps: `MemoryFloorReached` where the step must be dropped."""
        if not self._has_updated:
            self.watchdog.check()

    def _look(self) -> None:
        state = self.watchdog.poll()
        if state.lowest_bytes is not None:
            known = [state.lowest_bytes] if self.lowest_bytes is None else [state.lowest_bytes, self.lowest_bytes]
            self.lowest_bytes = min(known)
        if state.is_low:
            self.num_warnings += 1
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what no tensor uses; a graph's pool keeps its own


class Instruments:
    """All meters of one run; a context manager that runs the watchdog.

    Args:
        shape: Of the model that is trained.
    """

    def __init__(self, device: torch.device, shape: ModelShape) -> None:
        self.device, self.shape = device, shape
        self.name = device_name(device)
        self.limits = memory_limits(device)
        self.watchdog = MemoryWatchdog(self.limits)
        self.guard = MemoryGuard(device, self.watchdog)
        self.probe: Probe = take_probe(device)
        self.rates = RateMeter(self.name, self.probe)
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        self.device_meter = DeviceMeter(uuid=uuid) if device.type == "cuda" else None
        self._num_told = 0

    def __enter__(self) -> "Instruments":
        self.watchdog.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.watchdog.__exit__()

    def facts_before(self) -> dict[str, object]:
        """For run.json when the run begins."""
        return {"probe_before": asdict(self.probe)}

    def facts_after(self) -> tuple[dict[str, object], list[str]]:
        """For run.json when it ends, and what a person should know of the machine's speed."""
        after = take_probe(self.device)
        return {"probe_after": asdict(after)}, probe_notes(self.name, self.probe, after)

    def step_metrics(
        self, line: Mapping[str, object], seconds: Mapping[str, float], *, flops: int
    ) -> tuple[dict[str, object], list[str]]:
        """What the meters add to a step's line, and sentences for the run's events."""
        rates, texts = self.rates.metrics(line, seconds, flops=flops, step_bytes=self.shape.weight_bytes)
        if self.guard.num_warnings > self._num_told:
            self._num_told = self.guard.num_warnings
            texts.append(
                f"memory is short: {(self.guard.lowest_bytes or 0) / 2**30:.2f} GiB were left, the run ends below "
                f"{self.limits.floor_bytes / 2**30:.2f} GiB; caches were emptied"
            )
        is_cuda = self.device.type == "cuda"
        state = asdict(DeviceState() if self.device_meter is None else self.device_meter.state())
        memory = {
            "mem_reserved_bytes": torch.cuda.memory_reserved(self.device) if is_cuda else None,
            "mem_available_min_bytes": self.guard.lowest_bytes,
        }
        return {**rates, **memory, **state}, texts
