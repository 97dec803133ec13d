"""Which design `linear_grpo` takes, how many rows a chunk has, and what both cost: arithmetic, never a measurement at
run time, so that two runs on one machine do the same work in the same order.

With F the product rate, BW the bandwidth, eps the tile's share of cuBLAS' rate, N active rows, G = 2 N V D / F:

    anchored  G/eps + 2 G            chunked  3 G + 6 N V / BW            recompute  2 G/eps + 2 G

and no product below its own bytes / BW. anchored beats chunked iff eps > 1/(1 + x), x = 3 F / (BW D); on a tie chunked,
which has less code of ours. F and BW are published or assumed (DEVICE_RATES says which); `benchmarks/gpu_check.py`
measures them and eps on the machine it runs on.

T rows, N active rows, C rows a chunk, V vocabulary, D width.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.head_chunks import BLOCK_ELEMENTS, PRODUCT_ROWS, chunk_rows
from sparkgrpo.kernels.head_sweep import CUDA_CHUNK_ROWS, CUDA_SCORE_ROWS, DWEIGHT_BLOCK_ROWS
from sparkgrpo.kernels.launch import check_choice
from sparkgrpo.kernels.tile_table import SPLIT_COLUMNS

Design = Literal["auto", "anchored", "chunked", "recompute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """What a GPU sustains on the head's products."""

    product_tflops: float
    """bf16 operands, fp32 accumulation, 1e12 a second."""
    bandwidth_gbps: float
    """1e9 bytes a second."""
    tile_share: float
    """eps: rate of the Triton tile over that of cuBLAS."""
    source: str


DEVICE_RATES = {
    90: DeviceRates(product_tflops=790, bandwidth_gbps=4300, tile_share=0.6, source="H200: assumed"),
    120: DeviceRates(product_tflops=200, bandwidth_gbps=1600, tile_share=0.85, source="RTX 5090: assumed"),
    121: DeviceRates(product_tflops=92, bandwidth_gbps=220, tile_share=0.85, source="GB10: published, share assumed"),
}  # fmt: skip
"""By compute capability; another GPU takes the nearest below, or sm_90's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlan:
    """How one call is computed. The bytes are asserted by tests; the seconds are an estimate."""

    design: Literal["anchored", "chunked", "recompute"]
    chunk_tokens: int
    """C."""
    num_bytes: int
    """Extra memory at the peak, inputs and row outputs aside."""
    time_s: float | None
    """On a GPU, by DEVICE_RATES; None on a CPU, whose rates nobody publishes."""


def device_rates(capability: int) -> DeviceRates:
    """The rates of the nearest known GPU at or below this compute capability."""
    known = [number for number in DEVICE_RATES if number <= capability]
    return DEVICE_RATES[max(known, default=90)]


def design_times_s(num_rows: int, V: int, D: int, rates: DeviceRates, *, needs_dweight: bool) -> dict[str, float]:
    """Seconds of each design; a frozen weight saves one gradient product."""
    product_s = 2.0 * num_rows * V * D / (rates.product_tflops * 1e12)
    product_s = max(product_s, 2.0 * V * D / (rates.bandwidth_gbps * 1e9))
    gradients_s = product_s * (2 if needs_dweight else 1)
    pass_s = 6.0 * num_rows * V / (rates.bandwidth_gbps * 1e9)
    return {
        "anchored": product_s / rates.tile_share + gradients_s,
        "chunked": product_s + gradients_s + pass_s,
        "recompute": 2 * product_s / rates.tile_share + gradients_s,
    }


def cheapest_design(times_s: dict[str, float] | None) -> Literal["anchored", "chunked", "recompute"]:
    """The fastest; within 1 % the one with less code of ours. recompute is never ahead of anchored. None: a CPU."""
    if times_s is None:
        return "chunked"
    return "anchored" if times_s["anchored"] < 0.99 * times_s["chunked"] else "chunked"


def plan_linear_grpo(
    num_rows: int,
    V: int,
    D: int,
    *,
    objective: GrpoObjective,
    dtype: torch.dtype,
    device: torch.device,
    needs_dweight: bool,
    design: Design = "auto",
    chunk_tokens: int | None = None,
    longest_sequence: int = 0,
) -> HeadPlan:
    """Design, chunk and cost of `linear_grpo` on num_rows active rows.

    Args:
        num_rows: N; V: vocabulary rows that exist; D: width.
        objective: Its ratio decides whether a sequence must fit a chunk.
        dtype: Of hidden states and head. needs_dweight: The head is trained.
        design, chunk_tokens: Forced, or "auto" and None. longest_sequence: Active rows, under ratio "sequence".

    Raises:
        ValueError: an unknown design; a forced one that keeps a chunk where the longest sequence does not fit it.
    """
    check_choice("design", design, ("auto", "anchored", "chunked", "recompute"))
    is_gpu = dispatch.runs_triton(device)
    if chunk_tokens is None:
        chunk_tokens = (CUDA_CHUNK_ROWS if needs_dweight else CUDA_SCORE_ROWS) if is_gpu else chunk_rows(V, None)
    is_too_long = objective.ratio == "sequence" and longest_sequence > chunk_tokens
    if is_too_long and design in ("anchored", "chunked"):
        raise ValueError(
            f"design {design!r} under ratio 'sequence' needs whole sequences in a chunk: the longest has"
            f" {longest_sequence} rows, the chunk {chunk_tokens}; raise chunk_tokens, or use design 'auto'"
        )
    times_s = _times_s(num_rows, V, D, device, needs_dweight) if is_gpu else None
    if design == "auto":
        design = "recompute" if is_too_long else cheapest_design(times_s)
    return HeadPlan(
        design=design,
        chunk_tokens=chunk_tokens,
        num_bytes=_num_bytes(
            num_rows, V, D, min(chunk_tokens, num_rows), dtype.itemsize, design, is_gpu, needs_dweight
        ),
        time_s=None if times_s is None else times_s[design],
    )


def _num_bytes(
    num_rows: int, V: int, D: int, C: int, itemsize: int, design: str, is_gpu: bool, needs_dweight: bool
) -> int:
    """The chunk and its rows, what is kept of every row, dweight, and the blocks in which products come."""
    exp_bytes = itemsize if is_gpu and design != "chunked" else 4
    num_bytes = C * V * exp_bytes + C * (4 * D + 8 * -(-V // SPLIT_COLUMNS))
    num_bytes += num_rows * (D * itemsize + 64)
    if needs_dweight:
        num_bytes += 4 * D * (V + (min(V, DWEIGHT_BLOCK_ROWS) if is_gpu and num_rows > C else 0))
    return num_bytes if is_gpu else num_bytes + 4 * (BLOCK_ELEMENTS + PRODUCT_ROWS * max(C, 2 * D))


def _times_s(num_rows: int, V: int, D: int, device: torch.device, needs_dweight: bool) -> dict[str, float]:
    from sparkgrpo.kernels.triton_launch import capability_of

    return design_times_s(num_rows, V, D, device_rates(capability_of(device)), needs_dweight=needs_dweight)
