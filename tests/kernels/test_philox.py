"""Philox4x32-10: the published answers, three implementations that agree bit for bit, and draws that depend on nothing
else.

The third implementation, `tl.philox`, is compared in `test_philox_triton.py`.
"""

import itertools

import pytest
import torch

from sparkgrpo.kernels.philox import MASK32, draw_uniforms, philox_4x32, philox_words, uniform24

PI_KEY = 0x299F31D0_A4093822
KNOWN_ANSWERS = [  # kat_vectors of the Random123 distribution, philox4x32 10
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (MASK32,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI_KEY, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
Word = torch.Tensor | int


def signed(key: int) -> int:
    """The same 64 bits as an int64 can hold them."""
    return key - (1 << 64) if key >= 1 << 63 else key


def chi_square(counts: torch.Tensor) -> float:
    """Of counts that should be equal."""
    wanted = counts.sum() / counts.numel()
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN_ANSWERS)
def test_published_answers(key: int, counter: tuple[int, int, int, int], answer: tuple[int, ...]) -> None:
    assert philox_words(key, *counter) == answer
    assert philox_words(signed(key), *counter) == answer
    for tensor_key in (key, torch.tensor(signed(key)), torch.tensor([signed(key)])):
        assert tuple(int(word) for word in philox_4x32(tensor_key, *counter)) == answer


@pytest.mark.parametrize("key", [0, 7, 2**32 + 5, -3, 2**62 + 12345, 2**63, 2**64 - 1])
def test_tensors_and_plain_integers_agree(key: int) -> None:
    generator = torch.Generator().manual_seed(0)
    counter = torch.randint(0, 2**32, (4, 200), generator=generator)
    counter[:, :5] = torch.tensor([0, 1, MASK32, 1 << 31, (1 << 31) - 1])
    expected = [list(words) for words in zip(*(philox_words(key, *c) for c in counter.T.tolist()), strict=True)]
    assert torch.stack(philox_4x32(key, *counter)).tolist() == expected
    assert torch.stack(philox_4x32(torch.tensor([signed(key)]), *counter)).tolist() == expected


def test_key_and_counters_broadcast_in_any_mix() -> None:
    values: tuple[int, ...] = (11, 3, 5, 7, 9)
    expected = philox_words(*values)
    shapes = ((), (1,), (4, 1), (3,))
    for kinds in itertools.product((False, True), repeat=5):
        words: list[Word] = [
            torch.full(shapes[n % 4], value, dtype=(torch.int64, torch.int32)[n % 2]) if is_tensor else value
            for n, (value, is_tensor) in enumerate(zip(values, kinds, strict=True))
        ]
        result = philox_4x32(*words)
        shape = torch.broadcast_shapes(*(word.shape for word in words if isinstance(word, torch.Tensor)))
        for got, wanted in zip(result, expected, strict=True):
            assert got.dtype == torch.int64
            assert torch.equal(got.expand(shape), torch.full(shape, wanted))


def test_every_bit_of_key_and_counter_counts() -> None:
    seen = {philox_words(0)}
    seen |= {philox_words(1 << bit) for bit in range(64)}
    seen |= {
        philox_words(0, *(value << bit for value in unit)) for bit in range(32) for unit in torch.eye(4).int().tolist()
    }
    assert len(seen) == 1 + 64 + 4 * 32
    stream = torch.tensor([0] + [1 << bit for bit in range(63)] + [-(1 << 63)])
    assert len(set(draw_uniforms(0, 0, stream)[0].tolist())) == 65


def test_a_draw_depends_on_its_own_stream_and_position_alone() -> None:
    stream, position = torch.arange(64) << 16, torch.full((64,), 17)
    whole = draw_uniforms(99, position, stream)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    for u, shuffled, alone in zip(
        whole, draw_uniforms(99, position, stream[order]), draw_uniforms(99, position[:1], stream[5:6]), strict=True
    ):
        assert torch.equal(shuffled, u[order])
        assert torch.equal(alone, u[5:6])


@pytest.mark.parametrize("difference", [1, -1, 1 << 16, 1 << 32])
def test_neighbouring_seeds_share_no_draw(difference: int) -> None:
    """With key = seed + row, row r of one seed would be row r - 1 of the next."""
    stream = torch.arange(-32, 32)
    draws = draw_uniforms(1234, 17, stream)[0]
    others = draw_uniforms(1234 + difference, 17, stream)[0]
    assert not set(draws.tolist()) & set(others.tolist())


def test_uniforms_are_exact_multiples_below_one() -> None:
    words = torch.tensor([0, 255, 256, 2**31, 2**32 - 1])
    assert uniform24(words).tolist() == [0.0, 0.0, 2.0**-24, 0.5, 1 - 2.0**-24]
    assert uniform24(words).dtype == torch.float32


def test_uniforms_are_uniform_and_the_two_of_a_draw_unrelated() -> None:
    """2^17 draws; 63 degrees of freedom, standard deviation 11.2: 63 +- 5 sigma. The seed is fixed, so is the
    result."""
    position, stream = torch.arange(32)[:, None], torch.arange(4096)
    u_block, u_token = (u.flatten() for u in draw_uniforms(7, position, stream))
    for u in (u_block, u_token):
        assert 7 < chi_square(torch.histc(u, bins=64, min=0, max=1)) < 119
    pairs = (u_block * 8).long() * 8 + (u_token * 8).long()
    assert 7 < chi_square(torch.bincount(pairs, minlength=64).float()) < 119
    steps = u_block.view(32, 4096)  # the same stream at one position and at the next
    pairs = (steps[:-1] * 8).long() * 8 + (steps[1:] * 8).long()
    assert 7 < chi_square(torch.bincount(pairs.flatten(), minlength=64).float()) < 119
