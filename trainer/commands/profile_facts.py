"""What a recorded run knows and its trace does not: model, tokens, rates and their shares, memory, the machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from sparkgrpo.profiling.probe_verdict import compare_probes
from sparkgrpo.profiling.roofline import limits_of
from sparkgrpo.profiling.wording import percent
from sparkgrpo.trainer.runlog import read_run

STATE = (("sm_clock_mhz", "Clock", "MHz"), ("temp_c", "Temperature", "C"), ("power_w", "Power", "W"))

Line = Mapping[str, object]


def recorded_facts(
    run_folder: Path, *, warm: Sequence[Line], recorded: Sequence[Line], memory: Mapping[str, object]
) -> dict[str, object]:
    """The facts beside a trace, for the report and for --diff.

    Args:
        warm, recorded: Lines of metrics.jsonl without and with recording.
        memory: By phase (`StepRecorder.memory`).
    """
    run = read_run(run_folder)
    model, hardware = run.get("model"), run.get("hardware")
    probe = run.get("probe_before")
    device = str(hardware.get("name") or hardware.get("cpu")) if isinstance(hardware, Mapping) else ""
    plain_s, marked_s = _median(warm[1:] or warm, "t_step"), _median(recorded, "t_step")
    return {
        "recorder": "sparkgrpo",
        "device": device,
        "model": model.get("name") if isinstance(model, Mapping) else None,
        "num_params": model.get("num_params") if isinstance(model, Mapping) else None,
        "task": run.get("task"),
        "num_steps": len(recorded),
        "num_tokens": sum(value for line in recorded if isinstance(value := line.get("num_tokens"), int)),
        "recording_cost": marked_s / plain_s if plain_s and marked_s else None,
        "probe_before": probe,
        "probe_after": run.get("probe_after"),
        "rates": _rates(recorded, probe if isinstance(probe, Mapping) else {}, device),
        "memory": dict(memory),
        "state": _state(run, recorded, plain_s, marked_s),
    }


def _rates(lines: Sequence[Line], probe: Line, device: str) -> list[dict[str, str]]:
    limits = limits_of(device)
    rows = []
    for what, key, unit, share, spec, note in (
        (
            "decoding",
            "decode_gbps",
            "GB/s",
            "frac_decode_roofline",
            limits and limits.read_gbps,
            "bytes to move",
        ),
        (
            "training",
            "train_tflops",
            "TFLOP/s",
            "frac_train_roofline",
            limits and limits.bf16_tflops,
            "6 N, attention",
        ),
    ):
        rate, of_probe = _median(lines, key), _median(lines, share)
        if rate is None:
            continue
        cached = key == "decode_gbps" and of_probe is None and bool(probe)
        rows.append(
            {
                "what": what,
                "rate": f"{rate:.4g} {unit}",
                "of_probe": percent(of_probe),
                "of_spec": percent(rate / spec if spec else None),
                "note": "the weights fit the cache: memory is no limit" if cached else note,
            }
        )
    tokens = _median(lines, "tok_per_s")
    if tokens is not None:
        rows.append(
            {"what": "tokens", "rate": f"{tokens:,.0f} tok/s", "of_probe": "", "of_spec": "", "note": "of t_gen"}
        )
    return rows


def _state(run: Line, lines: Sequence[Line], plain_s: float | None, marked_s: float | None) -> list[str]:
    texts = []
    if plain_s and marked_s:
        texts.append(
            f"A recorded step took {marked_s:.3g} s, the ones before {plain_s:.3g} s: recording costs a factor of "
            f"{marked_s / plain_s:.2f}."
        )
    before, after = run.get("probe_before"), run.get("probe_after")
    if isinstance(before, Mapping):
        texts.append(
            f"Probe before: read {before.get('read_gbps', 0):.3g} GB/s, copy {before.get('copy_gbps', 0):.3g} GB/s, "
            f"matrix product {before.get('product_tflops', 0):.3g} TFLOP/s."
        )
        if isinstance(after, Mapping):
            texts.append(f"Before and after: {compare_probes(before, after).text}.")
    for key, name, unit in (
        ("sm_clock_mhz", "Clock", "MHz"),
        ("temp_c", "Temperature", "C"),
        ("power_w", "Power", "W"),
    ):
        value = _median(lines, key)
        texts.append(f"{name}: {'cannot say' if value is None else f'{value:.0f} {unit}'}.")
    return texts


def _median(lines: Sequence[Line], key: str) -> float | None:
    values = [float(value) for line in lines if isinstance(value := line.get(key), int | float)]
    return median(values) if values else None
