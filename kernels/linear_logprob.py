"""Log-prob of chosen tokens and entropy of the softmax from the LM head's input, without logits in memory.

    z_j = (hidden . weight_j) / tau for j < num_valid, -inf beyond          accumulated in fp32, never rounded to bf16
    lse = log sum_j e^z_j     p_j = e^(z_j - lse)     logp = z_y - lse     H = -sum_j p_j log p_j  (0 log 0 = 0), nats
    dz_j = (1/tau) (g 1[j = y] - p_j (g + h (log p_j + H)))     dhidden = dz @ weight     dweight = dz^T @ hidden

T rows, N active rows, C rows a chunk, V vocabulary, D width, y the row's target, tau the temperature; g = dloss/dlogp,
h = dloss/dH. The derivatives arrive in backward, which sweeps again: 2 N V D flops forward, 6 N V D backward (4 with
one operand frozen). Forward stores one chunk [C, V] of fp32 on a CPU (`head_chunks.py`) and none on a GPU
(`tile_sweep.py`); backward stores one, there in the operands' dtype. Saved: the inputs (no copies) and four numbers a
row, nothing of size T V. Where the loss is known beforehand `linear_grpo` sweeps once.
"""

import torch

from sparkgrpo.kernels.head_chunks import GradientBuffers, KnownRows, scatter_rows, take_rows
from sparkgrpo.kernels.head_sweep import Sweep, open_head_sweep
from sparkgrpo.kernels.launch import (
    check_chunk_tokens,
    check_head,
    check_num_valid,
    check_row_input,
    check_temperature,
    refuse_second_order,
)
from sparkgrpo.kernels.token_logprob import TokenLogprob, token_logprob_reference


def linear_logprob_reference(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    num_valid: int | None = None,
    is_active_T: torch.Tensor | None = None,
    anchor_logprob_T: torch.Tensor | None = None,
    want_entropy: bool = True,
    chunk_tokens: int | None = None,
) -> TokenLogprob:
    """`linear_logprob` through real logits with autograd; fp64 for fp64 operands, else fp32."""
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        logits_TV = hidden_TD.to(wide) @ weight_VD[:num_valid].to(wide).T
        return token_logprob_reference(
            logits_TV, target_id_T, temperature=temperature, is_active_T=is_active_T, want_entropy=want_entropy
        )


def _open(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    options: tuple[torch.Tensor | None, float, int, torch.Tensor | None, torch.Tensor | None, int | None],
) -> tuple[Sweep, torch.Tensor | None]:
    """The sweep over the active rows, and which they are (None: all). On CUDA a mask of rows is the one host sync."""
    temperature_T, temperature, num_valid, is_active_T, anchor_logprob_T, chunk_tokens = options
    row_idx_N = None if is_active_T is None else is_active_T.nonzero()[:, 0]
    sweep = open_head_sweep(
        hidden_TD,
        weight_VD,
        target_id_T,
        temperature=temperature if temperature_T is None else temperature_T,
        num_valid=num_valid,
        row_idx_N=row_idx_N,
        anchor_logprob_T=anchor_logprob_T,
        chunk_tokens=chunk_tokens,
    )
    return sweep, row_idx_N


@torch.library.custom_op("sparkgrpo::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    temperature_T: torch.Tensor | None,
    temperature: float,
    num_valid: int,
    is_active_T: torch.Tensor | None,
    anchor_logprob_T: torch.Tensor | None,
    chunk_tokens: int | None,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy (empty unless wanted), log-sum-exp and R/S of every row, fp32 [T]."""
    options = (temperature_T, temperature, num_valid, is_active_T, anchor_logprob_T, chunk_tokens)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        sweep, row_idx_N = _open(hidden_TD, weight_VD, target_id_T, options)
        logprob_N, entropy_N, lse_N, rest_frac_N = (
            hidden_TD.new_zeros(sweep.num_rows, dtype=torch.float32) for _ in range(4)
        )
        for start, stop in sweep.chunks():
            stats = sweep.statistics(start, stop, want_entropy)
            logprob_N[start:stop], lse_N[start:stop] = stats.logprob(), stats.lse()
            torch.div(stats.rest_C, stats.total_C, out=rest_frac_N[start:stop])
            if want_entropy:
                entropy_N[start:stop] = stats.entropy()
    T = hidden_TD.shape[0]
    outputs = [scatter_rows(x_N, row_idx_N, T) for x_N in (logprob_N, entropy_N, lse_N, rest_frac_N)]
    if not want_entropy:
        outputs[1] = hidden_TD.new_empty(0, dtype=torch.float32)
    return outputs[0], outputs[1], outputs[2], outputs[3]


@_linear_logprob.register_fake
def _(
    hidden_TD, weight_VD, target_id_T, temperature_T, temperature, num_valid, is_active_T, anchor, chunk, want_entropy
):
    T = hidden_TD.shape[0]
    rows = [hidden_TD.new_empty(T, dtype=torch.float32) for _ in range(4)]
    if not want_entropy:
        rows[1] = hidden_TD.new_empty(0, dtype=torch.float32)
    return tuple(rows)


@torch.library.custom_op("sparkgrpo::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    temperature_T: torch.Tensor | None,
    temperature: float,
    num_valid: int,
    is_active_T: torch.Tensor | None,
    chunk_tokens: int | None,
    known_T: list[torch.Tensor],
    g_T: torch.Tensor | None,
    h_T: torch.Tensor | None,
    needs_dhidden: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dhidden and dweight (empty unless needed), from a second sweep that knows the rows' statistics."""
    options = (temperature_T, temperature, num_valid, is_active_T, None, chunk_tokens)
    empty = hidden_TD.new_empty(0)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        sweep, row_idx_N = _open(hidden_TD, weight_VD, target_id_T, options)
        logprob_T, entropy_T, lse_T, rest_frac_T = known_T
        known = KnownRows(logprob_T, entropy_T if entropy_T.numel() else None, lse_T, rest_frac_T)
        known = known if row_idx_N is None else known.rows(row_idx_N)
        g_N = torch.zeros_like(known.lse) if g_T is None else take_rows(g_T, row_idx_N)
        h_N = None if h_T is None else take_rows(h_T, row_idx_N)
        dhidden_ND = hidden_TD.new_empty(sweep.num_rows, hidden_TD.shape[1]) if needs_dhidden else None
        dweight_VD = hidden_TD.new_zeros(weight_VD.shape, dtype=torch.float32) if needs_dweight else None
        for start, stop in sweep.chunks():
            chunk = slice(start, stop)
            h_C = None if h_N is None else h_N[chunk]
            dhidden_CD = None if dhidden_ND is None else dhidden_ND[chunk]
            into = GradientBuffers(dhidden_CD, dweight_VD, start == 0)
            sweep.known_gradients(chunk, known.rows(chunk), g_N[chunk], h_C, into)
    dhidden_TD = empty if dhidden_ND is None else scatter_rows(dhidden_ND, row_idx_N, hidden_TD.shape[0])
    return dhidden_TD, empty.clone() if dweight_VD is None else dweight_VD.to(weight_VD.dtype)


@_linear_logprob_backward.register_fake
def _(hidden_TD, weight_VD, target, temperature_T, temperature, num_valid, active, chunk, known, g, h, dh, dw):
    empty = hidden_TD.new_empty
    return empty(hidden_TD.shape) if dh else empty(0), empty(weight_VD.shape) if dw else empty(0)


def _save_for_backward(ctx, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
    hidden_TD, weight_VD, target_id_T, temperature_T, *numbers, is_active_T, _, ctx.chunk_tokens, _ = inputs
    ctx.temperature, ctx.num_valid = numbers
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2], output[3])
    ctx.save_for_backward(hidden_TD, weight_VD, target_id_T, temperature_T, is_active_T, *output)


