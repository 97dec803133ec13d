"""Sampling: the distribution, the corners of the inverse CDF, the log-prob, and the bookkeeping of a decode step.

B slots, S result rows and a spare one, C most new tokens, V vocabulary.
"""

from dataclasses import dataclass, fields

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparkgrpo.kernels import sampling
from sparkgrpo.kernels.sampling import (
    BLOCK_V,
    INVALID,
    LENGTH,
    RUNNING,
    STOP,
    result_uniforms,
    sample_tokens,
    sample_update,
)

NUM_DRAWS = 50_000
LAST_UNIFORM = 1 - 2.0**-24
UNTOUCHED = -7


def draw(
    logits_BV: torch.Tensor,
    *,
    num_valid: int | None = None,
    temperature: float = 1.0,
    seed: int = 7,
    position: int = 5,
    stream_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    B = len(logits_BV)
    return sample_tokens(
        logits_BV,
        num_valid=num_valid or logits_BV.shape[1],
        inv_temperature_1=torch.tensor([1 / temperature if temperature else 0.0]),
        uniform_2B=torch.stack(
            sampling.draw_uniforms(
                torch.tensor([seed]), torch.full((B,), position), torch.arange(B) if stream_B is None else stream_B
            )
        ),
    )


def random_logits(B: int, V: int, seed: int = 0) -> torch.Tensor:
    return 1.5 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


def give_uniforms(monkeypatch: pytest.MonkeyPatch, u_block: float, u_token: float) -> None:
    """The same two uniforms for every row."""

    def given(key: torch.Tensor, position_B: torch.Tensor, stream_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full(stream_B.shape, u_block), torch.full(stream_B.shape, u_token)

    monkeypatch.setattr(sampling, "draw_uniforms", given)


# The distribution. 50 tokens in 4 blocks of 16, the last ragged: 49 degrees of freedom, standard deviation 9.9. The
# limit of 94 is 4.5 of them above the mean; a tilt of +-5 % adds 50,000 * 0.05^2 = 125. The rarest token is expected 5
# times and more.
CHI_SQUARE_LIMIT = 94.0


@pytest.fixture
def blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK_V", 16)


def chi_square_of_draws(temperature: float, tilt: float = 0.0) -> float:
    """50,000 draws against probabilities that are tilted up and down in turn."""
    logits_V = random_logits(1, 60)[0]
    logits_V[50:] = 50.0  # rows that do not exist
    token, _ = draw(logits_V.expand(NUM_DRAWS, -1), num_valid=50, temperature=temperature)
    assert int(token.max()) < 50
    sign_V = torch.tensor([1.0, -1.0]).repeat(25)
    wanted = (logits_V[:50].double() / temperature).softmax(0) * (1 + tilt * sign_V)
    wanted *= NUM_DRAWS / wanted.sum()
    assert wanted.min() > 5
    return float(((torch.bincount(token, minlength=50) - wanted) ** 2 / wanted).sum())


@pytest.mark.usefixtures("blocks_of_16")
@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.3])
def test_draws_follow_the_distribution(temperature: float) -> None:
    assert chi_square_of_draws(temperature) < CHI_SQUARE_LIMIT


@pytest.mark.usefixtures("blocks_of_16")
@pytest.mark.parametrize("tilt", [0.05, -0.05])
def test_a_tilt_of_five_percent_would_be_seen(tilt: float) -> None:
    assert chi_square_of_draws(1.0, tilt) > CHI_SQUARE_LIMIT


def test_block_width_is_no_part_of_the_distribution() -> None:
    assert chi_square_of_draws(1.0) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("V", [37, BLOCK_V, 2 * BLOCK_V + 3])
def test_logprob_is_that_of_the_distribution_sampled_from(V: int, temperature: float) -> None:
    logits_BV = random_logits(16, V + 5)
    logits_BV[:, V:] = torch.nan  # rows that do not exist are not even read
    token, logprob = draw(logits_BV, num_valid=V, temperature=temperature)
    expected = (logits_BV[:, :V].double() / temperature).log_softmax(1).gather(1, token[:, None])[:, 0]
    # fp32: the sum of V terms and a logarithm of order 10
    torch.testing.assert_close(logprob.double(), expected, rtol=0, atol=5e-6)


def test_rows_beyond_num_valid_do_not_exist() -> None:
    logits_BV = random_logits(256, 1100)
    padded_BV = torch.cat((logits_BV, torch.full((256, 9), 50.0)), 1)
    for got, expected in zip(draw(padded_BV, num_valid=1100), draw(logits_BV), strict=True):
        assert torch.equal(got, expected)


