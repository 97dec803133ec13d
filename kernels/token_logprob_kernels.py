"""Triton kernels of `token_logprob`: forward and backward, one program a row, each reading the logits once.

    shift c = max_j z_j      a = z_y - c     e = e^a     R = sum_{j != y} e^(z_j - c)     S = R + e
    M = sum_{j != y} (z_j - c) e^(z_j - c)       the maximum runs along: S, M at c become, at c' >= c with d = c - c',
                                                 S e^d and (M + d S) e^d
    logp = -log1p(R/e) if R < e, else a - log S      H = log S - (M + a e)/S      lse = c + log S
    dz_j = -(1/tau) p_j (g + h (log p_j + H))        dz_y = (1/tau) (g R/S - h (e/S) (logp + H))

R is kept apart from e because 1 - p_y = R/S keeps its digits where the model is certain. A row depends on nothing but
its own logits: same bits alone, in any batch and at any place. Rows whose stride is no multiple of 16 elements are
read with narrow loads.

T rows, V vocabulary, y the row's target, tau the temperature; statistics [T, 4] hold c, R, S, H in fp32.
Bytes: forward T V itemsize; backward twice that, half of it written.
"""

import itertools

import torch
import triton
import triton.language as tl

from sparkgrpo.kernels.triton_launch import CompileCase, check_triton, launch

BLOCK_BYTES = 8192
"""Of a row at a time: 32 bytes, two 16-byte loads, for each of 256 threads."""
ROW_INPUTS = ["target_ptr", "temperature_ptr", "is_active_ptr"]
"""They may be slices: an address that is no multiple of 16 bytes must not mean another compiled variant."""
LOG2_E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
LOWEST_STEP = tl.constexpr(-1000.0)
"""Nats by which a maximum grows at most: e^d is 0 long before, and d times a sum stays finite."""


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1] as 2 artanh(x / (2 + x)); what follows s^13 is below half an ulp."""
    s = x / (2.0 + x)
    q = s * s
    tail = 1.0 / 9.0 + q * (1.0 / 11.0 + q * (1.0 / 13.0))
    return 2.0 * s * (1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * (1.0 / 7.0 + q * tail))))


@triton.jit
def _add_block(x, offs, target, inv_temperature, top, rest, moment, WANT_ENTROPY: tl.constexpr):
    """(maximum, R, M) with the logits x of columns offs added; R and M by lanes [BLOCK], the target left out."""
    z = x.to(tl.float32) * inv_temperature  # [BLOCK]
    new_top = tl.maximum(top, tl.max(z, 0))
    shift = tl.where(new_top == -INF, 0.0, new_top)
    step = tl.where(top == -INF, 0.0, tl.maximum(top - shift, LOWEST_STEP))
    factor = tl.exp2(step * LOG2_E)
    y = z - shift
    e = tl.where(offs != target, tl.exp2(y * LOG2_E), 0.0)
    if WANT_ENTROPY:
        moment = (moment + step * rest) * factor + e * tl.where(e > 0, y, 0.0)  # a column of -inf gives 0, not 0 x -inf
    return new_top, rest * factor + e, moment


@triton.jit
def _row_inputs(target_ptr, temperature_ptr, is_active_ptr, inv_temperature, row, num_valid):
    """The row's (target, 1 / tau, is it active); target -1 where it or the temperature is none that exists."""
    target = tl.load(target_ptr + row).to(tl.int64)
    if temperature_ptr is not None:
        inv_temperature = tl.div_rn(1.0, tl.load(temperature_ptr + row))
    is_active = target == target
    if is_active_ptr is not None:
        is_active = tl.load(is_active_ptr + row) != 0
    is_good = (target >= 0) & (target < num_valid) & (inv_temperature > 0)
    return tl.where(is_good, target, -1).to(tl.int32), inv_temperature, is_active


