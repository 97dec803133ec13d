"""Grouped decode attention against row-by-row attention in float64: full and uneven groups, ragged prompts, extremes.

N groups, B rows, K key heads, R query heads a key head, E head width, P longest prompt, C own tokens.
"""

from dataclasses import dataclass

import pytest
import torch

from sparkgrpo.kernels.grouped_attention import grouped_attention, grouped_attention_reference


@dataclass(frozen=True, kw_only=True)
class Case:
    q_BHE: torch.Tensor
    k_prompt: torch.Tensor
    v_prompt: torch.Tensor
    prompt_len_N: torch.Tensor
    k_own: torch.Tensor
    v_own: torch.Tensor
    group_B: torch.Tensor

    def reference(self) -> torch.Tensor:
        return grouped_attention_reference(
            self.q_BHE, self.k_prompt, self.v_prompt, self.prompt_len_N, self.k_own, self.v_own, self.group_B
        )

    def grouped(self) -> torch.Tensor:
        count_N = torch.bincount(self.group_B)
        rank_B = torch.cat([torch.arange(int(count)) for count in count_N])
        is_filler_NP = torch.arange(self.k_prompt.shape[3]) >= self.prompt_len_N[:, None]
        return grouped_attention(
            self.q_BHE,
            self.k_prompt,
            self.v_prompt,
            is_filler_NP if is_filler_NP.any() else None,
            self.k_own,
            self.v_own,
            self.group_B,
            rank_B,
            int(count_N.max()),
        )


def make_case(
    counts: tuple[int, ...],
    prompt_lens: tuple[int, ...],
    *,
    K: int = 3,
    R: int = 3,
    E: int = 8,
    C: int = 7,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
) -> Case:
    """Own keys are slices of a longer buffer; fillers are zero, as the cache leaves them."""
    generator = torch.Generator().manual_seed(sum(counts))
    N, B, P = len(counts), sum(counts), max(prompt_lens)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    is_real_NP = torch.arange(P) < torch.tensor(prompt_lens)[:, None]
    return Case(
        q_BHE=randn(B, K * R, E),
        k_prompt=randn(K, N, E, P) * is_real_NP[:, None],
        v_prompt=randn(K, N, P, E) * is_real_NP[:, :, None],
        prompt_len_N=torch.tensor(prompt_lens),
        k_own=randn(K, B, E, C + 5)[..., :C],
        v_own=randn(K, B, C + 5, E)[:, :, :C],
        group_B=torch.arange(N).repeat_interleave(torch.tensor(counts)),
    )


SHAPES = {
    "full groups": ((4, 4, 4), (5, 9, 1)),
    "full groups, equal prompts": ((2, 2), (6, 6)),
    "uneven groups": ((4, 1, 3), (5, 9, 1)),
    "uneven groups, equal prompts": ((1, 5), (6, 6)),
    "no siblings": ((1, 1, 1, 1), (2, 7, 7, 3)),
    "one row": ((1,), (1,)),
    "one group": ((6,), (12,)),
}


@pytest.mark.parametrize("heads", [(3, 3), (2, 1), (1, 4)])
@pytest.mark.parametrize("own", [1, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_each_row_alone_in_fp64(shape: str, own: int, heads: tuple[int, int]) -> None:
    case = make_case(*SHAPES[shape], K=heads[0], R=heads[1], C=own)
    # 19 keys, values of order 1, fp64: 1e-15; a wrong key or a filler that counts is off by 1e-2
    torch.testing.assert_close(case.grouped(), case.reference(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    # Values of order 1. fp32: a few units of 2^-24. bf16: q/sqrt(E), scores, probabilities and both partial outputs are
    # each rounded to 8 bits, scores of up to 4 with them: some units of 2^-8.
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)],
)
@pytest.mark.parametrize("shape", ["full groups", "uneven groups"])
def test_lower_precision_stays_within_its_rounding(shape: str, dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(*SHAPES[shape], dtype=dtype)
    out = case.grouped()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), case.reference().double(), rtol=0, atol=tolerance)


def test_one_key_far_above_the_others_takes_all() -> None:
    """Scores of some thousands: the softmax subtracts the maximum of both parts, whichever holds it."""
    case = make_case((2, 1), (4, 2), scale=60.0, dtype=torch.float32)
    out = case.grouped()
    assert out.isfinite().all()
    torch.testing.assert_close(out, case.reference(), rtol=1e-4, atol=1e-3)  # scores of 1e4 in fp32 are exact to 1e-3


@pytest.mark.parametrize("shape", ["full groups", "uneven groups"])
def test_rows_and_groups_do_not_meet(shape: str) -> None:
    """NaN in all of one group's prompt and in all of one row's own keys stays with those rows."""
    case = make_case(*SHAPES[shape])
    clean = case.grouped()
    case.k_prompt[:, 0], case.v_prompt[:, 0] = torch.nan, torch.nan
    case.k_own[:, 4], case.v_own[:, 4] = torch.nan, torch.nan
    poisoned = case.grouped()
    is_hit = case.group_B == 0
    is_hit[4] = True
    assert poisoned[is_hit].isnan().all()
    assert torch.equal(poisoned[~is_hit], clean[~is_hit])


def test_what_lies_behind_the_slice_is_not_read() -> None:
    case = make_case(*SHAPES["full groups"], C=3)
    clean = case.grouped()
    for own, axis in ((case.k_own, 3), (case.v_own, 2)):
        base = own._base
        assert base is not None
        base.narrow(axis, 3, 5).fill_(torch.nan)
    assert torch.equal(case.grouped(), clean)
