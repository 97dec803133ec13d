"""The harness: what is timed, what is not and why, who is compared with whom."""

import gc
import itertools
import weakref

import pytest
import torch

from benchmarks.comparison import Comparison, Implementation, Outputs, Row, Step, output_errors, run_comparison
from benchmarks.peak_memory import peak_extra_bytes
from benchmarks.table import render

CPU = torch.device("cpu")


def comparison(implementations: list[Implementation]) -> Comparison:
    return Comparison(
        op="double",
        device=CPU,
        conditions={"T": 4},
        case=torch.ones(4),
        check_case=torch.ones(2),
        truths={"op": {"y": torch.full((2,), 2.0, dtype=torch.float64)}},
        bounds={"y": 1e-6},
        peer_bounds={"y": 1e-2},
        implementations=implementations,
    )


def doubling(name: str, factor: float = 2.0, **options: object) -> Implementation:
    return Implementation(name=name, make=lambda x: lambda: {"y": factor * x}, **options)


def rows_of(*implementations: Implementation) -> dict[str, Row]:
    compared = comparison(list(implementations))
    run_comparison(compared, rounds=2)
    return {row.name: row for row in compared.rows}


def test_a_wrong_implementation_is_not_timed() -> None:
    rows = rows_of(doubling("ours", 2.0001, is_ours=True), doubling("eager", 2.0001), doubling("peer", 2.1))
    assert rows["ours"].failure is not None and "y off by 5.0e-05; not timed" in rows["ours"].failure
    assert rows["ours"].times_s == [] and rows["peer"].times_s == []
    assert len(rows["eager"].times_s) == 2 and rows["eager"].failure is None  # peers may round more


def test_nan_is_wrong() -> None:
    assert rows_of(doubling("ours", float("nan"), is_ours=True))["ours"].failure is not None


def test_a_missing_peer_keeps_its_row_and_says_why() -> None:
    def missing(_: torch.Tensor) -> None:
        raise ImportError("no module named peer\nand more")

    rows = rows_of(Implementation(name="peer", make=missing), doubling("eager"))
    assert rows["peer"].failure == "ImportError: no module named peer"
    assert "missing" in str(rows["peer"].failure_traceback)
    assert len(rows["eager"].times_s) == 2


class Block:
    """Stands for memory that an implementation took."""

    def __init__(self) -> None:
        self.me = self  # so that only the garbage collector frees it


@pytest.mark.parametrize("steps_before", [0, 5])
def test_an_implementation_out_of_memory_costs_its_own_row_alone(steps_before: int) -> None:
    """At its first step; or, with 5 good ones before, as late as the timed rounds."""
    blocks: list[weakref.ref[Block]] = []
    num_steps = 0

    def hungry(x: torch.Tensor) -> Step:
        def step() -> Outputs:
            nonlocal num_steps
            num_steps += 1
            if num_steps > steps_before:
                block = Block()
                blocks.append(weakref.ref(block))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return {"y": 2 * x}

        return step

    def next_one(x: torch.Tensor) -> Step:
        def step() -> Outputs:
            assert not any(block() for block in blocks), "memory of the one before is still held"
            return {"y": 2 * x}

        return step

    gc.disable()
    try:
        rows = rows_of(
            doubling("ours", is_ours=True),
            Implementation(name="eager", make=hungry),
            Implementation(name="bare", make=next_one),
        )
    finally:
        gc.enable()
    assert blocks and "OutOfMemoryError: CUDA out of memory" in str(rows["eager"].failure)
    assert rows["eager"].median_s is None and rows["eager"].times_s == []
    assert rows["ours"].median_s and rows["bare"].median_s, rows["bare"].failure


def test_implementations_rotate() -> None:
    order: list[str] = []

    def noting(name: str) -> Implementation:
        def make(x: torch.Tensor):  # noqa: ANN202
            def step() -> Outputs:
                if not order or order[-1] != name:
                    order.append(name)
                return {"y": 2 * x}

            return step

        return Implementation(name=name, make=make)

    run_comparison(comparison([noting("a"), noting("b"), noting("c")]), rounds=3)
    assert order[3:] == list("abc" + "bca" + "cab") or order[3:] == list("abcbcacab")


def test_ratios_are_against_baseline_and_floor() -> None:
    compared = comparison(
        [doubling("eager"), doubling("ours", is_ours=True), doubling("bare", truth=None, is_floor=True)]
    )
    run_comparison(compared, rounds=3)
    eager, ours, bare = compared.rows
    assert eager.speedup == 1.0 and bare.frac_floor == 1.0 and compared.floor_s == bare.min_s
    assert ours.min_s is not None and ours.median_s is not None and eager.median_s is not None
    assert ours.speedup == eager.median_s / ours.median_s
    assert compared.floor_s is not None and ours.frac_floor == compared.floor_s / ours.min_s


def test_without_a_floor_the_copy_is_the_limit() -> None:
    compared = comparison([doubling("eager")])
    compared.num_bytes, compared.copy_gbps = 4_000_000_000, 2.0
    assert compared.floor_s == 2.0


def test_unlike_bits_are_seen() -> None:
    flips = itertools.count()
    noisy = Implementation(name="ours", make=lambda x: lambda: {"y": x * 2 + (next(flips) % 2) * 1e-6})
    assert rows_of(noisy)["ours"].has_equal_bits is False
    assert rows_of(doubling("ours"))["ours"].has_equal_bits is True


def test_errors_are_nats_or_relative() -> None:
    truth = {"logprob": torch.tensor([-1.0, -100.0]).double(), "dx": torch.tensor([3.0, 4.0]).double()}
    errors = output_errors({"logprob": torch.tensor([-1.5, -100.0]), "dx": torch.tensor([3.0, 4.5])}, truth)
    assert errors["logprob"] == 0.5
    assert abs(errors["dx"] - 0.1) < 1e-6


def test_peak_memory_counts_what_is_freed_again() -> None:
    def step() -> torch.Tensor:
        return torch.ones(64 << 18)[:1].clone()  # 64 MiB that do not outlive the step

    peak = peak_extra_bytes(step, CPU)
    assert peak is None or 63 << 20 < peak < 80 << 20


def test_the_table_shows_every_row() -> None:
    compared = comparison([doubling("eager"), doubling("ours", 3.0, is_ours=True)])
    run_comparison(compared, rounds=1)
    title, head, *lines = render(compared).splitlines()
    assert "double  cpu  T 4" in title and "load" in title and head.startswith("implementation")
    assert len(lines) == 2 and "not timed" in lines[1]
