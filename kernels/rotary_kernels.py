"""Triton kernel of `rotary`, for both directions.

N rows, one a token and head; E head width. A program turns ROWS rows, 16 bytes a thread and load; the heads of a token
read the same angles, which come from the cache after the first.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.triton_launch import ROW_WARPS, CompileCase, check_triton, launch


@triton.jit(do_not_specialize=["num_rows"])
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, num_rows, num_heads, half, stride_token, stride_head,
    IS_BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`half` is E/2. Backward turns by the negative angle."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token = (row.to(tl.int32) // num_heads).to(tl.int64)  # [ROWS]; a 64-bit division is a subroutine
    head = row - token * num_heads  # [ROWS]
    offs_e = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    mask = (row < num_rows)[:, None] & (offs_e < half)[None, :]  # [ROWS, BLOCK_E]
    offs_x = (token * stride_token + head * stride_head)[:, None] + offs_e[None, :]
    offs_angle = (token * half)[:, None] + offs_e[None, :]
    first = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_E]
    second = tl.load(x_ptr + half + offs_x, mask=mask, other=0.0).to(tl.float32)  # [ROWS, BLOCK_E]
    cos = tl.load(cos_ptr + offs_angle, mask=mask, other=0.0)  # [ROWS, BLOCK_E]
    sin = tl.load(sin_ptr + offs_angle, mask=mask, other=0.0)  # [ROWS, BLOCK_E]
    if IS_BACKWARD:
        sin = -sin
    offs_y = (row * (2 * half))[:, None] + offs_e[None, :]
    tl.store(y_ptr + offs_y, first * cos - second * sin, mask=mask)
    tl.store(y_ptr + half + offs_y, second * cos + first * sin, mask=mask)


def _tile(half: int, dtype: torch.dtype) -> Mapping[str, int]:
    """Rows and columns of a program: 16 bytes of each half for each of its threads."""
    block_e = max(16, triton.next_power_of_2(half))
    return {"ROWS": max(1, 32 * ROW_WARPS * (16 // dtype.itemsize) // block_e), "BLOCK_E": block_e}


def _rotary(x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor, is_backward: bool) -> torch.Tensor:
    x_THE = x_THE if x_THE.stride(2) == 1 else x_THE.contiguous()
    T, H, E = x_THE.shape
    y_THE = torch.empty_like(x_THE, memory_format=torch.contiguous_format)
    tile = _tile(E // 2, x_THE.dtype)
    strides = x_THE.stride()[:2]
    args = (x_THE, cos_T1E.contiguous(), sin_T1E.contiguous(), y_THE, T * H, H, E // 2, *strides)
    launch(_rotary_kernel, (triton.cdiv(T * H, tile["ROWS"]),), args, {"IS_BACKWARD": is_backward, **tile})
    return y_THE


def rotary_fwd(qk_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    """Every head turned by its token's angles; contiguous."""
    check_triton(qk_THE.device)
    return _rotary(qk_THE, cos_T1E, sin_T1E, is_backward=False)


def rotary_bwd(dy_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    """The gradient of the input: dy turned back; contiguous."""
    return _rotary(dy_THE, cos_T1E, sin_T1E, is_backward=True)


def compile_cases(capability: int) -> list[CompileCase]:
    """The same on every GPU: head widths 64 and 128."""
    cases = []
    for dtype, element in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for width in (64, 128):
            for kind, is_backward in (("forward", False), ("backward", True)):
                sizes = dict.fromkeys(("num_rows", "num_heads", "half", "stride_token", "stride_head"), "i32")
                pointers = {"x_ptr": element, "cos_ptr": "*fp32", "sin_ptr": "*fp32", "y_ptr": element}
                cases.append(
                    CompileCase(
                        name=f"rotary {str(dtype).removeprefix('torch.')} E {width} {kind}",
                        kernel=_rotary_kernel,
                        signature=pointers | sizes,
                        constexprs={"IS_BACKWARD": is_backward, **_tile(width // 2, dtype)},
                        aligned=("half", "stride_token", "stride_head"),
                    )
                )
    return cases
