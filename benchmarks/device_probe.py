"""What the device gives right now: bandwidth of a copy and rate of a product. Limits are stated against these."""

import torch

from benchmarks.comparison import sample_s

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}


def copy_gbps(device: torch.device, *, is_quick: bool = False) -> float:
    """GB/s of a device-to-device copy, read and write counted, best of 5."""
    num = (1 << 20) if is_quick else COPY_BYTES[device.type]
    source = torch.ones(num, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num / min(sample_s(lambda: {"y": target.copy_(source)}, device) for _ in range(5)) / 1e9


def product_tflops(device: torch.device, dtype: torch.dtype, *, is_quick: bool = False) -> float:
    """TFLOP/s of a square product, best of 5."""
    size = 256 if is_quick else PRODUCT_SIZE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / min(sample_s(lambda: {"y": a @ a}, device) for _ in range(5)) / 1e12
