"""Faults that other projects shipped in the same op, and the promises of ours that are not about values.

Each test names its source where it has one. T rows, V vocabulary, D width.
"""

import math
import re
from typing import Any

import pytest
import torch

from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.head_chunks import PAD_ROWS, chunk_rows
from sparkgrpo.kernels.head_sweep import CUDA_CHUNK_ROWS
from sparkgrpo.kernels.linear_grpo import GrpoLoss, linear_grpo, linear_grpo_reference

T, V, D = 40, 96, 24
PLAIN = GrpoObjective(beta=0.1)


def operands(dtype: torch.dtype = torch.float32, *, num_rows: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(num_rows, D, generator=rng).to(dtype).requires_grad_()
    return hidden_TD, (0.5 * torch.randn(V, D, generator=rng)).to(dtype).requires_grad_()


def row_inputs(num_rows: int = T) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return {
        "target_id_T": torch.randint(0, V, (num_rows,), generator=rng),
        "advantage_T": torch.randn(num_rows, generator=rng),
        "token_weight_T": torch.rand(num_rows, generator=rng) + 0.1,
        "old_logprob_T": -3 - torch.rand(num_rows, generator=rng),
        "ref_logprob_T": -3 - torch.rand(num_rows, generator=rng),
    }


def call(hidden_TD: Any, weight_VD: Any, **options: Any) -> GrpoLoss:
    given: dict[str, Any] = row_inputs(hidden_TD.shape[0]) | {"objective": PLAIN} | options
    return linear_grpo(hidden_TD, weight_VD, **given)


def gradients(out: GrpoLoss, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out.loss, inputs))


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("objective", [PLAIN, GrpoObjective(entropy_coef=0.1), GrpoObjective(ratio="sequence")])
def test_no_tensor_of_rows_times_vocabulary(objective: GrpoObjective, op_watch: Any) -> None:
    hidden_TD, weight_VD = operands(num_rows=200)
    bounds = torch.arange(0, 201, 8, dtype=torch.int32)
    with op_watch:
        out = call(hidden_TD, weight_VD, objective=objective, chunk_tokens=16, cu_seqlens_S1=bounds)
        (2 * out.loss).backward()
    assert op_watch.largest <= max(16 * V, V * D, 200 * D)


def test_dead_rows_are_not_computed(producer: str, op_watch: Any) -> None:
    hidden_TD, weight_VD = operands()
    inputs = row_inputs()
    inputs["token_weight_T"][::2] = 0.0
    inputs["advantage_T"][1::4] = 0.0
    with torch.no_grad():
        hidden_TD[::2] = hidden_TD[1::4] = float("nan")
    with op_watch:
        out = call(hidden_TD, weight_VD, **inputs | {"objective": GrpoObjective(), "old_logprob_T": None})
        out.loss.backward()
    rows = {  # 10 rows are alive: logits where they are no tile's, dweight, dhidden
        "torch": [PAD_ROWS, V, PAD_ROWS],
        "torch recompute": [PAD_ROWS, PAD_ROWS, V, PAD_ROWS],
        "anchored": [V, 10],
        "chunked": [10, V, 10],
        "recompute": [V, 10],
    }
    assert op_watch.product_rows() == rows[producer]
    assert hidden_TD.grad is not None and weight_VD.grad is not None
    assert int(out.is_active_T.sum()) == 10 and bool(weight_VD.grad.isfinite().all())
    assert not hidden_TD.grad[~out.is_active_T].any() and bool((hidden_TD.grad[out.is_active_T] != 0).any(1).all())