def _backward(ctx, g_T: torch.Tensor | None, h_T: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    refuse_second_order("linear_logprob")
    hidden_TD, weight_VD, target_id_T, temperature_T, is_active_T, *known_T = ctx.saved_tensors
    needs_dhidden, needs_dweight = ctx.needs_input_grad[:2]
    if g_T is None and h_T is None:
        return (None,) * 10
    dhidden_TD, dweight_VD = _linear_logprob_backward(
        hidden_TD, weight_VD, target_id_T, temperature_T, ctx.temperature, ctx.num_valid, is_active_T,
        ctx.chunk_tokens, known_T, g_T, h_T, needs_dhidden, needs_dweight,
    )  # fmt: skip
    return dhidden_TD if needs_dhidden else None, dweight_VD if needs_dweight else None, *(None,) * 8


_linear_logprob.register_autograd(_backward, setup_context=_save_for_backward)


def linear_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    num_valid: int | None = None,
    is_active_T: torch.Tensor | None = None,
    anchor_logprob_T: torch.Tensor | None = None,
    want_entropy: bool = True,
    chunk_tokens: int | None = None,
) -> TokenLogprob:
    """LM head, log-prob of each row's target and entropy of its softmax; no [T, V] tensor is made.

    Args:
        hidden_TD: bf16 or fp32 [T, D], any strides.
        weight_VD: same dtype, [V, D] with contiguous rows; may be the tied embedding.
        target_id_T: int32 or int64 [T].
        temperature: a number above 0, or fp32 [T].
        num_valid: rows of the weight that exist (len(tokenizer)); the rest is not read, its gradient is exactly 0.
        is_active_T: bool [T]; other rows are not computed and give exactly 0 in values and gradient.
        anchor_logprob_T: fp32 [T], a guess of the log-prob (the rollout's); saves time on CUDA, never changes a result.
        want_entropy: entropy_T is None without it.
        chunk_tokens: rows whose logits exist at a time; None lets the op choose.

    Returns:
        TokenLogprob, fp32 [T], nats.

    Raises:
        ValueError: shape, dtype, device, strides, temperature; on the CPU an active target outside [0, num_valid). On
            CUDA such a row's log-prob is NaN.
    """
    check_head(hidden_TD, weight_VD)
    T, device = hidden_TD.shape[0], hidden_TD.device
    num_valid = check_num_valid(num_valid, weight_VD.shape[0])
    check_row_input("target_id_T", target_id_T, T, device, (torch.int32, torch.int64))
    check_row_input("is_active_T", is_active_T, T, device, (torch.bool,), is_optional=True)
    check_row_input("anchor_logprob_T", anchor_logprob_T, T, device, is_optional=True)
    check_temperature(temperature, T, device)
    check_chunk_tokens(chunk_tokens)
    is_tensor = isinstance(temperature, torch.Tensor)
    logprob_T, entropy_T, lse_T, _ = _linear_logprob(
        hidden_TD, weight_VD, target_id_T, temperature if is_tensor else None, 1.0 if is_tensor else float(temperature),
        num_valid, is_active_T, anchor_logprob_T, chunk_tokens, want_entropy,
    )  # fmt: skip
    return TokenLogprob(logprob_T, entropy_T if want_entropy else None, lse_T)
