"""The GRPO loss from the LM head's input, with both gradients, in one sweep over the vocabulary and no [T, V] tensor.

    logp, H of each row: linear_logprob.py      loss, g = dloss/dlogp, h = dloss/dH: grpo_row_loss.py
    dz_j = (1/tau) (g 1[j = y] - p_j (g + h (log p_j + H)))     dhidden = dz @ weight     dweight = dz^T @ hidden

g and h are known once a chunk's rows are summed, so that the forward makes the gradients from the exponentials that
it still holds: three products, 6 N V D flops (4 with one operand frozen, 2 with both). A row whose gradient is exactly
0 before the sweep (weight 0; advantage 0 without KL and entropy terms) is not computed at all.

T rows, N active rows, C rows a chunk, S sequences, V vocabulary, D width, y the row's target, tau the temperature.
Bytes beside inputs and outputs: one chunk (4 C V; 2 C V where the design is `anchored`), 4 C D, T D itemsize for
dhidden, 4 V D for dweight (none with grad_weight_VD); `head_plan.py` has the sum and the choice of design. When the
ratio is per sequence and a sequence is longer than the chunk, g is known after all rows: then the forward sweeps twice,
four products.
"""

from typing import Any, NamedTuple, cast

import torch

from sparkgrpo.kernels.active_rows import is_active_reference
from sparkgrpo.kernels.grpo_row_loss import GrpoObjective, RowInputs, grpo_row_loss, grpo_row_loss_reference
from sparkgrpo.kernels.grpo_sweep import GrpoCall, run_sweeps
from sparkgrpo.kernels.head_plan import Design
from sparkgrpo.kernels.launch import refuse_second_order
from sparkgrpo.kernels.linear_logprob import linear_logprob_reference


class GrpoLoss(NamedTuple):
    """The loss and what it was made of. `loss` alone is differentiable; rows that are not active are 0 everywhere."""

    loss: torch.Tensor
    """fp32 scalar."""
    logprob_T: torch.Tensor
    """fp32, nats."""
    entropy_T: torch.Tensor | None
    """fp32, nats; None unless wanted."""
    ratio_T: torch.Tensor
    """fp32, before clipping; the sequence's in each of its rows under ratio "sequence"."""
    kl_T: torch.Tensor | None
    """fp32, nats, by the objective's estimator; None without a reference."""
    clip_side_T: torch.Tensor
    """int8: 0, or where the clip binds -1 below 1 - eps_low, +1 above 1 + eps_high, +2 above delta."""
    is_active_T: torch.Tensor
    """bool: rows that were computed and count."""
    num_repaired: torch.Tensor
    """int32 scalar: rows whose anchor was too far off and that were computed again; 0 where no anchor is used."""