def test_two_words_reach_the_last_of_150_000_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    V = 151_665
    give_uniforms(monkeypatch, LAST_UNIFORM, LAST_UNIFORM)
    assert int(draw(torch.zeros(1, V))[0]) == V - 1
    give_uniforms(monkeypatch, 0.0, 2.0**-10)
    assert int(draw(torch.zeros(1, V))[0]) == 1  # the first number that is not below 1/1024 of the block


@pytest.mark.parametrize("u_block", [0.0, LAST_UNIFORM])
@pytest.mark.parametrize("u_token", [0.0, LAST_UNIFORM])
@pytest.mark.parametrize("first", [0, 100, 1024, 1500, 3071])
def test_no_uniform_picks_a_token_without_mass(
    u_block: float, u_token: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks with mass in a few places only; the empty blocks before and behind them are never picked."""
    give_uniforms(monkeypatch, u_block, u_token)
    logits_BV = torch.full((48, 3072), -torch.inf)
    places = torch.tensor(sorted({first, min(first + 3, 3071), min(first + 40, 3071)}))
    logits_BV[:, places] = random_logits(48, len(places), seed=first)
    token, logprob = draw(logits_BV)
    assert torch.isin(token, places).all()
    assert logprob.isfinite().all()
    if u_block == u_token:
        assert (token == (places[0] if u_block == 0 else places[-1])).all()


def test_a_mass_too_small_to_be_divided_is_still_the_one_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(-103) is fp32's smallest number: times a uniform it rounds to itself or to 0, and nothing exceeds it."""
    give_uniforms(monkeypatch, 0.0, LAST_UNIFORM)
    logits_BV = torch.full((1, 2500), -torch.inf)
    logits_BV[0, 5], logits_BV[0, 2000] = -103.0, 0.0
    token, logprob = draw(logits_BV)
    assert int(token) in (5, 2000)  # 2000 on a processor that flushes such numbers to zero
    assert logprob.isfinite()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_valid_token(temperature: float) -> None:
    logits_BV = torch.tensor([[-3.0, 50.0], [88.0, 50.0]])
    token, logprob = draw(logits_BV, num_valid=1, temperature=temperature)
    assert token.tolist() == [0, 0] and logprob.tolist() == [0.0, 0.0]


def test_all_mass_in_a_ragged_last_block() -> None:
    logits_BV = torch.full((2000, 2 * BLOCK_V + 3), -torch.inf)
    logits_BV[:, -3:] = torch.tensor([1.0, 0.0, 1.0]).log()
    token, logprob = draw(logits_BV)
    assert set(token.tolist()) == {2 * BLOCK_V, 2 * BLOCK_V + 2}
    torch.testing.assert_close(logprob, torch.full((2000,), -0.693147), rtol=0, atol=1e-6)


def test_greedy_takes_the_lowest_index_of_a_tie_and_its_logprob_at_temperature_one() -> None:
    logits_BV = random_logits(3, 2500).clamp_(max=5.0)
    for row, ties in enumerate(((4, 1500, 2499), (1023, 1024), (0, 1))):
        logits_BV[row, list(ties)] = 6.0
    token, logprob = draw(logits_BV, temperature=0.0)
    assert token.tolist() == [4, 1023, 0]
    expected = logits_BV.double().log_softmax(1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), expected, rtol=0, atol=5e-6)
    assert draw(torch.zeros(2, 2500), temperature=0.0)[0].tolist() == [0, 0]


def test_a_draw_depends_on_key_position_and_stream_alone() -> None:
    logits_BV = random_logits(64, 1100)
    stream_B = torch.arange(64) << 16
    token, _ = draw(logits_BV, stream_B=stream_B)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(logits_BV[order], stream_B=stream_B[order])[0], token[order])
    assert torch.equal(draw(logits_BV[9:12], stream_B=stream_B[9:12])[0], token[9:12])
    assert torch.equal(draw(logits_BV, stream_B=stream_B)[0], token)
    for changed in ({"seed": 8}, {"seed": 7 + (1 << 32)}, {"position": 6}, {"stream_B": stream_B + 1}):
        other = draw(logits_BV, **({"stream_B": stream_B} | changed))[0]
        assert (other != token).float().mean() > 0.8  # the likeliest of 1,100 tokens have about 2 %


def test_siblings_and_neighbouring_keys_draw_differently_from_flat_logits() -> None:
    """Eight equal siblings of 1,000 flat tokens draw 8 different ones with 97 %; seed and streams are fixed."""
    first = draw(torch.zeros(8, 1000))[0]
    assert len(set(first.tolist())) == 8
    assert not set(draw(torch.zeros(8, 1000), seed=8)[0].tolist()) & set(first.tolist())


