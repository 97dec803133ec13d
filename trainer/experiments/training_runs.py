"""Training runs of an experiment on the embedded model: made once, found again, one control for all experiments."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.experiments.outcome import Bench
from sparkgrpo.trainer.experiments.plot import Line, line_plot
from sparkgrpo.trainer.run_reader import RunRecord, read_record

CONTROL: Mapping[str, object] = {}
"""The recipe of the embedded model as it is."""
_WITHOUT_EFFECT = ("num_threads", "run_dir", "resume", "plain", "checkpoint_every", "keep_checkpoints", "num_samples")


def seeds_of(bench: Bench, name: str, changes: Mapping[str, object]) -> list[RunRecord]:
    """The finished runs of a variant, one a seed; those that are there already are not made again."""
    return [training_run(bench, name, seed, changes) for seed in range(bench.num_seeds)]


def training_run(bench: Bench, name: str, seed: int, changes: Mapping[str, object]) -> RunRecord:
    """One run in ``<folder>/<name>_s<seed>``, or its record if it is there, finished, with the same settings.

    Args:
        changes: Settings above the recipe of the embedded model, by their names in `Config`.
    """
    from sparkgrpo.trainer.dashboard import PlainView
    from sparkgrpo.trainer.machine import EMBEDDED, model_recipe
    from sparkgrpo.trainer.report import write_report
    from sparkgrpo.trainer.run import train
    from sparkgrpo.trainer.settings import check_layer, config_json, resolve

    folder = bench.folder / f"{name}_s{seed}"
    wanted = {"model": EMBEDDED, "device": "cpu", "precision": "fp32", "seed": seed, "num_threads": bench.num_threads}
    settings = wanted | check_layer(f"experiment {name}", changes)
    config, user_set = resolve(settings | {"run_dir": str(folder), "plain": True}, recipe=model_recipe(EMBEDDED))
    for attempt in range(100):
        candidate = folder if attempt == 0 else folder.with_name(f"{folder.name}_{attempt + 1}")
        if not candidate.exists():
            break
        record = read_record(candidate) if (candidate / "run.json").is_file() else None
        if record is not None and record.status == "finished" and _is_same(record.config, config_json(config)):
            bench.say(f"{candidate.name}: found")
            return record
    else:
        raise RuntimeError(f"{folder}: a hundred unfinished runs are in the way")
    config, user_set = resolve(settings | {"run_dir": str(candidate), "plain": True}, recipe=model_recipe(EMBEDDED))
    bench.folder.mkdir(parents=True, exist_ok=True)
    log = bench.folder / f"{candidate.name}.log"
    bench.say(f"{candidate.name}: {config.steps} steps, lines go to {log}")
    with open(log, "w", encoding="ascii") as stream:
        train(config, user_set=user_set, view=PlainView(stream))
    write_report(candidate, candidate / "report.html")
    return read_record(candidate)


def _is_same(recorded: Mapping[str, object], wanted: Mapping[str, object]) -> bool:
    """Whether the settings that decide results agree. A path of a model is known by its last two parts."""

    def deciding(settings: Mapping[str, object]) -> dict[str, object]:
        kept = {key: value for key, value in settings.items() if key not in _WITHOUT_EFFECT}
        return kept | {"model": "/".join(str(settings.get("model", "")).split("/")[-3:])}

    one, other = deciding(recorded), deciding(wanted)
    # A setting that came with a later version is one that the older run could not have changed.
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def final_accuracy(record: RunRecord) -> float:
    """Held-out accuracy after the last step; NaN without an evaluation."""
    known = [value for row in record.evals if (value := number(row.get("accuracy"))) is not None]
    return known[-1] if known else float("nan")


def accuracy_gain(record: RunRecord) -> float:
    """Held-out accuracy after less before."""
    known = [value for row in record.evals if (value := number(row.get("accuracy"))) is not None]
    return known[-1] - known[0] if known else float("nan")


def accuracy_error(record: RunRecord) -> float:
    """Standard error of the last accuracy by the number of problems."""
    return number(record.evals[-1].get("accuracy_se")) or 0.0 if record.evals else 0.0


def last_mean(record: RunRecord, key: str, num_steps: int = 10) -> float:
    """Mean of a metric over the last steps; NaN where it is not known."""
    known = [value for row in record.steps[-num_steps:] if (value := number(row.get(key))) is not None]
    return float(np.mean(known)) if known else float("nan")


def first_mean(record: RunRecord, key: str, num_steps: int = 5) -> float:
    """Mean of a metric over the first steps; NaN where it is not known."""
    known = [value for row in record.steps[:num_steps] if (value := number(row.get(key))) is not None]
    return float(np.mean(known)) if known else float("nan")


def accuracy_plot(title: str, variants: Mapping[str, list[RunRecord]]) -> str:
    """Held-out accuracy over steps, a line a seed."""
    lines = [
        Line(
            label=label,
            points=[(number(row.get("step")) or 0.0, number(row.get("accuracy")) or 0.0) for row in record.evals],
        )
        for label, records in variants.items()
        for record in records
    ]
    return line_plot(title, lines, x_label="step", y_label="held-out accuracy", y_range=(0.0, 1.0))


def metric_plot(title: str, key: str, y_label: str, variants: Mapping[str, list[RunRecord]]) -> str:
    """One metric over steps, a line a seed: means of five steps."""
    lines = [
        Line(label=label, points=_smoothed(record, key)) for label, records in variants.items() for record in records
    ]
    return line_plot(title, lines, x_label="step, means of five", y_label=y_label)


def _smoothed(record: RunRecord, key: str) -> list[tuple[float, float]]:
    known = [
        (number(row.get("step")) or 0.0, value) for row in record.steps if (value := number(row.get(key))) is not None
    ]
    return [
        (known[i][0], sum(value for _, value in known[max(0, i - 2) : i + 3]) / len(known[max(0, i - 2) : i + 3]))
        for i in range(len(known))
    ]


def folders(*groups: list[RunRecord]) -> list[Path]:
    """Where these runs lie."""
    return [record.folder for group in groups for record in group]
