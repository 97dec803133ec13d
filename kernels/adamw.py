"""AdamW over lists of tensors in one pass: moments, fp32 master, its bf16 copy, and how many stored weights moved.

    g = grad grad_scale      m = beta1 m + (1 - beta1) g      v = beta2 v + (1 - beta2) g^2
    w = (1 - lr weight_decay) w - lr/(1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)      copy = bf16(w)

Bytes: 30 a weight is the floor, and what the kernel moves: w, g, m and v are read (16), w, m, v (12) and the copy (2)
written; 28 without a copy. Old copies are not read: they are the rounded old masters. About 15 flops a weight.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv:1711.05101), as torch.optim.AdamW.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw as torch_adamw

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.launch import check_device

CPU_BLOCK = 1 << 17
"""Weights that the CPU updates together: what is read and written of them, 3 MiB, stays in the core's caches."""
CHUNK = 1 << 14
"""Weights of one CUDA program; a tensor begins a new one."""


def adamw_reference(
    master: Sequence[torch.Tensor],
    grad: Sequence[torch.Tensor],
    exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor],
    bf16_copy: Sequence[torch.Tensor] | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: torch.Tensor,
) -> torch.Tensor:
    """`adamw` in float64, rounded once where the tensors given are narrower; in place."""
    num_changed = torch.zeros((), dtype=torch.int64, device=grad_scale.device)
    if not bool(grad_scale.isfinite()):
        return num_changed
    for i, w in enumerate(master):
        g = grad[i].double() * grad_scale.double()
        m = beta1 * exp_avg[i].double() + (1 - beta1) * g
        v = beta2 * exp_avg_sq[i].double() + (1 - beta2) * g * g
        update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
        stored = w if bf16_copy is None else bf16_copy[i]
        before = stored.clone()
        w.copy_((1 - lr * weight_decay) * w.double() - lr * update)
        exp_avg[i].copy_(m)
        exp_avg_sq[i].copy_(v)
        stored.copy_(w)
        is_same = (stored == before) & (stored.signbit() == before.signbit())
        num_changed += (~is_same).sum()
    return num_changed


