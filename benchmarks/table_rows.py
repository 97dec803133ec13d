"""Lines of the numbers tables, each made from one result file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

Result = Mapping[str, Any]


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


def default_run_rows(result: Result) -> list[Row]:
    wall = [run["wall_s"] for run in result["runs"]]
    return [
        Row(
            what="default run, embedded model, evaluations included",
            ours=f"{min(wall):.0f} to {max(wall):.0f} s",
            peer="",
            ratio=accuracy_text(result).replace("**", ""),
        )
    ]


def step_rows(model: str) -> Callable[[Result], list[Row]]:
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
    "whole": "fp32, one micro-batch",
    "bf16": "bf16 autocast, no checkpointing",
    "checkpointing": "fp32, gradient checkpointing",
    "continuous": "fp32, continuous batching",
    "liger": "fp32, Liger layers",
    "vllm": "bf16, vLLM",
}


def memory_rows(result: Result) -> list[Row]:
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


def learning_rows(result: Result) -> list[Row]:
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


def update_rows(result: Result) -> list[Row]:
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


def generation_rows(model: str) -> Callable[[Result], list[Row]]:
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


def is_headline(conditions: Mapping[str, Any]) -> bool:
    return conditions["dtype"] == "float32" and conditions["f"] == 1.0
