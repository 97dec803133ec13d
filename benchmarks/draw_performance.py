"""Renews what README.md and docs/performance.md say in numbers, and the plots in docs/performance/, from result files.

    python -m benchmarks.draw_performance [--device cpu-x86_64-2-cores] [--check]

Nothing is measured here. `--check` writes nothing and ends with 1 where a document or plot differs from its files.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.performance_tables import SMOLLM, load, parts_of, with_parts
from benchmarks.record import RESULTS
from benchmarks.svg_chart import Line, bar_chart, line_chart
from benchmarks.table_rows import Result

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (Path("README.md"), Path("docs/performance.md"))
PLOTS = Path("docs/performance")
DEVICE = "cpu-x86_64-2-cores"
"""Whose figures the documents show."""
PHASES = {"t_gen": "generate", "t_ref": "reference", "t_train": "train", "t_opt": "optimiser", "t_other": "other"}


def _split(seconds: Mapping[str, float]) -> dict[str, float]:
    """The phases that a reader can see; all others together."""
    shown = {PHASES[key]: seconds.get(key, 0.0) for key in list(PHASES)[:-1]}
    return {**shown, "other": max(0.0, seconds["t_step"] - sum(shown.values()))}


def _side_name(name: str) -> str:
    """ "ours/fp32" and "trl/fp32" as people read them."""
    return name.replace("trl/", "TRL ").replace("/", " ")


def step_plot(result: Result, model: str) -> str:
    """The split of a step, ours and TRL's."""
    sides: Mapping[str, Any] = result["sides"]
    bars = {_side_name(name): _split(side["split_s"]) for name, side in sides.items()}
    return bar_chart(f"One GRPO step, {model}: {result['conditions']['batch'].split(', beta')[0]}", bars, unit="s")


def memory_plot(result: Result) -> str:
    bars = {_side_name(name): {"peak": side["peak_bytes"] / 2**30} for name, side in result["sides"].items()}
    return bar_chart(f"Peak memory of the process, {result['conditions']['model']}", bars, unit="GiB")


def learning_plot(result: Result, axis: str) -> str:
    scale, label = (1.0, "seconds of training") if axis == "seconds" else (1e-3, "thousand completion tokens")
    lines = [
        Line(label={"ours": "sparkgrpo", "trl": "TRL"}[name], points=[(scale * p[axis], p["accuracy"]) for p in curve])
        for name, curve in result["curves"].items()
    ]
    title = f"Held-out accuracy against {label}"
    return line_chart(title, lines, x_label=label, y_format="{:.0%}".format, y_high=1.0)


def scaling_plot(result: Result, phase: str) -> str:
    """Time over size, both as multiples of the smallest: a slope of 1 is linear."""
    lines = []
    for name, axis in result["axes"].items():
        if phase in axis["phases"]:
            medians: list[float] = axis["phases"][phase]["median_s"]
            relative = [
                (size / axis["sizes"][0], s / medians[0]) for size, s in zip(axis["sizes"], medians, strict=True)
            ]
            lines.append(Line(label=f"{name} {axis['phases'][phase]['exponent']:.2f}", points=relative))
    what = {"t_gen": "generation", "t_update": "reference and update"}[phase]
    title = f"Time of {what} over size, both relative (legend: exponent)"
    return line_chart(title, lines, x_label="size, times the smallest", is_log=True)


def limit_plot(result: Result) -> str:
    """How near every implementation of the head comes to its bare products, in the first case."""
    case: Mapping[str, Any] = result["cases"][0]
    rows = [row for row in case["rows"] if row["frac_floor"] is not None]
    bars = {row["name"]: {"share": 100 * row["frac_floor"]} for row in sorted(rows, key=lambda r: -r["frac_floor"])}
    facts = case["conditions"]
    what = f"{facts['T']} rows, V {facts['V']:,}, {facts['dtype']}"
    return bar_chart(f"Head and loss, {what}: % of the bare products' rate", bars, unit="%")


def plots_of(results: Path, device: str) -> dict[str, str]:
    """Every plot whose file exists, by file name."""
    found = {
        "step_smollm2": (f"versus_trl_step_{SMOLLM}", lambda r: step_plot(r, "SmolLM2-135M")),
        "step_embedded": ("versus_trl_step_embedded", lambda r: step_plot(r, "embedded model")),
        "memory_smollm2": (f"versus_trl_memory_{SMOLLM}", memory_plot),
        "learn_seconds": ("versus_trl_learn_embedded", lambda r: learning_plot(r, "seconds")),
        "learn_tokens": ("versus_trl_learn_embedded", lambda r: learning_plot(r, "tokens")),
        "scaling_generation": ("scaling", lambda r: scaling_plot(r, "t_gen")),
        "scaling_update": ("scaling", lambda r: scaling_plot(r, "t_update")),
        "head_limit": ("linear_grpo", limit_plot),
    }
    plots = {}
    for name, (source, draw) in found.items():
        result = load(results / device, source)
        if result is not None:
            plots[f"{name}.svg"] = draw(result)
    return plots


def images_part(plots: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Links to those of the plots that exist."""
    lines = [f"![{name.replace('_', ' ')}](performance/{name}.svg)" for name in names if f"{name}.svg" in plots]
    return "\n".join(lines) or "Not drawn yet: its result files are missing."


def documents(root: Path, results: Path, device: str) -> dict[Path, str]:
    """Every generated file by its path under the root."""
    plots = plots_of(results, device)
    parts = {
        **parts_of(results, device),
        "step_plots": images_part(plots, ("step_smollm2", "step_embedded", "memory_smollm2")),
        "learn_plots": images_part(plots, ("learn_seconds", "learn_tokens")),
        "scaling_plots": images_part(plots, ("scaling_generation", "scaling_update")),
        "head_plots": images_part(plots, ("head_limit",)),
    }
    texts = {path: with_parts((root / path).read_text(encoding="utf-8"), parts) for path in DOCUMENTS}
    return {**texts, **{PLOTS / name: text for name, text in plots.items()}}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default=DEVICE, help="a folder of benchmarks/results")
    parser.add_argument("--check", action="store_true", help="only say what differs")
    options = parser.parse_args()
    differing = []
    for path, text in documents(ROOT, RESULTS, options.device).items():
        target = ROOT / path
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            differing.append(str(path))
            if not options.check:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
    print(f"{'differs' if options.check else 'renewed'}: {', '.join(differing) or 'nothing'}")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
