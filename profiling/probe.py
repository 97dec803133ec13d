"""What the machine gives right now: read and copy bandwidth and the rate of a matrix product, in about 0.2 s.

Taken before and after a run, because machines change their speed without telling (a DGX Spark has been seen at a third
of its rate with nothing to be read anywhere). Figures whose probes differ by more than 10 % are not compared.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

PROBE_S = 0.05
"""Of each rate."""
CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE_BYTES = 32 << 20
MIN_BUFFER_BYTES, MAX_BUFFER_BYTES = 64 << 20, 1 << 30
PRODUCT_SIZE = {"cpu": 1024, "cuda": 4096}
SLOW_GB10 = {"read_gbps": 190.0, "product_tflops": 60.0}
"""Below either a GB10 is in its slow state: owners read 231-234 GB/s and 91-97 TFLOP/s."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Rates of a moment; the best of what fits into the time."""

    read_gbps: float
    """1e9 bytes a second."""
    copy_gbps: float
    """Read and write counted."""
    product_tflops: float
    """bf16 on CUDA, fp32 on a CPU."""
    cache_bytes: int
    """The last cache, which the buffers exceed four times (1 GiB at most)."""


def probe_device(device: torch.device, *, product: Product = torch.mm, seconds: float = PROBE_S) -> Probe:
    """Measure.

    Args:
        product: a [M, K] @ b [K, N] as the caller's model computes it; the better of it and torch.mm counts.
        seconds: For each of the three rates.
    """
    cache_bytes = last_cache_bytes(device)
    num_bytes = min(max(4 * cache_bytes, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = 4096
    source = torch.ones(num_bytes // dtype.itemsize // width, width, dtype=dtype, device=device)
    vector = torch.ones(width, dtype=dtype, device=device)
    read_s = min(_best_s(lambda: source @ vector, device, seconds / 2), _best_s(source.sum, device, seconds / 2))
    copy_s = _best_s(partial(torch.empty_like(source).copy_, source), device, seconds)
    size = PRODUCT_SIZE[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    product_s = min(_best_s(partial(f, a, a), device, seconds / 2) for f in dict.fromkeys((torch.mm, product)))
    moved = source.numel() * source.element_size()
    return Probe(
        read_gbps=moved / read_s / 1e9,
        copy_gbps=2 * moved / copy_s / 1e9,
        product_tflops=2 * size**3 / product_s / 1e12,
        cache_bytes=cache_bytes,
    )


def slow_state(device_name: str, probe: Probe) -> str | None:
    """What to tell of a GB10 that is slower than it should be; None for a healthy or another device."""
    if "GB10" not in device_name.upper():
        return None
    slow = [
        f"{name.replace('_', ' ')} {getattr(probe, name):.0f} below {least:.0f}"
        for name, least in SLOW_GB10.items()
        if getattr(probe, name) < least
    ]
    if not slow:
        return None
    return (
        f"this GB10 is slow right now ({', '.join(slow)}); known remedies: update the firmware, shut down and "
        "unplug the machine for a minute, look for a clock cap (nvidia-smi -q -d CLOCK)"
    )


def last_cache_bytes(device: torch.device, folder: Path = CPU_CACHE) -> int:
    """Size of the last cache before memory: L2 of a CUDA device, the largest of a CPU; 32 MiB where nobody says."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or DEFAULT_CACHE_BYTES
    sizes = [0]
    for path in folder.glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG]?)", path.read_text(encoding="ascii").strip())
        if found:
            sizes.append(int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]])
    return max(sizes) or DEFAULT_CACHE_BYTES


def _best_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of the repetitions that fit into the time; one before it warms up."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        elapsed = _cuda_s(work) if device.type == "cuda" else _host_s(work)
        best = min(best, elapsed)
        if time.perf_counter() > end:
            return best


def _host_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cuda_s(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
