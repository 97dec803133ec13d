"""Paged attention against dense attention in float64, on pages that are NaN wherever no row has a token.

B rows, H query heads, K key heads, R = H / K, E head width, M pages a row. Bounds: fp32 1e-5, some 40 roundings of
numbers near 1; bf16 2e-2, since results reach 3 and the interpreter's store truncates them (2^-7 of the value), where a
GPU rounds them and the exponentials (2^-9 each).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from sparkgrpo.kernels.kv_cache import PAGE_TOKENS
from sparkgrpo.kernels.paged_attention import (
    FEW_ROWS,
    AttentionScratch,
    num_partials,
    paged_attention,
    paged_attention_reference,
    split_length,
)

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTHS = (0, 1, 15, 16, 17, 255, 256, 257, 320)
"""Ends of pages and splits, and a row that fills its table."""
M = 20


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


class Case(NamedTuple):
    """The arguments of `paged_attention`, and the tokens that lie in the pages."""

    q_BHE: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table_BM: torch.Tensor
    context_len_B: torch.Tensor
    kv_2BTKE: torch.Tensor

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return self[:5]

    def rows(self, idx: list[int]) -> tuple[torch.Tensor, ...]:
        """The same pages for some of the rows, in this order."""
        q_BHE, k_pages, v_pages, block_table_BM, context_len_B = self.args
        return q_BHE[idx], k_pages, v_pages, block_table_BM[idx], context_len_B[idx]


def make_case(
    lengths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    R: int = 2,
    K: int = 2,
    E: int = 64,
    num_pages: int = M,
    place_seed: int = 1,
) -> Case:
    """Rows of these lengths in pages that `place_seed` scatters; NaN where no token lies, page 0 included."""
    B, capacity = len(lengths), num_pages * PAGE_TOKENS
    generator = torch.Generator().manual_seed(0)
    q_BHE = torch.randn(B, K * R, E, generator=generator).to(dtype)
    kv_2BTKE = torch.randn(2, B, capacity, K, E, generator=generator).to(dtype)
    context_len_B = torch.tensor(lengths, dtype=torch.int32)
    holds_BT = torch.arange(capacity) < context_len_B[:, None]
    kv_2BTKE[:, ~holds_BT] = torch.nan
    is_used_BM = holds_BT.unflatten(1, (num_pages, PAGE_TOKENS)).any(2)
    num_used = int(is_used_BM.sum())
    order = 1 + torch.randperm(num_used + 3, generator=torch.Generator().manual_seed(place_seed))[:num_used]
    block_table_BM = torch.zeros(B, num_pages, dtype=torch.int32)
    block_table_BM[is_used_BM] = order.int()
    pages = torch.full((2, num_used + 4, PAGE_TOKENS, K, E), torch.nan, dtype=dtype)
    pages[:, order] = kv_2BTKE.unflatten(2, (num_pages, PAGE_TOKENS))[:, is_used_BM]
    tensors = (q_BHE, pages[0], pages[1], block_table_BM, context_len_B, kv_2BTKE)
    return Case(*(x.to(device) for x in tensors))


def dense_attention(case: Case) -> torch.Tensor:
    """Each row alone, in float64, from its tokens: no pages, no masks."""
    _, H, _ = case.q_BHE.shape
    out_BHE = torch.zeros_like(case.q_BHE, dtype=torch.float64)
    for b, length in enumerate(case.context_len_B.tolist()):
        k, v = case.kv_2BTKE[:, b, :length].double().transpose(1, 2)  # [K, length, E]
        k, v = (x.repeat_interleave(H // k.shape[0], 0) for x in (k, v))
        score = (k @ case.q_BHE[b].double()[:, :, None])[:, :, 0] * case.q_BHE.shape[2] ** -0.5
        if length:
            out_BHE[b] = (score.softmax(-1)[:, None] @ v)[:, 0]
    return out_BHE


def run_splits(case: Case, split_len: int) -> torch.Tensor:
    from sparkgrpo.kernels.paged_attention_kernels import paged_attention_fwd

    B, H, E = case.q_BHE.shape
    P = B * H * -(-case.block_table_BM.shape[1] * PAGE_TOKENS // split_len)
    scratch = filled_scratch(P, E, case.q_BHE.device)
    q_BHE, *rest = case.args
    return paged_attention_fwd(q_BHE, *rest, (scratch.top_P, scratch.total_P, scratch.acc_PE), split_len)


def filled_scratch(P: int, E: int, device: torch.device, value: float = torch.nan) -> AttentionScratch:
    full = [torch.full(shape, value, device=device) for shape in ((P,), (P,), (P, E))]
    return AttentionScratch(top_P=full[0], total_P=full[1], acc_PE=full[2])


SHAPES = [(1, 2, 64), (7, 2, 64), (2, 1, 80), (1, 2, 96), (4, 1, 128), (8, 1, 128), (17, 1, 64), (4, 1, 256)]


@pytest.mark.parametrize(("R", "K", "E"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("triton_path")
def test_equals_dense_attention(R: int, K: int, E: int, dtype: torch.dtype, device: torch.device) -> None:
    """bf16 in the interpreter: operands are widened, since its bf16 product is wrong (triton 11584)."""
    case = make_case(LENGTHS, device, dtype, R=R, K=K, E=E)
    out_BHE, want_BHE = paged_attention(*case.args), dense_attention(case)
    assert out_BHE.dtype == dtype and out_BHE.is_contiguous()
    assert (out_BHE - want_BHE).abs().max() < BOUND[dtype]
    twin_BHE = paged_attention_reference(*case.args)
    assert twin_BHE.dtype == dtype and (twin_BHE - want_BHE).abs().max() < BOUND[dtype]


def test_reference_computes_in_float64_where_the_inputs_are(device: torch.device) -> None:
    case = make_case(LENGTHS, device, torch.float64)
    assert (paged_attention_reference(*case.args) - dense_attention(case)).abs().max() < 1e-13


@pytest.mark.parametrize("split_len", [16, 48, 64, 128, 272, 320, 1024])
@pytest.mark.usefixtures("triton_path")
def test_merged_equals_at_once_at_every_split_length(split_len: int, device: torch.device) -> None:
    """Prefix merge wrong (vllm 22003, 22103)."""
    case = make_case(LENGTHS, device)
    assert (run_splits(case, split_len) - dense_attention(case)).abs().max() < BOUND[torch.float32]


@pytest.mark.usefixtures("triton_path")
def test_splits_far_apart_in_score(device: torch.device) -> None:
    """One split holds all of the mass, before and behind others whose exponentials are 0."""
    case = make_case((48, 48, 48), device, num_pages=3)
    for b in range(3):
        page = int(case.block_table_BM[b, b])
        case.k_pages[page] = 40 * case.q_BHE[b, 0] * torch.ones(PAGE_TOKENS, 2, 1, device=device)
    k_BTKE = case.k_pages[case.block_table_BM.long()].flatten(1, 2)
    want_BHE = dense_attention(case._replace(kv_2BTKE=torch.stack((k_BTKE, case.kv_2BTKE[1]))))
    # Scores reach 40 |q|^2 / 8 = 320 and are off by a few of their units, 2^-16.
    assert (run_splits(case, 16) - want_BHE).abs().max() < 1e-3


@pytest.mark.usefixtures("triton_path")
def test_a_finished_row_is_exact_zeros_among_many_unused_splits(device: torch.device) -> None:
    """Empty split NaN or 1 (flashinfer 4401)."""
    case = make_case((0, 5, 0), device, num_pages=40)
    scratch = filled_scratch(num_partials(3, 4, 40), 64, device)
    out_BHE = paged_attention(*case.args, scratch=scratch)
    assert (out_BHE[[0, 2]] == 0).all() and (out_BHE - dense_attention(case)).abs().max() < 1e-5
    is_written = ~scratch.top_P.view(3, 4, -1).isnan()
    assert is_written[1, :, 0].all() and is_written.sum() == 4, "a split beyond a row was written"


@pytest.mark.usefixtures("triton_path")
def test_parking_a_row_changes_no_other(device: torch.device) -> None:
    case = make_case(LENGTHS, device)
    want_BHE = paged_attention(*case.args)
    before = [pages.view(torch.int32).clone() for pages in (case.k_pages, case.v_pages)]
    case.context_len_B[[3, 8]] = 0  # their tables still name pages
    out_BHE = paged_attention(*case.args)
    others = [b for b in range(len(LENGTHS)) if b not in (3, 8)]
    assert torch.equal(out_BHE[others], want_BHE[others]) and (out_BHE[[3, 8]] == 0).all()
    for pages, old in zip((case.k_pages, case.v_pages), before, strict=True):
        assert torch.equal(pages.view(torch.int32), old)


@pytest.mark.usefixtures("triton_path")
def test_page_0_is_nobodys(device: torch.device) -> None:
    """Padding writes live slot 0 (rvllm 32): whatever lies in page 0, live rows keep their bits."""
    case = make_case(LENGTHS, device, torch.bfloat16)
    want_BHE = paged_attention(*case.args)
    for value in (0.0, 1e30, torch.inf):
        case.k_pages[0], case.v_pages[0] = value, value
        assert torch.equal(paged_attention(*case.args), want_BHE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("triton_path")
def test_bits_depend_neither_on_batch_nor_on_places_nor_on_the_tables_width(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Padding shifts positions (unsloth 3699): alone, reversed, in a wider table, in other pages."""
    case = make_case(LENGTHS, device, dtype)
    want_BHE = paged_attention(*case.args)
    for idx in ([1], [8], list(range(8, -1, -1)), [7, 2, 7]):
        assert torch.equal(paged_attention(*case.rows(idx)), want_BHE[idx])
    moved = make_case(LENGTHS, device, dtype, place_seed=2)
    assert not torch.equal(moved.block_table_BM, case.block_table_BM)
    assert torch.equal(paged_attention(*moved.args), want_BHE)
    wide_BM = torch.cat((case.block_table_BM, case.block_table_BM.flip(1)), 1)
    assert torch.equal(paged_attention(*case._replace(block_table_BM=wide_BM).args), want_BHE)


