"""The inverse CDF of a draw against exact integers."""

import itertools

import pytest
import torch

from sparkgrpo.kernels.sampling import _draw

LAST_UNIFORM = 1 - 2.0**-24


@pytest.mark.parametrize("num_columns", [1, 31, 32, 33, 687, 1024])
def test_the_drawn_index_is_the_first_whose_running_mass_exceeds(num_columns: int) -> None:
    """Against Python's integers, with runs of columns that have no mass."""
    rng = torch.Generator().manual_seed(num_columns)
    mass_BC = torch.rand(200, num_columns, generator=rng) * (torch.rand(200, num_columns, generator=rng) < 0.1)
    mass_BC[0] = 0.0
    uniform_B = torch.rand(200, generator=rng).mul(2**24).floor().mul(2.0**-24)
    uniform_B[1], uniform_B[2] = 0.0, LAST_UNIFORM
    for index, mass_C, uniform in zip(_draw(mass_BC, uniform_B).tolist(), mass_BC, uniform_B, strict=True):
        running = list(itertools.accumulate(int(mass * 2**40) for mass in mass_C.tolist()))
        threshold = int(float(uniform) * 2**24) * running[-1] >> 24
        expected = next((i for i, total in enumerate(running) if total > threshold), None)
        assert index == expected if expected is not None else index >= num_columns
