"""The head with the GRPO loss, and scoring, against the peers.

    pytest --benchmark [--benchmark-full] [-k linear_grpo]

On a CPU V 49,152 and D 576 (SmolLM2-135M), in full also V 151,936 and D 896 (Qwen2.5-0.5B), whose speed and memory at
512 and 2,048 rows are this project's goals for a CPU. Rows of weight 0 cost ours nothing; peers compute them all the
same, so that they are compared where all rows count, and eager alone where half do.
"""

from dataclasses import dataclass

import pytest
import torch

from benchmarks.collector import Collector
from benchmarks.head_case import HeadShape
from benchmarks.head_comparison import head_comparison

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A shape, and where it is run."""

    shape: HeadShape
    device: str
    is_full: bool = False


def _cpu(T: int, V: int, D: int, dtype: torch.dtype, frac_active: float, *, is_full: bool = False) -> BenchCase:
    shape = HeadShape(T=T, V=V, D=D, dtype=dtype, frac_active=frac_active)
    return BenchCase(shape=shape, device="cpu", is_full=is_full)


def _cuda(T: int, D: int, frac_active: float, dtype: torch.dtype = BF16) -> BenchCase:
    return BenchCase(shape=HeadShape(T=T, V=151_936, D=D, dtype=dtype, frac_active=frac_active), device="cuda")


GRPO_CASES = [
    *(_cpu(512, 49_152, 576, dtype, f) for dtype in (FP32, BF16) for f in (1.0, 0.5)),
    *(_cpu(T, 151_936, 896, FP32, f, is_full=True) for T in (512, 2048) for f in (1.0, 0.5)),
    _cpu(2048, 151_936, 896, BF16, 1.0, is_full=True),
    *(_cuda(T, 896, f) for T in (8192, 2048, 32_768) for f in (1.0, 0.5, 0.25)),
    _cuda(8192, 1536, 1.0),
    _cuda(8192, 2048, 1.0),
]
SCORE_CASES = [_cpu(512, 49_152, 576, FP32, 1.0), _cpu(512, 49_152, 576, BF16, 1.0), _cuda(8192, 896, 1.0)]


def _run(op: str, case: BenchCase, collector: Collector, benchmark) -> None:  # noqa: ANN001
    if case.device != collector.device.type:
        pytest.skip(f"a case for {case.device}")
    if case.is_full and not collector.is_full:
        pytest.skip("a long case: --benchmark-full")
    is_small = case.device == "cuda" or case.shape.T <= 512
    has_peers = case.shape.frac_active == 1.0 and is_small
    comparison = head_comparison(op, case.shape, collector.device, has_peers=has_peers)
    collector.run(comparison, benchmark, is_full=case.is_full)


def _name(case: BenchCase) -> str:
    return "-".join(str(value) for value in case.shape.conditions().values())


@pytest.mark.parametrize("case", GRPO_CASES, ids=_name)
def bench_linear_grpo(case: BenchCase, collector: Collector, benchmark) -> None:  # noqa: ANN001
    _run("linear_grpo", case, collector, benchmark)


@pytest.mark.parametrize("case", SCORE_CASES, ids=_name)
def bench_linear_logprob(case: BenchCase, collector: Collector, benchmark) -> None:  # noqa: ANN001
    _run("linear_logprob", case, collector, benchmark)
