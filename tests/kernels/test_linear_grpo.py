"""linear_grpo against float64 autograd through real logits: values and all gradients under every option.

T rows, V vocabulary, D width. Bounds: u = 2^-24 is fp32's unit roundoff. A logit is a sum of D products whose rounding
errors walk at random: 0.5 u sqrt(D) B with B = max_j sum_k |hidden_k weight_jk| / tau; log and lse add 4 u each.
Gradients are sums of such numbers in fp32: relative L2 1e-5.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.linear_grpo import GrpoLoss, linear_grpo, linear_grpo_reference

U = 2.0**-24
GRADIENT_BOUND = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch; rows of weight 0 hold targets and log-probs that must never be used."""

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    target_T: torch.Tensor
    advantage_T: torch.Tensor
    token_weight_T: torch.Tensor
    old_T: torch.Tensor
    ref_T: torch.Tensor
    cu_seqlens_S1: torch.Tensor

    def call(self, *, is_reference: bool = False, **options: Any) -> GrpoLoss:
        """The op on the case, its options over the case's own."""
        own: dict[str, Any] = {"old_logprob_T": self.old_T, "ref_logprob_T": self.ref_T}
        own |= {"cu_seqlens_S1": self.cu_seqlens_S1} | options
        rows = (self.target_T, self.advantage_T, self.token_weight_T)
        return (linear_grpo_reference if is_reference else linear_grpo)(self.hidden_TD, self.weight_VD, *rows, **own)


