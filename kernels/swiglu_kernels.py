"""Triton kernels of `swiglu`: elementwise, one pass forward and one backward.

T rows, F width of the feed-forward, 2F numbers a row of the input. A program handles ROWS x BLOCK_F outputs: 16 bytes a
thread and load in bf16, and at F 4,864 (Qwen2.5-0.5B) 5 % of the lanes masked; rows of 2,048 columns would mask 21 %.
"""

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.triton_launch import CompileCase, check_triton, launch

ROWS, BLOCK_F = 2, 1024


@triton.jit
def _half_tile(num_rows, width, stride_row, ROWS: tl.constexpr, BLOCK_F: tl.constexpr):
    """Rows and columns of this program, where they start in a tensor of that row stride, and which exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    offs = (row * stride_row)[:, None] + column[None, :]  # [ROWS, BLOCK_F]
    return row, column, offs, (row < num_rows)[:, None] & (column < width)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_fwd_kernel(gate_up_ptr, y_ptr, num_rows, width, stride_row, ROWS: tl.constexpr, BLOCK_F: tl.constexpr):
    row, column, offs, mask = _half_tile(num_rows, width, stride_row, ROWS, BLOCK_F)
    gate = tl.load(gate_up_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_F]
    up = tl.load(gate_up_ptr + width + offs, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_F]
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + (row * width)[:, None] + column[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_bwd_kernel(
    gate_up_ptr, dy_ptr, dgate_up_ptr, num_rows, width, stride_row, stride_dy_row,
    ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row, column, offs, mask = _half_tile(num_rows, width, stride_row, ROWS, BLOCK_F)
    gate = tl.load(gate_up_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_F]
    up = tl.load(gate_up_ptr + width + offs, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_F]
    offs_dy = (row * stride_dy_row)[:, None] + column[None, :]
    dy = tl.load(dy_ptr + offs_dy, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_F]
    sig = tl.sigmoid(gate)
    offs_out = (row * (2 * width))[:, None] + column[None, :]
    tl.store(dgate_up_ptr + offs_out, dy * up * sig * (1.0 + gate * (1.0 - sig)), mask=mask)
    tl.store(dgate_up_ptr + width + offs_out, dy * gate * sig, mask=mask)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as [T, columns] with contiguous rows; a view where its strides allow."""
    x_TC = x.reshape(-1, x.shape[-1])
    return x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, ROWS), triton.cdiv(width, BLOCK_F)


def swiglu_fwd(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """y, contiguous."""
    check_triton(gate_up_T2F.device)
    rows = _as_rows(gate_up_T2F)
    T, width = rows.shape[0], rows.shape[1] // 2
    y_TF = gate_up_T2F.new_empty(*gate_up_T2F.shape[:-1], width)
    args = (rows, y_TF, T, width, rows.stride(0))
    launch(_swiglu_fwd_kernel, _grid(T, width), args, {"ROWS": ROWS, "BLOCK_F": BLOCK_F})
    return y_TF


def swiglu_bwd(gate_up_T2F: torch.Tensor, dy_TF: torch.Tensor) -> torch.Tensor:
    """The gradient of the input, contiguous."""
    rows, dy_rows = _as_rows(gate_up_T2F), _as_rows(dy_TF)
    T, width = dy_rows.shape
    dgate_up_T2F = torch.empty_like(gate_up_T2F, memory_format=torch.contiguous_format)
    args = (rows, dy_rows, dgate_up_T2F, T, width, rows.stride(0), dy_rows.stride(0))
    launch(_swiglu_bwd_kernel, _grid(T, width), args, {"ROWS": ROWS, "BLOCK_F": BLOCK_F})
    return dgate_up_T2F


def compile_cases(capability: int) -> list[CompileCase]:
    """The same on every GPU: one variant a kernel and dtype for every T and every F that is a multiple of 16."""
    cases = []
    for dtype, element in (("bfloat16", "*bf16"), ("float32", "*fp32")):
        for kind, kernel in (("forward", _swiglu_fwd_kernel), ("backward", _swiglu_bwd_kernel)):
            names = [arg for arg in kernel.arg_names if arg not in ("ROWS", "BLOCK_F")]
            cases.append(
                CompileCase(
                    name=f"swiglu {dtype} {kind}",
                    kernel=kernel,
                    signature={arg: element if arg.endswith("_ptr") else "i32" for arg in names},
                    constexprs={"ROWS": ROWS, "BLOCK_F": BLOCK_F},
                    aligned=tuple(arg for arg in names if arg == "width" or arg.startswith("stride_")),
                )
            )
    return cases
