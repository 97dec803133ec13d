"""The sampling kernels against their twin, token by token, and what only they can get wrong.

B slots, S result rows and a spare one, C most new tokens, V vocabulary. What is allocated is filled with NaN. A draw
costs 11 ms in Triton's interpreter: a few hundred are compared here, thousands under the mark `slow`.
"""

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sparkgrpo.kernels import sampling
from sparkgrpo.kernels.philox import uniform24
from sparkgrpo.kernels.sampling import INVALID, LENGTH, RUNNING, STOP, sample_update

triton = pytest.importorskip("triton", reason="Triton comes with Linux only")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("sparkgrpo.kernels.sampling_kernels")

State = dict[str, torch.Tensor]
UNTOUCHED = -7
MOST_NEIGHBOURS = 2
"""Of 5,200 draws. The last bits of exp2 and of a block's sum move a boundary past the word of 1.1e-5 of draws at most
(`sampling.py`): three or more in one run of 30,000."""
LAST_WORD = 2**32 - 1


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    yield
    torch.use_deterministic_algorithms(False)


def make_state(
    B: int,
    *,
    context_len: int = 5,
    max_new: int = 4,
    eos: tuple[int, ...] = (),
    temperature: float = 1.0,
    seed: int = 7,
    device: torch.device | str = "cpu",
) -> State:
    """Every slot alive, its next token the first of its row."""
    i32 = {"dtype": torch.int32}
    state = {
        "token_B": torch.full((B,), UNTOUCHED, **i32),
        "context_len_B": torch.full((B,), context_len, **i32),
        "prompt_len_B": torch.full((B,), context_len, **i32),
        "row_id_B": torch.arange(B, **i32),
        "stream_B": (torch.arange(B) << 16) + (5 << 40),
        "out_token_SC": torch.full((B + 1, max_new), UNTOUCHED, **i32),
        "out_logprob_SC": torch.full((B + 1, max_new), float(UNTOUCHED)),
        "num_new_S": torch.zeros(B + 1, **i32),
        "finish_S": torch.zeros(B + 1, dtype=torch.int8),
        "num_alive_1": torch.tensor([B], **i32),
        "seed_1": torch.tensor([seed]),
        "inv_temperature_1": torch.tensor([1 / temperature if temperature else 0.0]),
        "eos_ids_8": torch.tensor([*eos, *[-1] * (8 - len(eos))], **i32),
        "max_new_1": torch.tensor([max_new], **i32),
    }
    return {name: x.to(device) for name, x in state.items()}


def clone(state: State) -> State:
    return {name: x.clone() for name, x in state.items()}


def update(state: State, logits_BV: torch.Tensor, *, num_valid: int | None = None, **options: Any) -> State:
    """One step of the kernels, on the state itself."""
    with patch("sparkgrpo.kernels.dispatch.runs_triton", lambda _: True):
        sample_update(logits_BV, num_valid=num_valid or logits_BV.shape[1], **state, **options)
    return state


def updated_by_twin(state: State, logits_BV: torch.Tensor, num_valid: int | None = None) -> State:
    """The same step of the torch path, on a copy, on the CPU."""
    twin = {name: x.cpu().clone() for name, x in state.items()}
    with patch("sparkgrpo.kernels.dispatch.runs_triton", lambda _: False):
        sample_update(logits_BV.cpu(), num_valid=num_valid or logits_BV.shape[1], **twin)
    return twin


def random_logits(B: int, V: int, seed: int = 0, deviation: float = 1.5) -> torch.Tensor:
    return deviation * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


def compare(state: State, logits_BV: torch.Tensor, num_valid: int | None = None) -> int:
    """Number of tokens that differ from the twin's; where they are equal, all else must be."""
    twin = updated_by_twin(state, logits_BV, num_valid)
    got = {name: x.cpu() for name, x in update(state, logits_BV, num_valid=num_valid).items()}
    is_same = got["token_B"] == twin["token_B"]
    if is_same.all():
        for name, x in got.items():
            x, y = (x[:-1], twin[name][:-1]) if name.endswith(("_S", "_SC")) else (x, twin[name])
            if name == "out_logprob_SC":  # fp32: a sum of V terms and a logarithm of order 10
                torch.testing.assert_close(x, y, rtol=0, atol=5e-6, equal_nan=True)
            else:
                assert torch.equal(x, y), name
    return int((~is_same).sum())