def linear_grpo_reference(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    advantage_T: torch.Tensor,
    token_weight_T: torch.Tensor,
    *,
    objective: GrpoObjective,
    temperature: float | torch.Tensor = 1.0,
    num_valid: int | None = None,
    old_logprob_T: torch.Tensor | None = None,
    ref_logprob_T: torch.Tensor | None = None,
    anchor_logprob_T: torch.Tensor | None = None,
    cu_seqlens_S1: torch.Tensor | None = None,
    active_idx_N: torch.Tensor | None = None,
    want_entropy: bool = True,
    chunk_tokens: int | None = None,
    design: Design = "auto",
    grad_weight_VD: torch.Tensor | None = None,
) -> GrpoLoss:
    """`linear_grpo` through real logits with autograd; fp64 for fp64 operands, else fp32.

    Anchor, chunk and design change nothing here; ValueError for grad_weight_VD, which autograd cannot fill.
    """
    if grad_weight_VD is not None:
        raise ValueError("the reference does not fill grad_weight_VD, got a tensor; read weight_VD.grad")
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    is_active_T = is_active_reference(objective, advantage_T, token_weight_T, cu_seqlens_S1, active_idx_N)
    rows = linear_logprob_reference(
        hidden_TD, weight_VD, target_id_T, temperature=temperature, num_valid=num_valid, is_active_T=is_active_T
    )

    def data(values_T: torch.Tensor) -> torch.Tensor:
        return torch.where(is_active_T, values_T.to(wide), 0.0)

    inputs = RowInputs(
        advantage_C=data(advantage_T),
        weight_C=data(token_weight_T),
        old_C=None if old_logprob_T is None else data(old_logprob_T),
        ref_C=None if ref_logprob_T is None else data(ref_logprob_T),
        seq_len_S=None if objective.ratio == "token" or cu_seqlens_S1 is None else cu_seqlens_S1.diff().long(),
    )
    loss = grpo_row_loss_reference(objective, rows.logprob_T, rows.entropy_T, inputs).sum()
    logprob_T, entropy_T = rows.logprob_T.detach(), None if rows.entropy_T is None else rows.entropy_T.detach()
    metrics = grpo_row_loss(objective, logprob_T, entropy_T, inputs)
    return GrpoLoss(
        loss=loss,
        logprob_T=logprob_T,
        entropy_T=entropy_T if want_entropy else None,
        ratio_T=metrics.ratio_C,
        kl_T=metrics.kl_C,
        clip_side_T=metrics.clip_side_C,
        is_active_T=is_active_T,
        num_repaired=torch.zeros((), dtype=torch.int32, device=hidden_TD.device),
    )


@torch.library.custom_op("sparkgrpo::linear_grpo", mutates_args=("grad_weight_VD",))
def _linear_grpo(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    advantage_T: torch.Tensor,
    token_weight_T: torch.Tensor,
    temperature_T: torch.Tensor | None,
    old_logprob_T: torch.Tensor | None,
    ref_logprob_T: torch.Tensor | None,
    anchor_logprob_T: torch.Tensor | None,
    cu_seqlens_S1: torch.Tensor | None,
    active_idx_N: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
    temperature: float,
    num_valid: int | None,
    want_entropy: bool,
    chunk_tokens: int | None,
    design: str,
    surrogate: str,
    ratio: str,
    kl: str,
    delta: float | None,
    coefficients: list[float],
    needs_dhidden: bool,
    needs_dweight: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
]:  # fmt: skip
    """The fields of GrpoLoss, then dhidden [T, D] and dweight [V, D] fp32; empty where there is none. No autograd: one
    opaque node that makes values and gradients, whatever compiles around it. coefficients: eps_low, eps_high, beta and
    entropy_coef of the objective."""
    eps_low, eps_high, beta, entropy_coef = coefficients
    named: dict[str, Any] = {"surrogate": surrogate, "ratio": ratio, "kl": kl}  # checked where they are used
    objective = GrpoObjective(
        eps_low=eps_low, eps_high=eps_high, delta=delta, beta=beta, entropy_coef=entropy_coef, **named
    )
    call = GrpoCall(
        target_id_T=target_id_T, advantage_T=advantage_T, token_weight_T=token_weight_T, objective=objective,
        temperature=temperature if temperature_T is None else temperature_T, num_valid=num_valid,
        old_logprob_T=old_logprob_T, ref_logprob_T=ref_logprob_T, anchor_logprob_T=anchor_logprob_T,
        cu_seqlens_S1=cu_seqlens_S1, active_idx_N=active_idx_N, want_entropy=want_entropy, chunk_tokens=chunk_tokens,
        design=cast(Design, design), grad_weight_VD=grad_weight_VD,
    )  # fmt: skip
    T = hidden_TD.shape[0]
    with torch.autocast(hidden_TD.device.type, enabled=False):
        out, gradients, num_repaired = run_sweeps(call, hidden_TD, weight_VD, (needs_dhidden, needs_dweight))
    rows = (out.logprob_N, out.entropy_N if want_entropy else None, out.ratio_N, out.kl_N)
    rows = (out.scatter(x_N, T) for x_N in (*rows, out.clip_side_N, out.rows.is_counted_N))
    dweight_VD = None if grad_weight_VD is not None else gradients.dweight_VD
    results = (out.loss_N.sum(dtype=torch.float64).float(), *rows, num_repaired, gradients.dhidden_TD, dweight_VD)
    return tuple(hidden_TD.new_empty(0) if x is None else x for x in results)  # pyright: ignore[reportReturnType]  ten


