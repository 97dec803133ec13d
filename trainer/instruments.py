"""The meters of a run: rates against the machine's limits, memory and its floor, clock and temperature.

They watch; what follows from them (an event, an end that can be resumed) is the run's to do.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from sparkgrpo.profiling.device_state import DeviceMeter, DeviceState
from sparkgrpo.profiling.environment import device_name
from sparkgrpo.profiling.memory import memory_limits, peak_bytes
from sparkgrpo.profiling.phases import OTHER, PhaseClock, clock_error
from sparkgrpo.profiling.probe import Probe
from sparkgrpo.profiling.recorder import StepRecorder
from sparkgrpo.profiling.roofline import ModelShape
from sparkgrpo.profiling.watchdog import MemoryWatchdog
from sparkgrpo.trainer.rates import RateMeter, probe_notes, take_probe
from sparkgrpo.trainer.rollout.engine import RolloutEngine


class MemoryGuard:
    """Ends a step whose memory has run out, at a boundary where nothing is lost. Observes the run's clock.

    Until the first update of a step the weights are those of the last one, and the step can be dropped; from then on it
    is finished, evaluation, checkpoint and log line included. A boundary is that of a phase, of a micro-batch's
    backward pass, or of a decode step; never that of `t_other`, in which a line may still be unwritten.
    """

    def __init__(self, device: torch.device, watchdog: MemoryWatchdog) -> None:
        self.device, self.watchdog = device, watchdog
        self.num_warnings = 0
        self.lowest_bytes: int | None = None
        """Lowest MemAvailable of the step so far."""
        self.lowest_of_last_step_bytes: int | None = None
        """Of the step that ended last."""
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
        if phase != OTHER:
            self.between_steps()

    def step_done(self) -> None:
        """Nothing of this step can be dropped any more, whether it had an update or not."""
        self._has_updated = True

    def step_ended(self) -> None:
        """The last look at memory of this step."""
        self._look()
        self.lowest_of_last_step_bytes = self.lowest_bytes

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
        recorder: Records some steps, with which the run ends.
    """

    def __init__(self, device: torch.device, shape: ModelShape, recorder: StepRecorder | None = None) -> None:
        self.device, self.shape, self.recorder = device, shape, recorder
        self.name = device_name(device)
        self.limits = memory_limits(device)
        self.watchdog = MemoryWatchdog(self.limits)
        self.guard = MemoryGuard(device, self.watchdog)
        self.probe = _probe(device)
        self.rates = RateMeter(self.name, self.probe)
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        self.device_meter = DeviceMeter(uuid=uuid) if device.type == "cuda" else None
        self._num_told = 0

    def __enter__(self) -> "Instruments":
        self.watchdog.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.watchdog.__exit__()

    def attach(self, clock: PhaseClock, engine: RolloutEngine) -> None:
        """Let the meters look at every boundary of a phase and between decode steps."""
        clock.observers = [self.guard, *([] if self.recorder is None else [self.recorder])]
        engine.between_steps = self.guard.between_steps

    @property
    def is_recorded(self) -> bool:
        """The steps that were to be recorded are."""
        return self.recorder is not None and self.recorder.is_done

    def facts_before(self) -> dict[str, object]:
        """For run.json when the run begins."""
        return {"probe_before": None if self.probe is None else asdict(self.probe)}

    def facts_after(self, warn: Callable[[str], None]) -> dict[str, object]:
        """For run.json when the run ends; `warn` gets what a person should know of the machine's speed."""
        after = None if self.watchdog.is_at_floor else _probe(self.device)
        for note in probe_notes(self.name, self.probe, after):
            warn(note)
        return {"probe_after": None if after is None else asdict(after)}

    def step_metrics(
        self, known: Mapping[str, object], seconds: Mapping[str, float], *, flops: int
    ) -> tuple[dict[str, object], list[str]]:
        """What the meters add to a step's line, and sentences for the run's events.

        Args:
            known: What the step measured itself. seconds: Its phases. flops: Of t_train.
        """
        rates, texts = self.rates.metrics(known, seconds, flops=flops, step_bytes=self.shape.weight_bytes)
        num_tokens = known["num_tokens"]
        assert isinstance(num_tokens, int)
        if self.guard.num_warnings > self._num_told:
            self._num_told = self.guard.num_warnings
            lowest_bytes = self.guard.lowest_of_last_step_bytes or 0
            texts.append(
                f"memory is short: {lowest_bytes / 2**30:.2f} GiB were left, the run ends below "
                f"{self.limits.floor_bytes / 2**30:.2f} GiB; caches were emptied"
            )
        error = clock_error(seconds)
        is_cuda = self.device.type == "cuda"
        measured = {
            "tok_per_s": num_tokens / seconds["t_gen"],
            "mem_peak_bytes": peak_bytes(self.device),
            "mem_reserved_bytes": torch.cuda.memory_reserved(self.device) if is_cuda else None,
            "mem_available_min_bytes": self.guard.lowest_of_last_step_bytes,
        }
        state = asdict(DeviceState() if self.device_meter is None else self.device_meter.state())
        return {**measured, **rates, **state}, texts + ([] if error is None else [error])


def _probe(device: torch.device) -> Probe | None:
    """Today's rates; None where their buffers do not fit beside the model: no run fails for want of a probe."""
    try:
        return take_probe(device)
    except (MemoryError, torch.OutOfMemoryError):
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the buffers of the probe are nothing that the run uses again
