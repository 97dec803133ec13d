"""The tables of README.md and docs/performance.md, made from the result files and from nothing else.

A generated part of a document stands between `<!-- NAME: ... -->` and `<!-- /NAME -->`. A row whose file is missing
becomes a line under "not measured", so that what is not known is said.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.table_rows import (
    Result,
    Row,
    accuracy_text,
    case_rows,
    default_run_rows,
    generation_rows,
    is_headline,
    learning_rows,
    memory_rows,
    step_rows,
    update_rows,
)

SMOLLM = "smollm2-135m-instruct.q4"
ONLY_CUDA = "gpu_check"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A result file and the lines that it gives."""

    name: str
    what: str
    """In the list of what was not measured."""
    rows: Callable[[Result], list[Row]]


SOURCES = (
    Source(name="default_run", what="the default run", rows=default_run_rows),
    Source(
        name=f"versus_trl_step_{SMOLLM}", what="whole step, SmolLM2-135M, against TRL", rows=step_rows("SmolLM2-135M")
    ),
    Source(
        name="versus_trl_step_embedded",
        what="whole step, embedded model, against TRL",
        rows=step_rows("embedded model"),
    ),
    Source(name=f"versus_trl_memory_{SMOLLM}", what="peak memory, SmolLM2-135M, against TRL", rows=memory_rows),
    Source(name="versus_trl_memory_embedded", what="peak memory, embedded model, against TRL", rows=memory_rows),
    Source(name="versus_trl_learn_embedded", what="learning curves against TRL", rows=learning_rows),
    Source(name="update_against_trl", what="reference and update alone against TRL", rows=update_rows),
    Source(
        name="linear_grpo_full",
        what="head and loss at the size of Qwen2.5-0.5B",
        rows=lambda result: case_rows(result, only=is_headline),
    ),
    *(
        Source(
            name=f"generate_against_hf_{model}_{precision}_{precision}",
            what=f"generation, {title}, {precision}, against Hugging Face",
            rows=generation_rows(title),
        )
        for model, title, precision in (
            (SMOLLM, "SmolLM2-135M", "fp32"),
            (SMOLLM, "SmolLM2-135M", "bf16"),
            ("embedded", "embedded model", "fp32"),
        )
    ),
)
OPS = (
    "linear_grpo", "linear_grpo_full", "linear_logprob", "prefix_attention", "sample_tokens", "linear", "rms_norm",
    "swiglu", "rotary", "token_logprob", "adamw",
)  # fmt: skip


def load(folder: Path, name: str) -> Result | None:
    """A result file, or None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def commit_of(result: Result) -> str:
    """Seven digits; with a + where files had changes beyond it."""
    commit = result["commit"]
    return "none" if commit is None else commit["commit"][:7] + ("+" if commit["dirty"] else "")


def hardware_text(result: Result) -> str:
    """What was measured on, in words."""
    hardware, versions = result["hardware"], result["versions"]
    if hardware["device"] == "cpu":
        where = f"{hardware['cpu_cores']} cores of {hardware['cpu']}"
    else:
        where = hardware.get("name", hardware["device"])
    return f"{where}, torch {versions['torch']}"


def table(rows: Sequence[tuple[Row, Result]]) -> str:
    """Markdown; one line a row, with commit and file."""
    lines = ["| what | ours | peer | ratio | of the limit | commit | file |", "|---|---|---|---|---|---|---|"]
    for row, result in rows:
        cells = (row.what, row.ours, row.peer, row.ratio, row.limit, commit_of(result), f"`{result['name']}.json`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def numbers_part(results: Path, device: str) -> str:
    """The README's table of one device, and what is missing there."""
    rows: list[tuple[Row, Result]] = []
    missing = []
    for source in SOURCES:
        result = load(results / device, source.name)
        if result is None:
            missing.append(source.what)
        else:
            rows += [(row, result) for row in source.rows(result)]
    if not rows:
        return f"Nothing has been measured on {device} yet."
    head = f"{hardware_text(rows[0][1])}; files in `benchmarks/results/{device}/`.\n\n"
    lack = f"\n\nNot measured here yet: {'; '.join(missing)}." if missing else ""
    return head + table(rows) + lack