CASES = [(V, temperature, seed) for V, temperature, seed in zip(
    (1, 7, 1023, 1024, 1025, 151_665), (0.6, 1.3, 1.0, 0.6, 1.3, 1.0), (7, 2**32 + 5, -3, 2**62 + 12345, 0, 2**33),
    strict=True,
)]  # fmt: skip


@pytest.mark.parametrize(("V", "temperature", "seed"), CASES)
def test_random_tokens_equal_the_twins_for_any_seed(
    V: int, temperature: float, seed: int, device: torch.device
) -> None:
    """pytorch 196613: torch's own streams differ by GPU. Philox words, and the draws from them, do not."""
    B = 4 if V > 10_000 else 40
    state = make_state(B, temperature=temperature, seed=seed, eos=(0, 3), max_new=3, device=device)
    assert compare(state, random_logits(B, V, seed=V).to(device)) == 0


@pytest.mark.slow
def test_thousands_of_tokens_equal_the_twins(device: torch.device) -> None:
    num_different = num_draws = 0
    for round_idx, (V, temperature, seed) in enumerate(CASES):
        B = 100 if V > 10_000 else 500
        for deviation in (0.0, 2.0):
            logits_BV = random_logits(B, V, seed=V, deviation=deviation).to(device)
            state = make_state(B, context_len=round_idx + 1, temperature=temperature, seed=seed, device=device)
            num_different += compare(state, logits_BV)
            num_draws += B
    assert num_draws == 5200 and num_different <= MOST_NEIGHBOURS


@pytest.mark.parametrize("V", [16, 17, 50, 64, 65, 300])
def test_many_small_blocks(V: int, device: torch.device) -> None:
    """Whole tiles of four blocks and ragged ones, as a wide vocabulary has."""
    with patch.object(sampling, "BLOCK_V", 16):
        assert compare(make_state(24, device=device), random_logits(24, V, seed=V).to(device)) == 0


