"""Log-prob of chosen tokens and entropy of the softmax from the LM head's input, without logits in memory.

    z_j = (hidden . weight_j) / tau for j < num_valid, -inf beyond          accumulated in fp32, never rounded to bf16
    lse = log sum_j e^z_j     p_j = e^(z_j - lse)     logp = z_y - lse     H = -sum_j p_j log p_j  (0 log 0 = 0), nats
    dz_j = (1/tau) (g 1[j = y] - p_j (g + h (log p_j + H)))     dhidden = dz @ weight     dweight = dz^T @ hidden

T rows, N active rows, C rows a chunk, V vocabulary, D width, y the row's target, tau the temperature; g = dloss/dlogp,
h = dloss/dH. One chunk [C, V] of fp32 exists at a time (`head_chunks.py`); the derivatives arrive in backward, so that
it computes the chunk again: 2 N V D flops forward, 6 N V D backward (4 with one operand frozen).
Saved: the inputs (no copies), nothing of size T V. Where the loss is known beforehand `linear_grpo` sweeps once.
"""

from dataclasses import dataclass

import torch

from sparkgrpo.kernels.head_chunks import HeadSweep, open_sweep, scatter_rows, take_rows
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """The inputs that are not differentiated."""

    target_id_T: torch.Tensor
    temperature: float | torch.Tensor
    num_valid: int | None
    row_idx_N: torch.Tensor | None
    """int64, the active rows; None is all."""
    chunk_tokens: int | None
    want_entropy: bool

    def sweep(self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> HeadSweep:
        return open_sweep(
            hidden_TD,
            weight_VD,
            self.target_id_T,
            temperature=self.temperature,
            num_valid=self.num_valid,
            row_idx_N=self.row_idx_N,
            chunk_tokens=self.chunk_tokens,
        )


class _LinearLogprob(torch.autograd.Function):
    """Forward sweeps for values; backward, which alone knows g and h, sweeps again and makes the gradients."""

    @staticmethod
    def forward(ctx, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, call: _Call) -> tuple[torch.Tensor | None, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TD, weight_VD)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            sweep = call.sweep(hidden_TD, weight_VD)
            outputs = [hidden_TD.new_zeros(sweep.num_rows, dtype=torch.float32) for _ in range(3)]
            for start, stop in sweep.chunks():
                stats = sweep.exponentials(start, stop, call.want_entropy)
                outputs[0][start:stop], outputs[2][start:stop] = stats.logprob(), stats.lse()
                if call.want_entropy:
                    outputs[1][start:stop] = stats.entropy()
        logprob_T, entropy_T, lse_T = (scatter_rows(x_N, call.row_idx_N, hidden_TD.shape[0]) for x_N in outputs)
        ctx.mark_non_differentiable(lse_T)
        return logprob_T, entropy_T if call.want_entropy else None, lse_T

    @staticmethod
    def backward(ctx, g_T: torch.Tensor | None, h_T: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        refuse_second_order("linear_logprob")
        if g_T is None and h_T is None:
            return None, None, None
        hidden_TD, weight_VD = ctx.saved_tensors
        call: _Call = ctx.call
        needs_dhidden, needs_dweight, _ = ctx.needs_input_grad
        g_N = None if g_T is None else take_rows(g_T, call.row_idx_N)
        h_N = None if h_T is None else take_rows(h_T, call.row_idx_N)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            sweep = call.sweep(hidden_TD, weight_VD)
            dhidden_ND = hidden_TD.new_empty(sweep.num_rows, hidden_TD.shape[1]) if needs_dhidden else None
            dweight_VD = hidden_TD.new_zeros(weight_VD.shape, dtype=torch.float32) if needs_dweight else None
            for start, stop in sweep.chunks():
                stats = sweep.exponentials(start, stop, h_N is not None)
                g_C = torch.zeros_like(stats.rest_C) if g_N is None else g_N[start:stop]
                h_C = None if h_N is None else h_N[start:stop]
                dhidden_CD = None if dhidden_ND is None else dhidden_ND[start:stop]
                sweep.gradients(slice(start, stop), stats, g_C, h_C, dhidden_CD, dweight_VD)
        dhidden_TD = None if dhidden_ND is None else scatter_rows(dhidden_ND, call.row_idx_N, hidden_TD.shape[0])
        return dhidden_TD, None if dweight_VD is None else dweight_VD.to(weight_VD.dtype), None


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
    check_num_valid(num_valid, weight_VD.shape[0])
    check_row_input("target_id_T", target_id_T, T, device, (torch.int32, torch.int64))
    check_row_input("is_active_T", is_active_T, T, device, (torch.bool,), is_optional=True)
    check_row_input("anchor_logprob_T", anchor_logprob_T, T, device, is_optional=True)
    check_temperature(temperature, T, device)
    check_chunk_tokens(chunk_tokens)
    row_idx_N = None if is_active_T is None else is_active_T.nonzero()[:, 0]  # on CUDA the op's one host sync
    call = _Call(
        target_id_T=target_id_T, temperature=temperature, num_valid=num_valid, row_idx_N=row_idx_N,
        chunk_tokens=chunk_tokens, want_entropy=want_entropy,
    )  # fmt: skip
    return TokenLogprob(*_LinearLogprob.apply(hidden_TD, weight_VD, call))