@pytest.mark.usefixtures("producer")
def test_living_rows_do_not_see_dead_ones() -> None:
    hidden_TD, weight_VD = operands()
    inputs = row_inputs()
    inputs["token_weight_T"][20:] = 0.0
    both, both_grads = (out := call(hidden_TD, weight_VD, **inputs)), gradients(out, hidden_TD)
    alone = call(hidden_TD[:20], weight_VD, **{name: x[:20] for name, x in inputs.items()})
    assert torch.equal(both.logprob_T[:20], alone.logprob_T)
    assert torch.equal(both_grads[0], gradients(alone, hidden_TD)[0])


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize("size", [0, T])
def test_nothing_counts(size: int) -> None:
    """trl 7077: 0/0 or a detached loss."""
    hidden_TD, weight_VD = operands(num_rows=size)
    out = call(hidden_TD, weight_VD, token_weight_T=torch.zeros(size), old_logprob_T=torch.full((size,), float("nan")))
    assert float(out.loss.detach()) == 0.0 and out.loss.requires_grad
    out.loss.backward()
    assert hidden_TD.grad is not None and not hidden_TD.grad.any() and hidden_TD.grad.shape == (size, D)
    assert weight_VD.grad is not None and not weight_VD.grad.any()


def test_row_weights_reach_dweight(is_triton: bool) -> None:
    """Liger 968: row weights applied after dweight is summed. Liger 512: it is summed in bf16, here over 64 chunks."""
    hidden_TD, weight_VD = operands(torch.bfloat16, num_rows=64)
    inputs = row_inputs(64) | {"token_weight_T": torch.linspace(1, 10, 64), "advantage_T": torch.ones(64)}
    with torch.no_grad():
        hidden_TD.copy_(hidden_TD.abs())
    total_VD = torch.zeros(V, D)
    call(hidden_TD, weight_VD, chunk_tokens=1, grad_weight_VD=total_VD, **inputs)
    wide = [x.detach().double().requires_grad_() for x in (hidden_TD, weight_VD)]
    given: dict[str, Any] = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    twin = linear_grpo_reference(wide[0], wide[1], objective=PLAIN, **given)
    # On a GPU E and the scaled rows are bf16 (4e-3; 8e-3 where the interpreter truncates): sums in bf16 would add 6e-3.
    assert rel_l2(total_VD, gradients(twin, wide[1])[0]) < (8e-3 if is_triton else 1e-5)


@pytest.mark.usefixtures("producer")
def test_grad_weight_adds_up_over_micro_batches() -> None:
    hidden_TD, weight_VD = operands()
    out = call(hidden_TD, weight_VD)
    want = gradients(out, hidden_TD, weight_VD)
    total_VD = torch.ones(V, D)
    added = call(hidden_TD, weight_VD, grad_weight_VD=total_VD)
    assert rel_l2(total_VD, 1 + want[1]) < 1e-6
    added.loss.backward()
    assert weight_VD.grad is None and hidden_TD.grad is not None and torch.equal(hidden_TD.grad, want[0])
    scaled = call(hidden_TD, weight_VD, grad_weight_VD=total_VD)
    (dhidden_TD,) = torch.autograd.grad(2 * scaled.loss, hidden_TD)
    assert bool(dhidden_TD.isnan().all())  # dweight could not be scaled any more: no silently wrong number
    before_VD = total_VD.clone()
    with torch.no_grad():
        call(hidden_TD, weight_VD, grad_weight_VD=total_VD)
    assert torch.equal(total_VD, before_VD)
    frozen_VD = torch.zeros(V, D)
    call(hidden_TD.detach(), weight_VD.detach(), grad_weight_VD=frozen_VD)
    assert torch.equal(frozen_VD, want[1])


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_operands_cost_no_product(frozen: str, producer: str, op_watch: Any) -> None:
    hidden_TD, weight_VD = operands()
    want = gradients(call(hidden_TD, weight_VD), hidden_TD, weight_VD)
    hidden_TD.requires_grad_(frozen == "weight")
    weight_VD.requires_grad_(frozen == "hidden")
    with op_watch:
        out = call(hidden_TD, weight_VD)
    num_products = 1 if frozen == "both" else 2
    num_products += {"torch recompute": frozen != "both", "anchored": -1, "recompute": -1}.get(producer, 0)
    assert len(op_watch.product_rows()) == num_products - (producer == "chunked" and frozen == "both")
    assert out.loss.requires_grad == (frozen != "both")
    if frozen != "both":
        given, grad = (hidden_TD, want[0]) if frozen == "weight" else (weight_VD, want[1])
        assert torch.equal(gradients(out, given)[0], grad)


