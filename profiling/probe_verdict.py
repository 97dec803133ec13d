"""Whether two probes of a machine allow a comparison of what ran beside them. See `probe.py` for the probes."""

from collections.abc import Mapping
from dataclasses import dataclass

NOTED = 0.05
NOT_COMPARABLE = 0.10
RATES = {"read_gbps": ("read", "GB/s"), "copy_gbps": ("copy", "GB/s"), "product_tflops": ("matrix product", "TFLOP/s")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeVerdict:
    """How far two probes are apart."""

    is_comparable: bool
    text: str
    """A sentence with the rate that differs most."""


def compare_probes(before: Mapping[str, object], after: Mapping[str, object]) -> ProbeVerdict:
    """Not comparable when a rate differs by more than 10 % of the larger; more than 5 % is noted.

    Args:
        before, after: `probe.Probe` as a mapping; a rate that is missing in one of them says nothing.
    """
    worst, text = 0.0, "no rate was probed both times"
    for key, (name, unit) in RATES.items():
        a, b = before.get(key), after.get(key)
        if isinstance(a, int | float) and isinstance(b, int | float) and max(a, b) > 0:
            apart = abs(a - b) / max(a, b)
            if apart >= worst:
                worst, text = apart, f"{name} {a:.3g} and {b:.3g} {unit}, {100 * apart:.0f} % apart"
    if worst > NOT_COMPARABLE:
        return ProbeVerdict(is_comparable=False, text=f"not comparable: the machine gave {text}")
    return ProbeVerdict(is_comparable=True, text=f"noted: {text}" if worst > NOTED else text)
