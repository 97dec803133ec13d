"""Counts of work against counts of single tokens and parameters; shares above 100 % are refused."""

import pytest

from sparkgrpo.profiling import roofline
from sparkgrpo.profiling.roofline import ModelShape, decode_share, limits_of, train_share

SHAPE = ModelShape(
    vocab_size=33, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=48, itemsize=4
)
MIB = 1 << 20


def test_parameters_are_those_of_the_products() -> None:
    """q 32x32, k and v 32x16, o 32x32, gate and up 32x48, down 48x32, twice."""
    assert SHAPE.layer_params == 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 32 * 48 + 48 * 32)
    assert SHAPE.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert SHAPE.weight_bytes == (SHAPE.layer_params + 33 * 32) * 4


def test_flops_token_by_token() -> None:
    """A prompt of 3 and completions of 2 and 1 tokens, counted one query at a time."""
    pairs = sum(range(1, 4)) + sum(3 + i for i in (1, 2)) + (3 + 1)
    assert roofline.tree_pairs([3], [[2, 1]]) == pairs
    attention = 0
    for _ in range(SHAPE.num_layers):
        attention += pairs * SHAPE.num_heads * 2 * 2 * SHAPE.head_width  # scores and values, a multiply and an add each
    forward = 6 * 2 * SHAPE.layer_params + 3 * 2 * 33 * 32 + attention
    assert roofline.forward_flops(SHAPE, num_tokens=6, num_head_rows=3, num_pairs=pairs) == forward
    assert roofline.train_flops(SHAPE, num_tokens=6, num_head_rows=3, num_pairs=pairs) == 3 * forward
    frozen = roofline.train_flops(SHAPE, num_tokens=6, num_head_rows=3, num_pairs=pairs, is_frozen=True)
    assert frozen == 2 * forward  # adapters: no gradient of the weights themselves


def test_bytes_of_decoding() -> None:
    found = roofline.decode_bytes(SHAPE, num_steps=5, num_context_tokens=70, num_rows=12)
    assert found == 5 * SHAPE.weight_bytes + 70 * SHAPE.kv_bytes_per_token + 12 * 33 * 8


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("NVIDIA GB10", 273),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H200", 4800),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA GeForce RTX 5090", 1792),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD EPYC", None),
    ],
)
def test_limits_by_name(name: str, gbps: float | None) -> None:
    """Cards of a listed name with other rates are not known; what is listed says where it stands."""
    found = limits_of(name)
    assert (found and found.read_gbps) == gbps
    assert all(limits.source and limits.date for limits in roofline.LIMITS)


def test_share_of_decoding() -> None:
    share = decode_share(180.0, 230.0, 273.0, step_bytes=1000 * MIB, cache_bytes=24 * MIB)
    assert share.value == pytest.approx(180 / 230) and share.fault is None


def test_a_model_in_the_cache_has_no_share() -> None:
    assert decode_share(500.0, 20.0, None, step_bytes=4 * MIB, cache_bytes=32 * MIB).value is None
    assert decode_share(500.0, 20.0, None, step_bytes=4 * MIB, cache_bytes=32 * MIB).fault is None


def test_above_the_limit_is_refused_and_the_suspect_named() -> None:
    share = decode_share(400.0, 230.0, 273.0, step_bytes=1000 * MIB, cache_bytes=24 * MIB)
    assert share.value is None and share.fault is not None
    assert (
        "400 GB/s is above the limit of 273 GB/s" in share.fault and "suspect the bytes of a decode step" in share.fault
    )
    share = train_share(1.0, 0.1, None)
    assert share.value is None and share.fault is not None and "suspect the product probe" in share.fault


def test_between_a_slow_probe_and_the_published_rate_nothing_is_said() -> None:
    """The probe was taken while something else ran: no share, and no bug of ours either."""
    share = decode_share(260.0, 200.0, 273.0, step_bytes=1000 * MIB, cache_bytes=24 * MIB)
    assert (share.value, share.fault) == (None, None)
    share = train_share(95.0, 70.0, 125.0)
    assert (share.value, share.fault) == (None, None)


def test_what_the_cache_serves_is_no_bug() -> None:
    """Half of a step's bytes lie in the cache: twice the memory's rate is possible then."""
    share = decode_share(38.0, 20.0, None, step_bytes=65 * MIB, cache_bytes=32 * MIB)
    assert (share.value, share.fault) == (None, None)
    assert decode_share(80.0, 20.0, None, step_bytes=65 * MIB, cache_bytes=32 * MIB).fault is not None