@pytest.mark.usefixtures("producer")
def test_tied_embedding_gets_both_gradients() -> None:
    _, weight_VD = operands()
    ids = torch.arange(T)
    tied = gradients(call(torch.tanh(weight_VD[ids]), weight_VD), weight_VD)[0]
    one, two = weight_VD.detach().clone().requires_grad_(), weight_VD.detach().clone().requires_grad_()
    apart = gradients(call(torch.tanh(one[ids]), two), one, two)
    assert rel_l2(tied, apart[0] + apart[1]) < 1e-6


@pytest.mark.usefixtures("producer")
def test_backward_scales_repeats_and_refuses_second_order() -> None:
    hidden_TD, weight_VD = operands()
    out = call(hidden_TD, weight_VD)
    first = torch.autograd.grad(out.loss, (hidden_TD, weight_VD), retain_graph=True)
    kept = [x.clone() for x in first]
    scaled = torch.autograd.grad(out.loss * -2.5, (hidden_TD, weight_VD), retain_graph=True)
    again = torch.autograd.grad(out.loss, (hidden_TD, weight_VD), retain_graph=True)
    for a, b, c in zip(kept, scaled, again, strict=True):
        assert torch.equal(a * -2.5, b) and torch.equal(a, c)
    out.loss.backward(retain_graph=True)
    out.loss.backward(retain_graph=True)
    assert weight_VD.grad is not None and torch.equal(weight_VD.grad, 2 * kept[1])
    with pytest.raises(RuntimeError, match="linear_grpo has no second derivative"):
        torch.autograd.grad(out.loss, hidden_TD, create_graph=True)