@dataclass(kw_only=True, slots=True)
class AdamwTables:
    """What the device must know of a set of tensors. It is kept by the caller and made anew only when one has moved."""

    key: tuple[object, ...] = ()
    """Device, sizes and addresses that the tables were made from; equal ones mean equal tables."""
    tensors: tuple[torch.Tensor, ...] = ()
    """int64 [tensors, 7]: addresses of master, grad, exp_avg, exp_avg_sq and copy (0: none); weights; first chunk.
    int32 [chunks]: which tensor."""
    is_aligned: bool = False
    """Every address is a multiple of 16 bytes."""

    def update(
        self, lists: Sequence[Sequence[torch.Tensor] | None], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tables of these five lists (the last may be None), which are kept while nothing has moved.

        They reach the device from pinned memory: nobody waits for it.
        """
        sizes = [w.numel() for w in lists[0] or ()]
        addresses = [[0] * len(sizes) if x is None else [t.data_ptr() for t in x] for x in lists]
        key = (device, sizes, addresses)
        if key != self.key:
            num_chunks = torch.tensor([-(-size // CHUNK) for size in sizes], dtype=torch.int64)
            first_chunk = num_chunks.cumsum(0) - num_chunks
            table = torch.tensor([*addresses, sizes, first_chunk.tolist()], dtype=torch.int64).t().contiguous()
            tensor_of_chunk = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), num_chunks)
            self.tensors = tuple(_sent_to(device, x) for x in (table, tensor_of_chunk))
            self.is_aligned = all(address % 16 == 0 for column in addresses for address in column)
            self.key = key
        tensor_table, tensor_of_chunk = self.tensors
        return tensor_table, tensor_of_chunk


def _sent_to(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _cpu_blocks(sizes: Sequence[int]) -> Iterator[list[tuple[int, slice]]]:
    """Parts (tensor, weights of it) in order, together about CPU_BLOCK weights an item."""
    block, num = [], 0
    for i, size in enumerate(sizes):
        for start in range(0, size, CPU_BLOCK):
            stop = min(start + CPU_BLOCK, size)
            block.append((i, slice(start, stop)))
            num += stop - start
            if num >= CPU_BLOCK:
                yield block
                block, num = [], 0
    if block:
        yield block


def _count_unlike(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of unlike bits; on the CPU three times as fast as counting where a != b."""
    word = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return int(torch.count_nonzero(a.view(word) ^ b.view(word)))


def _adamw_cpu(
    lists: Sequence[Sequence[torch.Tensor]],
    bf16_copy: Sequence[torch.Tensor] | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
) -> int:
    """torch's fused update, bit for bit, a block at a time: what is compared and scaled is no larger than a block."""
    if not math.isfinite(grad_scale):
        return 0
    flat = [[x.detach().view(-1) for x in tensors] for tensors in lists]
    flat_copy = None if bf16_copy is None else [x.detach().view(-1) for x in bf16_copy]
    num_changed = 0
    for parts in _cpu_blocks([w.numel() for w in flat[0]]):
        w, g, m, v = ([tensors[i][part] for i, part in parts] for tensors in flat)
        if grad_scale != 1.0:
            g = [x * grad_scale for x in g]
        before = [x.clone() for x in w] if flat_copy is None else [flat_copy[i][part] for i, part in parts]
        steps = [torch.tensor(step - 1.0) for _ in parts]
        torch_adamw(
            w,
            g,
            m,
            v,
            [],
            steps,
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
        )
        after = w if flat_copy is None else [x.bfloat16() for x in w]
        num_changed += sum(_count_unlike(a, b) for a, b in zip(after, before, strict=True))
        if flat_copy is not None:
            for old, new in zip(before, after, strict=True):
                old.copy_(new)
    return num_changed


def _check_lists(lists: dict[str, Sequence[torch.Tensor] | None], device: torch.device) -> None:
    """Raises ValueError unless the lists hold dense fp32 (copies bf16) tensors of the masters' shapes on the device."""
    master = lists["master"] or ()
    for name, tensors in lists.items():
        if tensors is None:
            continue
        dtype = torch.bfloat16 if name == "bf16_copy" else torch.float32
        if len(tensors) != len(master):
            raise ValueError(f"{name} must hold one tensor for each of the {len(master)} masters, got {len(tensors)}")
        for i, (x, w) in enumerate(zip(tensors, master, strict=True)):
            if x.dtype != dtype or x.shape != w.shape or not x.is_contiguous():
                raise ValueError(
                    f"{name}[{i}] must be contiguous {dtype} of shape {tuple(w.shape)} like master[{i}], got {x.dtype},"
                    f" {tuple(x.shape)}, strides {x.stride()}; pass .contiguous() tensors of one set of parameters"
                )
            check_device(f"{name}[{i}]", x, device)


def _check_numbers(step: int, grad_scale: torch.Tensor) -> None:
    if step < 1:
        raise ValueError(f"step must be 1 for the first update, got {step}; count it before the call")
    if grad_scale.numel() != 1 or grad_scale.dtype != torch.float32:
        raise ValueError(
            f"grad_scale must be a float32 scalar tensor, got {grad_scale.dtype} {tuple(grad_scale.shape)}; for no"
            " scaling pass torch.ones((), device=...)"
        )


@torch.no_grad()
def adamw(
    master: Sequence[torch.Tensor],
    grad: Sequence[torch.Tensor],
    exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor],
    bf16_copy: Sequence[torch.Tensor] | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: torch.Tensor,
    tables: AdamwTables | None = None,
) -> torch.Tensor:
    """One AdamW step, in place. On CUDA one launch for all tensors, and no host sync.

    Args:
        master: Weights, fp32, contiguous, any shapes.
        grad: Accumulated gradients, fp32, the masters' shapes; only read.
        exp_avg, exp_avg_sq: Moments, fp32, the masters' shapes.
        bf16_copy: bf16 weights, on entry the rounded masters; None where the masters are the weights.
        lr, beta1, beta2, eps, weight_decay: Numbers, the same for all.
        step: 1 for the first update.
        grad_scale: fp32 scalar on the masters' device; gradients are multiplied by it (the clip factor). Where it is
            not finite nothing is written.
        tables: Kept by a caller who comes again with the same tensors; filled here.

    Returns:
        int64 scalar on the device: stored weights (copies, else masters) whose bits changed.

    Raises:
        ValueError: Lists of unlike lengths, shapes, dtypes or devices; tensors that are not contiguous; step below 1.
    """
    device = grad_scale.device
    lists = {"master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "bf16_copy": bf16_copy}
    _check_numbers(step, grad_scale)
    _check_lists(lists, device)
    rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    if not dispatch.runs_triton(device):
        fp32_lists = (master, grad, exp_avg, exp_avg_sq)
        return torch.tensor(_adamw_cpu(fp32_lists, bf16_copy, step=step, grad_scale=float(grad_scale), **rates))
    from sparkgrpo.kernels.adamw_kernels import launch_adamw

    tables = AdamwTables() if tables is None else tables
    tensor_table, tensor_of_chunk = tables.update(list(lists.values()), device)
    written = [x for name, tensors in lists.items() if name != "grad" and tensors is not None for x in tensors]
    torch.autograd.graph.increment_version(written)  # the kernel writes by address, behind autograd's back
    return launch_adamw(
        tensor_table,
        tensor_of_chunk,
        grad_scale,
        has_copy=bf16_copy is not None,
        is_aligned=tables.is_aligned,
        chunk=CHUNK,
        step=step,
        **rates,
    )