@_linear_grpo.register_fake
def _(hidden_TD, weight_VD, *rest):  # noqa: ANN002
    ref_T, adds_dweight, want_entropy, (needs_dhidden, needs_dweight) = (
        rest[5],
        rest[9] is not None,
        rest[12],
        rest[-2:],
    )
    T, empty = hidden_TD.shape[0], hidden_TD.new_empty
    has_rows = (True, want_entropy, True, ref_T is not None)
    rows = [empty(T, dtype=torch.float32) if has else empty(0) for has in has_rows]
    return (
        empty((), dtype=torch.float32), *rows, empty(T, dtype=torch.int8), empty(T, dtype=torch.bool),
        empty((), dtype=torch.int32), empty(hidden_TD.shape) if needs_dhidden else empty(0),
        empty(weight_VD.shape, dtype=torch.float32) if needs_dweight and not adds_dweight else empty(0),
    )  # fmt: skip


class _AttachGradients(torch.autograd.Function):
    """The loss, with the gradients that were made beside it as its derivatives."""

    @staticmethod
    def forward(
        ctx,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        loss: torch.Tensor,
        dhidden_TD: torch.Tensor,
        dweight_VD: torch.Tensor,
        adds_dweight: bool,
    ) -> torch.Tensor:
        ctx.adds_dweight, ctx.weight_dtype = adds_dweight, weight_VD.dtype
        ctx.save_for_backward(dhidden_TD, dweight_VD)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_order("linear_grpo")
        dhidden_TD, dweight_VD = ctx.saved_tensors
        if ctx.adds_dweight:  # dweight lies in grad_weight_VD already, unscaled: a factor here would be a silent lie
            grad_loss = torch.where(grad_loss == 1.0, 1.0, float("nan"))
        # On the CPU reading the factor is free, and a factor of 1 saves a pass over [V, D] and a copy of it: autograd
        # takes the saved tensor over when nothing else holds it, and copies it when the graph is retained.
        is_readable = grad_loss.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (is_readable and float(grad_loss) == 1.0):
            dhidden_TD, dweight_VD = dhidden_TD * grad_loss, dweight_VD * grad_loss
        needs_dhidden, needs_dweight = ctx.needs_input_grad[:2]
        needs_dweight = needs_dweight and not ctx.adds_dweight
        dweight = dweight_VD.to(ctx.weight_dtype) if needs_dweight else None
        return dhidden_TD.to(dhidden_TD.dtype) if needs_dhidden else None, dweight, None, None, None, None