@pytest.mark.usefixtures("producer")
def test_autocast_changes_nothing() -> None:
    """trl 7077: an fp32 head narrowed inside a bf16 region."""
    hidden_TD, weight_VD = operands()
    out = call(hidden_TD, weight_VD)
    grads = gradients(out, hidden_TD, weight_VD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = call(hidden_TD, weight_VD)
        inside_grads = gradients(inside, hidden_TD, weight_VD)
    assert torch.equal(out.loss, inside.loss) and torch.equal(out.logprob_T, inside.logprob_T)
    assert all(torch.equal(a, b) for a, b in zip(grads, inside_grads, strict=True))


@pytest.mark.usefixtures("producer")
def test_views_of_a_slice() -> None:
    """verl 7235: hidden copied inside, the trunk gets None. unsloth-zoo 591: a strided view fails."""
    big = torch.randn(5, 9, D, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weight_VD = operands()[1]
    for part in (slice(None, -1), slice(-8, None)):
        out = call(big[:, part].flatten(0, 1), weight_VD)
        (dbig,) = torch.autograd.grad(out.loss, big)
        assert bool((dbig[:, part] != 0).any(-1).all()) and int((dbig != 0).any(-1).sum()) == 40
    wide = torch.randn(T, D + 7, generator=torch.Generator().manual_seed(3))
    for view in (wide[:, 3 : 3 + D], wide[:, :D].t().contiguous().t(), wide[:1, :D].expand(T, D)):
        assert not view.is_contiguous()
        torch.testing.assert_close(call(view, weight_VD).logprob_T, call(view.contiguous(), weight_VD).logprob_T)
    padded_VD = torch.randn(V, D + 5, generator=torch.Generator().manual_seed(4))[:, :D]
    assert torch.equal(call(wide[:, :D], padded_VD).logprob_T, call(wide[:, :D], padded_VD.contiguous()).logprob_T)


@pytest.mark.usefixtures("producer")
def test_columns_beyond_num_valid_do_not_exist() -> None:
    """verl 5349: a column past V counted as logit 0, where all real logits are far below."""
    hidden_TD, weight_VD = operands()
    with torch.no_grad():
        hidden_TD[:, 0], weight_VD[:, 0] = 4.0, -8.0
        weight_VD[90:] = float("nan")
    inputs = row_inputs() | {"target_id_T": torch.arange(T) % 90}
    out = call(hidden_TD, weight_VD, num_valid=90, **inputs)
    logits = hidden_TD.double() @ weight_VD[:90].double().T
    assert float(logits.detach().max()) < -12
    want = torch.log_softmax(logits, 1).gather(1, inputs["target_id_T"][:, None])[:, 0]
    torch.testing.assert_close(out.logprob_T.double(), want.detach(), rtol=1e-5, atol=1e-5)
    dweight_VD = gradients(out, weight_VD)[0]
    assert not dweight_VD[90:].any() and bool(dweight_VD[:90].isfinite().all())


@pytest.mark.usefixtures("producer")
def test_certain_rows_keep_their_digits() -> None:
    """1 - p from 1e-2 to 1e-9: the gradient of such a row is proportional to it; relative 1e-3 per row."""
    num_rows = 32
    gap = torch.linspace(2, 9, num_rows) * math.log(10) + math.log(V - 1)
    hidden_TD, weight_VD = torch.zeros(num_rows, D), torch.zeros(V, D)
    hidden_TD[:, 0], weight_VD[0, 0] = gap, 1.0
    weight_VD[1:, 1] = 1e-3 * torch.arange(1, V)
    row = torch.ones(num_rows)
    target = torch.zeros(num_rows, dtype=torch.int64)
    grads = []
    for op, dtype in ((linear_grpo, torch.float32), (linear_grpo_reference, torch.float64)):
        h, w = (x.to(dtype).requires_grad_() for x in (hidden_TD, weight_VD))
        grads.append(
            torch.autograd.grad(op(h, w, target, row.to(dtype), row.to(dtype), objective=GrpoObjective()).loss, h)[0]
        )
    error_T = (grads[0].double() - grads[1]).norm(dim=1) / grads[1].norm(dim=1)
    assert float(error_T.max()) < 1e-3


@pytest.mark.usefixtures("producer")
def test_temperature_is_in_the_gradient() -> None:
    """trl 3029, miles 68: tau in the value alone. With old None and clip off, dhidden is A w (1/tau) (...)."""
    hidden_TD, weight_VD = operands()
    objective = GrpoObjective()
    want = gradients(call(hidden_TD / 0.7, weight_VD, objective=objective, old_logprob_T=None), hidden_TD, weight_VD)
    for temperature in (0.7, torch.full((T,), 0.7)):
        out = call(hidden_TD, weight_VD, objective=objective, old_logprob_T=None, temperature=temperature)
        assert all(rel_l2(a, b) < 1e-6 for a, b in zip(gradients(out, hidden_TD, weight_VD), want, strict=True))


@pytest.mark.parametrize("target", [-100, V, V + 3, 2**32 + 3, -(2**33)])
def test_target_that_does_not_exist(target: int, is_triton: bool) -> None:
    """An error where values can be read at no cost, NaN where they cannot: never a finite wrong number."""
    hidden_TD, weight_VD = operands()
    inputs = row_inputs()
    inputs["target_id_T"][7] = target
    if is_triton:
        out = call(hidden_TD, weight_VD, **inputs)
        assert out.loss.isnan() and out.logprob_T.isnan().tolist() == [row == 7 for row in range(T)]
        assert bool(gradients(out, hidden_TD)[0][7].isnan().all())
    else:
        with pytest.raises(ValueError, match=rf"must be in \[0, {V}\), got {target}; there is no ignore index"):
            call(hidden_TD, weight_VD, **inputs)
    inputs["token_weight_T"][7] = 0.0
    out = call(hidden_TD, weight_VD, **inputs)
    assert float(out.logprob_T[7]) == 0.0 and not gradients(out, hidden_TD)[0][7].any()


@pytest.mark.usefixtures("producer")
def test_repeats_give_the_same_bits() -> None:
    hidden_TD, weight_VD = operands()
    runs = [gradients(call(hidden_TD, weight_VD, chunk_tokens=16), hidden_TD, weight_VD) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_chunk_carries_work_at_a_large_vocabulary() -> None:
    """Liger 1472: a rule in V / D alone makes chunks of a few rows, and dweight is read and written for each."""
    assert CUDA_CHUNK_ROWS >= 1024
    assert chunk_rows(151_936, None) >= 128
    assert chunk_rows(151_936, 7) == 7


BAD_INPUTS = {
    "hidden_TD must be a 2-D tensor, got (2, 20, 24)": {"hidden_TD": torch.zeros(2, 20, D)},
    "hidden_TD must be bfloat16 or float32, got torch.float16; fp16 loses": {"hidden_TD": torch.zeros(T, D).half()},
    "must have one dtype, got torch.bfloat16 and torch.float32": {"hidden_TD": torch.zeros(T, D).bfloat16()},
    "must have one width D, got (40, 23) and (96, 24)": {"hidden_TD": torch.zeros(T, D - 1)},
    "weight_VD must have contiguous rows, got strides (1, 96)": {"weight_VD": torch.zeros(D, V).t()},
    "weight_VD must be on cpu like the other inputs, got meta": {"weight_VD": torch.zeros(V, D, device="meta")},
    "target_id_T must have shape [40], one value a row, got (39,)": {"target_id_T": torch.zeros(39, dtype=torch.int64)},
    "target_id_T must be int32 or int64, got torch.float32": {"target_id_T": torch.zeros(T)},
    "advantage_T must be float32, got torch.float64": {"advantage_T": torch.zeros(T).double()},
    "advantage_T must be a tensor of shape [40], got NoneType": {"advantage_T": None},
    "old_logprob_T is data and gets no gradient": {"old_logprob_T": torch.zeros(T, requires_grad=True)},
    "beta 0.1 needs ref_logprob_T, got None": {"ref_logprob_T": None},
    "temperature must be finite and above 0, got 0.0": {"temperature": 0.0},
    "temperature of every row that counts must be above 0, got -1.0": {"temperature": torch.full((T,), -1.0)},
    "temperature must be a number or a float32 tensor [T], got str": {"temperature": "1"},
    "num_valid must be an int in [1, 96] (len(tokenizer)), got 97": {"num_valid": 97},
    "chunk_tokens must be None or a positive number of rows, got 0": {"chunk_tokens": 0},
    "ratio 'sequence' needs cu_seqlens_S1": {"objective": GrpoObjective(ratio="sequence")},
    "cu_seqlens_S1 must be int32 of shape [S + 1], got torch.int64": {"cu_seqlens_S1": torch.tensor([0, T])},
    "end at the number of rows 40, got first 0, last 39": {"cu_seqlens_S1": torch.tensor([0, 39], dtype=torch.int32)},
    "cu_seqlens_S1 must start at 0, never fall": {"cu_seqlens_S1": torch.tensor([0, 9, 8, T], dtype=torch.int32)},
    "active_idx_N must hold rising row numbers in [0, 40)": {"active_idx_N": torch.tensor([3, 3])},
    "active_idx_N must be int32 row numbers [N], got torch.bool": {"active_idx_N": torch.ones(T, dtype=torch.bool)},
    "got 'chunkd'; did you mean 'chunked'?": {"design": "chunkd"},
    "design 'anchored' is made of Triton tiles, which serve CUDA, got tensors on cpu": {"design": "anchored"},
    "grad_weight_VD must be contiguous float32 (96, 24)": {"grad_weight_VD": torch.zeros(V, D).double()},
    "objective must be a GrpoObjective, got dict": {"objective": {}},
}


@pytest.mark.parametrize("message", BAD_INPUTS)
def test_bad_input(message: str) -> None:
    hidden_TD, weight_VD = operands()
    given = {"hidden_TD": hidden_TD, "weight_VD": weight_VD} | BAD_INPUTS[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**given)