def gpu_part(results: Path) -> str:
    """What gpu_check found on each GPU that it ran on, or that it ran on none."""
    found = [(path.parent.name, json.loads(path.read_text())) for path in sorted(results.glob(f"*/{ONLY_CUDA}.json"))]
    found = [(device, result) for device, result in found if not device.startswith("cpu")]
    if not found:
        return "No GPU figure has been measured yet, so none stands here."
    parts = []
    for device, result in found:
        checks = [finding for finding in result["findings"] if finding["ok"] is not None]
        wrong = [f"{finding['group']}/{finding['item']}" for finding in checks if not finding["ok"]]
        verdict = f"{len(checks)} checks, {'all right' if not wrong else 'wrong: ' + ', '.join(wrong)}"
        parts.append(f"{hardware_text(result)}, commit {commit_of(result)} (`{device}/gpu_check.json`): {verdict}.")
        parts += [
            f"- {f['item']}: {f['text'].splitlines()[0]}" for f in result["findings"] if f["figures"] and _rate(f)
        ]
    return "\n".join(parts)


def _rate(finding: Mapping[str, Any]) -> bool:
    return finding["group"] in ("environment", "decode", "step")


def ops_part(results: Path, device: str) -> str:
    """Every op that was benchmarked on a device."""
    found = [load(results / device, name) for name in OPS]
    rows = [(row, result) for result in found if result is not None for row in case_rows(result)]
    return table(rows) if rows else f"Nothing has been measured on {device} yet."


def scaling_part(results: Path, device: str) -> str:
    """Exponents of every axis."""
    result = load(results / device, "scaling")
    if result is None:
        return "`python -m benchmarks.scaling` has not been run here yet."
    names = {"t_gen": "generation", "t_update": "reference and update"}
    lines = ["| size | range | phase | exponent | at most | why |", "|---|---|---|---|---|---|"]
    for name, axis in result["axes"].items():
        for phase, found in axis["phases"].items():
            mark = "" if found["is_within"] else " **worse than expected**"
            cells = (name, f"{axis['sizes'][0]:,} to {axis['sizes'][-1]:,}", names[phase])
            cells += (f"{found['exponent']:.2f}{mark}", f"{found['expected_at_most']:.1f}", axis["why"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def profile_part(results: Path, device: str) -> str:
    """The costs of a step that are no products, largest first."""
    result = load(results / device, "step_profile")
    if result is None:
        return "`python -m benchmarks.step_profile` has not been run here yet."
    parts = []
    for run in result["runs"]:
        parts.append(f"{run['model']}, {run['batch']}: products {100 * run['frac_products']:.0f} % of the CPU time.\n")
        parts.append("| operation | share | calls | s |\n|---|---|---|---|")
        for op in run["others"][:6]:
            parts.append(f"| `{op['name']}` | {100 * op['frac']:.1f} % | {op['calls']:,} | {op['self_s']:.3f} |")
        parts.append("")
    return "\n".join(parts).strip()


def accuracy_part(results: Path, device: str) -> str:
    """The one sentence that the README opens with."""
    result = load(results / device, "default_run")
    if result is None:
        return "How far it gets has not been measured yet."
    wall = fmean(run["wall_s"] for run in result["runs"]) / 60
    what = f"{accuracy_text(result)} of 200 held-out puzzles, greedy"
    return f"On two CPU cores it takes it from {what}, in {wall:.1f} minutes."


def parts_of(results: Path, device: str) -> dict[str, str]:
    """Every generated part by name."""
    return {
        "accuracy": accuracy_part(results, device),
        "numbers": numbers_part(results, device),
        "gpu": gpu_part(results),
        "ops": ops_part(results, device),
        "scaling": scaling_part(results, device),
        "profile": profile_part(results, device),
    }


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """The document with its generated parts renewed.

    Raises:
        ValueError: A part that nobody makes.
    """

    def renewed(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in parts:
            raise ValueError(f"expected a generated part of {', '.join(parts)}, got {name!r}: mend the marker")
        return f"{match['open']}\n{parts[name]}\n<!-- /{name} -->"

    return re.sub(r"(?P<open><!-- (?P<name>\w+): [^>]*-->)\n.*?<!-- /(?P=name) -->", renewed, text, flags=re.DOTALL)