@triton.jit
def _target_logprob(guess, rest, total):
    """log p_y from a, R and S."""
    e = tl.exp2(guess * LOG2_E)
    is_certain = rest < e
    ratio = tl.where(is_certain, rest, 0.0) / tl.where(is_certain, e, 1.0)
    return tl.where(is_certain, -_log1p(ratio), guess - tl.log(total))


@triton.jit(do_not_specialize=["num_valid"], do_not_specialize_on_alignment=ROW_INPUTS)
def _token_logprob_fwd_kernel(
    logits_ptr,
    target_ptr,
    temperature_ptr,
    is_active_ptr,
    logprob_ptr,
    entropy_ptr,
    lse_ptr,
    stats_ptr,
    inv_temperature,
    num_valid,
    stride_row,
    WANT_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """temperature_ptr, is_active_ptr, entropy_ptr: None where the call has no such thing."""
    row = tl.program_id(0).to(tl.int64)
    target, inv_temperature, is_active = _row_inputs(
        target_ptr, temperature_ptr, is_active_ptr, inv_temperature, row, num_valid
    )
    logits_ptr += row * stride_row
    num_columns = tl.where(is_active, num_valid, 0)
    num_full = num_columns // BLOCK * BLOCK
    top = -INF
    rest = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    # A mask whose bound is no known multiple of 16 would split 16-byte loads: whole blocks go without one.
    for first in range(0, num_full, BLOCK):
        offs = first + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(logits_ptr + offs)
        top, rest, moment = _add_block(x, offs, target, inv_temperature, top, rest, moment, WANT_ENTROPY)
    for first in range(num_full, num_columns, BLOCK):
        offs = first + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(logits_ptr + offs, mask=offs < num_columns, other=-INF)
        top, rest, moment = _add_block(x, offs, target, inv_temperature, top, rest, moment, WANT_ENTROPY)
    shift = tl.where(top == -INF, 0.0, top)
    target_logit = tl.load(logits_ptr + target, mask=is_active & (target >= 0), other=float("nan")).to(tl.float32)
    guess = target_logit * inv_temperature - shift
    e = tl.exp2(guess * LOG2_E)
    rest_sum = tl.sum(rest, 0)
    total = rest_sum + e
    log_total = tl.log(total)
    logprob = _target_logprob(guess, rest_sum, total)
    tl.store(logprob_ptr + row, tl.where(is_active, logprob, 0.0))
    tl.store(lse_ptr + row, tl.where(is_active, shift + log_total, 0.0))
    entropy = 0.0
    if WANT_ENTROPY:
        entropy = log_total - (tl.sum(moment, 0) + tl.where(e > 0, guess, 0.0) * e) / total
        entropy = tl.where((entropy < 0) | ~is_active, 0.0, entropy)  # a maximum would turn NaN into 0
        tl.store(entropy_ptr + row, entropy)
    tl.store(stats_ptr + 4 * row, shift)
    tl.store(stats_ptr + 4 * row + 1, rest_sum)
    tl.store(stats_ptr + 4 * row + 2, tl.where(is_active, total, 0.0))
    tl.store(stats_ptr + 4 * row + 3, entropy)


@triton.jit
def _dlogits(x, offs, target, inv_temperature, shift, scale, constant, h, target_term, HAS_H: tl.constexpr):
    """Gradient of the logits x of columns offs, fp32 [BLOCK]."""
    y = x.to(tl.float32) * inv_temperature - shift
    e = tl.exp2(y * LOG2_E)
    factor = constant
    if HAS_H:
        factor += h * tl.where(e > 0, y, 0.0)
    return tl.where(offs == target, target_term, scale * e * factor)


@triton.jit(do_not_specialize=["num_valid"], do_not_specialize_on_alignment=[*ROW_INPUTS, "g_ptr", "h_ptr"])
def _token_logprob_bwd_kernel(
    logits_ptr,
    target_ptr,
    temperature_ptr,
    is_active_ptr,
    stats_ptr,
    g_ptr,
    h_ptr,
    dlogits_ptr,
    inv_temperature,
    num_valid,
    num_columns,
    stride_row,
    HAS_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """num_columns: of dlogits, which is dense. temperature_ptr, is_active_ptr, h_ptr: None where there is none."""
    row = tl.program_id(0).to(tl.int64)
    target, inv_temperature, is_active = _row_inputs(
        target_ptr, temperature_ptr, is_active_ptr, inv_temperature, row, num_valid
    )
    logits_ptr += row * stride_row
    dlogits_ptr += row * num_columns
    g = tl.load(g_ptr + row)
    is_read = is_active & (g != 0)
    h = 0.0
    if HAS_H:
        h = tl.load(h_ptr + row)
        is_read = is_active & ((g != 0) | (h != 0))
    shift = tl.load(stats_ptr + 4 * row, mask=is_read, other=0.0)
    rest = tl.load(stats_ptr + 4 * row + 1, mask=is_read, other=0.0)
    total = tl.load(stats_ptr + 4 * row + 2, mask=is_read, other=1.0)
    target_logit = tl.load(logits_ptr + target, mask=is_read & (target >= 0), other=0.0).to(tl.float32)
    guess = target_logit * inv_temperature - shift
    constant, target_term = g, inv_temperature * g * (rest / total)
    if HAS_H:
        entropy = tl.load(stats_ptr + 4 * row + 3, mask=is_read, other=0.0)
        constant = g + h * (entropy - tl.log(total))
        e = tl.exp2(guess * LOG2_E)
        minus_surprise = tl.where(e > 0, _target_logprob(guess, rest, total), 0.0) + entropy
        target_term -= inv_temperature * h * (e / total) * minus_surprise
    scale = -inv_temperature / total
    num_read = tl.where(is_read, num_valid, 0)
    num_full = num_read // BLOCK * BLOCK
    for first in range(0, num_full, BLOCK):
        offs = first + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(logits_ptr + offs)
        d = _dlogits(x, offs, target, inv_temperature, shift, scale, constant, h, target_term, HAS_H)
        tl.store(dlogits_ptr + offs, d.to(dlogits_ptr.dtype.element_ty))
    for first in range(num_full, num_columns, BLOCK):
        offs = first + tl.arange(0, BLOCK)  # [BLOCK]
        mask = offs < num_read
        x = tl.load(logits_ptr + offs, mask=mask, other=-INF)
        d = _dlogits(x, offs, target, inv_temperature, shift, scale, constant, h, target_term, HAS_H)
        d = tl.where(mask, d, 0.0)
        tl.store(dlogits_ptr + offs, d.to(dlogits_ptr.dtype.element_ty), mask=offs < num_columns)


def _block_columns(dtype: torch.dtype) -> int:
    return BLOCK_BYTES // dtype.itemsize


def _with_dense_rows(logits_TV: torch.Tensor) -> torch.Tensor:
    return logits_TV if logits_TV.stride(1) == 1 or logits_TV.shape[1] == 1 else logits_TV.contiguous()


def _inverse(temperature: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """(temperatures [T] or None, the inverse of a number)."""
    if isinstance(temperature, torch.Tensor):
        return temperature.contiguous(), 1.0
    return None, 1.0 / temperature


def token_logprob_fwd(
    logits_TV: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    num_valid: int,
    is_active_T: torch.Tensor | None,
    want_entropy: bool,
    block_columns: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(logprob_T, entropy_T or None, lse_T, statistics [T, 4] for the backward), fp32; arguments as `token_logprob`.

    block_columns: a power of two, for tests: many blocks of a small vocabulary.
    """
    check_triton(logits_TV.device)
    logits_TV = _with_dense_rows(logits_TV)
    T = logits_TV.shape[0]
    logprob_T, lse_T = (logits_TV.new_empty(T, dtype=torch.float32) for _ in range(2))
    entropy_T = logits_TV.new_empty(T, dtype=torch.float32) if want_entropy else None
    stats_T4 = logits_TV.new_empty(T, 4, dtype=torch.float32)
    temperature_T, inv_temperature = _inverse(temperature)
    is_active_T = None if is_active_T is None else is_active_T.contiguous()
    row_inputs = (target_id_T.contiguous(), temperature_T, is_active_T)
    outputs, scalars = (logprob_T, entropy_T, lse_T, stats_T4), (inv_temperature, num_valid, logits_TV.stride(0))
    launch(
        _token_logprob_fwd_kernel,
        (T,),
        (logits_TV, *row_inputs, *outputs, *scalars),
        {"WANT_ENTROPY": want_entropy, "BLOCK": block_columns or _block_columns(logits_TV.dtype)},
    )
    return logprob_T, entropy_T, lse_T, stats_T4


def token_logprob_bwd(
    logits_TV: torch.Tensor,
    target_id_T: torch.Tensor,
    stats_T4: torch.Tensor,
    g_T: torch.Tensor | None,
    h_T: torch.Tensor | None,
    *,
    temperature: float | torch.Tensor,
    num_valid: int,
    is_active_T: torch.Tensor | None,
    block_columns: int | None = None,
) -> torch.Tensor:
    """dlogits [T, V], dense, in the logits' dtype. g_T, h_T: dloss/dlogprob and dloss/dentropy, any strides, or None.

    Rows with neither are exactly 0 and not read.
    """
    check_triton(logits_TV.device)
    logits_TV = _with_dense_rows(logits_TV)
    T, V = logits_TV.shape
    dlogits_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    temperature_T, inv_temperature = _inverse(temperature)
    g_T = logits_TV.new_zeros(T, dtype=torch.float32) if g_T is None else g_T.contiguous()
    h_T = None if h_T is None else h_T.contiguous()
    is_active_T = None if is_active_T is None else is_active_T.contiguous()
    row_inputs = (target_id_T.contiguous(), temperature_T, is_active_T, stats_T4, g_T, h_T)
    launch(
        _token_logprob_bwd_kernel,
        (T,),
        (logits_TV, *row_inputs, dlogits_TV, inv_temperature, num_valid, V, logits_TV.stride(0)),
        {"HAS_H": h_T is not None, "BLOCK": block_columns or _block_columns(logits_TV.dtype)},
    )
    return dlogits_TV


def compile_cases(capability: int) -> list[CompileCase]:
    """Both kernels with every optional argument, and with none; rows that are multiples of 16 elements."""
    inputs = {"target_ptr": "*i64", "stats_ptr": "*fp32", "inv_temperature": "fp32", "num_valid": "i32"}
    inputs["stride_row"] = "i32"
    cases = []
    for (name, dtype), is_full in itertools.product((("bf16", torch.bfloat16), ("fp32", torch.float32)), (True, False)):
        forward = inputs | {"logits_ptr": f"*{name}", "logprob_ptr": "*fp32", "lse_ptr": "*fp32"}
        backward = inputs | {
            "logits_ptr": f"*{name}",
            "dlogits_ptr": f"*{name}",
            "g_ptr": "*fp32",
            "num_columns": "i32",
        }
        for kernel, own, last, flag in (
            (_token_logprob_fwd_kernel, forward, "entropy_ptr", "WANT_ENTROPY"),
            (_token_logprob_bwd_kernel, backward, "h_ptr", "HAS_H"),
        ):
            optional = {"temperature_ptr": "*fp32", "is_active_ptr": "*i1", last: "*fp32"}
            constexprs = {flag: is_full, "BLOCK": _block_columns(dtype)}
            direction = "fwd" if last == "entropy_ptr" else "bwd"
            cases.append(
                CompileCase(
                    name=f"token_logprob {direction} {name}, {'every option' if is_full else 'plain'}",
                    kernel=kernel,
                    signature=own | (optional if is_full else {}),
                    constexprs=constexprs | ({} if is_full else dict.fromkeys(optional)),
                    aligned=("stride_row",) if direction == "fwd" else ("stride_row", "num_columns"),
                )
            )
    return cases
