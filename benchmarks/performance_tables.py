"""The tables of README.md and docs/performance.md, made from the result files and from nothing else.

A generated part of a document stands between `<!-- NAME: ... -->` and `<!-- /NAME -->`. A row whose file is missing
becomes a line under "not measured", so that what is not known is said.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

Result = Mapping[str, Any]
SMOLLM = "smollm2-135m-instruct.q4"
ONLY_CUDA = "gpu_check"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the numbers table."""

    what: str
    ours: str
    peer: str
    ratio: str
    limit: str = ""
    """Share of what the machine could do."""
    key: str = ""
    """Tells the row from others of its file where `what` holds measured figures."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A result file and the lines that it gives."""

    name: str
    what: str
    """In the list of what was not measured."""
    rows: Callable[[Result], list[Row]]


def seconds(value: float) -> str:
    """Three digits, in s or ms."""
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def _count(values: Sequence[float]) -> str:
    """How many measurements a median is of."""
    return f" (n {len(values)})" if values else ""


def times(value: float) -> str:
    return f"**{value:.3g}x**" if value < 100 else f"**{value:.0f}x**"


def accuracy_text(result: Result) -> str:
    """The default run over its seeds, as a sentence of the README has it."""
    after = [100 * run["eval_after"] for run in result["runs"]]
    before = fmean(100 * run["eval_before"] for run in result["runs"])
    spread = f", standard deviation {stdev(after):.1f}" if len(after) > 1 else ""
    seeds = f"{len(after)} seeds: {min(after):.0f} to {max(after):.0f} %{spread}"
    return f"**{before:.0f} % to {fmean(after):.0f} %** ({seeds})"


def _default_run(result: Result) -> list[Row]:
    wall = [run["wall_s"] for run in result["runs"]]
    return [
        Row(
            what="default run, embedded model, evaluations included",
            ours=f"{min(wall):.0f} to {max(wall):.0f} s",
            peer="",
            ratio=accuracy_text(result).replace("**", ""),
        )
    ]


def _steps(model: str) -> Callable[[Result], list[Row]]:
    def rows(result: Result) -> list[Row]:
        batch, sides = result["conditions"]["batch"].split(", beta")[0], result["sides"]
        return [
            Row(
                what=f"whole GRPO step, {model}, {batch}: ours {own[5:]}, TRL {PEER_NAMES[peer[4:]]}",
                ours=f"{seconds(sides[own]['median_s'])}{_count(sides[own].get('t_step_s', ()))}",
                peer=f"TRL {result['conditions'].get('trl', '')} {seconds(sides[peer]['median_s'])}"
                + _count(sides[peer].get("t_step_s", ())),
                ratio=times(ratio["median"]),
            )
            for pair, ratio in result["ratios"].items()
            for peer, own in [pair.split(" over ")]
            if _is_fair(own, peer)
        ]

    return rows


def _is_fair(own: str, peer: str) -> bool:
    """Whether a pair belongs in a table: our bf16 beside their fp32 would count a gain of precision as ours."""
    return not ("bf16" in own and peer.removeprefix("trl/") not in BF16_PEERS)


BF16_PEERS = ("default", "bf16", "vllm")
PEER_NAMES = {
    "default": "bf16 autocast, gradient checkpointing (its defaults)",
    "fp32": "fp32",
    "bf16": "bf16 autocast, no checkpointing",
    "checkpointing": "fp32, gradient checkpointing",
    "continuous": "fp32, continuous batching",
    "liger": "fp32, Liger layers",
    "vllm": "bf16, vLLM",
}


def _memory(result: Result) -> list[Row]:
    sides = result["sides"]
    return [
        Row(
            what=f"peak memory of such a step, {result['conditions']['model']}: {own.removeprefix('ours/')}, TRL "
            + PEER_NAMES[peer.removeprefix("trl/")],
            ours=mebibytes(sides[own]["peak_bytes"]),
            peer=f"TRL {mebibytes(sides[peer]['peak_bytes'])}",
            ratio=f"{each['peak_bytes']:.2f} of it",
        )
        for pair, each in result["ratios"].items()
        for own, peer in [pair.split(" over ")]
        if _is_fair(own, peer)
    ]


def _learning(result: Result) -> list[Row]:
    summary = result["summary"]
    equal, by_tokens = summary["at_equal_seconds"], summary["at_equal_tokens"]
    shown = {side: summary[f"{side}_seconds_to_target"] for side in ("ours", "trl")}
    text = {side: "not reached" if value is None else seconds(value) for side, value in shown.items()}
    ratio = summary["seconds_ratio"]
    whole = {side: curve[-1]["seconds"] for side, curve in result["curves"].items()}
    return [
        Row(
            what=f"seconds of {result['curves']['ours'][-1]['step']} steps of the default run, evaluations apart",
            ours=seconds(whole["ours"]),
            peer=f"TRL {seconds(whole['trl'])}",
            ratio=times(whole["trl"] / whole["ours"]),
        ),
        Row(
            what=f"of these to {100 * summary['target_accuracy']:.0f} % held-out, the first step included",
            ours=text["ours"],
            peer=f"TRL {text['trl']}",
            ratio="" if ratio is None else times(ratio),
        ),
        Row(
            key="accuracy at equal seconds",
            what=f"held-out accuracy after {seconds(equal['budget'])} of training each, one seed",
            ours=f"{100 * equal['ours']:.1f} %",
            peer=f"TRL {100 * equal['trl']:.1f} %",
            ratio="",
        ),
        Row(
            key="accuracy at equal tokens",
            what=f"held-out accuracy after {by_tokens['budget']:,.0f} completion tokens each, one seed",
            ours=f"{100 * by_tokens['ours']:.1f} %",
            peer=f"TRL {100 * by_tokens['trl']:.1f} %",
            ratio="",
        ),
    ]