def make_case(T: int = 37, V: int = 301, D: int = 48, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """Confident and unsure rows; advantages of both signs and 0; ratios inside, below, above and beyond all bounds."""
    rng = torch.Generator().manual_seed(seed)
    hidden_TD = (2 * torch.randn(T, D, generator=rng)).to(dtype)
    weight_VD = (0.4 * torch.randn(V, D, generator=rng)).to(dtype)
    logits_TV = hidden_TD.double() @ weight_VD.double().T
    target_T = torch.randint(0, V, (T,), generator=rng)
    target_T[::3] = logits_TV.argmax(1)[::3] if T else target_T[::3]
    logprob_T = torch.log_softmax(logits_TV, 1).gather(1, target_T[:, None])[:, 0].float()
    advantage_T = torch.randn(T, generator=rng)
    weight_T = torch.rand(T, generator=rng) + 0.1
    shift_T = torch.tensor([0.05, 0.7, -0.7, -0.05, -1.5, 3.0, -200.0]).repeat(T // 7 + 1)[:T]
    old_T, ref_T = logprob_T - shift_T, logprob_T + torch.randn(T, generator=rng)
    advantage_T[1::5] = 0.0
    weight_T[2::6] = 0.0
    target_T[2::6], old_T[2::6], ref_T[2::6] = -100, float("nan"), float("-inf")
    bounds = torch.tensor([0, min(5, T), min(5, T), min(20, T), T], dtype=torch.int32)
    return Case(
        hidden_TD=hidden_TD, weight_VD=weight_VD, target_T=target_T, advantage_T=advantage_T, token_weight_T=weight_T,
        old_T=old_T, ref_T=ref_T, cu_seqlens_S1=bounds,
    )  # fmt: skip


def widened(value: Any) -> Any:
    """float64 where it is a float tensor."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def run(case: Case, *, is_reference: bool = False, **options: Any) -> tuple[GrpoLoss, list[torch.Tensor]]:
    """Result and [dhidden, dweight] of the op, or of its twin in float64."""
    if is_reference:
        case = Case(**{name: widened(value) for name, value in vars(case).items()})
        options = {name: widened(value) for name, value in options.items()}
    operands = [case.hidden_TD.clone().requires_grad_(), case.weight_VD.clone().requires_grad_()]
    case = replace(case, hidden_TD=operands[0], weight_VD=operands[1])
    out = case.call(is_reference=is_reference, **options)
    grads = torch.autograd.grad(out.loss, operands)
    return out, list(grads)


def logit_bound(case: Case, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """0.5 u sqrt(D) B of every row, float64 [T]."""
    size_T = (case.hidden_TD.double().abs() @ case.weight_VD.double().abs().T).amax(1)
    return 0.5 * U * math.sqrt(case.hidden_TD.shape[1]) * size_T / temperature


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300)) if want.norm() else float(got.norm())


def assert_equals_reference(case: Case, *, gradient_bound: float = GRADIENT_BOUND, **options: Any) -> None:
    got, got_grads = run(case, **options)
    want, want_grads = run(case, is_reference=True, **options)
    is_active_T = want.is_active_T
    assert torch.equal(got.is_active_T, is_active_T) and got.is_active_T.dtype == torch.bool
    assert got.clip_side_T.dtype == torch.int8 and got.loss.dtype == got.ratio_T.dtype == torch.float32
    bound_T = logit_bound(case, options.get("temperature", 1.0))
    near_T = bound_T + 4 * U * want.logprob_T.abs().clamp(min=1.0)
    assert bool(((got.logprob_T - want.logprob_T).abs() <= near_T).all())
    if got.entropy_T is not None and want.entropy_T is not None:
        assert bool(((got.entropy_T - want.entropy_T).abs() <= near_T * (1 + want.entropy_T)).all())
    assert bool(((got.ratio_T - want.ratio_T).abs() <= (2 * near_T + 4 * U) * want.ratio_T + 1e-30).all())
    assert torch.equal(got.clip_side_T, want.clip_side_T)
    if got.kl_T is not None and want.kl_T is not None:  # |dK/dlogp| is at most 1 + |q| + e^q
        q_T = torch.where(is_active_T, case.ref_T - want.logprob_T, 0.0)
        assert bool(
            ((got.kl_T - want.kl_T).abs() <= near_T * (1 + q_T.abs() + q_T.exp()) + 1e-6 * want.kl_T.abs()).all()
        )
    for values_T in (x for x in got[1:6] if x is not None):
        assert not values_T[~is_active_T].any()
    size = float(want.loss.detach().abs()) + float((case.advantage_T.abs() * case.token_weight_T * want.ratio_T).sum())
    assert abs(float(got.loss.detach()) - float(want.loss.detach())) <= 1e-5 * (1 + size)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        assert rel_l2(got_grad, want_grad) <= gradient_bound
    assert not got_grads[0][~is_active_T].any()


OBJECTIVES = {
    "grpo": {"beta": 0.04},
    "clip": {},
    "clip higher": {"eps_low": 0.2, "eps_high": 0.28},
    "never clipped": {"eps_low": 1.0, "eps_high": math.inf},
    "delta": {"delta": 1.9},
    "cispo": {"surrogate": "cispo", "eps_high": 0.28},
    "cispo + kl": {"surrogate": "cispo", "beta": 0.1},
    "gspo": {"ratio": "sequence", "eps_low": 0.1, "eps_high": 0.1},
    "gspo + kl + entropy": {"ratio": "sequence", "beta": 0.1, "entropy_coef": 0.02},
    "cispo sequence": {"surrogate": "cispo", "ratio": "sequence"},
    "k1": {"beta": 0.3, "kl": "k1"},
    "k2": {"beta": 0.3, "kl": "k2"},
    "entropy": {"entropy_coef": 0.05},
    "entropy punished": {"entropy_coef": -0.05, "beta": 0.1},
}


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_every_objective(objective: dict[str, Any]) -> None:
    case = make_case()
    assert_equals_reference(case, objective=GrpoObjective(**objective), chunk_tokens=20)


ROW_TEMPERATURE_T = torch.linspace(0.6, 1.7, 37)
CALLS = {
    "one chunk": {},
    "chunk of 1": {"chunk_tokens": 1},
    "chunk of 16": {"chunk_tokens": 16},
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": ROW_TEMPERATURE_T, "chunk_tokens": 16},
    "num_valid": {"num_valid": 290},
    "no entropy": {"want_entropy": False},
    "no old": {"old_logprob_T": None},
    "anchor": {"anchor_logprob_T": torch.full((37,), float("nan"))},
}


@pytest.mark.parametrize("name", ["grpo", "clip", "cispo", "gspo + kl + entropy", "entropy punished"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_argument(name: str, call: dict[str, Any], is_triton: bool) -> None:
    if is_triton and "chunk_tokens" in call:
        call = call | {"chunk_tokens": max(9, call["chunk_tokens"])}  # the interpreter takes its time
    case = make_case(seed=1)
    case.target_T.clamp_(max=289)
    assert_equals_reference(case, objective=GrpoObjective(**OBJECTIVES[name]), **call)


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize(("T", "V"), list(itertools.product((0, 1, 37), (1, 127, 128, 129, 301))))
def test_odd_shapes(T: int, V: int) -> None:
    for name in ("grpo", "gspo + kl + entropy"):
        assert_equals_reference(make_case(T, V, seed=T + V), objective=GrpoObjective(**OBJECTIVES[name]))


@pytest.mark.parametrize("name", ["clip", "entropy", "gspo"])
def test_bf16_operands(name: str, is_triton: bool) -> None:
    """On a CPU the products are fp32: only dhidden is rounded, once (2^-9 at most, 2^-9 / sqrt(3) in the mean square).
    On a GPU E and the scaled hidden rows are rounded too, 2^-9 / sqrt(3) each: 4e-3; the interpreter truncates E: 8e-3.
    """
    V = 601 if is_triton else 9001  # more than one block of widened weights
    case = make_case(V=V, dtype=torch.bfloat16, seed=3)
    call = {"objective": GrpoObjective(**OBJECTIVES[name]), "chunk_tokens": 16, "num_valid": V - 2, "temperature": 0.9}
    case.target_T.clamp_(max=V - 3)
    assert_equals_reference(case, gradient_bound=8e-3 if is_triton else 2.0**-8, **call)
    wide_VD = torch.zeros(V, 48)
    case.call(grad_weight_VD=wide_VD, **call)
    want = run(case, is_reference=True, **call)[1][1]
    assert rel_l2(wide_VD, want) <= (8e-3 if is_triton else GRADIENT_BOUND)


@pytest.mark.usefixtures("producer")
def test_out_of_reach_ratio_meets_its_bounds() -> None:
    """NeMo-RL 4120: logp 0, old -200: e^200 is infinite, the clipped loss is not."""
    row = torch.ones(1)
    for advantage, eps_high, delta, loss, side in (
        (1.0, 0.2, None, -1.2, 1),
        (-1.0, 0.2, 3.0, 3.0, 2),
        (-1.0, 0.2, None, math.exp(20), 0),
        (1.0, math.inf, None, -math.exp(20), 0),
    ):
        case = Case(
            hidden_TD=torch.ones(1, 1), weight_VD=torch.ones(1, 1), target_T=torch.zeros(1, dtype=torch.int64),
            advantage_T=advantage * row, token_weight_T=row, old_T=-200 * row, ref_T=row, cu_seqlens_S1=row.int(),
        )  # fmt: skip
        out, grads = run(case, objective=GrpoObjective(eps_high=eps_high, delta=delta), cu_seqlens_S1=None)
        assert float(out.loss.detach()) == pytest.approx(loss, rel=1e-6) and int(out.clip_side_T[0]) == side
        assert not any(grad.any() for grad in grads)


@pytest.mark.usefixtures("producer")
def test_sequence_with_one_dead_row_keeps_it() -> None:
    """A row of advantage 0 carries its sequence's ratio; a sequence of such rows is dead; weight 0 is always dead."""
    case = make_case(T=12, seed=4)
    case.target_T.clamp_(min=0)
    case.token_weight_T.fill_(0.5)[7] = 0.0
    case.advantage_T.fill_(1.0)[[2, 8, 9, 10, 11]] = 0.0
    bounds = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    old_T = torch.full((12,), -6.0)
    out, _ = run(case, objective=GrpoObjective(ratio="sequence"), cu_seqlens_S1=bounds, old_logprob_T=old_T)
    assert out.is_active_T.tolist() == [True] * 7 + [False] * 5
    assert out.ratio_T[:4].unique().numel() == 1 and out.ratio_T[4:7].unique().numel() == 1


def test_chunks_end_on_sequence_ends_or_the_op_sweeps_twice() -> None:
    case, objective = make_case(T=37, seed=5), GrpoObjective(ratio="sequence", eps_low=0.1)
    once, once_grads = run(case, objective=objective, chunk_tokens=37)
    for chunk_tokens in (4, 16, 20):
        again, grads = run(case, objective=objective, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(again.ratio_T, once.ratio_T, rtol=1e-5, atol=0)
        assert all(rel_l2(a, b.double()) < GRADIENT_BOUND for a, b in zip(grads, once_grads, strict=True))
    with pytest.raises(ValueError, match="the longest has 14 rows, the chunk 8; raise chunk_tokens"):
        run(case, objective=objective, chunk_tokens=8, design="chunked")


@pytest.mark.usefixtures("producer")
def test_active_idx_names_the_rows_that_count() -> None:
    case, objective = make_case(seed=6), GrpoObjective(beta=0.1)
    idx_N = torch.arange(0, 37, 3, dtype=torch.int32)
    assert_equals_reference(case, objective=objective, active_idx_N=idx_N, chunk_tokens=16)
    assert_equals_reference(case, objective=GrpoObjective(ratio="sequence"), active_idx_N=idx_N.long())
    found, found_grads = run(case, objective=objective)
    named, named_grads = run(case, objective=objective, active_idx_N=found.is_active_T.nonzero()[:, 0].int())
    assert all(torch.equal(a, b) for a, b in zip(found, named, strict=True) if a is not None and b is not None)
    assert all(torch.equal(a, b) for a, b in zip(found_grads, named_grads, strict=True))


@pytest.mark.usefixtures("producer")
def test_row_loss_is_linear_in_the_token_weights(is_triton: bool) -> None:
    """trl 5619, Liger 1082: 3 and 97 tokens give the same apart and together, because normalisers are data."""
    case, objective = make_case(T=100, seed=7), GrpoObjective(beta=0.1)
    if is_triton:  # exact sums of products: the interpreter's round by a row's place, and e^20 makes that seen
        case = replace(case, hidden_TD=case.hidden_TD.mul(8).round() / 8, weight_VD=case.weight_VD.mul(32).round() / 32)
    whole, whole_grads = run(case, objective=objective)
    total, dweight_VD = 0.0, torch.zeros_like(case.weight_VD)
    for part in (slice(0, 3), slice(3, 100)):
        names = ("hidden_TD", "target_T", "advantage_T", "token_weight_T", "old_T", "ref_T")
        bounds = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
        piece = replace(case, **{name: vars(case)[name][part] for name in names}, cu_seqlens_S1=bounds)
        out, grads = run(piece, objective=objective)
        total, dweight_VD = total + float(out.loss.detach()), dweight_VD + grads[1]
    assert total == pytest.approx(float(whole.loss.detach()), rel=1e-6)
    assert rel_l2(dweight_VD, whole_grads[1].double()) <= 1e-6


def on_cuda(case: Case) -> Case:
    """The case with all but the bounds of sequences, which stay on the host, on the first GPU."""
    return replace(case, **{key: x.cuda() for key, x in vars(case).items() if key != "cu_seqlens_S1"})


@pytest.mark.gpu
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("design", ["anchored", "chunked", "recompute"])
def test_on_cuda(design: str, dtype: torch.dtype, name: str) -> None:
    """fp32 as on the CPU; bf16: E and the scaled hidden rows are rounded to bf16, 2^-9 / sqrt(3) each: 4e-3."""
    case = make_case(dtype=dtype, seed=9)
    options = {"objective": GrpoObjective(**OBJECTIVES[name]), "temperature": 0.9}
    want, want_grads = run(case, is_reference=True, **options)
    got, grads = run(on_cuda(case), design=design, **options)
    near_T = logit_bound(case, 0.9) + 4 * U * want.logprob_T.abs().clamp(min=1.0)
    assert bool(((got.logprob_T.cpu() - want.logprob_T).abs() <= near_T).all())
    assert torch.equal(got.is_active_T.cpu(), want.is_active_T)
    bound = GRADIENT_BOUND if dtype == torch.float32 else 4e-3 + 2.0**-8  # and the gradients themselves are bf16
    assert all(rel_l2(a.cpu(), b) <= bound for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_batch_on_cuda() -> None:
    """Every number of a row, alone and among 200, at any chunk; gradients of hidden states too; and no host sync."""
    case = on_cuda(make_case(200, 4099, 64, dtype=torch.bfloat16, seed=10))
    options = {"objective": GrpoObjective(beta=0.1), "design": "anchored", "cu_seqlens_S1": None}
    idx_N = case.token_weight_T.nonzero()[:, 0].int()
    run(case, active_idx_N=idx_N, **options)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole, whole_grads = run(case, active_idx_N=idx_N, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for rows, chunk_tokens in ((slice(0, 1), None), (slice(40, 103), None), (slice(0, 200), 64)):
        names = ("hidden_TD", "target_T", "advantage_T", "token_weight_T", "old_T", "ref_T")
        piece = replace(case, **{name: vars(case)[name][rows] for name in names})
        part, _ = run(piece, chunk_tokens=chunk_tokens, **options)
        assert part.entropy_T is not None and whole.entropy_T is not None
        assert torch.equal(part.logprob_T, whole.logprob_T[rows]) and torch.equal(part.entropy_T, whole.entropy_T[rows])
    again, again_grads = run(case, active_idx_N=idx_N, **options)
    assert torch.equal(again.loss, whole.loss) and torch.equal(again_grads[1], whole_grads[1])


@pytest.mark.gpu
def test_target_that_does_not_exist_is_nan_on_cuda() -> None:
    case = on_cuda(make_case(seed=10))
    case.target_T[4], case.token_weight_T[4] = 301, 1.0
    out = case.call(objective=GrpoObjective(beta=0.1))
    assert math.isnan(out.logprob_T[4]) and math.isnan(out.loss) and int(out.logprob_T.isnan().sum()) == 1


def test_twin_equals_the_textbook_formula() -> None:
    """The specification itself, on rows that no cap touches: min(rho A, clip(rho) A), k3, mean entropy."""
    case = make_case(seed=8)
    target_T, advantage_T, weight_T = case.target_T.clamp(min=0), case.advantage_T, case.token_weight_T
    h, w = (x.double().requires_grad_() for x in (case.hidden_TD, case.weight_VD))
    logp_TV = torch.log_softmax(h @ w.T / 0.8, 1)
    logp = logp_TV.gather(1, target_T[:, None])[:, 0]
    old, ref = logp.detach() + 0.3 * torch.randn(37), logp.detach() + 0.3 * torch.randn(37)
    rho, q = (logp - old).exp(), ref - logp
    surrogate = torch.min(rho * advantage_T, rho.clamp(0.8, 1.28) * advantage_T)
    entropy = -(logp_TV.exp() * logp_TV).sum(1)
    loss = (weight_T * (-surrogate + 0.1 * (q.exp() - q - 1) - 0.01 * entropy)).sum()
    want = torch.autograd.grad(loss, (h, w))
    objective = GrpoObjective(eps_high=0.28, beta=0.1, entropy_coef=0.01)
    twin = linear_grpo_reference(
        h, w, target_T, advantage_T, weight_T, objective=objective, temperature=0.8, old_logprob_T=old,
        ref_logprob_T=ref,
    )  # fmt: skip
    assert float(twin.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-12)
    got = torch.autograd.grad(twin.loss, (h, w))
    assert max(rel_l2(a, b) for a, b in zip(got, want, strict=True)) < 1e-12
