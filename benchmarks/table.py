"""A comparison as text: one table a case, one line an implementation."""

import os

from benchmarks.comparison import Comparison, Row

GRADIENTS = ("dhidden", "dweight", "dlogits", "dx", "dgate_up", "dqk", "master")


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)


def _gradient_errors(row: Row) -> tuple[str, str]:
    found = [row.errors[name] for name in GRADIENTS if name in row.errors]
    first, second = (*found, None, None)[:2]
    return _number(first, ".0e"), _number(second, ".0e")


def _cells(row: Row, has_bytes: bool) -> tuple[str, ...]:
    bits = {True: "bits", False: "differs", None: "-"}[row.has_equal_bits]
    return (
        row.name,
        _number(row.min_s, ".3f" if (row.min_s or 1) < 0.01 else ".1f", 1e3),
        _number(row.median_s, ".3f" if (row.median_s or 1) < 0.01 else ".1f", 1e3),
        _number(row.iqr_s, ".2g", 1e3),
        _number(row.gbps, ".0f") if has_bytes else _number(row.frac_floor, ".2f"),
        _number(row.frac_floor, ".2f") if has_bytes else _number(row.speedup, ".2f"),
        _number(row.errors.get("logprob"), ".0e"),
        _number(row.errors.get("logprob_p99"), ".0e"),
        *_gradient_errors(row),
        _number(row.peak_extra_bytes, ".0f", 2**-20),
        bits,
        row.failure or row.note,
    )


def render(comparison: Comparison) -> str:
    """The table of one case."""
    has_bytes = comparison.num_bytes is not None
    conditions = "  ".join(f"{key} {value}" for key, value in comparison.conditions.items())
    floor = _number(comparison.floor_s, ".4g", 1e3)
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    head = (
        "implementation",
        "min ms",
        "median",
        "IQR",
        *(("GB/s", "of copy") if has_bytes else ("of floor", "vs eager")),
    )
    head += ("logp max", "p99", "grad 1", "grad 2", "extra MiB", "repeat", "note")
    lines = [head, *(_cells(row, has_bytes) for row in comparison.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    title = f"{comparison.op}  {comparison.device.type}  {conditions}   floor {floor} ms   load {load}"
    texts = [
        "  ".join(
            cell.ljust(width) if i in (0, len(head) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join((title, *texts))