def _update(result: Result) -> list[Row]:
    """TRL over ours, and dead groups skipped over our full update; processor time, since sides take no turns."""
    sides, model = result["sides"], result["conditions"]["model"]

    def cpu(name: str) -> float:
        return median(sides[name]["cpu_s"])

    half = "ours, half of the groups dead and beta 0"
    rows = [
        Row(
            what=f"reference and update alone, {model}, 4 x 8 x 64 given tokens, processor time, {name}",
            ours=f"{seconds(cpu('ours'))}{_count(sides['ours']['cpu_s'])}, {mebibytes(sides['ours']['peak_bytes'])}",
            peer=f"{seconds(cpu(name))}{_count(sides[name]['cpu_s'])}, {mebibytes(sides[name]['peak_bytes'])}",
            ratio=times(cpu(name) / cpu("ours")),
        )
        for name in sides
        if name.startswith("TRL") and "ours" in sides
    ]
    if half in sides and "ours" in sides:
        gain = Row(
            what="the same, half of the groups dead and beta 0, against our own full update",
            ours=seconds(cpu(half)),
            peer=f"ours {seconds(cpu('ours'))}",
            ratio=times(cpu("ours") / cpu(half)),
        )
        rows.append(gain)
    return rows


def _generation(model: str) -> Callable[[Result], list[Row]]:
    def rows(result: Result) -> list[Row]:
        precision = result["conditions"]["precision"]
        same = precision["ours"] == precision["hf"]
        how = precision["ours"] if same else f"ours {precision['ours']}, theirs {precision['hf']}"
        ours, peer = (median(result[key]) for key in ("ours_s", "hf_s"))
        return [
            Row(
                what=f"generation, {model}, 64 sequences of unlike lengths, {how}",
                ours=f"{seconds(ours)}{_count(result['ours_s'])}",
                peer=f"Hugging Face `generate` {seconds(peer)}{_count(result['hf_s'])}",
                ratio=times(result["ratio_median"]),
            )
        ]

    return rows


def case_rows(result: Result, *, only: Callable[[Mapping[str, Any]], bool] = lambda conditions: True) -> list[Row]:
    """Lines of an op's cases: our first implementation, its baseline and, where it is faster, the fastest peer."""
    rows = []
    for case in result["cases"]:
        if not only(case["conditions"]):
            continue
        measured = [row for row in case["rows"] if row["median_s"] is not None and not row["is_floor"]]
        ours = next((row for row in measured if row["is_ours"]), None)
        peers = [row for row in measured if not row["is_ours"]]
        conditions = ", ".join(f"{key} {value}" for key, value in case["conditions"].items() if "MiB" not in key)
        what = f"`{result['name'].removesuffix('_full')}` {conditions}"
        if ours is None:
            continue
        if not peers:  # all failed: out of memory, say
            limit = "" if ours["frac_floor"] is None else f"{100 * ours['frac_floor']:.0f} %"
            rows.append(Row(what=what, ours=_measured(ours), peer="none ran", ratio="", limit=limit))
            continue
        base = next((row for row in peers if row["name"] == case["baseline"]), peers[0])
        best = min(peers, key=lambda row: row["median_s"])
        shown = [base] if best is base else [base, best]
        rows.append(
            Row(
                what=what,
                ours=_measured(ours),
                peer="; ".join(f"{row['name']} {_measured(row)}" for row in shown),
                ratio="; ".join(times(row["median_s"] / ours["median_s"]) for row in shown),
                limit="" if ours["frac_floor"] is None else f"{100 * ours['frac_floor']:.0f} %",
            )
        )
    return rows


def _measured(row: Mapping[str, Any]) -> str:
    memory = "" if row["peak_extra_bytes"] is None else f", {mebibytes(row['peak_extra_bytes'])}"
    if not row["errors"]:
        return seconds(row["median_s"]) + memory
    worst = max((name for name in row["errors"] if not name.endswith("_p99")), key=lambda name: row["errors"][name])
    return f"{seconds(row['median_s'])}{memory} ({worst} off by {row['errors'][worst]:.0e})"


def _is_headline(conditions: Mapping[str, Any]) -> bool:
    return conditions["dtype"] == "float32" and conditions["f"] == 1.0


SOURCES = (
    Source(name="default_run", what="the default run", rows=_default_run),
    Source(name=f"versus_trl_step_{SMOLLM}", what="whole step, SmolLM2-135M, against TRL", rows=_steps("SmolLM2-135M")),
    Source(
        name="versus_trl_step_embedded", what="whole step, embedded model, against TRL", rows=_steps("embedded model")
    ),
    Source(name=f"versus_trl_memory_{SMOLLM}", what="peak memory, SmolLM2-135M, against TRL", rows=_memory),
    Source(name="versus_trl_memory_embedded", what="peak memory, embedded model, against TRL", rows=_memory),
    Source(name="versus_trl_learn_embedded", what="learning curves against TRL", rows=_learning),
    Source(name="update_against_trl", what="reference and update alone against TRL", rows=_update),
    Source(
        name="linear_grpo_full",
        what="head and loss at the size of Qwen2.5-0.5B",
        rows=lambda result: case_rows(result, only=_is_headline),
    ),
    *(
        Source(
            name=f"generate_against_hf_{model}_{precision}_{precision}",
            what=f"generation, {title}, {precision}, against Hugging Face",
            rows=_generation(title),
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