@pytest.mark.usefixtures("triton_path")
def test_bits_are_the_same_for_every_batch_from_64_rows_on(device: torch.device) -> None:
    lengths = (600, 300, *([3] * (FEW_ROWS - 2)))
    case = make_case(lengths, device, R=1, K=1, num_pages=38)
    assert split_length(FEW_ROWS - 1) == 256 and split_length(FEW_ROWS) == split_length(1024) == 512
    want_BHE = paged_attention(*case.args)
    more = [*range(FEW_ROWS), 1, 0, 5]
    assert torch.equal(paged_attention(*case.rows(more)), want_BHE[more])
    few_BHE = paged_attention(*case.rows([0, 1]))
    assert (few_BHE - want_BHE[:2]).abs().max() < 1e-5
    assert (few_BHE - dense_attention(case)[:2]).abs().max() < 1e-5


@pytest.mark.usefixtures("triton_path")
def test_siblings_share_their_prompts_pages(device: torch.device) -> None:
    case = make_case((40, 35, 33), device, num_pages=4)
    case.block_table_BM[1:, :2] = case.block_table_BM[0, :2]
    case.kv_2BTKE[:, 1:, :32] = case.kv_2BTKE[:, :1, :32]
    assert (paged_attention(*case.args) - dense_attention(case)).abs().max() < BOUND[torch.float32]


