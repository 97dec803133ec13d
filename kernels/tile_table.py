"""Which tile the head kernels take on which GPU: a table, decided offline, so that nothing is tuned at run time and two
runs on one machine launch the same programs.

Every row is compiled by `python -m sparkgrpo.kernels.compile_report` for its GPU: no spills, at most 101,376 bytes of
shared memory on sm_12x. Rejected there: 128 x 256 (spills; 163,856 B with a stored E), 128 x 128 by pointers or with 4
warps (spills), 128 x 128 with 4 stages and a stored E (131,096 B); by pointers at odd strides everything above 64 x 64
x 32 (spills).

M, N, K: rows, vocabulary columns and width of one tile.
"""

from dataclasses import dataclass

import torch

SPLIT_COLUMNS = 2048
"""Columns that one program sweeps; the same for every number of rows, so that a row's sums have one order."""
GROUP_ROWS = 6144
"""Rows of hidden states that stay in the L2 (11 MB at D 896, of 24) while the weight streams past once a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Shape of a tile and how it is launched."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    use_tma: bool
    """Operands come through tensor descriptors; else through pointers, which take any stride."""


_TMA = Tile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3, use_tma=True)
_POINTERS = Tile(block_m=64, block_n=64, block_k=32, num_warps=8, num_stages=2, use_tma=False)
"""Rows that no descriptor takes (a width that is no multiple of 8): loads of 2 bytes, no model of the field has it."""
_FP32 = Tile(block_m=32, block_n=32, block_k=16, num_warps=4, num_stages=2, use_tma=False)
"""IEEE products on the ordinary cores: for tests, not for speed."""


def head_tile(capability: int, dtype: torch.dtype, *, is_tma_aligned: bool) -> Tile:
    """The tile for operands of this dtype on this GPU.

    is_tma_aligned: base and row stride of both operands are multiples of 16 bytes, which descriptors demand; they exist
    from sm_90 on.
    """
    if dtype == torch.float32:
        return _FP32
    return _TMA if capability >= 90 and is_tma_aligned else _POINTERS


def interpreted_tile(*, use_tma: bool) -> Tile:
    """A tile small enough for odd shapes in Triton's interpreter."""
    return Tile(block_m=16, block_n=32, block_k=16, num_warps=4, num_stages=1, use_tma=use_tma)