# Bookkeeping.


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The arguments of `sample_update`, by name."""

    token_B: torch.Tensor
    context_len_B: torch.Tensor
    prompt_len_B: torch.Tensor
    row_id_B: torch.Tensor
    stream_B: torch.Tensor
    out_token_SC: torch.Tensor
    out_logprob_SC: torch.Tensor
    num_new_S: torch.Tensor
    finish_S: torch.Tensor
    num_alive_1: torch.Tensor
    seed_1: torch.Tensor
    inv_temperature_1: torch.Tensor
    eos_ids_8: torch.Tensor
    max_new_1: torch.Tensor

    def update(self, logits_BV: torch.Tensor) -> None:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        sample_update(logits_BV, num_valid=logits_BV.shape[1], **tensors)

    def clone(self) -> "Slots":
        return Slots(**{field.name: getattr(self, field.name).clone() for field in fields(self)})


def make_slots(B: int, *, prompt_len: int = 5, max_new: int = 4, eos: tuple[int, ...] = ()) -> Slots:
    i32 = torch.int32
    return Slots(
        token_B=torch.zeros(B, dtype=i32),
        context_len_B=torch.full((B,), prompt_len, dtype=i32),
        prompt_len_B=torch.full((B,), prompt_len, dtype=i32),
        row_id_B=torch.arange(B, dtype=i32),
        stream_B=torch.arange(B),
        out_token_SC=torch.full((B + 1, max_new), UNTOUCHED, dtype=i32),
        out_logprob_SC=torch.full((B + 1, max_new), float(UNTOUCHED)),
        num_new_S=torch.zeros(B + 1, dtype=i32),
        finish_S=torch.zeros(B + 1, dtype=torch.int8),
        num_alive_1=torch.tensor([B], dtype=i32),
        seed_1=torch.tensor([7]),
        inv_temperature_1=torch.ones(1),
        eos_ids_8=torch.tensor([*eos, *[-1] * (8 - len(eos))], dtype=i32),
        max_new_1=torch.tensor([max_new], dtype=i32),
    )


def forced(token_B: list[int], V: int = 16) -> torch.Tensor:
    """Logits whose only likely token is the given one of each row."""
    return torch.full((len(token_B), V), -30.0).scatter_(1, torch.tensor(token_B)[:, None], 30.0)


def test_scripted_rows_stop_run_out_and_stay_parked() -> None:
    """Slot 0 stops at once, 1 by the second stop id in the last place (not by length), 2 by length, 3 is parked."""
    script = [[9, 1, 1, 8], [1, 1, 1, 8], [1, 1, 8, 8], [1, 2, 1, 8]]
    slots = make_slots(4, eos=(9, 2))
    slots.context_len_B[3], slots.num_alive_1[0] = 0, 3
    slots.row_id_B[:] = torch.tensor([2, 0, 1, 3])
    alive, context = [], []
    for wanted in script:
        slots.update(forced(wanted))
        alive.append(int(slots.num_alive_1))
        context.append(slots.context_len_B.tolist())
    assert alive == [2, 2, 2, 0]
    assert context == [[0, 6, 6, 0], [0, 7, 7, 0], [0, 8, 8, 0], [0, 0, 0, 0]]
    assert slots.finish_S.tolist()[:4] == [STOP, LENGTH, STOP, RUNNING]
    assert slots.num_new_S.tolist()[:4] == [4, 4, 1, 0]
    gap = [UNTOUCHED] * 3
    assert slots.out_token_SC.tolist()[:4] == [[1, 1, 1, 2], [1, 1, 8, 1], [9, *gap], [UNTOUCHED, *gap]]
    assert (slots.out_logprob_SC[2, 1:] == UNTOUCHED).all() and (slots.out_logprob_SC[3] == UNTOUCHED).all()
    assert slots.out_logprob_SC[:2].abs().max() < 1e-6
    assert slots.token_B.tolist() == [9, 2, 1, 0], "the last token of each row; a parked slot keeps its own"


def test_draws_made_beforehand_are_those_of_each_step() -> None:
    """Three rows of their own prompt and stream, slots in another order than rows, until the limit."""
    kept = []
    for is_beforehand in (False, True):
        slots = make_slots(3)
        slots.prompt_len_B.copy_(torch.tensor([5, 2, 9]))
        slots.context_len_B.copy_(slots.prompt_len_B)
        slots.row_id_B.copy_(torch.tensor([2, 0, 1]))
        uniform_2SC = None
        if is_beforehand:
            by_row = torch.argsort(slots.row_id_B)
            uniform_2SC = torch.full((2, 4, 4), torch.nan)
            uniform_2SC[:, :3] = result_uniforms(slots.seed_1, slots.prompt_len_B[by_row], slots.stream_B[by_row], 4)
            uniform_2SC[:, 3] = 0.0
        for step in range(4):
            logits_BV = random_logits(3, 700, seed=step)
            sample_update(logits_BV, num_valid=700, uniform_2SC=uniform_2SC, **vars(slots))
        assert slots.num_new_S[:3].tolist() == [4, 4, 4]
        kept.append((slots.out_token_SC[:3], slots.out_logprob_SC[:3]))
    assert torch.equal(kept[0][0], kept[1][0]) and torch.equal(kept[0][1], kept[1][1])


def test_a_parked_slot_writes_to_the_spare_row_alone() -> None:
    """Even where its stale row_id names the row of a live slot, and whatever its logits are."""
    slots = make_slots(5, eos=(3,))
    slots.context_len_B[[1, 3, 4]] = 0
    slots.row_id_B[:] = torch.tensor([4, 4, 0, 0, 2])
    slots.num_alive_1[0] = 2
    before = slots.clone()
    logits_BV = random_logits(5, 16)
    logits_BV[3], logits_BV[4] = torch.nan, forced([3])[0]
    slots.update(logits_BV)
    alone = before.clone()
    alone.update(logits_BV.clone().index_copy_(0, torch.tensor([1, 3, 4]), random_logits(3, 16, seed=9)))
    for field in fields(slots):
        got, expected, old = (getattr(x, field.name) for x in (slots, alone, before))
        if field.name.endswith(("_S", "_SC")):
            got, expected, old = got[:-1], expected[:-1], old[:-1]
            assert torch.equal(got[[1, 2, 3]], old[[1, 2, 3]]), field.name
        assert torch.equal(got, expected), field.name
    assert slots.num_new_S.tolist()[:5] == [1, 0, 0, 0, 1]
    assert slots.context_len_B[[1, 3, 4]].tolist() == [0, 0, 0]
    assert torch.equal(slots.token_B[[1, 3, 4]], before.token_B[[1, 3, 4]])


@pytest.mark.parametrize("bad", ["one NaN", "one +inf", "all -inf", "all NaN"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_row_as_invalid(bad: str, temperature: float) -> None:
    slots = make_slots(3, eos=(0,))
    slots.inv_temperature_1.fill_(temperature)
    clean = slots.clone()
    logits_BV = random_logits(3, 16)
    clean.update(logits_BV)
    value = torch.tensor({"one +inf": torch.inf, "all -inf": -torch.inf}.get(bad, torch.nan))
    logits_BV[1, 5 if bad.startswith("one") else slice(None)] = value
    slots.update(logits_BV)
    assert int(slots.finish_S[1]) == INVALID
    assert int(slots.context_len_B[1]) == 0 and int(slots.num_new_S[1]) == 1
    assert int(slots.num_alive_1) == int((slots.context_len_B > 0).sum())
    for field in ("out_token_SC", "out_logprob_SC", "finish_S"):
        got, expected = getattr(slots, field)[[0, 2]], getattr(clean, field)[[0, 2]]
        assert torch.equal(got, expected), f"{field} of the rows beside it"


def test_impossible_tokens_are_no_fault() -> None:
    slots = make_slots(2)
    logits_BV = random_logits(2, 16)
    logits_BV[:, ::2] = -torch.inf
    slots.update(logits_BV)
    assert slots.finish_S.tolist()[:2] == [RUNNING, RUNNING]


def test_results_follow_the_row_and_not_the_slot() -> None:
    logits_BV = random_logits(6, 40)
    slots = make_slots(6, eos=(1, 2, 3, 4, 5, 6, 7, 8))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = slots.clone()
    for name in ("row_id_B", "stream_B"):
        getattr(permuted, name).copy_(getattr(slots, name)[order])
    slots.update(logits_BV)
    permuted.update(logits_BV[order])
    for name in ("out_token_SC", "out_logprob_SC", "num_new_S", "finish_S", "num_alive_1"):
        assert torch.equal(getattr(permuted, name), getattr(slots, name)), name


class OpTrace(TorchDispatchMode):
    """The names and shapes of all torch ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        self.ops.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


def test_an_update_reads_nothing_on_the_host() -> None:
    """The same ops of the same shapes whatever the rows do, and none that waits for a device or sizes by content."""
    slots = make_slots(4, eos=(9, 2))
    traces = []
    for wanted in ([9, 1, 1, 8], [1, 1, 1, 8], [1, 2, 9, 8], [1, 2, 1, 8]):
        logits_BV = forced(wanted)
        with OpTrace() as trace:
            slots.update(logits_BV)
        traces.append(trace.ops)
    assert traces[1:] == [traces[0]] * 3
    refused = ("_local_scalar_dense", "nonzero", "masked_select", "equal.", "unique", "lift_fresh", "multinomial")
    assert not [op for op in traces[0] if any(name in op for name in refused)]