@pytest.mark.usefixtures("triton_path")
def test_a_row_longer_than_its_table_is_nan_and_harms_nobody(device: torch.device) -> None:
    case = make_case((32, 5, 32), device, num_pages=2)
    want_BHE = paged_attention(*case.args)
    case.context_len_B[0] = 33
    ones = filled_scratch(num_partials(3, 4, 2), 64, device, 1.0)  # not what a merge that reads it could make NaN
    for op in (paged_attention, paged_attention_reference):
        out_BHE = op(*case.args, scratch=ones)
        assert out_BHE[0].isnan().all() and (out_BHE[1:] - want_BHE[1:]).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's, of inf - inf
@pytest.mark.usefixtures("triton_path")
def test_what_is_not_finite_in_a_row_stays_in_it_and_is_not_hidden(device: torch.device) -> None:
    case = make_case((20, 20, 20), device, num_pages=2)
    want_BHE = paged_attention(*case.args)
    case.q_BHE[1] = torch.nan
    for op in (paged_attention, paged_attention_reference):
        out_BHE = op(*case.args)
        assert out_BHE[1].isnan().all() and (out_BHE - want_BHE)[[0, 2]].abs().max() < 1e-5


@pytest.mark.usefixtures("triton_path")
def test_strides_change_no_bit(device: torch.device) -> None:
    case = make_case(LENGTHS, device, torch.bfloat16)
    want_BHE = paged_attention(*case.args)
    B, H, E = case.q_BHE.shape
    fused = torch.full((B, H + 4, E), torch.nan, dtype=torch.bfloat16, device=device)
    fused[:, :H] = case.q_BHE
    heads_first = case.q_BHE.transpose(0, 1).contiguous().transpose(0, 1)
    channels_first = case.q_BHE.transpose(0, 2).contiguous().transpose(0, 2)
    for q_BHE in (fused[:, :H], heads_first, channels_first):
        assert torch.equal(paged_attention(q_BHE, *case.args[1:]), want_BHE)
    table_MB = case.block_table_BM.t().contiguous()
    length_2B = case.context_len_B.repeat_interleave(2)
    rows = (table_MB.t(), length_2B[::2])
    assert torch.equal(paged_attention(*case.args[:3], *rows), want_BHE)


