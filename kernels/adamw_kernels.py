"""The AdamW kernel: one program a chunk of one tensor, found through tables; formula and bytes in `adamw.py`.

Addresses come from a table on the device, so that any number of tensors is one launch and one compiled variant.
"""

import math

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.triton_launch import CompileCase, check_triton, launch

BLOCK = 1024
"""Four weights a thread: one 16-byte load of each fp32 tensor. With eight the bf16 stores want another layout than the
fp32 ones, and the registers would change places through shared memory, with barriers."""
NUM_COLUMNS = tl.constexpr(7)
"""Of `AdamwTables.tensor_table`."""


@triton.jit
def _fp32_at(entry_ptr, IS_ALIGNED: tl.constexpr):
    """The address in a table's entry. Without the hint, next to the cast that it is read from, no load is 16 bytes."""
    ptr = tl.load(entry_ptr).to(tl.pointer_type(tl.float32))
    if IS_ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _bf16_at(entry_ptr, IS_ALIGNED: tl.constexpr):
    ptr = tl.load(entry_ptr).to(tl.pointer_type(tl.bfloat16))
    if IS_ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _update_block(
    master_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    copy_ptr,
    offs,
    mask,
    grad_scale,
    step_size,
    inv_sqrt_correction2,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    HAS_COPY: tl.constexpr,
):
    """Updates the weights at offs and returns, as int32, which stored ones changed. mask: None for a whole block."""
    other = None if mask is None else 0.0
    g = tl.load(grad_ptr + offs, mask=mask, other=other) * grad_scale  # [BLOCK]
    w = tl.load(master_ptr + offs, mask=mask, other=other)  # [BLOCK]
    m = beta1 * tl.load(exp_avg_ptr + offs, mask=mask, other=other) + rest1 * g
    v = beta2 * tl.load(exp_avg_sq_ptr + offs, mask=mask, other=other) + rest2 * g * g
    new_w = w - (decay * w + step_size * tl.div_rn(m, tl.sqrt_rn(v) * inv_sqrt_correction2 + eps))
    tl.store(master_ptr + offs, new_w, mask=mask)
    tl.store(exp_avg_ptr + offs, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
    if HAS_COPY:
        new_copy = new_w.to(tl.bfloat16)
        tl.store(copy_ptr + offs, new_copy, mask=mask)
        is_changed = new_copy.to(tl.int16, bitcast=True) != w.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        is_changed = new_w.to(tl.int32, bitcast=True) != w.to(tl.int32, bitcast=True)
    if mask is not None:
        is_changed = is_changed & mask
    return is_changed.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["grad_scale_ptr"])
def _adamw_kernel(
    tensor_table_ptr,
    tensor_of_chunk_ptr,
    num_changed_ptr,
    grad_scale_ptr,
    step_size,
    inv_sqrt_correction2,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    HAS_COPY: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row_ptr = tensor_table_ptr + tl.load(tensor_of_chunk_ptr + pid).to(tl.int64) * NUM_COLUMNS
    start = (pid - tl.load(row_ptr + 6)) * CHUNK
    master_ptr = _fp32_at(row_ptr, IS_ALIGNED) + start
    grad_ptr = _fp32_at(row_ptr + 1, IS_ALIGNED) + start
    exp_avg_ptr = _fp32_at(row_ptr + 2, IS_ALIGNED) + start
    exp_avg_sq_ptr = _fp32_at(row_ptr + 3, IS_ALIGNED) + start
    copy_ptr = _bf16_at(row_ptr + 4, IS_ALIGNED) + start
    grad_scale = tl.load(grad_scale_ptr)
    num = tl.minimum(tl.load(row_ptr + 5) - start, CHUNK).to(tl.int32)
    num = tl.where(tl.abs(grad_scale) < float("inf"), num, 0)
    num_full = num // BLOCK * BLOCK
    num_changed = tl.zeros((BLOCK,), tl.int32)
    # A mask whose bound is no known multiple of 16 would split 16-byte loads: whole blocks go without one.
    for first in range(0, num_full, BLOCK):
        offs = first + tl.arange(0, BLOCK)  # [BLOCK]
        num_changed += _update_block(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, copy_ptr, offs, None, grad_scale, step_size,
            inv_sqrt_correction2, decay, beta1, rest1, beta2, rest2, eps, HAS_COPY,
        )  # fmt: skip
    for first in range(num_full, num, BLOCK):
        offs = first + tl.arange(0, BLOCK)  # [BLOCK]
        num_changed += _update_block(
            master_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, copy_ptr, offs, offs < num, grad_scale, step_size,
            inv_sqrt_correction2, decay, beta1, rest1, beta2, rest2, eps, HAS_COPY,
        )  # fmt: skip
    tl.store(num_changed_ptr + pid, tl.sum(num_changed, 0))


def launch_adamw(
    tensor_table: torch.Tensor,
    tensor_of_chunk: torch.Tensor,
    grad_scale: torch.Tensor,
    *,
    has_copy: bool,
    is_aligned: bool,
    chunk: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> torch.Tensor:
    """One step over the tensors that an `AdamwTables` describes, in place; the changed weights, an int64 scalar.

    Bias corrections and complements are taken in float64 here: 1 - 0.999 in fp32 has lost three digits.
    """
    check_triton(grad_scale.device)
    num_changed = torch.empty_like(tensor_of_chunk)
    scalars = (
        lr / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
        lr * weight_decay,  # not its complement: 1 - 1e-8 is 1 in fp32
        *(beta1, 1 - beta1, beta2, 1 - beta2, eps),
    )
    launch(
        _adamw_kernel,
        (num_changed.numel(),),
        (tensor_table, tensor_of_chunk, num_changed, grad_scale, *(float(x) for x in scalars)),
        {"HAS_COPY": has_copy, "IS_ALIGNED": is_aligned, "CHUNK": chunk, "BLOCK": BLOCK},
    )
    return num_changed.sum(dtype=torch.int64)


def compile_cases(capability: int) -> list[CompileCase]:
    """With and without a bf16 copy; the last is for tensors at odd addresses."""
    signature = {"tensor_table_ptr": "*i64", "tensor_of_chunk_ptr": "*i32", "num_changed_ptr": "*i32"}
    signature["grad_scale_ptr"] = "*fp32"
    names = ("step_size", "inv_sqrt_correction2", "decay", "beta1", "rest1", "beta2", "rest2", "eps")
    signature |= dict.fromkeys(names, "fp32")
    return [
        CompileCase(
            name=f"adamw {name}",
            kernel=_adamw_kernel,
            signature=signature,
            constexprs={"HAS_COPY": has_copy, "IS_ALIGNED": is_aligned, "CHUNK": 1 << 14, "BLOCK": BLOCK},
        )
        for name, has_copy, is_aligned in (
            ("bf16", True, True),
            ("fp32", False, True),
            ("bf16, unaligned", True, False),
        )
    ]
