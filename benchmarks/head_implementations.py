"""Who computes the head with the GRPO loss, and who scores with it: ours by design, the peers, and the bare products.

Peers get what they can use: no peer skips rows of weight 0; `F.linear_cross_entropy` knows no clip, KL or entropy. All
end in gradients of hidden states and head, and all but that one report the entropy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.comparison import Implementation, Outputs, Step
from benchmarks.head_case import OBJECTIVE, HeadCase
from sparkgrpo.kernels.cpu_products import has_onednn_products, product_
from sparkgrpo.kernels.head_chunks import PRODUCT_ROWS
from sparkgrpo.kernels.head_plan import Design
from sparkgrpo.kernels.linear_grpo import linear_grpo
from sparkgrpo.kernels.linear_logprob import linear_logprob

CHUNK_ROWS = {"cpu": 256, "cuda": 4096}
TRL_VOCAB_CHUNK = 32_768
"""What TRL passes."""

LogprobEntropy = tuple[torch.Tensor, torch.Tensor]


def ours(case: HeadCase, design: Design) -> Step:
    def step() -> Outputs:
        out = linear_grpo(
            case.hidden_TD,
            case.weight_VD,
            case.target_T,
            case.advantage_T,
            weight_T,
            objective=OBJECTIVE,
            ref_logprob_T=case.ref_T,
            anchor_logprob_T=case.anchor_T,
            active_idx_N=case.active_idx_N,
            design=design,
        )
        assert out.entropy_T is not None
        return _with_gradients(case, out.loss, (out.logprob_T, out.entropy_T))

    weight_T = case.token_weight_T
    return step


def _with_gradients(case: HeadCase, loss: torch.Tensor, values: LogprobEntropy) -> Outputs:
    dhidden_TD, dweight_VD = torch.autograd.grad(loss, (case.hidden_TD, case.weight_VD))
    active = case.active_idx_N.long()
    logprob, entropy = (x_T.detach()[active] for x_T in values)
    return {"loss": loss.detach(), "logprob": logprob, "entropy": entropy, "dhidden": dhidden_TD, "dweight": dweight_VD}


def logprob_and_entropy(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor) -> LogprobEntropy:
    """The straightforward way: logits in the operands' dtype, softmax in fp32."""
    logprob_TV = (hidden_TD @ weight_VD.T).float().log_softmax(1)
    with torch.no_grad():
        entropy_T = -(logprob_TV.exp() * logprob_TV).sum(1)
    return logprob_TV.gather(1, target_T[:, None])[:, 0], entropy_T


def row_loss(
    logprob_T: torch.Tensor,
    advantage_T: torch.Tensor,
    weight_T: torch.Tensor,
    ref_T: torch.Tensor,
) -> torch.Tensor:
    """Clipped surrogate (the old policy is the present one) and k3, summed by token weight."""
    ratio_T = (logprob_T - logprob_T.detach()).exp()
    clipped_T = ratio_T.clamp(1 - OBJECTIVE.eps_low, 1 + OBJECTIVE.eps_high)
    gain_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    log_ratio_T = ref_T - logprob_T
    kl_T = log_ratio_T.exp() - log_ratio_T - 1
    return (weight_T * (OBJECTIVE.beta * kl_T - gain_T)).sum()


