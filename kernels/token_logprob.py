"""Log-prob of chosen tokens and entropy of the softmax, from logits that exist.

    z_j = logits_j / tau for j < num_valid, -inf beyond      lse = log sum_j e^z_j      p_j = e^(z_j - lse)
    logp = z_y - lse                                         H = -sum_j p_j log p_j  (0 log 0 = 0), nats
    dlogits_j = (1/tau) (g 1[j = y] - p_j (g + h (log p_j + H)))          g = dloss/dlogp, h = dloss/dH

T rows, V vocabulary, y the row's target, tau the temperature. fp32 inside. Triton serves CUDA, torch the CPU.
Bytes: forward reads the logits once (T V itemsize); backward reads them again and writes their gradient. Flops: about
5 T V forward. Where the logits come from a linear head, `linear_logprob` does the same without them.
"""

from typing import Any, NamedTuple

import torch

from sparkgrpo.kernels import dispatch
from sparkgrpo.kernels.head_chunks import BLOCK_ELEMENTS, FAR_BELOW, RowStatistics, exponentiate_, finish_exponentials_
from sparkgrpo.kernels.launch import (
    check_counted_rows,
    check_matrix,
    check_num_valid,
    check_row_input,
    check_temperature,
    refuse_second_order,
)

BLOCK_COLUMNS = 1 << 15
"""Columns that are made exponentials together: with the head's 2,048 the few rows of a large vocabulary made blocks so
small that calls took half of the time."""
BLOCK_ROWS_ELEMENTS = 4 * BLOCK_ELEMENTS
"""Logits of the rows that are handled together: small enough for the cache, large enough for few Python calls."""


class TokenLogprob(NamedTuple):
    """Log-prob, entropy and log-sum-exp of rows, fp32 [T] in nats; 0 where a row is not active."""

    logprob_T: torch.Tensor
    entropy_T: torch.Tensor | None
    """None unless wanted."""
    lse_T: torch.Tensor
    """Detached; the other two are differentiable."""


def token_logprob_reference(
    logits_TV: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    num_valid: int | None = None,
    is_active_T: torch.Tensor | None = None,
    want_entropy: bool = True,
) -> TokenLogprob:
    """`token_logprob` as plain PyTorch with autograd; fp64 for fp64 logits, else fp32."""
    T, wide = logits_TV.shape[0], torch.promote_types(logits_TV.dtype, torch.float32)
    is_active_T = torch.ones_like(target_id_T, dtype=torch.bool) if is_active_T is None else is_active_T
    idx_N = is_active_T.nonzero()[:, 0]
    tau_N1 = temperature[idx_N, None] if isinstance(temperature, torch.Tensor) else temperature
    logp_NV = torch.log_softmax(logits_TV[idx_N, :num_valid].to(wide) / tau_N1, 1)
    logprob_N = logp_NV.gather(1, target_id_T[idx_N, None].long())[:, 0]
    prob_NV = logp_NV.exp()
    entropy_N = -(prob_NV * torch.where(prob_NV > 0, logp_NV, 0.0)).sum(1)
    lse_N = torch.logsumexp(logits_TV[idx_N, :num_valid].to(wide) / tau_N1, 1).detach()
    zeros_T = logits_TV.new_zeros(T, dtype=wide)
    outputs = (zeros_T.index_put((idx_N,), x_N) for x_N in (logprob_N, entropy_N, lse_N))
    logprob_T, entropy_T, lse_T = outputs
    return TokenLogprob(logprob_T, entropy_T if want_entropy else None, lse_T)


class _Rows(NamedTuple):
    """Row inputs of one call on the CPU. target_T: int64, in range; inverse temperatures: a number or fp32 [T]."""

    target_T: torch.Tensor
    inv_temperature: float | torch.Tensor
    num_valid: int
    is_active_T: torch.Tensor | None


def _prepare_rows(
    target_id_T: torch.Tensor,
    temperature: float | torch.Tensor,
    num_valid: int,
    is_active_T: torch.Tensor | None,
) -> _Rows:
    target_T = target_id_T.long()
    if is_active_T is not None:
        target_T = torch.where(is_active_T, target_T, 0)
        if isinstance(temperature, torch.Tensor):
            temperature = torch.where(is_active_T, temperature, 1.0)
    check_counted_rows(target_T, temperature, num_valid)
    return _Rows(target_T, 1.0 / temperature, num_valid, is_active_T)


