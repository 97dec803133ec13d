"""The writes of the paged cache: the right places change, by the right bits, and no other.

B rows, T tokens, H query heads, K key heads, E head width, M pages a row, L layers. The pool starts as NaN, so that
equal bits outside the places mean that nothing was written. Rotated numbers: two products and a sum, 2 u of the sum of
their absolute values, u = 2^-24; bf16 adds 2^-8 of the value, in the interpreter, which truncates, 2^-7.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from sparkgrpo.kernels.kv_cache import (
    PAGE_TOKENS,
    copy_pages,
    copy_pages_reference,
    rotate_and_write,
    rotate_and_write_reference,
    write_pages,
    write_pages_reference,
)
from sparkgrpo.kernels.paged_attention import paged_attention
from sparkgrpo.kernels.rotary import rotary, rotary_reference

U = 2.0**-24
LENGTHS = (0, 1, 15, 16, 17, 0, 48)
"""Parked slots, ends of pages, a row that fills its table."""
M, NUM_PAGES = 3, 24


@pytest.fixture
def triton_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels serve CPU tensors too, and memory that is allocated starts as NaN."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(was_deterministic)


class Step(NamedTuple):
    """The arguments of `rotate_and_write`."""

    q_BHE: torch.Tensor
    k_BKE: torch.Tensor
    v_BKE: torch.Tensor
    cos_B1E: torch.Tensor
    sin_B1E: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table_BM: torch.Tensor
    context_len_B: torch.Tensor

    def with_new_pages(self) -> "Step":
        k_pages, v_pages = (torch.full_like(pages, torch.nan) for pages in (self.k_pages, self.v_pages))
        return self._replace(k_pages=k_pages, v_pages=v_pages)

    def rows(self, idx: list[int]) -> "Step":
        """Some of the rows, in this order, on a pool of their own."""
        rows = {name: getattr(self, name)[idx] for name in self._fields if "pages" not in name}
        return self.with_new_pages()._replace(**rows)

    def slots(self) -> dict[int, tuple[int, int]]:
        """Row -> (page, offset) of each row that has a token to write."""
        lengths = self.context_len_B.tolist()
        tables = self.block_table_BM.tolist()
        last_B = [(b, n - 1) for b, n in enumerate(lengths) if 0 < n <= M * PAGE_TOKENS]
        return {b: (tables[b][last // PAGE_TOKENS], last % PAGE_TOKENS) for b, last in last_B}


def make_step(device: torch.device, dtype: torch.dtype, *, R: int = 2, K: int = 2, E: int = 64) -> Step:
    """q, k and v are slices of one fused projection; pages are scattered; parked rows keep a table that names pages."""
    B, generator = len(LENGTHS), torch.Generator().manual_seed(0)
    fused = torch.randn(B, K * R + 2 * K, E, generator=generator).to(device, dtype)
    q_BHE, k_BKE, v_BKE = fused.split((K * R, K, K), 1)
    angle_B1E = torch.randint(0, 4096, (B, 1, 1), generator=generator) * 1e4 ** (-torch.arange(E // 2) / (E / 2))
    pages = torch.full((NUM_PAGES, PAGE_TOKENS, K, E), torch.nan, dtype=dtype, device=device)
    order = 1 + torch.randperm(NUM_PAGES - 1, generator=generator)[: B * M]
    return Step(
        *(q_BHE, k_BKE, v_BKE, angle_B1E.cos().to(device), angle_B1E.sin().to(device), pages, pages.clone()),
        block_table_BM=order.view(B, M).int().to(device),
        context_len_B=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    """NaN differs from NaN; its bits do not."""
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def rotation_bound(x_THE: torch.Tensor, step: Step) -> torch.Tensor:
    cos, sin = (t.double().abs().tile(2) for t in (step.cos_B1E, step.sin_B1E))
    terms = x_THE.double().abs() * cos + x_THE.double().abs().roll(x_THE.shape[2] // 2, -1) * sin
    rounding = 0.0 if x_THE.dtype == torch.float32 else 2.0**-8 if x_THE.is_cuda else 2.0**-7
    return (rounding + 2 * U) * terms


@pytest.mark.parametrize(("R", "K", "E"), [(1, 2, 64), (7, 2, 64), (4, 1, 80), (2, 3, 96), (4, 1, 128), (1, 1, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("triton_path")
def test_rotate_and_write(R: int, K: int, E: int, dtype: torch.dtype, device: torch.device) -> None:
    step = make_step(device, dtype, R=R, K=K, E=E)
    for op in (rotate_and_write, rotate_and_write_reference):
        step = step.with_new_pages()
        q_BHE = op(*step)
        want_q, want_k = (rotary_reference(x.double(), step.cos_B1E, step.sin_B1E) for x in (step.q_BHE, step.k_BKE))
        assert q_BHE.dtype == dtype and q_BHE.is_contiguous()
        assert ((q_BHE - want_q).abs() <= rotation_bound(step.q_BHE, step)).all()
        for b, (page, offset) in step.slots().items():
            assert torch.equal(step.v_pages[page, offset], step.v_BKE[b])
            assert ((step.k_pages[page, offset] - want_k[b]).abs() <= rotation_bound(step.k_BKE, step)[b]).all()
            step.k_pages[page, offset], step.v_pages[page, offset] = torch.nan, torch.nan
        assert step.k_pages[1:].isnan().all() and step.v_pages[1:].isnan().all()
        assert op(*step.rows([])).shape == (0, K * R, E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("triton_path")
def test_rotation_is_that_of_rotary(dtype: torch.dtype, device: torch.device) -> None:
    """The op of training and prefill: the same bits, where both are compiled within a rounding of each other."""
    step = make_step(device, dtype)
    q_BHE, want_q = rotate_and_write(*step), rotary(step.q_BHE, step.cos_B1E, step.sin_B1E)
    want_k = rotary(step.k_BKE, step.cos_B1E, step.sin_B1E)
    b_S = list(step.slots())
    k_SKE = torch.stack([step.k_pages[place] for place in step.slots().values()])
    if not q_BHE.is_cuda:
        assert torch.equal(q_BHE, want_q) and torch.equal(k_SKE, want_k[b_S])
    assert ((q_BHE - want_q).abs() <= rotation_bound(step.q_BHE, step)).all()
    assert ((k_SKE - want_k[b_S]).abs() <= rotation_bound(step.k_BKE, step)[b_S]).all()


@pytest.mark.parametrize("op", [rotate_and_write, rotate_and_write_reference])
@pytest.mark.usefixtures("triton_path")
def test_a_parked_slot_writes_no_live_place(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    """Index -1 writes the last slot (vllm 43810): all parked, the reference may change page 0, the kernel nothing."""
    step = make_step(device, torch.float32)
    step.context_len_B.zero_()
    assert op(*step).isfinite().all()
    first = 1 if op is rotate_and_write_reference else 0
    for pages in (step.k_pages, step.v_pages):
        assert pages[first:].isnan().all()


@pytest.mark.parametrize("op", [rotate_and_write, rotate_and_write_reference])
@pytest.mark.usefixtures("triton_path")
def test_parked_slots_change_no_live_row(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    """Padding writes live slot 0 (rvllm 32): live rows write the same bits with parked slots beside them and without,
    also where a parked slot's old table names a live row's page."""
    step = make_step(device, torch.bfloat16)
    step.block_table_BM[0] = step.block_table_BM[4]
    live = list(step.slots())
    alone = step.rows(live)
    q_SHE, q_BHE = op(*alone), op(*step)
    assert torch.equal(q_BHE[live], q_SHE)
    assert torch.equal(bits(step.k_pages[1:]), bits(alone.k_pages[1:]))
    assert torch.equal(bits(step.v_pages[1:]), bits(alone.v_pages[1:]))


@pytest.mark.parametrize("op", [rotate_and_write, rotate_and_write_reference])
@pytest.mark.usefixtures("triton_path")
def test_a_row_longer_than_its_table_writes_nothing(op: Callable[..., torch.Tensor], device: torch.device) -> None:
    step = make_step(device, torch.float32).rows([6, 4])  # the 49th token's page would be the second row's first
    step.context_len_B[0] = M * PAGE_TOKENS + 1
    op(*step)
    (place,) = step.slots().values()
    assert step.k_pages[place].isfinite().all()
    step.k_pages[place] = torch.nan
    assert step.k_pages[1:].isnan().all()


@pytest.mark.usefixtures("triton_path")
def test_bits_depend_neither_on_batch_nor_on_strides(device: torch.device) -> None:
    step = make_step(device, torch.bfloat16)
    q_BHE = rotate_and_write(*step)
    for idx in ([6], [4, 0, 2], list(range(6, -1, -1))):
        part = step.rows(idx)
        assert torch.equal(rotate_and_write(*part), q_BHE[idx])
        for place in part.slots().values():
            assert torch.equal(part.k_pages[place], step.k_pages[place])
            assert torch.equal(part.v_pages[place], step.v_pages[place])
    for order in ((1, 0, 2), (2, 1, 0)):
        names = ("q_BHE", "k_BKE", "v_BKE", "cos_B1E", "sin_B1E")
        strided = {n: getattr(step, n).permute(order).contiguous().permute(order) for n in names}
        strided["block_table_BM"] = step.block_table_BM.t().contiguous().t()
        strided["context_len_B"] = step.context_len_B.repeat_interleave(2)[::2]
        other = step.with_new_pages()._replace(**strided)
        assert torch.equal(rotate_and_write(*other), q_BHE)
        assert torch.equal(bits(other.k_pages), bits(step.k_pages))
        assert torch.equal(bits(other.v_pages), bits(step.v_pages))


@pytest.mark.parametrize("shape", [(0, 2, 64), (1, 2, 64), (37, 3, 64), (37, 1, 80), (5, 2, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [write_pages, write_pages_reference])
@pytest.mark.usefixtures("triton_path")
def test_write_pages(
    shape: tuple[int, int, int], dtype: torch.dtype, op: Callable[..., None], device: torch.device
) -> None:
    """Tokens in any order to any places; a negative one is not written, and least of all to the last place."""
    T, K, E = shape
    kv_T2KE = torch.randn(T, 2 * K, E, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    k_TKE, v_TKE = kv_T2KE.split(K, 1)
    slot_T = PAGE_TOKENS + torch.randperm(5 * PAGE_TOKENS, generator=torch.Generator().manual_seed(1))[:T]
    slot_T[2::5] = -1
    pages = torch.full((7, PAGE_TOKENS, K, E), torch.nan, dtype=dtype, device=device)
    k_pages, v_pages = pages.clone(), pages.clone()
    op(k_TKE, v_TKE, k_pages, v_pages, slot_T.to(device))
    for got, x_TKE in ((k_pages, k_TKE), (v_pages, v_TKE)):
        want = pages.clone().flatten(0, 1)
        want[slot_T[slot_T >= 0]] = x_TKE[slot_T >= 0]
        assert torch.equal(bits(got.flatten(0, 1)[PAGE_TOKENS:]), bits(want[PAGE_TOKENS:]))
        assert op is write_pages_reference or got[0].isnan().all()


@pytest.mark.parametrize("num_layers", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [copy_pages, copy_pages_reference])
@pytest.mark.usefixtures("triton_path")
def test_copy_pages(num_layers: int | None, dtype: torch.dtype, op: Callable[..., None], device: torch.device) -> None:
    """One page to several, all layers at once; what a page holds is copied bit by bit, NaN too."""
    shape = (9, PAGE_TOKENS, 3, 80) if num_layers is None else (num_layers, 9, PAGE_TOKENS, 3, 80)
    pool = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    pool[..., 5, :, :] = torch.nan
    k_pages, v_pages = pool.clone()
    source_C, target_C = (torch.tensor(x, device=device) for x in ([4, 4, 7], [8, 1, 3]))
    op(k_pages, v_pages, source_C, target_C)
    want = pool.unflatten(1, (-1, 9)) if num_layers is None else pool
    want = want.clone()
    want[:, :, target_C] = want[:, :, source_C]
    assert torch.equal(bits(torch.stack((k_pages, v_pages))), bits(want.view_as(pool)))
    before = k_pages.clone()
    op(k_pages, v_pages, source_C[:0], target_C[:0])
    assert torch.equal(bits(k_pages), bits(before))


@pytest.mark.usefixtures("triton_path")
def test_prefill_copy_and_steps_attend_like_a_dense_cache(device: torch.device) -> None:
    """A prompt of 20 tokens written once, its tail copied to a sibling, then three steps of both rows."""
    P, K, H, E, generator = 20, 2, 4, 64, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    pool = torch.full((2, 2, 6, PAGE_TOKENS, K, E), torch.nan, device=device)  # [k and v, L, ...]
    table_BM = torch.tensor([[3, 1], [3, 5]], dtype=torch.int32, device=device)
    k_TKE, v_TKE = draw(P, K, E), draw(P, K, E)
    slot_T = torch.tensor([3 * 16 + i if i < 16 else 1 * 16 + i - 16 for i in range(P)], device=device)
    for layer in range(2):
        write_pages(k_TKE, v_TKE, pool[0, layer], pool[1, layer], slot_T)
    copy_pages(pool[0], pool[1], torch.tensor([1], device=device), torch.tensor([5], device=device))
    k_BTKE, v_BTKE = (x.expand(2, P, K, E) for x in (k_TKE, v_TKE))
    for n in range(3):
        length_B = torch.full((2,), P + n + 1, dtype=torch.int32, device=device)
        angle_B1E = draw(2, 1, E // 2)
        q_BHE, k_BKE, v_BKE = draw(2, H, E), draw(2, K, E), draw(2, K, E)
        table = angle_B1E.cos(), angle_B1E.sin()
        k_BTKE = torch.cat((k_BTKE, rotary_reference(k_BKE, *table)[:, None]), 1)
        v_BTKE = torch.cat((v_BTKE, v_BKE[:, None]), 1)
        want = torch.nn.functional.scaled_dot_product_attention(
            rotary_reference(q_BHE, *table)[:, :, None],
            k_BTKE.transpose(1, 2).repeat_interleave(H // K, 1),
            v_BTKE.transpose(1, 2).repeat_interleave(H // K, 1),
        )[:, :, 0]
        for layer in range(2):
            pages = pool[0, layer], pool[1, layer]
            rotated_BHE = rotate_and_write(q_BHE, k_BKE, v_BKE, *table, *pages, table_BM, length_B)
            assert (paged_attention(rotated_BHE, *pages, table_BM, length_B) - want).abs().max() < 1e-5


@pytest.mark.usefixtures("triton_path")
def test_pools_beyond_32_bits(device: torch.device) -> None:
    torch.use_deterministic_algorithms(False)  # nothing may touch the pages between
    last_page = 2**21 + 4
    pages = torch.empty(last_page + 1, PAGE_TOKENS, 1, 64, dtype=torch.bfloat16, device=device)
    step = make_step(device, torch.bfloat16, K=1).rows([2])
    step = step._replace(block_table_BM=torch.full((1, M), last_page, dtype=torch.int32, device=device))
    rotate_and_write(*step._replace(k_pages=pages, v_pages=pages))
    assert torch.equal(pages[last_page, 14], step.v_BKE[0])
    slot_T = torch.tensor([last_page * PAGE_TOKENS + 3], device=device)
    write_pages(step.v_BKE, step.v_BKE, pages, pages, slot_T)
    assert torch.equal(pages[last_page, 3], step.v_BKE[0])
    copy_pages(pages, pages, torch.tensor([last_page], device=device), torch.tensor([last_page - 1], device=device))
    assert torch.equal(pages[last_page - 1, [3, 14]], step.v_BKE.expand(2, 1, 64))


def test_a_launch_repeats_whatever_the_lengths_are(
    triton_path: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch bakes in a length (transformers 45323): grid and numbers are those of the first step."""
    from sparkgrpo.kernels import kv_cache_kernels, triton_launch

    seen: list[tuple[Any, ...]] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: Any, **options: int) -> None:
        numbers = [x for x in args if not isinstance(x, torch.Tensor)]
        seen.append((grid, numbers, dict(constexprs), options))
        triton_launch.launch(kernel, grid, args, constexprs, **options)

    monkeypatch.setattr(kv_cache_kernels, "launch", record)
    step = make_step(device, torch.float32)
    for lengths in (LENGTHS, (1, 0, 17, 3, 4, 5, 6), (0,) * 7):
        step.context_len_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        rotate_and_write(*step)
    assert len(seen) == 3 and seen[1] == seen[0] == seen[2]