def whole_loss(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, target, advantage, token weight, reference -> loss, log-prob, entropy."""
    hidden_TD, weight_VD, target_T, *rows = operands
    logprob_T, entropy_T = logprob_and_entropy(hidden_TD, weight_VD, target_T)
    return row_loss(logprob_T, *rows), logprob_T, entropy_T


def _row_operands(case: HeadCase) -> tuple[torch.Tensor, ...]:
    return case.target_T, case.advantage_T, case.token_weight_T, case.ref_T


def eager(case: HeadCase, *, is_compiled: bool = False) -> Step:
    rows, loss_of = _row_operands(case), whole_loss
    if is_compiled:
        torch._dynamo.reset()
        loss_of = torch.compile(whole_loss, fullgraph=True, dynamic=False)

    def step() -> Outputs:
        loss, *values = loss_of(case.hidden_TD, case.weight_VD, *rows)
        return _with_gradients(case, loss, (values[0], values[1]))

    return step


def eager_chunked(case: HeadCase) -> Step:
    """A chunk of rows after the other, each with its own backward: the textbook's way to little memory."""
    rows, C = _row_operands(case), CHUNK_ROWS[case.hidden_TD.device.type]

    def step() -> Outputs:
        hidden_TD, weight_VD = case.hidden_TD, case.weight_VD
        dweight_VD = torch.zeros_like(weight_VD)
        losses, dhidden, logprobs, entropies = [], [], [], []
        for start in range(0, case.shape.T, C):
            part = hidden_TD[start : start + C].detach().requires_grad_()
            loss, logprob_C, entropy_C = whole_loss(part, weight_VD, *(x_T[start : start + C] for x_T in rows))
            dpart_CD, dpart_VD = torch.autograd.grad(loss, (part, weight_VD))
            dweight_VD += dpart_VD
            dhidden.append(dpart_CD)
            losses.append(loss.detach())
            logprobs.append(logprob_C.detach())
            entropies.append(entropy_C)
        active = case.active_idx_N.long()
        values = {"logprob": torch.cat(logprobs)[active], "entropy": torch.cat(entropies)[active]}
        return {"loss": torch.stack(losses).sum(), **values, "dhidden": torch.cat(dhidden), "dweight": dweight_VD}

    return step


def linear_cross_entropy(case: HeadCase, *, batch_chunk_size: int | None = None) -> Step:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise NotImplementedError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=batch_chunk_size)

    def step() -> Outputs:
        loss = function(case.hidden_TD, case.weight_VD, case.target_T.long(), options=options)
        dhidden_TD, dweight_VD = torch.autograd.grad(loss, (case.hidden_TD, case.weight_VD))
        return {"loss": loss.detach(), "dhidden": dhidden_TD, "dweight": dweight_VD}

    return step


def liger(case: HeadCase, *, is_one_chunk: bool) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    L, D = case.shape.seq_tokens, case.shape.D
    B = case.shape.T // L
    assert L * B == case.shape.T, "whole sequences alone"

    def by_sequence(x_T: torch.Tensor) -> torch.Tensor:
        return x_T.view(B, L)

    loss_of = LigerFusedLinearGRPOLoss(
        beta=OBJECTIVE.beta, compiled=False, use_ref_model=True, chunk_size=B if is_one_chunk else 1, loss_type="bnpo"
    )

    def step() -> Outputs:
        loss, _ = loss_of(
            case.hidden_TD.view(B, L, D),
            case.weight_VD,
            by_sequence(case.target_T),
            by_sequence(case.is_active_T).float(),
            by_sequence(case.advantage_T)[:, 0],
            ref_per_token_logps=by_sequence(case.ref_T),
        )
        dhidden_TD, dweight_VD = torch.autograd.grad(loss, (case.hidden_TD, case.weight_VD))
        return {"loss": loss.detach(), "dhidden": dhidden_TD, "dweight": dweight_VD}

    return step


