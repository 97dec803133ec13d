"""The GPU's producers in Triton's interpreter: anchors, repair, rows that do not count, and the row loss kernel.

What every producer must do alike is tested in test_linear_grpo.py, test_linear_grpo_faults.py, test_linear_logprob.py.
T rows, V vocabulary, D width; u = 2^-24.
"""

import math
from typing import Any

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective, RowInputs, grpo_row_loss, grpo_row_loss_reference
from sparkgrpo.kernels.linear_grpo import GrpoLoss, linear_grpo, linear_grpo_reference
from sparkgrpo.kernels.linear_logprob import linear_logprob, linear_logprob_reference

pytest.importorskip("triton", reason="Triton comes with Linux only")
from sparkgrpo.kernels.grpo_row_kernels import grpo_row_loss_fused  # after the skip: it needs Triton
from sparkgrpo.kernels.head_row_kernels import MAX_LOG_SUM

U = 2.0**-24
T, V, D = 37, 301, 48


@pytest.fixture(autouse=True, params=["anchored", "chunked", "recompute"])
def design(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from sparkgrpo.kernels.triton_launch import is_interpreted

    if not is_interpreted():
        pytest.skip("Triton's interpreter is off where a GPU is: the tests marked gpu run there")
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda device: True)
    return request.param


def make_rows(seed: int = 0) -> dict[str, torch.Tensor]:
    """Exact products (multiples of 1/8 and 1/32), so that a row's place in NumPy's products changes no bit."""
    rng = torch.Generator().manual_seed(seed)
    hidden_TD = (torch.randn(T, D, generator=rng) * 16).round() / 8
    weight_VD = (torch.randn(V, D, generator=rng) * 13).round() / 32
    target_T = torch.randint(V, (T,), generator=rng)
    logits_TV = hidden_TD @ weight_VD.T
    target_T[::3] = logits_TV.argmax(1)[::3]
    logprob_T = torch.log_softmax(logits_TV.double(), 1).gather(1, target_T[:, None])[:, 0].float()
    return {
        "hidden_TD": hidden_TD,
        "weight_VD": weight_VD,
        "target_id_T": target_T,
        "advantage_T": torch.randn(T, generator=rng),
        "token_weight_T": torch.rand(T, generator=rng) + 0.1,
        "old_logprob_T": logprob_T + 0.1 * torch.randn(T, generator=rng),
        "ref_logprob_T": logprob_T + 0.1 * torch.randn(T, generator=rng),
    }


def run(op: Any, rows: dict[str, torch.Tensor], **options: Any) -> tuple[GrpoLoss, tuple[torch.Tensor, ...]]:
    rows = dict(rows)
    operands = tuple(rows.pop(name).detach().requires_grad_() for name in ("hidden_TD", "weight_VD"))
    out = op(*operands, **rows, **options)
    return out, torch.autograd.grad(out.loss, operands)


def wide(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in rows.items()}


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


