"""What a trace tells, as plain data: phases, devices, kernels, graphs, idle time, trust. No text, no layout.

None stands for "cannot say": the file does not hold what would tell. It is never 0. All times are integer nanoseconds,
shares are fractions.
"""

from dataclasses import dataclass, field

from sparkgrpo.profiling.timeline import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSummary:
    """How busy a device was, by kernels alone and with copies, fills and replays."""

    number: int
    device: Device
    num_kernels: int | None
    kernel_sum_ns: int | None
    kernel_busy_ns: int | None
    """Length of the union: overlapping kernels count once."""
    kernel_window_ns: int | None
    """From the first kernel's start to the last one's end."""
    activity_busy_ns: int
    activity_window_ns: int

    @property
    def frac_kernel_busy(self) -> float | None:
        """Share of the kernels' own window."""
        return self.kernel_busy_ns / self.kernel_window_ns if self.kernel_busy_ns and self.kernel_window_ns else None

    @property
    def frac_activity_busy(self) -> float | None:
        """Share of the window of all activity."""
        return self.activity_busy_ns / self.activity_window_ns if self.activity_window_ns else None


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleSummary:
    """Where a device had nothing to do while the host was in a phase, by what the host did meanwhile."""

    host_ns: int
    """No call of CUDA ran: Python, or waiting for something else."""
    sync_ns: int
    """The host waited for the device."""
    allocator_ns: int
    """Memory was got or given back."""
    launch_ns: int
    """Some other call of CUDA ran: launches, mostly."""

    @property
    def total_ns(self) -> int:
        """All of it."""
        return self.host_ns + self.sync_ns + self.allocator_ns + self.launch_ns

    @property
    def cause(self) -> str:
        """The largest part: host, sync, allocator, launch or none."""
        parts = {name: getattr(self, f"{name}_ns") for name in ("host", "sync", "allocator", "launch")}
        return max(parts, key=lambda name: parts[name]) if self.total_ns else "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationSummary:
    """An operation of torch on the host."""

    name: str
    num_calls: int
    self_ns: int
    """Without what it called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSummary:
    """One phase over the whole capture."""

    name: str
    num: int
    """Times it was entered."""
    wall_ns: int
    """Of the host."""
    frac_of_steps: float | None
    """Of the wall time of the whole steps; None without one."""
    num_kernels: int | None
    num_replays: int | None
    kernel_sum_ns: int | None
    activity_sum_ns: int | None
    activity_busy_ns: int | None
    """Union on each device, summed over devices."""
    device_span_ns: int | None
    """First start to last end on the device, summed over the times it was entered."""
    idle: IdleSummary | None
    operations: tuple[OperationSummary, ...] | None
    """The costliest operations of the host by self time; None where the trace has none."""
    operations_ns: int | None
    """Self time of all of them; what is missing to the wall time is Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSummary:
    """All launches of one kernel."""

    name: str
    owner: str
    """ours, cuBLAS, NCCL, attention, torch or other."""
    num_calls: int
    total_ns: int
    frac_of_kernels: float
    phases: tuple[tuple[str, int], ...] | None
    """Nanoseconds by phase, largest first."""
    registers: int | None
    shared_bytes: int | None
    waves: float | None
    """Blocks over blocks that run at one time, of the most frequent launch; below 1 a part of the device is empty."""

    @property
    def mean_ns(self) -> float:
        """Of one launch."""
        return self.total_ns / self.num_calls


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeSummary:
    """Kernels by the innermost range of the thread that launched them."""

    name: str
    num_kernels: int
    sum_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """Replays of CUDA graphs."""

    num_launches: int
    num_opaque: int
    """Launches whose kernels the file does not hold: record with --cuda-graph-trace=node."""
    num_without_time: int
    """Replay rows with start = end = 0."""
    nodes_per_replay: float | None
    launch_ns: int
    """Host time of the launch calls, each once."""
    median_gap_ns: int | None
    """On the device between two replays that follow each other in one phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unattributed:
    """Kernels that no phase can claim."""

    num_kernels: int
    frac_of_kernels: float
    frac_of_time: float
    num_without_call: int
    """Launched before the capture began, or by a process whose calls are not in the file."""
    num_outside: int
    """Launched outside every phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSummary:
    """The whole report of one trace."""

    kind: str
    graph_mode: str | None
    versions: dict[str, str]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    num_processes: int | None
    num_steps: int | None
    """Whole steps."""
    step_ns: int | None
    """Their wall time."""
    phases_ns: int | None
    """Sum of the phases inside the whole steps: must equal step_ns within 1 %."""
    num_open_ranges: int | None
    num_other_ranges: int
    devices: tuple[DeviceSummary, ...] | None
    phases: tuple[PhaseSummary, ...] | None
    kernels: tuple[KernelSummary, ...] | None
    num_kernels: int | None
    num_kernels_with_call: int | None
    launch_calls: dict[str, int] | None
    """Kernels by the call that launched them."""
    unattributed: Unattributed | None
    ranges: tuple[RangeSummary, ...] | None
    copies: dict[str, tuple[int, int, int]] | None
    """Number, bytes and nanoseconds by direction."""
    graphs: GraphSummary | None
    operations: tuple[OperationSummary, ...] | None
    """Of the whole capture, where it has no phases."""
    facts: dict[str, object] = field(default_factory=dict)
    """What `sparkgrpo profile` wrote beside the trace."""
    suggestions: tuple[str, ...] = ()

    @property
    def frac_unaccounted(self) -> float | None:
        """Share of the steps' wall time that no phase names."""
        if not self.step_ns or self.phases_ns is None:
            return None
        return (self.step_ns - self.phases_ns) / self.step_ns
