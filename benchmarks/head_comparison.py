"""Comparisons of the head's two ops, ready to run."""

import torch

from benchmarks.comparison import Comparison
from benchmarks.head_case import CHECK_ROWS, HeadShape, head_truths, logit_bound, make_head_case
from benchmarks.head_implementations import grpo_implementations, score_implementations

GRADIENT_BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""fp32: sums of V and T terms in another order. bf16: exponentials, scaled rows, result are rounded, 2^-9 each."""
PEER_BOUNDS = {"loss": 0.1, "logprob": 1.0, "entropy": 1.0, "dhidden": 0.2, "dweight": 0.2}


def head_comparison(op: str, shape: HeadShape, device: torch.device, *, has_peers: bool = True) -> Comparison:
    """`op` is linear_grpo or linear_logprob. Without peers: ours, eager and the floor."""
    case = make_head_case(shape, device)
    check_case = case.first_rows(CHECK_ROWS)
    has_gradients = op == "linear_grpo"
    truths = head_truths(check_case, has_gradients=has_gradients, has_ce=has_gradients and has_peers)
    nats = logit_bound(check_case)
    bound = GRADIENT_BOUND[shape.dtype]
    # The entropy is a difference of two moments as large as itself; the loss's terms may cancel.
    bounds = {"loss": 1e-3, "logprob": nats, "entropy": 10 * nats, "dhidden": bound, "dweight": bound}
    if has_gradients:
        implementations = grpo_implementations(device, has_peers=has_peers)
    else:
        implementations = score_implementations(device, has_peers=has_peers)
    return Comparison(
        op=op,
        device=device,
        conditions={**shape.conditions(), "dweight MiB": shape.V * shape.D * shape.dtype.itemsize >> 20},
        case=case,
        check_case=check_case,
        truths=truths,
        bounds=bounds,
        peer_bounds=PEER_BOUNDS,
        implementations=implementations,
    )
