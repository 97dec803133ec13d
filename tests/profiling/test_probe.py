"""The probe on this machine, its verdicts, and the size of the last cache."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from sparkgrpo.profiling.probe import DEFAULT_CACHE_BYTES, Probe, last_cache_bytes, probe_device, slow_state
from sparkgrpo.profiling.probe_verdict import compare_probes

HEALTHY = Probe(read_gbps=232.0, copy_gbps=218.0, product_tflops=92.0, cache_bytes=24 << 20)


def test_probe_of_this_machine() -> None:
    used: list[int] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        used.append(len(a))
        return torch.mm(a, b)

    probe = probe_device(torch.device("cpu"), product=product, seconds=0.01)
    assert 0.1 < probe.read_gbps < 5000 and 0.1 < probe.copy_gbps < 5000 and 1e-4 < probe.product_tflops < 100
    assert used and probe.cache_bytes >= 1 << 18


def test_last_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(torch.device("cpu"), tmp_path) == 32 << 20
    assert last_cache_bytes(torch.device("cpu"), tmp_path / "none") == DEFAULT_CACHE_BYTES


@pytest.mark.parametrize(
    ("after", "is_comparable", "text"),
    [(225.0, True, "read 232 and 225"), (215.0, True, "noted: read 232 and 215"), (200.0, False, "not comparable")],
)
def test_probes_five_and_ten_percent_apart(after: float, is_comparable: bool, text: str) -> None:
    verdict = compare_probes(asdict(HEALTHY), asdict(HEALTHY) | {"read_gbps": after})
    assert verdict.is_comparable == is_comparable and text in verdict.text
    turned = compare_probes(asdict(HEALTHY) | {"read_gbps": after}, asdict(HEALTHY))
    assert turned.is_comparable == is_comparable


def test_probes_that_say_nothing() -> None:
    assert compare_probes({}, {"read_gbps": 5.0}).is_comparable
    assert compare_probes({"read_gbps": None}, {"read_gbps": 5.0}).text == "no rate was probed both times"


def test_the_slow_state_of_a_spark() -> None:
    slow = Probe(read_gbps=75.0, copy_gbps=218.0, product_tflops=92.0, cache_bytes=24 << 20)
    assert slow_state("NVIDIA GB10", HEALTHY) is None and slow_state("NVIDIA H100", slow) is None
    assert "read gbps 75 below 190" in (slow_state("NVIDIA GB10", slow) or "")
