"""top_k, top_p and min_p against transformers' warpers in float64, ties included, and in the op that samples.

B rows, V vocabulary. fp32 sums of probabilities differ from float64's in the last bits: no top_p here is a multiple of
1 / n, which n equal tokens would meet exactly.
"""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparkgrpo.kernels.sampling import Filters, check_filters, filter_logits_, sample_update

INF = torch.inf


def make_filters(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))


def filtered(
    logits_BV: torch.Tensor,
    *,
    temperature: float = 1.0,
    num_valid: int | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    logits_BV = logits_BV.clone()
    filter_logits_(
        logits_BV,
        num_valid=num_valid or logits_BV.shape[1],
        inv_temperature_1=torch.tensor([1 / temperature if temperature else 0.0]),
        filters=make_filters(top_k, top_p, min_p),
    )
    return logits_BV


def kept_by_transformers(
    logits_BV: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """In the order of `GenerationMixin._get_logits_processor`, each left out where it is off, as there."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(0, 0, dtype=torch.long), logits_BV.double()).isfinite()


def random_logits(B: int, V: int, seed: int = 0, deviation: float = 2.0) -> torch.Tensor:
    return deviation * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


def assert_keeps_the_same(logits_BV: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    got = filtered(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    is_kept = kept_by_transformers(logits_BV, temperature, top_k, top_p, min_p)
    assert torch.equal(got.isfinite(), is_kept)
    assert torch.equal(got[is_kept], logits_BV[is_kept]), "what is kept is not changed"
    assert bool(is_kept.any(1).all())


OPTIONS = list(itertools.product((0, 1, 7, 500), (1.0, 0.8731, 0.3137, 1e-4), (0.0, 0.05, 1.0)))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), OPTIONS)
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_equals_transformers(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    for V in (1, 2, 61, 300):
        assert_keeps_the_same(random_logits(24, V, seed=V), temperature, top_k, top_p, min_p)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), OPTIONS)
def test_equals_transformers_on_ties(top_k: int, top_p: float, min_p: float) -> None:
    """Few values, so that the k-th, the edge of the nucleus and the maximum are shared by many tokens.

    As many of each value stay; which of them is arbitrary there (its sort is not stable), and the lowest indices here.
    """
    for num_values, V in ((2, 40), (6, 300), (40, 300)):
        logits_BV = torch.randint(0, num_values, (24, V), generator=torch.Generator().manual_seed(V)) * 2.0**-2
        logits_BV += torch.tensor([0.0, 2.0**-6]).repeat(12)[:, None]
        got = filtered(logits_BV, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = logits_BV.masked_fill(~kept_by_transformers(logits_BV, 1.0, top_k, top_p, min_p), -INF)
        assert torch.equal(got.sort(1).values, expected.sort(1).values)
        edge_B1 = got.masked_fill(got == -INF, INF).amin(1, keepdim=True)
        is_edge_kept = (got == edge_B1).int().masked_fill(logits_BV != edge_B1, -1)
        for row in is_edge_kept:
            assert row[row >= 0].diff().le(0).all(), "a later one stayed in place of an earlier one"


def test_all_logits_equal() -> None:
    """top_k and min_p keep ties whole; top_p cuts through them: 3 of 8 equal tokens reach a mass of 0.3."""
    flat_BV = torch.zeros(1, 8)
    assert int(filtered(flat_BV, top_k=3).isfinite().sum()) == 8
    assert int(filtered(flat_BV, min_p=1.0).isfinite().sum()) == 8
    assert filtered(flat_BV, top_p=0.3).isfinite().tolist() == [[True] * 3 + [False] * 5]


def test_order_is_temperature_then_k_then_p_then_min_p() -> None:
    """Of probabilities 0.4 0.3 0.2 0.1: p of 0.75 after k of 2 is taken of 0.57 0.43, and before it of all four."""
    logits_BV = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert filtered(logits_BV, top_p=0.75).isfinite().tolist() == [[True, True, True, False]]
    assert filtered(logits_BV, top_k=2, top_p=0.56).isfinite().tolist() == [[True, False, False, False]]
    assert filtered(logits_BV, top_p=0.56).isfinite().tolist() == [[True, True, False, False]]
    assert filtered(logits_BV, top_p=0.75, temperature=0.3).isfinite().tolist() == [[True, True, False, False]]
    # min_p 0.6 before top_p would leave two tokens, of which 0.56 takes one
    assert filtered(logits_BV, top_p=0.56, min_p=0.6).isfinite().tolist() == [[True, True, False, False]]


def test_off_changes_nothing() -> None:
    logits_BV = random_logits(5, 60)
    logits_BV[:, ::7] = -INF
    logits_BV[:, 3] = -300.0  # a probability of 0 in fp32 is no reason to drop a token
    assert torch.equal(filtered(logits_BV), logits_BV)
    assert torch.equal(filtered(logits_BV, top_k=60), logits_BV)


def test_greedy_rows_are_left_alone() -> None:
    """Their log-prob is that of the full softmax at temperature 1."""
    logits_BV = random_logits(5, 60)
    assert torch.equal(filtered(logits_BV, temperature=0.0, top_k=2, top_p=0.3, min_p=0.5), logits_BV)


def test_columns_beyond_num_valid_neither_count_nor_change() -> None:
    logits_BV = random_logits(5, 60)
    padded_BV = torch.cat((logits_BV, torch.full((5, 4), 50.0)), 1)
    got = filtered(padded_BV, num_valid=60, top_k=9, top_p=0.8, min_p=0.01)
    assert torch.equal(got[:, :60], filtered(logits_BV, top_k=9, top_p=0.8, min_p=0.01))
    assert (got[:, 60:] == 50).all()


@pytest.mark.parametrize("value", [torch.nan, INF])
def test_a_row_that_is_not_finite_stays_so(value: float) -> None:
    logits_BV = random_logits(3, 60)
    logits_BV[1, 5] = value
    got = filtered(logits_BV, top_k=9, top_p=0.8, min_p=0.01)
    assert torch.equal(got[1, 5], logits_BV[1, 5]) or got[1, 5].isnan()
    clean = filtered(logits_BV[[0, 2]], top_k=9, top_p=0.8, min_p=0.01)
    assert torch.equal(got[[0, 2]], clean)


def sampled(logits_BV: torch.Tensor, filters: Filters | None, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs of one step."""
    B, i32 = len(logits_BV), {"dtype": torch.int32}
    token_B, logprob_SC = torch.zeros(B, **i32), torch.zeros(B + 1, 1)
    sample_update(
        logits_BV, num_valid=logits_BV.shape[1], filters=filters, token_B=token_B, out_logprob_SC=logprob_SC,
        context_len_B=torch.ones(B, **i32), prompt_len_B=torch.ones(B, **i32), row_id_B=torch.arange(B, **i32),
        stream_B=torch.arange(B), out_token_SC=torch.zeros(B + 1, 1, **i32), num_new_S=torch.zeros(B + 1, **i32),
        finish_S=torch.zeros(B + 1, dtype=torch.int8), num_alive_1=torch.tensor([B], **i32),
        seed_1=torch.tensor([7]), inv_temperature_1=torch.tensor([1 / temperature]),
        eos_ids_8=torch.full((8,), -1, **i32), max_new_1=torch.tensor([1], **i32),
    )  # fmt: skip
    return token_B.long(), logprob_SC[:-1, 0]


def test_logprob_is_that_of_the_tokens_that_may_be_drawn() -> None:
    """trl 6789, 6945: it exceeds the full softmax's by the log of the kept mass, which is why training refuses it."""
    logits_BV = random_logits(400, 60, deviation=1.0)
    token_B, logprob_B = sampled(logits_BV.clone(), make_filters(top_k=20, top_p=0.8, min_p=0.02), 0.7)
    scores_BV = logits_BV.double() / 0.7
    is_kept = kept_by_transformers(logits_BV, 0.7, 20, 0.8, 0.02)
    assert is_kept.gather(1, token_B[:, None]).all()
    renormalised = scores_BV.masked_fill(~is_kept, -INF).log_softmax(1).gather(1, token_B[:, None])[:, 0]
    torch.testing.assert_close(logprob_B.double(), renormalised, rtol=0, atol=5e-6)
    full = scores_BV.log_softmax(1)
    kept_mass = full.exp().masked_fill(~is_kept, 0.0).sum(1)
    assert kept_mass.max() < 0.95
    torch.testing.assert_close(renormalised - full.gather(1, token_B[:, None])[:, 0], -kept_mass.log())


def test_tokens_that_stay_keep_their_proportions() -> None:
    """20,000 draws of 3 tokens: 2 degrees of freedom; 25 is exceeded once in 270,000 times."""
    logits_BV = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(20_000, 1)
    token_B, _ = sampled(logits_BV, make_filters(top_k=3), 1.0)
    wanted = torch.tensor([4.0, 3.0, 2.0, 0.0]) / 9 * 20_000
    counts = torch.bincount(token_B, minlength=4)
    assert counts[3] == 0
    assert float(((counts - wanted)[:3] ** 2 / wanted[:3]).sum()) < 25


def test_filters_that_are_off_draw_what_none_draws() -> None:
    logits_BV = random_logits(50, 60)
    for got, expected in zip(sampled(logits_BV, make_filters(), 0.8), sampled(logits_BV, None, 0.8), strict=True):
        assert torch.equal(got, expected)


class OpTrace(TorchDispatchMode):
    """The names and shapes of all torch ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.ops.append(f"{func} {[tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]}")
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_host() -> None:
    """The same ops of the same shapes for every value: one captured graph serves all."""
    traces = []
    for options in ({}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1, "temperature": 0.5}, {"temperature": 0.0}):
        temperature = options.pop("temperature", 1.0)
        logits_BV, filters = random_logits(4, 60), make_filters(**options)
        inv_temperature_1 = torch.tensor([1 / temperature if temperature else 0.0])
        with OpTrace() as trace:
            filter_logits_(logits_BV, num_valid=58, inv_temperature_1=inv_temperature_1, filters=filters)
        traces.append(trace.ops)
    assert traces[1:] == [traces[0]] * 3
    refused = ("_local_scalar_dense", "nonzero", "masked_select", "equal.", "unique", "multinomial")
    assert not [op for op in traces[0] if any(name in op for name in refused)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (1, 1e-6, 1.0), (10**9, 1, 0)])
def test_values_in_range_are_accepted(top_k: int, top_p: float, min_p: float) -> None:
    check_filters(top_k, top_p, min_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "name"),
    [
        (-1, 1.0, 0.0, "top_k"),
        (1.0, 1.0, 0.0, "top_k"),
        (True, 1.0, 0.0, "top_k"),
        (0, 0.0, 0.0, "top_p"),
        (0, 1.1, 0.0, "top_p"),
        (0, float("nan"), 0.0, "top_p"),
        (0, 1.0, -0.1, "min_p"),
        (0, 1.0, 1.1, "min_p"),
        (0, 1.0, float("nan"), "min_p"),
    ],
)
def test_values_out_of_range_are_refused(top_k: int, top_p: float, min_p: float, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        check_filters(top_k, top_p, min_p)