def test_reference_runs_the_same_ops_whatever_the_lengths_are(op_watch: Any, device: torch.device) -> None:
    """Fixed shapes, nothing read on the host: what a captured step may hold."""
    step, traces = make_step(device, torch.float32), []
    for lengths in (LENGTHS, (1, 0, 17, 3, 4, 5, 6), (0,) * 7):
        step.context_len_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        op_watch.calls.clear()
        with op_watch:
            rotate_and_write_reference(*step)
        traces.append(list(op_watch.calls))
    assert traces[0] and traces[1] == traces[0] == traces[2]
    assert not [name for name, _ in traces[0] if "_local_scalar_dense" in name or "nonzero" in name]


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(torch.device("cpu"), torch.float32)

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=match):
            rotate_and_write(*step._replace(**changed))

    refused(r"q_BHE must be \[B, H, 64\] with H a multiple of 2", q_BHE=step.q_BHE[..., :32])
    refused(r"k_BKE must be \[7, 2, 64\], tokens", k_BKE=step.k_BKE[:3])
    refused(r"v_BKE must be \[7, 2, 64\], tokens", v_BKE=step.v_BKE[:, :1])
    refused("v_BKE must be torch.float32 like the pages", v_BKE=step.v_BKE.bfloat16())
    refused("k_BKE requires a gradient", k_BKE=step.k_BKE.clone().requires_grad_())
    refused("k_BKE must be on cpu", k_BKE=step.k_BKE.to("meta"))
    refused(r"cos_B1E must be float32 \[7, 1, 32\]", cos_B1E=step.cos_B1E.bfloat16())
    refused(r"sin_B1E must be float32 \[7, 1, 32\]", sin_B1E=step.sin_B1E[:, 0])
    refused("block_table_BM must be int32", block_table_BM=step.block_table_BM.long())
    refused("context_len_B must be int32", context_len_B=step.context_len_B.long())
    refused("H a multiple of 2", q_BHE=step.q_BHE[:, :3])
    odd, one = torch.zeros(3, PAGE_TOKENS, 1, 7), torch.zeros(7, 1, 7)
    refused("even head width, got 7", q_BHE=one, k_BKE=one, v_BKE=one, k_pages=odd, v_pages=odd)
    k_pages, v_pages, slot_T = step.k_pages, step.v_pages, torch.zeros(7, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"page_slot_T must be int64 \[7\], got torch.int32"):
        write_pages(step.k_BKE, step.v_BKE, k_pages, v_pages, slot_T.int())
    with pytest.raises(ValueError, match=r"v_TKE must be \[7, 2, 64\]"):
        write_pages(step.k_BKE, step.v_BKE[:2], k_pages, v_pages, slot_T)
    with pytest.raises(ValueError, match=r"k_pages must be \[num_pages, 16, K, E\], pages of 16 tokens"):
        write_pages(step.k_BKE, step.v_BKE, k_pages[None], v_pages[None], slot_T)
    with pytest.raises(ValueError, match=r"or \[L, num_pages, 16, K, E\], pages of 16 tokens"):
        copy_pages(k_pages.flatten(0, 1), v_pages, slot_T, slot_T)
    with pytest.raises(ValueError, match=r"target_C must be int64 \[7\]"):
        copy_pages(k_pages, v_pages, slot_T, slot_T[:3])
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    with pytest.raises(ValueError, match="on a GPU k_pages must be bfloat16 or float32"):
        copy_pages(k_pages.half(), v_pages.half(), slot_T, slot_T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_synchronised_on_a_device(dtype: torch.dtype, device: torch.device) -> None:
    step = make_step(device, dtype, R=7)
    twin = step.with_new_pages()
    slot_T = torch.arange(PAGE_TOKENS, PAGE_TOKENS + len(LENGTHS), device=device)
    source_C, target_C = (torch.tensor([page], device=device) for page in (1, 2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ops, pages in (
            ((rotate_and_write, write_pages, copy_pages), step[5:7]),
            ((rotate_and_write_reference, write_pages_reference, copy_pages_reference), twin[5:7]),
        ):
            ops[0](*step._replace(k_pages=pages[0], v_pages=pages[1]))
            ops[1](step.k_BKE, step.v_BKE, *pages, slot_T)
            ops[2](*pages, source_C, target_C)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(bits(step.v_pages[1:]), bits(twin.v_pages[1:]))
    assert torch.equal(step.k_pages[1:].isnan(), twin.k_pages[1:].isnan())
    # Both round once; the rotated keys, up to 6, may round apart by one step of theirs.
    step_size = 2.0**-21 if dtype == torch.float32 else 2.0**-5
    assert (step.k_pages[1:] - twin.k_pages[1:]).nan_to_num().abs().max() <= step_size


@pytest.mark.gpu
def test_a_captured_write_follows_the_lengths(device: torch.device) -> None:
    """Captured with every slot parked, which changes no page; replayed with live rows: the bits of an eager call."""
    step = make_step(device, torch.bfloat16)
    want = step.with_new_pages()
    want_q = rotate_and_write(*want)
    length_B = step.context_len_B.clone()
    step.context_len_B.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q_BHE = rotate_and_write(*step)
    graph.replay()
    assert step.k_pages.isnan().all() and step.v_pages.isnan().all()
    step.context_len_B.copy_(length_B)
    graph.replay()
    assert torch.equal(q_BHE, want_q) and torch.equal(bits(step.k_pages), bits(want.k_pages))
    assert torch.equal(bits(step.v_pages), bits(want.v_pages))
