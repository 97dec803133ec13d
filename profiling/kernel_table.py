"""Kernels by name: how often, how long, whose, and whether a launch fills the device.

N: kernel rows.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkgrpo.profiling.summary import KernelSummary
from sparkgrpo.profiling.timeline import UNKNOWN, Device, DeviceRows, KernelShapes, Timeline

OWNERS = (
    ("ours", re.compile(r"^_[a-z0-9_]+_kernel$")),
    ("NCCL", re.compile(r"nccl", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention", re.IGNORECASE)),
    ("cuBLAS", re.compile(r"gemm|cublas|cutlass|nvjet|splitK|gemv", re.IGNORECASE)),
    ("cuDNN", re.compile(r"cudnn|implicit_convolve|dgrad|wgrad|fprop", re.IGNORECASE)),
    ("compiled", re.compile(r"^triton_")),
    (
        "torch",
        re.compile(r"at::native|elementwise|reduce_kernel|CatArray|index|gather|scatter|layer_norm|softmax|cub::"),
    ),
)
"""By name; the first that matches. Ours are Triton kernels, which keep the name of their function: `_rotary_kernel`."""


def owner_of(name: str) -> str:
    """Whose kernel it is, by its name."""
    return next((owner for owner, pattern in OWNERS if pattern.search(name)), "other")


def kernel_summaries(
    timeline: Timeline, kernels: DeviceRows, phase_N: np.ndarray | None, phases: Sequence[str]
) -> tuple[KernelSummary, ...]:
    """One row a kernel name, costliest first.

    Args:
        phase_N: Index into `phases` of each row, -1 for none; None: cannot say.
    """
    names, name_N = np.unique(kernels.name_N, return_inverse=True)
    long_N = kernels.end_N - kernels.start_N
    nums, sums = np.bincount(name_N, minlength=len(names)), _sums(name_N, long_N, len(names))
    total_ns = max(int(long_N.sum()), 1)
    by_phase = None
    if phase_N is not None:
        cell_N = name_N * (len(phases) + 1) + phase_N + 1  # the first column is for those without a phase
        by_phase = _sums(cell_N, long_N, len(names) * (len(phases) + 1)).reshape(len(names), len(phases) + 1)
    shape_of = _typical_rows(name_N, timeline.shapes)
    titles = ("unattributed", *phases)
    rows = []
    titled = [timeline.names[place] if place != UNKNOWN else "unnamed" for place in names.tolist()]
    for i in sorted(range(len(titled)), key=lambda i: (-sums[i], titled[i])):
        name = titled[i]
        device = timeline.devices.get(int(kernels.device_N[shape_of[i]]) if shape_of else 0)
        shares = None if by_phase is None else [(titles[j], int(ns)) for j, ns in enumerate(by_phase[i]) if ns]
        rows.append(
            KernelSummary(
                name=name,
                owner=owner_of(name),
                num_calls=int(nums[i]),
                total_ns=int(sums[i]),
                frac_of_kernels=float(sums[i] / total_ns),
                phases=None if shares is None else tuple(sorted(shares, key=lambda share: -share[1])),
                **_shape(timeline.shapes, shape_of.get(i), device),
            )
        )
    return tuple(rows)


def _sums(key_N: np.ndarray, value_N: np.ndarray, num: int) -> np.ndarray:
    """int64 sums by key; exact below 2^53 ns, a hundred days."""
    return np.bincount(key_N, weights=value_N, minlength=num).astype(np.int64)


def _typical_rows(name_N: np.ndarray, shapes: KernelShapes | None) -> dict[int, int]:
    """A row of the most frequent launch shape of each name."""
    if shapes is None or not len(name_N):
        return {}
    columns = np.stack((name_N, shapes.blocks_N, shapes.threads_N, shapes.shared_bytes_N, shapes.registers_N))
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    first = np.flatnonzero(np.concatenate(([True], (np.diff(ordered, axis=1) != 0).any(axis=0))))
    nums = np.diff(np.concatenate((first, [len(name_N)])))
    best: dict[int, tuple[int, int]] = {}
    for place, num in zip(first.tolist(), nums.tolist(), strict=True):
        name = int(ordered[0, place])
        if name not in best or num > best[name][0]:
            best[name] = (num, int(order[place]))
    return {name: row for name, (_, row) in best.items()}


def _shape(shapes: KernelShapes | None, row: int | None, device: Device | None) -> dict[str, Any]:
    if shapes is None or row is None:
        return {"registers": None, "shared_bytes": None, "waves": None}
    columns = (shapes.registers_N, shapes.shared_bytes_N, shapes.blocks_N, shapes.threads_N)
    registers, shared_bytes, blocks, threads = (
        None if column[row] == UNKNOWN else int(column[row]) for column in columns
    )
    at_once = None if device is None else _blocks_at_once(device, registers, shared_bytes, threads)
    waves = blocks / at_once if blocks and at_once else None
    return {"registers": registers, "shared_bytes": shared_bytes, "waves": waves}


def _blocks_at_once(device: Device, registers: int | None, shared_bytes: int | None, threads: int | None) -> int | None:
    """Blocks that run at one time: the least that warps, registers, shared memory or the limit of blocks allow."""
    if device.num_sms is None or device.max_warps_per_sm is None or not threads:
        return None
    limits = [device.max_warps_per_sm // -(-threads // 32)]
    if device.max_blocks_per_sm:
        limits.append(device.max_blocks_per_sm)
    if device.registers_per_sm and registers:
        limits.append(device.registers_per_sm // (registers * threads))
    if device.shared_bytes_per_sm and shared_bytes:
        limits.append(device.shared_bytes_per_sm // shared_bytes)
    return device.num_sms * max(min(limits), 1)