def _exponentials(
    logits_TV: torch.Tensor, rows: _Rows, start: int, stop: int, want_entropy: bool, z_CV: torch.Tensor
) -> RowStatistics:
    """Makes z_CV, fp32, the E of rows [start, stop); their statistics. The logits are only read."""
    z_CV.copy_(logits_TV[start:stop, : rows.num_valid])
    if isinstance(rows.inv_temperature, torch.Tensor):
        z_CV *= rows.inv_temperature[start:stop, None]
    elif rows.inv_temperature != 1.0:
        z_CV *= rows.inv_temperature
    target_C1 = rows.target_T[start:stop, None]
    shift_C = z_CV.amax(1)
    guess_C = z_CV.gather(1, target_C1)[:, 0] - shift_C
    # A logit of -inf would make the moment 0 x -inf; that far below the maximum its exponential is 0 just the same.
    z_CV.clamp_(min=(shift_C - FAR_BELOW)[:, None])
    z_CV.scatter_(1, target_C1, (shift_C - FAR_BELOW)[:, None])
    rest_C, moment_C = exponentiate_(z_CV, shift_C, want_entropy, BLOCK_COLUMNS)
    return RowStatistics(shift_C, guess_C, rest_C, rest_C + guess_C.exp(), moment_C)


def _row_ranges(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    step = max(1, BLOCK_ROWS_ELEMENTS // num_columns)
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _block(logits_TV: torch.Tensor, ranges: list[tuple[int, int]], num_columns: int) -> torch.Tensor:
    """One fp32 buffer for the rows that are handled together; a new one each time would be new pages each time."""
    num_rows = ranges[0][1] - ranges[0][0] if ranges else 0
    return logits_TV.new_empty(num_rows, num_columns, dtype=torch.float32)


def _forward_cpu(
    logits_TV: torch.Tensor, rows: _Rows, want_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    logprob_T, entropy_T, lse_T = (logits_TV.new_zeros(len(logits_TV), dtype=torch.float32) for _ in range(3))
    ranges = _row_ranges(len(logits_TV), rows.num_valid)
    block_CV = _block(logits_TV, ranges, rows.num_valid)
    for start, stop in ranges:
        stats = _exponentials(logits_TV, rows, start, stop, want_entropy, block_CV[: stop - start])
        logprob_T[start:stop], lse_T[start:stop] = stats.logprob(), stats.lse()
        if want_entropy:
            entropy_T[start:stop] = stats.entropy()
    if rows.is_active_T is not None:
        for out_T in (logprob_T, entropy_T, lse_T):
            out_T.masked_fill_(~rows.is_active_T, 0.0)
    return logprob_T, entropy_T if want_entropy else None, lse_T


def _backward_cpu(
    logits_TV: torch.Tensor, rows: _Rows, g_T: torch.Tensor | None, h_T: torch.Tensor | None
) -> torch.Tensor:
    """The exponentials are made again: forward keeps nothing of their size."""
    dlogits_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    dlogits_TV[:, rows.num_valid :] = 0.0
    inv_temperature, ranges = rows.inv_temperature, _row_ranges(len(logits_TV), rows.num_valid)
    block_CV = None if dlogits_TV.dtype == torch.float32 else _block(logits_TV, ranges, rows.num_valid)
    for start, stop in ranges:
        out_CV = dlogits_TV[start:stop, : rows.num_valid]
        exp_CV = out_CV if block_CV is None else block_CV[: stop - start]
        stats = _exponentials(logits_TV, rows, start, stop, h_T is not None, exp_CV)
        g_C = torch.zeros_like(stats.rest_C) if g_T is None else g_T[start:stop]
        h_C = None if h_T is None else h_T[start:stop]
        finish_exponentials_(exp_CV, rows.target_T[start:stop], stats, g_C, h_C, BLOCK_COLUMNS)
        scale_C = (-1.0 if h_T is not None else -g_C) / stats.total_C
        scale_C *= inv_temperature[start:stop] if isinstance(inv_temperature, torch.Tensor) else inv_temperature
        exp_CV *= scale_C[:, None]
        if exp_CV is not out_CV:
            out_CV.copy_(exp_CV)
    if rows.is_active_T is not None:
        dlogits_TV.masked_fill_(~rows.is_active_T[:, None], 0.0)
    return dlogits_TV


_INPUTS = "Tensor logits_TV, Tensor target_id_T, float temperature, Tensor? temperature_T, SymInt num_valid"
"""temperature_T, where given, stands in place of temperature."""


@torch.library.custom_op(
    "sparkgrpo::token_logprob",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor? is_active_T, bool want_entropy) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _token_logprob_op(
    logits_TV: torch.Tensor,
    target_id_T: torch.Tensor,
    temperature: float,
    temperature_T: torch.Tensor | None,
    num_valid: int,
    is_active_T: torch.Tensor | None,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, lse, what the kernels' backward needs): opaque to torch.compile; empty where there is none."""
    tau = temperature if temperature_T is None else temperature_T
    if dispatch.runs_triton(logits_TV.device):
        from sparkgrpo.kernels.token_logprob_kernels import token_logprob_fwd

        logprob_T, entropy_T, lse_T, stats_T4 = token_logprob_fwd(
            logits_TV,
            target_id_T,
            temperature=tau,
            num_valid=num_valid,
            is_active_T=is_active_T,
            want_entropy=want_entropy,
        )
    else:
        rows = _prepare_rows(target_id_T, tau, num_valid, is_active_T)
        logprob_T, entropy_T, lse_T = _forward_cpu(logits_TV, rows, want_entropy)
        stats_T4 = lse_T.new_empty(0, 4)
    return logprob_T, lse_T.new_empty(0) if entropy_T is None else entropy_T, lse_T, stats_T4


@_token_logprob_op.register_fake
def _(logits_TV, target_id_T, temperature, temperature_T, num_valid, is_active_T, want_entropy):
    T = logits_TV.shape[0]
    shapes = ((T,), (T if want_entropy else 0,), (T,), (T if dispatch.runs_triton(logits_TV.device) else 0, 4))
    return tuple(logits_TV.new_empty(shape, dtype=torch.float32) for shape in shapes)


@torch.library.custom_op(
    "sparkgrpo::token_logprob_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor? is_active_T, Tensor stats_T4, Tensor? g_T, Tensor? h_T) -> Tensor",
)
def _token_logprob_backward_op(
    logits_TV: torch.Tensor,
    target_id_T: torch.Tensor,
    temperature: float,
    temperature_T: torch.Tensor | None,
    num_valid: int,
    is_active_T: torch.Tensor | None,
    stats_T4: torch.Tensor,
    g_T: torch.Tensor | None,
    h_T: torch.Tensor | None,
) -> torch.Tensor:
    tau = temperature if temperature_T is None else temperature_T
    if not dispatch.runs_triton(logits_TV.device):
        return _backward_cpu(logits_TV, _prepare_rows(target_id_T, tau, num_valid, is_active_T), g_T, h_T)
    from sparkgrpo.kernels.token_logprob_kernels import token_logprob_bwd

    return token_logprob_bwd(
        logits_TV,
        target_id_T,
        stats_T4,
        g_T,
        h_T,
        temperature=tau,
        num_valid=num_valid,
        is_active_T=is_active_T,
    )


@_token_logprob_backward_op.register_fake
def _(logits_TV, target_id_T, temperature, temperature_T, num_valid, is_active_T, stats_T4, g_T, h_T):
    return torch.empty_like(logits_TV, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401
    logits_TV, target_id_T, temperature, temperature_T, num_valid, is_active_T, _ = inputs
    _, _, lse_T, stats_T4 = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse_T, stats_T4)
    ctx.temperature, ctx.num_valid = temperature, num_valid
    ctx.save_for_backward(logits_TV, target_id_T, temperature_T, is_active_T, stats_T4)


def _backward(ctx: Any, g_T: torch.Tensor | None, h_T: torch.Tensor | None, *_: None) -> tuple[Any, ...]:  # noqa: ANN401
    refuse_second_order("token_logprob")
    logits_TV, target_id_T, temperature_T, is_active_T, stats_T4 = ctx.saved_tensors
    dlogits_TV = _token_logprob_backward_op(
        logits_TV, target_id_T, ctx.temperature, temperature_T, ctx.num_valid, is_active_T, stats_T4, g_T, h_T
    )
    return dlogits_TV, *(None,) * 6


_token_logprob_op.register_autograd(_backward, setup_context=_setup_context)


def token_logprob(
    logits_TV: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    num_valid: int | None = None,
    is_active_T: torch.Tensor | None = None,
    want_entropy: bool = True,
) -> TokenLogprob:
    """Log-prob of each row's target and entropy of its softmax, without a second [T, V] tensor in the forward.

    Args:
        logits_TV: bf16 or fp32 [T, V], any strides; never written to.
        target_id_T: int32 or int64 [T].
        temperature: a number above 0, or fp32 [T].
        num_valid: columns that exist (len(tokenizer)); None is all. Columns from there on get gradient exactly 0.
        is_active_T: bool [T]; other rows give exactly 0 in values and gradient, their target is never used.
        want_entropy: entropy_T is None without it.

    Returns:
        TokenLogprob, fp32 [T], nats.

    Raises:
        ValueError: shape, dtype, device, temperature; on the CPU an active target outside [0, num_valid). On CUDA such
            a row's log-prob is NaN.
    """
    check_matrix("logits_TV", logits_TV)
    T, V = logits_TV.shape
    num_valid = check_num_valid(num_valid, V)
    check_row_input("target_id_T", target_id_T, T, logits_TV.device, (torch.int32, torch.int64))
    check_row_input("is_active_T", is_active_T, T, logits_TV.device, (torch.bool,), is_optional=True)
    check_temperature(temperature, T, logits_TV.device)
    is_tensor = isinstance(temperature, torch.Tensor)
    tau, tau_T = (1.0, temperature) if is_tensor else (float(temperature), None)
    logprob_T, entropy_T, lse_T, _ = _token_logprob_op(
        logits_TV, target_id_T, tau, tau_T, num_valid, is_active_T, want_entropy
    )
    return TokenLogprob(logprob_T, entropy_T if want_entropy else None, lse_T)