def _trl_values(case: HeadCase, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> LogprobEntropy:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    outputs = ChunkedLogProbFunction.apply(
        hidden_TD, weight_VD, None, case.target_T, 1.0, TRL_VOCAB_CHUNK, None, 1.0, ("entropy",)
    )
    return outputs[0], outputs[1]


def trl(case: HeadCase) -> Step:
    rows = _row_operands(case)[1:]

    def step() -> Outputs:
        values = _trl_values(case, case.hidden_TD, case.weight_VD)
        return _with_gradients(case, row_loss(values[0], *rows), values)

    return step


def bare_products(case: HeadCase, product: Callable[..., None], *, num_products: int = 3) -> Step:
    """The three products of the rows that count, a chunk at a time; one of them for scoring."""
    device = case.hidden_TD.device.type
    dtype = torch.float32 if device == "cpu" else case.shape.dtype
    hidden_ND = case.hidden_TD.detach()[case.active_idx_N.long()].to(dtype)
    weight_VD = case.weight_VD.detach().to(dtype)
    C = CHUNK_ROWS[device]

    def step() -> Outputs:
        N, V = hidden_ND.shape[0], weight_VD.shape[0]
        chunk_CV = hidden_ND.new_empty(min(C, N), V)
        dhidden_ND, dweight_VD = torch.empty_like(hidden_ND), torch.empty_like(weight_VD)
        for start in range(0, N, C):
            rows_CD = hidden_ND[start : start + C]
            logits_CV = chunk_CV[: len(rows_CD)]
            product(logits_CV, rows_CD, weight_VD.T)
            if num_products == 3:
                product(dweight_VD, logits_CV.T, rows_CD, adds=start > 0)
                product(dhidden_ND[start : start + C], logits_CV, weight_VD)
        return {}

    return step


def torch_product(out_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor, *, adds: bool = False) -> None:
    torch.addmm(out_MN, a_MK, b_KN, beta=float(adds), out=out_MN)


def onednn_product(out_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor, *, adds: bool = False) -> None:
    """The products that ours are made of on this processor, along whichever dimension is the vocabulary."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    for start in range(0, max(M, K, N), PRODUCT_ROWS):
        block = slice(start, start + PRODUCT_ROWS)
        if max(M, N) < K:
            product_(out_MN, a_MK[:, block], b_KN[block], adds=adds or start > 0)
        elif M > N:
            product_(out_MN[block], a_MK[block], b_KN, adds=adds)
        else:
            product_(out_MN[:, block], a_MK, b_KN[:, block], adds=adds)


def _floors(name: str, num_products: int, device: torch.device) -> list[Implementation]:
    products = {f"{name}, torch.mm": torch_product}
    if device.type == "cpu" and has_onednn_products():
        products[f"{name}, oneDNN"] = onednn_product
    return [
        Implementation(
            name=full_name,
            make=partial(bare_products, product=product, num_products=num_products),
            truth=None,
            is_floor=True,
            note="active rows, fp32 on a CPU",
        )
        for full_name, product in products.items()
    ]


def grpo_implementations(device: torch.device, *, has_peers: bool) -> list[Implementation]:
    """Of `linear_grpo`, forward and both gradients. Without peers: ours, eager and the floor.

    The default chunks of torch and Liger stand beside ours on CUDA alone: on a CPU they take 2 to 10 times as long as
    anything else, minutes at a large vocabulary.
    """
    is_cuda = device.type == "cuda"
    designs: tuple[Design, ...] = ("auto", "anchored", "chunked", "recompute") if is_cuda else ("auto", "recompute")
    no_entropy = "gives no entropy"
    ours_rows = [Implementation(name=f"ours {d}", make=partial(ours, design=d), is_ours=True) for d in designs]
    eager_row, floors = Implementation(name="eager", make=eager), _floors("bare products", 3, device)
    if not has_peers:
        return [*ours_rows, eager_row, *floors]
    does_less: dict[str, Any] = {"truth": "ce", "note": "CE only: does less"}
    batch_chunks = partial(linear_cross_entropy, batch_chunk_size=4096)
    peers = [
        Implementation(name="eager chunked", make=eager_chunked, note=f"chunk {CHUNK_ROWS[device.type]}"),
        Implementation(name="torch.compile", make=partial(eager, is_compiled=True), note="compile time not counted"),
        Implementation(name="F.linear_cross_entropy 4096", make=batch_chunks, **does_less),
        Implementation(name="Liger, chunk B", make=partial(liger, is_one_chunk=True), note=no_entropy),
        Implementation(name="TRL chunked log-prob", make=trl),
    ]
    if is_cuda:
        peers.append(Implementation(name="F.linear_cross_entropy", make=linear_cross_entropy, **does_less))
        peers.append(Implementation(name="Liger, chunk 1", make=partial(liger, is_one_chunk=False), note=no_entropy))
    return [*ours_rows, eager_row, *peers, *floors]


def scored(case: HeadCase, who: str) -> Step:
    """Log-prob and entropy of all rows, without gradients."""
    values_of = logprob_and_entropy
    if who == "compile":
        torch._dynamo.reset()
        values_of = torch.compile(logprob_and_entropy, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step() -> Outputs:
        if who == "ours":
            out = linear_logprob(case.hidden_TD, case.weight_VD, case.target_T, anchor_logprob_T=case.anchor_T)
            assert out.entropy_T is not None
            values = out.logprob_T, out.entropy_T
        elif who == "trl":
            values = _trl_values(case, case.hidden_TD, case.weight_VD)
        else:
            values = values_of(case.hidden_TD, case.weight_VD, case.target_T)
        active = case.active_idx_N.long()
        return {"logprob": values[0][active], "entropy": values[1][active]}

    return step


def score_implementations(device: torch.device, *, has_peers: bool) -> list[Implementation]:
    """Of `linear_logprob` without gradients."""
    rows = [
        Implementation(name="ours", make=partial(scored, who="ours"), is_ours=True),
        Implementation(name="eager", make=partial(scored, who="eager")),
    ]
    if not has_peers:
        return [*rows, *_floors("bare product", 1, device)]
    return [
        *rows,
        Implementation(name="torch.compile", make=partial(scored, who="compile"), note="compile time not counted"),
        Implementation(name="TRL chunked log-prob", make=partial(scored, who="trl")),
        *_floors("bare product", 1, device),
    ]
