"""Philox in PyTorch against `tl.philox`, bit for bit: what lets a kernel and its twin sample the same tokens."""

import pytest
import torch

from sparkgrpo.kernels.philox import MASK32, draw_uniforms, philox_4x32

triton = pytest.importorskip("triton", reason="Triton comes with Linux only")
tl = pytest.importorskip("triton.language")


@triton.jit
def _philox_kernel(out_ptr, seed_ptr, counter_ptr, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202  # pyright: ignore[reportInvalidTypeForm]
    offs = tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < n
    c0 = tl.load(counter_ptr + offs, mask=mask, other=0)
    c1 = tl.load(counter_ptr + n + offs, mask=mask, other=0)
    c2 = tl.load(counter_ptr + 2 * n + offs, mask=mask, other=0)
    c3 = tl.load(counter_ptr + 3 * n + offs, mask=mask, other=0)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3)
    tl.store(out_ptr + offs, w0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out_ptr + n + offs, w1.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out_ptr + 2 * n + offs, w2.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out_ptr + 3 * n + offs, w3.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _uniform_kernel(out_ptr, seed_ptr, position_ptr, stream_ptr, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202  # pyright: ignore[reportInvalidTypeForm]
    offs = tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < n
    stream = tl.load(stream_ptr + offs, mask=mask, other=0)
    position = tl.load(position_ptr + offs, mask=mask, other=0)
    w0, w1, _, _ = tl.philox(tl.load(seed_ptr), position, stream.to(tl.int32), (stream >> 32).to(tl.int32), 0)
    tl.store(out_ptr + offs, (w0 >> 8).to(tl.float32) * 2.0**-24, mask=mask)
    tl.store(out_ptr + n + offs, (w1 >> 8).to(tl.float32) * 2.0**-24, mask=mask)


SEEDS = [0, 7, 2**32 + 5, -3, 2**62 + 12345]


@pytest.mark.parametrize("seed", SEEDS)
def test_words_equal_tl_philox(seed: int, device: torch.device) -> None:
    n = 1000
    counter = torch.randint(-(2**31), 2**31, (4, n), generator=torch.Generator().manual_seed(0)).int().to(device)
    seed_1 = torch.tensor([seed], device=device)
    out = torch.empty(4, n, dtype=torch.int32, device=device)
    _philox_kernel[(1,)](out, seed_1, counter, n, BLOCK=1024)
    assert torch.equal(torch.stack(philox_4x32(seed_1, *counter)), out.long() & MASK32)


@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_equal_those_of_a_kernel(seed: int, device: torch.device) -> None:
    n = 300
    seed_1 = torch.tensor([seed], device=device)
    position = torch.arange(n, dtype=torch.int32, device=device)
    stream = (torch.randint(0, 1 << 47, (n,), generator=torch.Generator().manual_seed(1)) << 16).to(device)
    out = torch.empty(2, n, device=device)
    _uniform_kernel[(1,)](out, seed_1, position, stream, n, BLOCK=512)
    assert torch.equal(torch.stack(draw_uniforms(seed_1, position, stream)), out)
