"""How fast a run decodes and trains, and what share of the machine's limits that is.

The limits are those of today: a probe before and after the run. `profiling/roofline.py` counts the work and refuses a
share above 100 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from sparkgrpo.kernels.linear import linear
from sparkgrpo.kernels.prefix_attention import TreeLayout
from sparkgrpo.profiling.probe import Probe, probe_device, slow_state
from sparkgrpo.profiling.probe_verdict import compare_probes
from sparkgrpo.profiling.roofline import (
    DeviceLimits,
    ModelShape,
    Share,
    decode_share,
    limits_of,
    train_flops,
    train_share,
    tree_pairs,
)
from sparkgrpo.trainer.batching import MicroBatch
from sparkgrpo.trainer.model.decoder import Decoder


def model_shape(model: Decoder, num_valid: int) -> ModelShape:
    """The shape of a decoder; the head counts with the rows that are tokens."""
    config = model.config
    return ModelShape(
        vocab_size=num_valid,
        width=config.width,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_width=config.head_width,
        ffn_width=config.ffn_width,
        itemsize=model.dtype.itemsize,
    )


def micro_batch_flops(shape: ModelShape, micros: Sequence[MicroBatch], *, is_frozen: bool = False) -> int:
    """Flops of one forward and backward over these micro-batches: what ran, prompts once, dead rows not.

    is_frozen: Only adapters are trained.
    """
    return sum(
        train_flops(
            shape,
            num_tokens=micro.layout.num_tokens,
            num_head_rows=len(micro.target_R),
            num_pairs=_pairs(micro.layout),
            is_frozen=is_frozen,
        )
        for micro in micros
    )


def _pairs(layout: TreeLayout) -> int:
    completions: list[list[int]] = [[] for _ in layout.prompt_len_N]
    for length, tree in zip(layout.completion_len_S, layout.tree_of_completion_S, strict=True):
        completions[tree].append(length)
    return tree_pairs(list(layout.prompt_len_N), completions)


class RateMeter:
    """Rates of a run's steps.

    Args:
        device_name: For the published limits.
        probe: Today's rates; None: no share is known.
    """

    def __init__(self, device_name: str, probe: Probe | None) -> None:
        self.limits: DeviceLimits | None = limits_of(device_name)
        self.probe = probe
        self.told: set[str] = set()
        """Kinds of faults that were told: a count that is wrong is wrong in every step."""

    def metrics(
        self, line: Mapping[str, object], seconds: Mapping[str, float], *, flops: int, step_bytes: float | None
    ) -> tuple[dict[str, float | None], list[str]]:
        """The rates of a step by their keys in metrics.jsonl, and sentences about what was refused.

        Args:
            line: The step's metrics, `decode_gbps` among them. seconds: Its phases.
            flops: Of t_train. step_bytes: Bytes of one decode step; None where none was made.
        """
        t_train, gbps = seconds["t_train"], line.get("decode_gbps")
        tflops = flops / t_train / 1e12 if flops and t_train > 0 else None
        shares = {"frac_decode_roofline": Share(value=None), "frac_train_roofline": Share(value=None)}
        if self.probe is not None:
            spec_gbps = None if self.limits is None else self.limits.read_gbps
            spec_tflops = None if self.limits is None else self.limits.bf16_tflops
            if isinstance(gbps, float) and step_bytes is not None:
                shares["frac_decode_roofline"] = decode_share(
                    gbps, self.probe.read_gbps, spec_gbps, step_bytes=step_bytes, cache_bytes=self.probe.cache_bytes
                )
            if tflops is not None:
                shares["frac_train_roofline"] = train_share(tflops, self.probe.product_tflops, spec_tflops)
        faults = [share.fault for name, share in shares.items() if share.fault is not None and name not in self.told]
        self.told |= {name for name, share in shares.items() if share.fault is not None}
        return {"train_tflops": tflops, **{name: share.value for name, share in shares.items()}}, faults


def take_probe(device: torch.device) -> Probe:
    """The machine's rates now, with the product that the model's layers use."""
    return probe_device(device, product=lambda a, b: linear(a, b.t()))


def probe_notes(device_name: str, before: Probe | None, after: Probe | None) -> list[str]:
    """What a person should know: a slow machine, or one that changed its speed during the run."""
    notes = [text for probe in (before, after) if probe is not None and (text := slow_state(device_name, probe))]
    if before is not None and after is not None:
        verdict = compare_probes(asdict(before), asdict(after))
        notes += [] if verdict.is_comparable else [f"before and after the run: {verdict.text}"]
    return notes[:2]
