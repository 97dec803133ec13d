"""Counter-based random numbers: Philox4x32-10 in PyTorch and in plain Python, equal bit for bit to `tl.philox`.

A draw is a pure function of (key, counter); nothing is stored, so no result can depend on the order, the batch or the
machine in which it is asked for. The key is the run's (64 bits); the counter names the draw.

    key     = (seed low, seed high)
    counter = (position, stream low, stream high, purpose)

The key is never `seed + row`: row r of one seed would then be row r - 1 of the next.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch

MASK32 = 0xFFFFFFFF
NUM_ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85

PURPOSE_SAMPLE = 0
"""Fourth counter word of token sampling; another use takes another number, never another seed."""


def philox_4x32(
    key: torch.Tensor | int,
    c0: torch.Tensor | int,
    c1: torch.Tensor | int = 0,
    c2: torch.Tensor | int = 0,
    c3: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random words for each counter.

    Args:
        key: All 64 bits are used; integers beyond 64 bits wrap.
        c0, c1, c2, c3: The low 32 bits are used. Tensors of any integer dtype, on one device; key and
            counters broadcast.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    words = [_low_word(x) for x in (c0, c1, c2, c3, key, key >> 32)]
    device = next((x.device for x in words if isinstance(x, torch.Tensor)), None)
    shaped = torch.broadcast_tensors(
        *(x if isinstance(x, torch.Tensor) else torch.full((), x, device=device) for x in words)
    )
    # Both halves of the cipher side by side, half as many calls: even words [c0, c2], odd words [c1, c3].
    even, odd, key = (torch.stack((shaped[i], shaped[j])) for i, j in ((0, 2), (1, 3), (4, 5)))
    half = torch.arange(2, device=device).view(2, *(1,) * (even.ndim - 1))
    multiplier = MULTIPLIER_0 + (MULTIPLIER_1 - MULTIPLIER_0) * half
    weyl = WEYL_0 + (WEYL_1 - WEYL_0) * half
    for number in range(NUM_ROUNDS):
        # int64 products wrap modulo 2^64, so both halves are exact. What is only ever xored keeps its upper bits: the
        # mask stands where those would matter, before the next product.
        product = (even * multiplier).flip(0)
        even, odd = ((product >> 32) ^ odd ^ (key + number * weyl)) & MASK32, product
    odd = odd & MASK32
    return even[0], odd[0], even[1], odd[1]


def _low_word(x: torch.Tensor | int) -> torch.Tensor | int:
    return (x.long() if isinstance(x, torch.Tensor) else x) & MASK32


def philox_words(key: int, c0: int = 0, c1: int = 0, c2: int = 0, c3: int = 0) -> tuple[int, int, int, int]:
    """The same four words from plain integers, for draws on the host (problems, prompt order, keys of rollouts)."""
    c0, c1, c2, c3 = c0 & MASK32, c1 & MASK32, c2 & MASK32, c3 & MASK32
    key0, key1 = key & MASK32, (key >> 32) & MASK32
    for _ in range(NUM_ROUNDS):
        product0, product1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ key0,
            product1 & MASK32,
            (product0 >> 32) ^ c3 ^ key1,
            product0 & MASK32,
        )
        key0, key1 = (key0 + WEYL_0) & MASK32, (key1 + WEYL_1) & MASK32
    return c0, c1, c2, c3


def uniform24(word: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1 - 2^-24] from the upper 24 bits of a word: exact, never 1, the same on every device."""
    return (word >> 8).float() * 2.0**-24


def draw_uniforms(
    key: torch.Tensor | int, position: torch.Tensor | int, stream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 uniforms for each row: one picks the vocabulary block, one the token in it.

    Two words because one 24-bit uniform cannot reach a sixth of a 151,936-word vocabulary.

    Args:
        key: A number or int64 [1]. position: integer [B]. stream: int64 [B], all 64 bits used.
    """
    word_0, word_1, _, _ = philox_4x32(key, position, stream, stream >> 32, PURPOSE_SAMPLE)
    return uniform24(word_0), uniform24(word_1)