@triton.jit
def _draw_kernel(mass_ptr, word_ptr, index_ptr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202  # pyright: ignore[reportInvalidTypeForm]
    pid = tl.program_id(0)
    mass = tl.load(mass_ptr + pid * BLOCK + tl.arange(0, BLOCK))
    word = tl.load(word_ptr + pid).to(tl.uint32, bitcast=True)
    tl.store(index_ptr + pid, kernels._draw(mass, word))


def draw_both(mass_BC: torch.Tensor, word_B: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    index_B = torch.full((len(word_B),), UNTOUCHED, dtype=torch.int32, device=device)
    word_i32 = torch.where(word_B >= 2**31, word_B - 2**32, word_B).int().to(device)
    _draw_kernel[(len(word_B),)](mass_BC.to(device), word_i32, index_B, BLOCK=mass_BC.shape[1])
    return index_B.cpu().long(), sampling._draw(mass_BC, uniform24(word_B))


def test_equal_masses_give_equal_tokens_for_every_word(device: torch.device) -> None:
    """No rounding is left once the masses are given: words at, just below and just above each boundary."""
    rng = torch.Generator().manual_seed(0)
    mass_C = torch.rand(64, generator=rng) ** 4
    running_C = (mass_C * 2.0**40).long().cumsum(0)
    edges = [int(r) * 2**24 // int(running_C[-1]) for r in running_C[:-1]]
    words = [max(0, min(2**24 - 1, edge + step)) << 8 for edge in edges[::3] for step in (-1, 0, 1)]
    word_B = torch.tensor([0, LAST_WORD, *words])
    got, expected = draw_both(mass_C.expand(len(word_B), -1).contiguous(), word_B, device)
    assert torch.equal(got, expected)
    assert len(set(got.tolist())) > 20


@pytest.mark.parametrize("places", [(0,), (63,), (5, 6, 40), (0, 63)])
def test_no_word_picks_an_index_without_mass(places: tuple[int, ...], device: torch.device) -> None:
    """The last word over empty last blocks, and the first one over empty first blocks; masses down to 2^-40."""
    mass_BC = torch.zeros(4, 64)
    mass_BC[:2, list(places)] = 1.0
    mass_BC[2:, list(places)] = 2.0**-40
    got, expected = draw_both(mass_BC, torch.tensor([0, LAST_WORD] * 2), device)
    assert got.tolist() == [places[0], places[-1]] * 2 == expected.tolist()


# 20 tokens in 2 blocks of 16: 19 degrees of freedom, standard deviation 6.2; the limit is 4.5 of them above the mean. A
# tilt t adds num_draws t^2 = 125: 5 % of 50,000 draws on a GPU, 25 % of the 2,000 that the interpreter has time for.
CHI_SQUARE_LIMIT = 47.0


@pytest.mark.slow
def test_draws_of_the_kernel_follow_the_distribution_and_a_tilt_would_be_seen(device: torch.device) -> None:
    num_draws = 50_000 if device.type == "cuda" else 2_000
    logits_V = random_logits(1, 23, deviation=0.7)[0]
    logits_V[20:] = 50.0  # columns that do not exist
    with patch.object(sampling, "BLOCK_V", 16):
        state = make_state(num_draws, device=device)
        update(state, logits_V.expand(num_draws, -1).to(device).contiguous(), num_valid=20)
    counts_V = torch.bincount(state["token_B"].cpu(), minlength=20)
    tilt, sign_V = math.sqrt(125 / num_draws), torch.tensor([1.0, -1.0]).repeat(10)
    for factor_V, is_true in ((1.0, True), (1 + tilt * sign_V, False), (1 - tilt * sign_V, False)):
        wanted_V = logits_V[:20].double().softmax(0) * factor_V
        wanted_V *= num_draws / wanted_V.sum()
        assert wanted_V.min() > 5
        assert (float(((counts_V - wanted_V) ** 2 / wanted_V).sum()) < CHI_SQUARE_LIMIT) == is_true


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprob_is_that_of_the_distribution_sampled_from(temperature: float, device: torch.device) -> None:
    """trl 4159, prime-rl 697: neither the raw one nor one divided by T twice."""
    logits_BV = random_logits(12, 1100).to(device)
    state = update(make_state(12, temperature=temperature, device=device), logits_BV)
    logp_BV = (logits_BV.double() / temperature).log_softmax(1)
    expected_B = logp_BV.gather(1, state["token_B"][:, None].long())[:, 0]
    torch.testing.assert_close(state["out_logprob_SC"][:12, 0].double(), expected_B, rtol=0, atol=5e-6)


def test_logits_rounded_to_bf16_are_refused() -> None:
    with pytest.raises(ValueError, match="logits_BV must be float32"):
        update(make_state(2), random_logits(2, 16).bfloat16())


def test_greedy_takes_the_lowest_index_of_a_tie_and_its_logprob_at_temperature_one(device: torch.device) -> None:
    logits_BV = random_logits(4, 2500).clamp_(max=5.0)
    for row, ties in enumerate(((4, 1500, 2499), (1023, 1024), (0, 1))):
        logits_BV[row, list(ties)] = 6.0
    logits_BV[3] = 0.0
    state = make_state(4, temperature=0.0, device=device)
    assert compare(state, logits_BV.to(device)) == 0
    assert state["token_B"].tolist() == [4, 1023, 0, 0]
    expected = logits_BV.double().log_softmax(1).gather(1, state["token_B"].cpu()[:, None].long())[:, 0]
    torch.testing.assert_close(state["out_logprob_SC"][:4, 0].cpu().double(), expected, rtol=0, atol=5e-6)


def test_phantom_columns_are_never_drawn_nor_counted(device: torch.device) -> None:
    """vllm 13175, NeMo-RL 237: head rows beyond the tokenizer, however likely; here odd row strides too."""
    logits_BV = random_logits(30, 1040).to(device)
    padded_BV = torch.cat((logits_BV, torch.full((30, 9), 50.0, device=device)), 1)
    got = update(make_state(30, device=device), padded_BV, num_valid=1040)
    expected = update(make_state(30, device=device), logits_BV)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert not padded_BV[:, :1040].ne(logits_BV).any()


def test_random_a_step_replayed_draws_alike_and_the_next_one_does_not(device: torch.device) -> None:
    """Megatron-LM 5697: with the counter in place the same graph draws the same tokens; one further, others.

    pytorch 172390: a generator's state breaks captures; none is touched.
    """
    generator_state = torch.get_rng_state()
    logits_BV = random_logits(30, 900).to(device)
    token = {length: update(make_state(30, context_len=length, device=device), logits_BV) for length in (5, 6)}
    again = update(make_state(30, context_len=5, device=device), logits_BV)
    assert torch.equal(again["token_B"], token[5]["token_B"])
    assert (token[5]["token_B"] != token[6]["token_B"]).float().mean() > 0.8
    assert torch.equal(torch.get_rng_state(), generator_state)


def test_random_siblings_of_flat_logits_differ(device: torch.device) -> None:
    """tt-metal 53077, verl 6857: siblings are neighbours in their streams alone; seed and streams are fixed."""
    state = make_state(8, device=device)
    state["stream_B"].copy_((3 << 16) + torch.arange(8))
    update(state, torch.zeros(8, 1000, device=device))
    assert len(set(state["token_B"].tolist())) == 8


def test_launches_repeat_whatever_the_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer 978, 2132, transformers 45323: neither a seed nor a length is a number of the launch.

    Grid, numbers and addresses repeat while rows grow and finish, and over rollouts of another seed, temperature, limit
    and stop ids; only shapes are in them.
    """
    seen: list[list[Any]] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: Any, **_: Any) -> None:
        seen[-1].append([grid, *(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args), dict(constexprs)])

    monkeypatch.setattr(kernels, "launch", record)
    state, logits_BV = make_state(6), random_logits(6, 1100)
    partials = (torch.empty(6, 2), torch.empty(6, 2))
    for step in range(3):
        state["context_len_B"].copy_(torch.tensor([5 + step, 0, 9, 7, 0, 3]))
        state["seed_1"].fill_(step << 40)
        state["inv_temperature_1"].fill_(step)
        state["max_new_1"].fill_(step + 1)
        state["eos_ids_8"].fill_(step)
        seen.append([])
        update(state, logits_BV, partials=partials)
    assert len(seen[0]) == 2 and seen[1:] == [seen[0]] * 2


def test_slots_a_parked_one_changes_nothing(device: torch.device) -> None:
    """vllm 43810, rvllm 32: stale row ids of -1 and of live rows, logits that are NaN, lengths out of range."""
    B, parked = 6, torch.tensor([0, 2, 5])
    logits_BV = random_logits(B, 40)
    state = make_state(B, eos=tuple(range(8)), device=device)
    state["context_len_B"][parked] = 0
    state["num_alive_1"].fill_(3)
    before = clone(state)
    clean = update(clone(state), logits_BV.to(device))
    state["row_id_B"][parked] = torch.tensor([-1, 1, 4], dtype=torch.int32, device=device)
    state["prompt_len_B"][parked] = -(2**30)
    logits_BV[parked] = torch.nan
    update(state, logits_BV.to(device))
    for name in ("token_B", "context_len_B", "out_token_SC", "out_logprob_SC", "num_new_S", "finish_S", "num_alive_1"):
        assert torch.equal(state[name], clean[name]), f"{name} of the live rows"
    assert torch.equal(state["token_B"][parked], before["token_B"][parked])
    for name in ("out_token_SC", "out_logprob_SC", "num_new_S", "finish_S"):
        assert torch.equal(state[name][[0, 2, 5, 6]], before[name][[0, 2, 5, 6]]), f"{name}: the spare row too"


@pytest.mark.parametrize("bad", ["one NaN", "one +inf", "all -inf", "all NaN"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_row_as_invalid(
    bad: str, temperature: float, device: torch.device
) -> None:
    logits_BV = random_logits(3, 40)
    value = torch.tensor({"one +inf": torch.inf, "all -inf": -torch.inf}.get(bad, torch.nan))
    logits_BV[1, 5 if bad.startswith("one") else slice(None)] = value
    with patch.object(sampling, "BLOCK_V", 16):
        state = make_state(3, temperature=temperature, eos=(0,), device=device)
        assert compare(state, logits_BV.to(device)) == 0
    assert state["finish_S"].tolist()[:3] == [RUNNING, INVALID, RUNNING]
    assert state["out_logprob_SC"][1, 0].isnan() and int(state["token_B"][1]) == 0
    assert state["context_len_B"].tolist() == [6, 0, 6] and int(state["num_alive_1"]) == 2


def forced(token_B: list[int], device: torch.device, V: int = 40) -> torch.Tensor:
    """Logits whose only likely token is the given one of each row."""
    logits_BV = torch.full((len(token_B), V), -30.0)
    return logits_BV.scatter_(1, torch.tensor(token_B)[:, None], 30.0).to(device)


def test_stop_each_of_eight_ids_ends_its_row(device: torch.device) -> None:
    """trl 7039: only one of them honoured. The atomic counts rows that finish together."""
    ids = (3, 5, 8, 13, 21, 34, 39, 1)
    state = make_state(10, eos=ids, device=device)
    update(state, forced([*ids, 2, 0], device))
    assert state["finish_S"].tolist() == [STOP] * 8 + [RUNNING] * 3
    assert int(state["num_alive_1"]) == 2


def test_stop_in_the_last_place_is_no_truncation(device: torch.device) -> None:
    """trl 3476, vllm 58228: a stop id in place C is a stop; none by C is the limit. The reason is stored at once."""
    state = make_state(3, eos=(9, 2), max_new=3, device=device)
    script = [[1, 1, 9], [1, 1, 4], [2, 1, 4]]
    reasons = [update(state, forced(wanted, device))["finish_S"].tolist()[:3] for wanted in script]
    assert reasons == [[RUNNING, RUNNING, STOP], [RUNNING, RUNNING, STOP], [STOP, LENGTH, STOP]]
    assert state["num_new_S"].tolist() == [3, 3, 1, 0] and int(state["num_alive_1"]) == 0
    assert state["out_token_SC"].tolist()[:3] == [[1, 1, 2], [1, 1, 1], [9, UNTOUCHED, UNTOUCHED]]
    assert state["token_B"].tolist() == [2, 1, 9] and state["context_len_B"].tolist() == [0, 0, 0]


def test_results_follow_the_row_and_not_the_slot(device: torch.device) -> None:
    logits_BV = random_logits(6, 40).to(device)
    state = make_state(6, eos=(1, 2, 3, 4, 5, 6, 7, 8), device=device)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = clone(state)
    for name in ("row_id_B", "stream_B"):
        permuted[name].copy_(state[name][order])
    update(state, logits_BV)
    update(permuted, logits_BV[order])
    for name in ("out_token_SC", "out_logprob_SC", "num_new_S", "finish_S", "num_alive_1"):
        assert torch.equal(permuted[name], state[name]), name


def test_partials_given_ahead_are_written_before_they_are_read(device: torch.device) -> None:
    logits_BV = random_logits(3, 1100).to(device)
    partials = tuple(torch.full((8, 2), torch.nan, device=device) for _ in range(2))
    got = update(make_state(3, device=device), logits_BV, partials=tuple(x[:3] for x in partials))
    expected = update(make_state(3, device=device), logits_BV)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert all(x[:3].isfinite().all() and x[3:].isnan().all() for x in partials)
    with pytest.raises(ValueError, match=r"partials must be two contiguous float32 \[3, 2\]"):
        update(make_state(3, device=device), logits_BV, partials=partials)


def test_no_slots_launch_nothing(device: torch.device) -> None:
    update(make_state(0, device=device), torch.empty(0, 40, device=device))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("context_len_B", torch.zeros(2, dtype=torch.int64)),
        ("row_id_B", torch.zeros(3, dtype=torch.int32)),
        ("stream_B", torch.zeros(2, dtype=torch.int32)),
        ("out_logprob_SC", torch.zeros(4, 3).t()),
        ("eos_ids_8", torch.zeros(4, dtype=torch.int32)),
        ("inv_temperature_1", torch.zeros(())),
    ],
)
def test_a_tensor_that_a_kernel_would_misread_is_refused(name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=name):
        update(make_state(2) | {name: wrong}, random_logits(2, 16))


@pytest.mark.parametrize("num_valid", [0, 17])
def test_columns_beyond_the_head_are_refused(num_valid: int) -> None:
    with pytest.raises(ValueError, match="num_valid"):
        sample_update(random_logits(2, 16), num_valid=num_valid, **make_state(2))