def _apply(call: GrpoCall, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> GrpoLoss:
    """Runs the opaque op on a checked call and ties its gradients to the operands."""
    objective = call.objective
    adds_dweight, is_grad_enabled = call.grad_weight_VD is not None, torch.is_grad_enabled()
    needs_dhidden = is_grad_enabled and hidden_TD.requires_grad
    needs_dweight = is_grad_enabled and (weight_VD.requires_grad or adds_dweight)
    temperature_T = call.temperature if isinstance(call.temperature, torch.Tensor) else None
    loss, *rows, num_repaired, dhidden_TD, dweight_VD = _linear_grpo(
        hidden_TD.detach(), weight_VD.detach(), call.target_id_T, call.advantage_T, call.token_weight_T, temperature_T,
        call.old_logprob_T, call.ref_logprob_T, call.anchor_logprob_T, call.cu_seqlens_S1, call.active_idx_N,
        call.grad_weight_VD, float(call.temperature) if temperature_T is None else 1.0, call.num_valid,
        call.want_entropy, call.chunk_tokens, call.design, objective.surrogate, objective.ratio, objective.kl,
        objective.delta, [objective.eps_low, objective.eps_high, objective.beta, objective.entropy_coef], needs_dhidden,
        needs_dweight,
    )  # fmt: skip
    if is_grad_enabled and (hidden_TD.requires_grad or weight_VD.requires_grad):
        loss = _AttachGradients.apply(hidden_TD, weight_VD, loss, dhidden_TD, dweight_VD, adds_dweight)
    logprob_T, entropy_T, ratio_T, kl_T, clip_side_T, is_active_T = rows
    return GrpoLoss(
        loss=loss,
        logprob_T=logprob_T,
        entropy_T=entropy_T if call.want_entropy else None,
        ratio_T=ratio_T,
        kl_T=None if call.ref_logprob_T is None else kl_T,
        clip_side_T=clip_side_T,
        is_active_T=is_active_T,
        num_repaired=num_repaired,
    )


def linear_grpo(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_id_T: torch.Tensor,
    advantage_T: torch.Tensor,
    token_weight_T: torch.Tensor,
    *,
    objective: GrpoObjective,
    temperature: float | torch.Tensor = 1.0,
    num_valid: int | None = None,
    old_logprob_T: torch.Tensor | None = None,
    ref_logprob_T: torch.Tensor | None = None,
    anchor_logprob_T: torch.Tensor | None = None,
    cu_seqlens_S1: torch.Tensor | None = None,
    active_idx_N: torch.Tensor | None = None,
    want_entropy: bool = True,
    chunk_tokens: int | None = None,
    design: Design = "auto",
    grad_weight_VD: torch.Tensor | None = None,
) -> GrpoLoss:
    """LM head, clipped surrogate, KL and entropy terms, forward and gradient; backward may run again (retain_graph).

    Args:
        hidden_TD: bf16 or fp32 [T, D], any strides.
        weight_VD: same dtype, [V, D] with contiguous rows; may be the tied embedding.
        target_id_T: int32 or int64 [T].
        advantage_T, token_weight_T: fp32 [T]; a row that does not count has weight 0, and is not computed.
        temperature: a number above 0, or fp32 [T].
        num_valid: rows of the weight that exist (len(tokenizer)); the rest is not read, its gradient is exactly 0.
        old_logprob_T: fp32 [T], nats, of the policy that sampled; None: the ratio is exactly 1.
        ref_logprob_T: fp32 [T], nats; needed with beta above 0, else a metric.
        anchor_logprob_T: fp32 [T], a guess of the log-prob (the rollout's): saves time on CUDA, changes no result.
        cu_seqlens_S1: int32 on the host, bounds of the sequences; needed under ratio "sequence".
        active_idx_N: int32, rising: rows that may have a gradient; others are dead. None: found here, with one sync
            (under ratio "sequence" where not all rows are active, one more: their numbers are read).
        chunk_tokens: rows whose logits exist at a time; None lets the op choose.
        grad_weight_VD: contiguous fp32 [V, D]: the forward adds dweight to it, weight_VD.grad stays as it is. The loss
            must then reach backward with factor 1, else dhidden is NaN. Nothing is added under no_grad.

    Raises:
        ValueError: shape, dtype, device, strides, names, a design that does not fit; on the CPU a counted target
            outside [0, num_valid). On CUDA such a row's log-prob and the loss are NaN.
    """
    call = GrpoCall(
        target_id_T=target_id_T, advantage_T=advantage_T, token_weight_T=token_weight_T, objective=objective,
        temperature=temperature, num_valid=num_valid, old_logprob_T=old_logprob_T, ref_logprob_T=ref_logprob_T,
        anchor_logprob_T=anchor_logprob_T, cu_seqlens_S1=cu_seqlens_S1, active_idx_N=active_idx_N,
        want_entropy=want_entropy, chunk_tokens=chunk_tokens, design=design, grad_weight_VD=grad_weight_VD,
    )  # fmt: skip
    call.check(hidden_TD, weight_VD)
    return _apply(call, hidden_TD, weight_VD)
