"""The plan of `linear_grpo`: its design, its chunk, and the bytes that it promises.

T rows, V vocabulary, D width.
"""

from typing import Any

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.head_plan import DEVICE_RATES, HeadPlan, design_times_s, device_rates, plan_linear_grpo
from sparkgrpo.kernels.linear_grpo import linear_grpo

PLAIN, GSPO = GrpoObjective(), GrpoObjective(ratio="sequence")


def plan(num_rows: int = 8192, V: int = 151_936, D: int = 896, **options: Any) -> HeadPlan:
    options = {
        "objective": PLAIN,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "needs_dweight": True,
    } | options
    return plan_linear_grpo(num_rows, V, D, **options)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for GB10; nothing is launched."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda device: True)


def test_cpu_keeps_one_chunk_and_knows_no_seconds() -> None:
    found = plan()
    assert found.design == "chunked" and found.chunk_tokens >= 128 and found.time_s is None
    assert plan(chunk_tokens=7).chunk_tokens == 7


@pytest.mark.usefixtures("on_gpu")
def test_chunk_carries_work_at_a_large_vocabulary() -> None:
    """Liger 1472: a rule in V / D alone makes chunks of a few rows, and dweight is read and written for each."""
    assert plan().chunk_tokens >= 1024 and plan(needs_dweight=False).chunk_tokens >= 1024


CHEAPEST = [(121, 896, "anchored"), (121, 3584, "anchored"), (90, 896, "chunked"), (90, 1536, "chunked")]


@pytest.mark.parametrize(("capability", "width", "design"), [*CHEAPEST, (90, 3584, "chunked")])
def test_the_cheapest_design(capability: int, width: int, design: str) -> None:
    """kernels.md: anchored beats chunked where the tile's share exceeds 1 / (1 + 3 F / (BW D))."""
    rates = DEVICE_RATES[capability]
    times_s = design_times_s(8192, 151_936, width, rates, needs_dweight=True)
    assert min(times_s, key=lambda name: times_s[name]) == design
    ratio = 3 * rates.product_tflops * 1e3 / (rates.bandwidth_gbps * width)
    assert (rates.tile_share > 1 / (1 + ratio)) == (design == "anchored")
    assert times_s["recompute"] > times_s["anchored"]


def test_estimates_on_gb10() -> None:
    """By hand: 2 x 8,192 x 151,936 x 896 flops at 92 TFLOP/s are 24.2 ms, 6 bytes a logit at 220 GB/s 33.9."""
    times_s = design_times_s(8192, 151_936, 896, DEVICE_RATES[121], needs_dweight=True)
    assert times_s["anchored"] * 1e3 == pytest.approx(24.24 / 0.85 + 2 * 24.24, rel=1e-3)
    assert times_s["chunked"] * 1e3 == pytest.approx(3 * 24.24 + 33.95, rel=1e-3)
    frozen_s = design_times_s(8192, 151_936, 896, DEVICE_RATES[121], needs_dweight=False)
    assert times_s["chunked"] - frozen_s["chunked"] == pytest.approx(24.24e-3, rel=1e-3)


def test_unknown_gpus_take_the_rates_of_the_nearest_below() -> None:
    assert device_rates(121) is DEVICE_RATES[121] and device_rates(125) is DEVICE_RATES[121]
    assert device_rates(100) is DEVICE_RATES[90] and device_rates(80) is DEVICE_RATES[90]


@pytest.mark.usefixtures("on_gpu")
def test_a_long_sequence_is_swept_twice() -> None:
    assert plan(objective=GSPO, longest_sequence=4096).design == "anchored"
    assert plan(objective=GSPO, longest_sequence=4097).design == "recompute"
    assert plan(longest_sequence=9999).design == "anchored"  # a ratio per token asks for no sequence
    for design in ("anchored", "chunked"):
        with pytest.raises(ValueError, match=f"design '{design}' under ratio 'sequence' needs whole sequences"):
            plan(objective=GSPO, longest_sequence=4097, design=design)


def test_unknown_design_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'anchored'"):
        plan(design="ankored")


def assert_bytes_as_promised(op_watch: Any, num_rows: int, V: int, D: int, **options: Any) -> None:
    """At most 2 % above the plan, and not far below it: a plan that is too careful refuses runs that would fit."""
    rng, dtype = torch.Generator().manual_seed(0), options.pop("dtype")
    operands = (torch.randn(num_rows, D, generator=rng).to(dtype), torch.randn(V, D, generator=rng).to(dtype))
    operands = (x.requires_grad_() for x in operands)
    rows_T, target_T = torch.rand(num_rows, generator=rng), torch.randint(V, (num_rows,), generator=rng)
    with op_watch:
        out = linear_grpo(*operands, target_T, rows_T, rows_T, objective=PLAIN, **options)
    assert out.loss.requires_grad
    promised = plan(num_rows, V, D, dtype=dtype, **options).num_bytes
    assert 0.9 * promised < op_watch.peak_bytes < 1.02 * promised


@pytest.mark.parametrize("design", ["chunked", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [100, 256, 1024])
def test_bytes_on_a_cpu(num_rows: int, dtype: torch.dtype, design: str, op_watch: Any) -> None:
    assert_bytes_as_promised(op_watch, num_rows, 40_000, 64, dtype=dtype, design=design, chunk_tokens=128)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("design", ["anchored", "chunked", "recompute"])
@pytest.mark.parametrize("num_rows", [16, 32, 64])
def test_bytes_on_a_gpu(num_rows: int, design: str, op_watch: Any) -> None:
    """The interpreter widens bf16, so that fp32 stands for both."""
    assert_bytes_as_promised(op_watch, num_rows, 3000, 32, dtype=torch.float32, design=design, chunk_tokens=16)
