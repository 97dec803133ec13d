"""AdamW: the CPU path against torch bit for bit, the kernel against float64, and what both promise beyond the update.

Bound of one update in fp32, u = 2^-24: a few roundings of the weight and of the update, whose size is about lr:
4 u |w| + 16 u lr; of a moment 4 u of its terms. The interpreter cuts bf16 off where a GPU rounds.
"""

import math
from typing import Any

import pytest
import torch

from sparkgrpo.kernels import adamw as op_file
from sparkgrpo.kernels.adamw import CPU_BLOCK, AdamwTables, adamw, adamw_reference

U = 2.0**-24
RATES: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
CHUNK = 4096
SHAPES = [(3, 5), (1,), (0,), (2, CHUNK), (CHUNK + 1029,), (1024,), (7, 11, 13)]


def make_lists(shapes: list[tuple[int, ...]], device: torch.device, seed: int = 0) -> list[list[torch.Tensor]]:
    """Masters, gradients, moments and bf16 copies, the gradients from tiny to large."""
    rng = torch.Generator().manual_seed(seed)
    master, grad, exp_avg = ([torch.randn(shape, generator=rng) for shape in shapes] for _ in range(3))
    grad = [g * 10.0 ** torch.randint(-6, 3, g.shape, generator=rng) for g in grad]
    exp_avg_sq = [x.square() for x in exp_avg]
    copies = [w.bfloat16() for w in master]
    return [[x.to(device) for x in tensors] for tensors in (master, grad, exp_avg, exp_avg_sq, copies)]


def clone(lists: list[list[torch.Tensor]], dtype: torch.dtype | None = None) -> list[list[torch.Tensor]]:
    return [[x.to(dtype or x.dtype, copy=True) for x in tensors] for tensors in lists]


def step_of(op: Any, lists: list[list[torch.Tensor]], has_copy: bool, **options: Any) -> int:
    *quads, copies = lists
    options["grad_scale"] = torch.tensor(options.pop("scale", 1.0), device=quads[0][0].device)
    return int(op(*quads, copies if has_copy else None, **(RATES | {"step": 1} | options)))


def stored_words(lists: list[list[torch.Tensor]], has_copy: bool) -> list[torch.Tensor]:
    return [x.view(torch.int16) if has_copy else x.view(torch.int32) for x in lists[4 if has_copy else 0]]


@pytest.fixture
def triton_path(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda _: True)
    monkeypatch.setattr(op_file, "CHUNK", CHUNK)