@pytest.mark.usefixtures("triton_path")
def test_pools_beyond_32_bits(device: torch.device) -> None:
    torch.use_deterministic_algorithms(False)  # nothing may touch the pages between
    last_page = 2**21 + 4
    pages = torch.empty(last_page + 1, PAGE_TOKENS, 1, 64, device=device)
    case = make_case((20,), device, K=1, num_pages=2)
    kv_TKE = case.kv_2BTKE[0, 0].nan_to_num()
    pages[[last_page, 2]] = kv_TKE.unflatten(0, (2, PAGE_TOKENS))
    table_BM = torch.tensor([[last_page, 2]], dtype=torch.int32, device=device)
    want_BHE = dense_attention(case._replace(kv_2BTKE=torch.stack((kv_TKE, kv_TKE))[:, None]))
    assert (paged_attention(case.q_BHE, pages, pages, table_BM, case.context_len_B) - want_BHE).abs().max() < 1e-5


@pytest.mark.usefixtures("triton_path")
def test_scratch_serves_every_smaller_batch_and_none(device: torch.device) -> None:
    for max_rows in (1, 63, 64, 70, 200):
        sizes = {"num_heads": 4, "width": 64, "num_pages": 40, "device": device}
        scratch = AttentionScratch.allocate(max_rows=max_rows, **sizes)
        assert len(scratch.top_P) == len(scratch.total_P) == len(scratch.acc_PE)
        assert len(scratch.top_P) == max(num_partials(B, 4, 40) for B in range(1, max_rows + 1))
    case = make_case(LENGTHS, device)
    scratch = filled_scratch(num_partials(70, 4, M), 64, device)
    assert torch.equal(paged_attention(*case.args, scratch=scratch), paged_attention(*case.args))
    for op in (paged_attention, paged_attention_reference):
        assert op(*case.rows([]), scratch=scratch).shape == (0, 4, 64)


