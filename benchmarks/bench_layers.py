"""Linear layers, attention over shared prompts and the draw of a token: shapes of SmolLM2-135M, and of Qwen2.5-0.5B.

pytest --benchmark [-k prefix_attention]
"""

import pytest

from benchmarks.collector import Collector
from benchmarks.layer_ops import AttentionSizes, attention_comparison, draw_comparison, linear_comparison

LINEARS = [(2048, 576, 3072), (2048, 1536, 576), (64, 576, 3072)]
ATTENTIONS = [
    AttentionSizes(N=4, G=8, P=100, C=64, H=9, K=3, E=64),
    AttentionSizes(N=4, G=8, P=400, C=128, H=14, K=2, E=64),
]
DRAWS = [(64, 49_152), (64, 151_936), (256, 687)]


@pytest.mark.parametrize("sizes", LINEARS, ids=lambda sizes: "x".join(map(str, sizes)))
def bench_linear(sizes: tuple[int, int, int], collector: Collector, benchmark) -> None:  # noqa: ANN001
    collector.run(linear_comparison(*sizes, collector.device), benchmark)


@pytest.mark.parametrize("sizes", ATTENTIONS, ids=lambda sizes: "-".join(map(str, vars(sizes).values())))
def bench_prefix_attention(sizes: AttentionSizes, collector: Collector, benchmark) -> None:  # noqa: ANN001
    collector.run(attention_comparison(sizes, collector.device), benchmark)


@pytest.mark.parametrize("sizes", DRAWS, ids=lambda sizes: "x".join(map(str, sizes)))
def bench_sample_tokens(sizes: tuple[int, int], collector: Collector, benchmark) -> None:  # noqa: ANN001
    collector.run(draw_comparison(*sizes, collector.device, collector.copy_gbps), benchmark)