def cut_off(w: torch.Tensor) -> torch.Tensor:
    """What the interpreter stores for an fp32 number in bf16."""
    return (w.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def narrowed(w: torch.Tensor) -> torch.Tensor:
    return w.bfloat16() if w.device.type == "cuda" else cut_off(w)


def assert_near_reference(
    got: list[list[torch.Tensor]], want: list[list[torch.Tensor]], grads: Any, scale: float
) -> None:
    for w, wide in zip(got[0], want[0], strict=True):
        assert bool(((w - wide).abs() <= 4 * U * wide.abs() + 16 * U * RATES["lr"]).all())
    for g, *moments in zip(grads, *got[2:4], *want[2:4], strict=True):
        m, v, wide_m, wide_v = moments
        g = (g * scale).double()
        assert bool(((m - wide_m).abs() <= 4 * U * (wide_m.abs() + 0.2 * g.abs() + 1e-30)).all())
        assert bool(((v - wide_v).abs() <= 4 * U * (wide_v + 1e-30)).all())


@pytest.mark.parametrize("step", [1, 2, 100_000])
@pytest.mark.parametrize("scale", [1.0, 0.03125])
@pytest.mark.parametrize("has_copy", [True, False])
def test_kernel_equals_reference(
    has_copy: bool, scale: float, step: int, device: torch.device, triton_path: None
) -> None:
    """Tensors of several chunks, of a ragged one, of one weight and of none, in one launch."""
    got = make_lists(SHAPES, device)
    got[4] = [narrowed(w) for w in got[0]]
    want, before = clone(got[:4], torch.float64), [x.clone() for x in stored_words(got, has_copy)]
    grads = [g.clone() for g in got[1]]
    num_changed = step_of(adamw, got, has_copy, scale=scale, step=step)
    step_of(adamw_reference, [*want, []], False, scale=scale, step=step)
    assert_near_reference(got, want, grads, scale)
    assert all(torch.equal(x, y) for x, y in zip(got[1], grads, strict=True)), "gradients are only read"
    after = stored_words(got, has_copy)
    assert num_changed == sum(int((x != y).sum()) for x, y in zip(after, before, strict=True)) > 0
    for w, copy in zip(got[0], got[4], strict=True):
        assert torch.equal(copy, narrowed(w)) == (has_copy or w.numel() == 0)


def test_kernel_at_odd_addresses(device: torch.device, triton_path: None) -> None:
    """Slices of a flat buffer: the same bits, by the variant that loads one word at a time."""
    want = make_lists([(CHUNK + 1029,), (50,)], device)
    got = [[torch.cat((x[:3], x))[3:] for x in tensors] for tensors in want]
    assert all(x.data_ptr() % 16 for x in got[0])
    assert step_of(adamw, got, True) == step_of(adamw, want, True)
    assert all(torch.equal(x, y) for a, b in zip(got, want, strict=True) for x, y in zip(a, b, strict=True))


def test_small_updates_are_counted_where_they_show(device: torch.device, triton_path: None) -> None:
    """At a rate of 1e-6 all masters move and few bf16 words do; without gradient and moments nothing does."""
    lists = make_lists([(5000,)], device)
    lists[4] = [narrowed(w) for w in lists[0]]
    for tensors in lists[1:4]:
        tensors[0][::5] = 0.0
    wide, before = clone(lists), [x.clone() for x in stored_words(lists, True)]
    options = {"lr": 1e-6, "weight_decay": 0.0}
    num_changed = step_of(adamw, lists, True, **options)
    assert num_changed == int((stored_words(lists, True)[0] != before[0]).sum()) < 100
    moving = step_of(adamw, wide, False, **options)
    assert 3000 < moving <= 4000 and torch.equal(wide[0][0][::5], make_lists([(5000,)], device)[0][0][::5])


@pytest.mark.parametrize("is_triton", [True, False])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_nothing_is_written_for_a_scale_that_is_not_finite(
    scale: float, is_triton: bool, device: torch.device, triton_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda _: is_triton)
    lists = make_lists(SHAPES, device)
    lists[1][3].fill_(math.nan)
    before = clone(lists)
    for op in (adamw, adamw_reference):
        assert step_of(op, lists, True, scale=scale) == 0
        assert all(
            x.equal(y)
            for a, b in zip(lists, before, strict=True)
            for x, y in zip(a, b, strict=True)
            if not x.isnan().any()
        )


@pytest.mark.parametrize("has_copy", [True, False])
def test_cpu_path_is_torchs_bit_for_bit(has_copy: bool) -> None:
    """Blocks change nothing: tensors of several, ragged, and many in one. After a clip as clip_grad_norm_ makes it."""
    shapes = [*SHAPES, (CPU_BLOCK + 1,), (2 * CPU_BLOCK - 7,), (3, CPU_BLOCK)]
    lists = make_lists(shapes, torch.device("cpu"))
    parameters = [torch.nn.Parameter(w.clone()) for w in lists[0]]
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    adam = torch.optim.AdamW(parameters, fused=True, **options)
    for p, m, v in zip(parameters, lists[2], lists[3], strict=True):
        adam.state[p] = {"step": torch.tensor(6.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    for step, bound in ((7, 10.0), (8, math.inf)):
        for p, g in zip(parameters, lists[1], strict=True):
            p.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
        scale = float(torch.clamp(bound / (norm + 1e-6), max=1.0))
        before = [x.clone() for x in stored_words(lists, has_copy)]
        num_changed = step_of(adamw, lists, has_copy, scale=scale, step=step)
        adam.step()
        assert num_changed == sum(
            int((x != y).sum()) for x, y in zip(stored_words(lists, has_copy), before, strict=True)
        )
        for i, p in enumerate(parameters):
            assert torch.equal(lists[0][i], p)
            assert torch.equal(lists[2][i], adam.state[p]["exp_avg"])
            assert torch.equal(lists[3][i], adam.state[p]["exp_avg_sq"])
            assert torch.equal(lists[4][i], p.bfloat16()) == (has_copy or p.numel() == 0)


def test_reference_is_torchs_formula() -> None:
    """In float64, where both have digits to spare."""
    lists = clone(make_lists(SHAPES, torch.device("cpu"))[:4], torch.float64)
    parameters = [torch.nn.Parameter(w.clone()) for w in lists[0]]
    adam = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)
    for p, g, m, v in zip(parameters, *lists[1:], strict=True):
        p.grad = g.clone()
        adam.state[p] = {"step": torch.tensor(3.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    adam.step()
    step_of(adamw_reference, [*lists, []], False, step=4)
    for w, p in zip(lists[0], parameters, strict=True):
        torch.testing.assert_close(w, p.detach(), rtol=1e-13, atol=1e-15)


def test_tables_are_kept_while_nothing_moves(device: torch.device, triton_path: None) -> None:
    lists, tables = make_lists(SHAPES, device), AdamwTables()
    step_of(adamw, lists, True, tables=tables)
    first = tables.tensors
    assert len(first[1]) == sum(-(-x.numel() // CHUNK) for x in lists[0])
    step_of(adamw, lists, True, tables=tables, step=2)
    assert all(x is y for x, y in zip(tables.tensors, first, strict=True))
    lists[1] = [g.clone() for g in lists[1]]  # as after gradients were dropped and made again
    want = clone(lists)
    step_of(adamw, lists, True, tables=tables, step=3)
    step_of(adamw, want, True, step=3)
    assert all(torch.equal(x, y) for x, y in zip(lists[0], want[0], strict=True))
    step_of(adamw, lists, False, tables=tables, step=4)
    step_of(adamw, want, False, step=4)
    assert all(torch.equal(x, y) for x, y in zip(lists[0], want[0], strict=True))


def test_weights_that_are_not_there_are_not_counted(device: torch.device, triton_path: None) -> None:
    """Behind the end of a tensor everything reads as 0, and without an epsilon 0 / 0 is no weight that stood still."""
    lists = make_lists([(5,)], device)
    assert step_of(adamw, lists, False, eps=0.0) == 5


def test_no_tensors(device: torch.device, triton_path: None) -> None:
    assert int(adamw([], [], [], [], None, step=1, grad_scale=torch.ones((), device=device), **RATES)) == 0


@pytest.mark.parametrize(
    ("message", "index", "bad"),
    [
        ("exp_avg must hold one tensor for each of the 2 masters, got 1", 2, [torch.zeros(2, 3)]),
        (r"grad\[1\] must be contiguous torch.float32", 1, [torch.zeros(2, 3), torch.zeros(4).bfloat16()]),
        (r"grad\[0\] must be contiguous .* shape \(2, 3\)", 1, [torch.zeros(3, 2), torch.zeros(4)]),
        (r"master\[0\] must be contiguous .* strides \(1, 2\)", 0, [torch.zeros(3, 2).t(), torch.zeros(4)]),
        (r"bf16_copy\[0\] must be contiguous torch.bfloat16", 4, [torch.zeros(2, 3), torch.zeros(4)]),
    ],
)
def test_bad_lists(message: str, index: int, bad: list[torch.Tensor]) -> None:
    lists = make_lists([(2, 3), (4,)], torch.device("cpu"))
    lists[index] = bad
    with pytest.raises(ValueError, match=message):
        step_of(adamw, lists, True)


def test_bad_numbers() -> None:
    lists = make_lists([(2, 3)], torch.device("cpu"))
    with pytest.raises(ValueError, match="step must be 1 for the first update, got 0"):
        step_of(adamw, lists, True, step=0)
    with pytest.raises(ValueError, match=r"grad_scale must be a float32 scalar tensor, got torch.float32 \(2,\)"):
        step_of(adamw, lists, True, scale=[1.0, 1.0])
