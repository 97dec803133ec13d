"""The ops that bandwidth limits, in GB/s of compulsory traffic and as a fraction of a copy.

pytest --benchmark [-k rms_norm]
"""

import pytest
import torch

from benchmarks.collector import Collector
from benchmarks.small_ops import adamw_comparison, small_comparison

SIZES = {
    "rms_norm": {"D": 896},
    "swiglu": {"F": 4864},
    "rotary": {"H": 16, "E": 64},
    "token_logprob": {"V": 151_936},
}
TOKENS = {"cpu": 1024, "cuda": 32_768}
LOGIT_ROWS = {"cpu": 64, "cuda": 2048}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("op", SIZES)
def bench_small_op(op: str, dtype: torch.dtype, collector: Collector, benchmark) -> None:  # noqa: ANN001
    device = collector.device
    num_rows = (LOGIT_ROWS if op == "token_logprob" else TOKENS)[device.type]
    sizes = {"T": num_rows, **SIZES[op]}
    comparison = small_comparison(op, sizes, dtype, device, collector.copy_gbps, has_compile=True)
    collector.run(comparison, benchmark)


def bench_adamw(collector: Collector, benchmark) -> None:  # noqa: ANN001
    num_tensors, size = (64, 2048) if collector.device.type == "cuda" else (16, 512)
    collector.run(adamw_comparison(num_tensors, size, collector.device, collector.copy_gbps), benchmark)