def test_a_launch_repeats_whatever_the_lengths_are(
    triton_path: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch bakes in a length (transformers 45323): grid and numbers are those of the first step."""
    from sparkgrpo.kernels import paged_attention_kernels, triton_launch

    seen: list[tuple[Any, ...]] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: Any, **options: int) -> None:
        numbers = [x for x in args if not isinstance(x, torch.Tensor)]
        seen.append((grid, numbers, dict(constexprs), options))
        triton_launch.launch(kernel, grid, args, constexprs, **options)

    monkeypatch.setattr(paged_attention_kernels, "launch", record)
    case = make_case((32, 32, 32), device, num_pages=2)
    for lengths in ((32, 32, 32), (1, 0, 17), (0, 0, 0)):
        case.context_len_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        paged_attention(*case.args)
    assert len(seen) == 6 and seen[:2] == seen[2:4] == seen[4:]


def test_reference_runs_the_same_ops_whatever_the_lengths_are(op_watch: Any, device: torch.device) -> None:
    """Fixed shapes, nothing read on the host: what a captured step may hold."""
    case = make_case((32, 32, 32), device, num_pages=2)
    traces = []
    for lengths in ((32, 32, 32), (1, 0, 17), (0, 0, 0)):
        case.context_len_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        op_watch.calls.clear()
        with op_watch:
            paged_attention_reference(*case.args)
        traces.append(list(op_watch.calls))
    assert traces[0] and traces[1] == traces[0] == traces[2]
    assert not [name for name, _ in traces[0] if "_local_scalar_dense" in name or "nonzero" in name]


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case((5, 6), torch.device("cpu"))
    q_BHE, k_pages, v_pages, table_BM, length_B = case.args

    def refused(match: str, **changed: Any) -> None:
        names = ("q_BHE", "k_pages", "v_pages", "block_table_BM", "context_len_B")
        arguments = dict(zip(names, case.args, strict=True)) | changed
        with pytest.raises(ValueError, match=match):
            paged_attention(**arguments)

    refused(r"k_pages must be \[num_pages, 16, K, E\]", k_pages=k_pages[:, :8])
    refused("k_pages must be contiguous", k_pages=k_pages.transpose(2, 3).contiguous().transpose(2, 3))
    refused("must have one shape and dtype", v_pages=v_pages.bfloat16())
    refused("v_pages is changed in place", v_pages=v_pages.clone().requires_grad_())
    refused("v_pages must be on cpu", v_pages=v_pages.to("meta"))
    refused(r"q_BHE must be \[B, H, 64\] with H a multiple of 2", q_BHE=q_BHE[:, :3])
    refused(r"q_BHE must be \[B, H, 64\]", q_BHE=q_BHE[..., :32])
    refused("q_BHE must be torch.float32 like the pages", q_BHE=q_BHE.bfloat16())
    refused("run it under torch.no_grad", q_BHE=q_BHE.clone().requires_grad_())
    refused(r"block_table_BM must be \[2, M\]", block_table_BM=table_BM[:1])
    refused("block_table_BM must be int32, got torch.int64", block_table_BM=table_BM.long())
    refused(r"context_len_B must be \[2\]", context_len_B=length_B[:1])
    refused("context_len_B must be int32", context_len_B=length_B.long())
    refused("scratch must have room for 16 partials of width 64, got 15", scratch=filled_scratch(15, 64, q_BHE.device))
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda x: True)
    half = {"q_BHE": q_BHE.half(), "k_pages": k_pages.half(), "v_pages": v_pages.half()}
    refused("on a GPU k_pages must be bfloat16 or float32", **half)
    narrow = {"q_BHE": q_BHE[..., :24], "k_pages": torch.zeros(3, 16, 2, 24), "v_pages": torch.zeros(3, 16, 2, 24)}
    refused("heads must be a multiple of 16", **narrow)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "K", "E"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_splits_on_a_device(R: int, K: int, E: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiler breaks inline mask (lmdeploy 4696): from 1 to 20 splits, compiled, nothing synchronised."""
    case = make_case(LENGTHS, device, dtype, R=R, K=K, E=E)
    want_BHE = dense_attention(case)
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_splits in range(1, M + 1):
            results.append(run_splits(case, -(-M // num_splits) * PAGE_TOKENS))
        results.append(paged_attention(*case.args))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out_BHE in results:
        assert (out_BHE[0] == 0).all() and (out_BHE - want_BHE).abs().max() < BOUND[dtype]


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths(device: torch.device) -> None:
    """Captured with every slot parked, replayed with live rows: the bits of an eager call."""
    case = make_case(LENGTHS, device, torch.bfloat16, R=7)
    scratch = filled_scratch(num_partials(len(LENGTHS), 14, M), 64, device)
    want_BHE = paged_attention(*case.args, scratch=scratch)
    length_B = case.context_len_B.clone()
    case.context_len_B.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_BHE = paged_attention(*case.args, scratch=scratch)
    graph.replay()
    assert (out_BHE == 0).all()
    case.context_len_B.copy_(length_B)
    graph.replay()
    assert torch.equal(out_BHE, want_BHE)