OBJECTIVES = [GrpoObjective(beta=0.1), GrpoObjective(entropy_coef=0.05)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["kl", "entropy"])
@pytest.mark.parametrize("shift", [0.0, 40.0, -40.0, 55.0, -55.0])
def test_a_guess_changes_no_result(design: str, objective: GrpoObjective, shift: float) -> None:
    """Up to 60 nats off nothing is repaired; log S and M/S then cancel: 4 u more for every nat between them."""
    rows = make_rows()
    want, want_grads = run(linear_grpo_reference, wide(rows), objective=objective)
    guess_T = (want.logprob_T.float() + shift).clamp(max=-1e-3)
    got, grads = run(linear_grpo, rows, objective=objective, design=design, anchor_logprob_T=guess_T)
    assert int(got.num_repaired) == 0
    bound = 4 * U * (60 + abs(shift))
    assert float((got.logprob_T - want.logprob_T).abs().max()) < bound
    assert got.entropy_T is not None and want.entropy_T is not None
    assert float((got.entropy_T - want.entropy_T).abs().max()) < bound * (1 + float(want.entropy_T.max()))
    assert all(rel_l2(a, b) < 1e-5 for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the first sweep of such a row overflows, as it may
@pytest.mark.parametrize("objective", OBJECTIVES, ids=["kl", "entropy"])
def test_rows_that_are_far_off_are_swept_again(design: str, objective: GrpoObjective) -> None:
    """A guess further than 60 nats from the truth, and a truth further than 60 from the guess 0 that replaces none."""
    rows = make_rows(1)
    rows["hidden_TD"][5] *= 16  # its target is hundreds of nats below the largest logit
    rows["target_id_T"][5] = int((rows["hidden_TD"][5] @ rows["weight_VD"].T).argmin())
    want, want_grads = run(linear_grpo_reference, wide(rows), objective=objective)
    assert float(want.logprob_T[5]) < -60
    guess_T = want.logprob_T.float()
    guess_T[5] = float("nan")
    guess_T[[7, 20, 36]] -= torch.tensor([61.0, 300.0, 1e30])
    guess_T[[0, 11, 12]] = torch.tensor([float("inf"), float("-inf"), 3.0])  # not usable: count as 0, which serves here
    got, grads = run(linear_grpo, rows, objective=objective, design=design, anchor_logprob_T=guess_T)
    assert int(got.num_repaired) == 4
    near = {"rtol": 4 * U, "atol": 240 * U}
    torch.testing.assert_close(got.logprob_T.double(), want.logprob_T.double(), **near)
    torch.testing.assert_close(got.entropy_T.double(), want.entropy_T.double(), **near)
    assert all(rel_l2(a, b) < 1e-5 for a, b in zip(grads, want_grads, strict=True))


def test_repair_leaves_neighbours_their_bits(design: str) -> None:
    if design == "chunked":
        pytest.skip("its products are cuBLAS', whose bits depend on the shape: no promise")
    rows, objective = make_rows(2), GrpoObjective(beta=0.1)
    guess_T = rows["old_logprob_T"].clamp(max=-0.01)
    plain, plain_grads = run(linear_grpo, rows, objective=objective, design=design, anchor_logprob_T=guess_T)
    far_T = guess_T.clone()
    far_T[[3, 17]] -= 100.0
    got, grads = run(linear_grpo, rows, objective=objective, design=design, anchor_logprob_T=far_T)
    is_near_T = torch.ones(T, dtype=torch.bool).index_fill(0, torch.tensor([3, 17]), False)
    assert int(got.num_repaired) == 2 and int(plain.num_repaired) == 0
    assert torch.equal(got.logprob_T[is_near_T], plain.logprob_T[is_near_T])
    assert got.entropy_T is not None and plain.entropy_T is not None
    assert torch.equal(got.entropy_T[is_near_T], plain.entropy_T[is_near_T])
    assert torch.equal(grads[0][is_near_T], plain_grads[0][is_near_T])


def test_scoring_repairs_too() -> None:
    rows = make_rows(3)
    operands = (rows["hidden_TD"], rows["weight_VD"], rows["target_id_T"])
    want = linear_logprob_reference(*(x.double() if x.is_floating_point() else x for x in operands))
    got = linear_logprob(*operands, anchor_logprob_T=torch.full((T,), -250.0))
    torch.testing.assert_close(got.logprob_T.double(), want.logprob_T, rtol=4 * U, atol=240 * U)
    torch.testing.assert_close(got.lse_T.double(), want.lse_T, rtol=4 * U, atol=240 * U)


def test_named_rows_that_do_not_count(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`active_idx_N` is taken at its word, without a sync: rows of weight 0 are computed from zeros and stay silent,
    whatever they hold."""
    monkeypatch.setattr("sparkgrpo.kernels.grpo_sweep.find_active_rows", lambda o, a, w, c, idx_N: idx_N.long())
    rows = make_rows(4)
    dead = torch.tensor([2, 3, 30])
    rows["token_weight_T"][dead] = 0.0
    for name in ("hidden_TD", "advantage_T", "old_logprob_T", "ref_logprob_T"):
        rows[name][dead] = float("nan")
    rows["target_id_T"][dead] = -100
    idx_N = torch.arange(0, T, dtype=torch.int32)[torch.arange(T) != 9]
    got, grads = run(linear_grpo, rows, objective=GrpoObjective(beta=0.1), design=design, active_idx_N=idx_N)
    clean = {name: torch.nan_to_num(x) if x.is_floating_point() else x for name, x in rows.items()}
    clean["token_weight_T"] = clean["token_weight_T"].index_fill(0, torch.tensor([9]), 0.0)
    clean["target_id_T"] = clean["target_id_T"].clamp(min=0)
    want, want_grads = run(linear_grpo_reference, wide(clean), objective=GrpoObjective(beta=0.1))
    torch.testing.assert_close(got.loss.detach().double(), want.loss.detach(), rtol=1e-5, atol=1e-6)
    assert not got.logprob_T[dead].any() and not grads[0][dead].any() and not got.is_active_T[dead].any()
    assert all(rel_l2(a, b) < 1e-5 for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.parametrize("width", [47, 50, 64])
def test_widths_that_no_descriptor_takes(design: str, width: int) -> None:
    """A row of 47 or 50 fp32 is no multiple of 16 bytes: pointers serve; 64 goes through descriptors."""
    rng = torch.Generator().manual_seed(width)
    rows = make_rows(5)
    rows["hidden_TD"], rows["weight_VD"] = (
        torch.randn(T, width, generator=rng),
        torch.randn(V, width, generator=rng) / 4,
    )
    got, grads = run(linear_grpo, rows, objective=GrpoObjective(beta=0.1), design=design, chunk_tokens=20)
    want, want_grads = run(linear_grpo_reference, wide(rows), objective=GrpoObjective(beta=0.1))
    torch.testing.assert_close(got.logprob_T.double(), want.logprob_T, rtol=1e-5, atol=1e-5)
    assert all(rel_l2(a, b) < 1e-5 for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.parametrize("vocab", [2047, 2048, 2049, 4300])
def test_splits_of_the_vocabulary(design: str, vocab: int) -> None:
    rng = torch.Generator().manual_seed(vocab)
    hidden_TD, weight_VD = torch.randn(5, 16, generator=rng), torch.randn(vocab, 16, generator=rng)
    rows = make_rows(6)
    rows = {name: x[:5] for name, x in rows.items()} | {"hidden_TD": hidden_TD, "weight_VD": weight_VD}
    rows["target_id_T"] = torch.tensor([0, vocab - 1, 2047 % vocab, 1, min(2048, vocab - 1)])
    for objective in OBJECTIVES:
        got, grads = run(linear_grpo, rows, objective=objective, design=design)
        want, want_grads = run(linear_grpo_reference, wide(rows), objective=objective)
        torch.testing.assert_close(got.logprob_T.double(), want.logprob_T, rtol=1e-5, atol=1e-5)
        assert all(rel_l2(a, b) < 1e-5 for a, b in zip(grads, want_grads, strict=True))


def test_gradient_of_a_row_sums_to_zero(design: str) -> None:
    """sum_j dz_j = 0: with a column of ones in the head, dhidden of that channel is the sum."""
    rows = make_rows(7)
    rows["weight_VD"][:, 0] = 1.0
    for objective in OBJECTIVES:
        out, grads = run(linear_grpo, rows, objective=objective, design=design)
        slope_T = rows["token_weight_T"] * (rows["advantage_T"].abs() * out.ratio_T + 1.0)  # the size of g and h
        assert bool((grads[0][:, 0].abs() < 64 * U * slope_T).all())


ROW_OBJECTIVES = [
    {},
    {"eps_low": 1.0, "eps_high": math.inf},
    {"delta": 1.5, "eps_high": 0.28},
    {"surrogate": "cispo", "eps_high": 0.28},
    {"beta": 0.3, "kl": "k1"},
    {"beta": 0.3, "kl": "k2"},
    {"beta": 0.3, "kl": "k3", "entropy_coef": 0.2},
]


@pytest.mark.parametrize("options", ROW_OBJECTIVES, ids=str)
@pytest.mark.parametrize("has_old", [True, False])
def test_row_loss_kernel_equals_its_twin(design: str, options: dict[str, Any], has_old: bool) -> None:
    """Ratios at, inside and far outside every bound, KL gaps from 1e-6 to 90 nats, dead rows full of NaN."""
    if design != "anchored":
        pytest.skip("the same for every design")
    rng, C, objective = torch.Generator().manual_seed(0), 700, GrpoObjective(**options)
    logprob_C = -5 * torch.rand(C, generator=rng)
    gap_C = torch.tensor([0.0, 1e-6, -1e-6, 0.1, -0.3, 0.7, 3.0, 25.0, -90.0, 0.499, 0.501]).repeat(64)[:C]
    weight_C = torch.rand(C, generator=rng)
    advantage_C = torch.randn(C, generator=rng).where(torch.rand(C, generator=rng) > 0.2, 0.0)
    entropy_C, ref_C, old_C = 3 * torch.rand(C, generator=rng), logprob_C + gap_C.flip(0), logprob_C - gap_C
    dead = torch.arange(3, C, 10)
    weight_C[dead] = 0.0
    for x_C in (advantage_C, ref_C, old_C, entropy_C):
        x_C[dead] = float("nan")
    inputs = RowInputs(advantage_C, weight_C, old_C if has_old else None, ref_C)
    got, twin = (op(objective, logprob_C, entropy_C, inputs) for op in (grpo_row_loss_fused, grpo_row_loss))
    for name, a, b in zip(got._fields, got, twin, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=4e-6, atol=1e-7, msg=name)
    logprob = logprob_C.double().requires_grad_()
    data = RowInputs(*(None if x is None else torch.nan_to_num(x.double()) for x in inputs[:4]))
    want_C = grpo_row_loss_reference(objective, logprob, torch.nan_to_num(entropy_C.double()), data)
    torch.testing.assert_close(got.loss_C.double(), want_C.detach(), rtol=4e-6, atol=1e-6)
    (slope_C,) = torch.autograd.grad(want_C.sum(), logprob)
    torch.testing.assert_close(got.g_C.double(), slope_C, rtol=4e-6, atol=1e-7)


def test_window_is_what_the_design_promises() -> None:
    assert MAX_LOG_SUM.value == 60.0
