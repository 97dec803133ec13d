"""Token weights, and the loss of every preset on a batch that was worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from sparkgrpo.kernels.linear_grpo import GrpoLoss, linear_grpo
from sparkgrpo.trainer.advantages import advantages
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.objectives import Normaliser, objective_of, token_weights
from sparkgrpo.trainer.settings import preset_names, read_preset
from sparkgrpo.trainer.shaping import shaped_rewards

LENGTH = torch.tensor([3, 2])
LOGP = torch.tensor([0.5, 0.25, 0.2, 0.4, 0.1]).log()
OLD = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.25]).log()
"""Ratios 2, 1, 0.8 | 1.6, 0.4; sequence ratios (2 x 1 x 0.8)^(1/3) = 1.6^(1/3) and 0.64^(1/2) = 0.8."""
REF = torch.tensor([0.5, 0.5, 0.1, 0.4, 0.2]).log()
"""ref / p: 1, 2, 1/2 | 1, 2."""
A, B = 1.0, -0.5
"""The advantages of the two completions."""
MAX_NEW = 4


def preset(name: str) -> Config:
    return replace(Config(max_new_tokens=MAX_NEW), **{**read_preset(name), "preset": name})  # pyright: ignore[reportArgumentType]


def loss_of(config: Config, *, has_old: bool = True) -> GrpoLoss:
    """The loss of the batch above. The head is the table of log-probs itself, so that the model says exactly LOGP."""
    num_rows = len(LOGP)
    p_T2 = torch.stack((LOGP.exp(), 1 - LOGP.exp()))
    weight_S = token_weights(config.normaliser, LENGTH, torch.tensor([True, True]), config.max_new_tokens)
    return linear_grpo(
        torch.eye(num_rows),
        p_T2.log().contiguous(),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.tensor([A, B]).repeat_interleave(LENGTH),
        weight_S.float().repeat_interleave(LENGTH),
        objective=objective_of(config),
        old_logprob_T=OLD if has_old else None,
        ref_logprob_T=REF if config.beta else None,
        cu_seqlens_S1=torch.tensor([0, 3, 5], dtype=torch.int32),
    )


def k3(ratio: float) -> float:
    """With ratio = ref / p."""
    return ratio - math.log(ratio) - 1


BY_HAND = {
    # Completion 1 (A = 1): min(rho, 1.2) = 1.2, 1, 0.8. Completion 2 (B = -0.5): max(rho, 0.8) = 1.6, 0.8.
    # Mean over the tokens of each, then over the two; KL: k3 of 1, 2, 1/2 and of 1, 2.
    "grpo": (-(1.2 + 1 + 0.8) / 3 + 0.5 * (1.6 + 0.8) / 2) / 2
    + 0.04 * ((0 + k3(2) + k3(0.5)) / 3 + (0 + k3(2)) / 2) / 2,
    # The same surrogate without KL; 2 completions x 4 tokens in place of their lengths.
    "dr_grpo": (-(1.2 + 1 + 0.8) + 0.5 * (1.6 + 0.8)) / 8,
    "rloo": (-(1.2 + 1 + 0.8) / 3 + 0.5 * (1.6 + 0.8) / 2) / 2,
    # One ratio a sequence: 1.6^(1/3) = 1.17 is cut to 1.0004, 0.8 is raised to 0.9997.
    "gspo": (-1.0004 + 0.5 * 0.9997) / 2,
    # min(rho, 1.28) weights the log-prob: 1.28, 1, 0.8 | 1.28, 0.4; all five tokens alike.
    "cispo": (
        -(1.28 * math.log(0.5) + 1 * math.log(0.25) + 0.8 * math.log(0.2))
        + 0.5 * (1.28 * math.log(0.4) + 0.4 * math.log(0.1))
    )
    / 5,
    # No clip at all.
    "reinforce": (-(2 + 1 + 0.8) + 0.5 * (1.6 + 0.4)) / 5,
    # All five tokens alike, and the higher upper bound: 1.28, 1, 0.8 | 1.6, 0.8.
    "dapo": (-(1.28 + 1 + 0.8) + 0.5 * (1.6 + 0.8)) / 5,
    # GRPO's surrogate and KL, over 2 completions x 4 tokens.
    "constant_normaliser": (-(1.2 + 1 + 0.8) + 0.5 * (1.6 + 0.8) + 0.04 * (0 + k3(2) + k3(0.5) + 0 + k3(2))) / 8,
}
BY_HAND |= dict.fromkeys(("no_baseline", "no_baseline_5_6", "rewards_5_6", "sloppy_verifier"), BY_HAND["grpo"])
BY_HAND |= dict.fromkeys(("no_leash_10x", "no_leash_20x"), BY_HAND["rloo"])

ADVANTAGES = {
    **dict.fromkeys(preset_names(), (0.5 / 0.5001, -0.5 / 0.5001)),
    "dr_grpo": (0.5, -0.5),
    "rloo": (1.0, -1.0),
    "reinforce": (1.0, 0.0),
    "no_baseline": (1.0, 0.0),
    "no_baseline_5_6": (6.0, 5.0),
}
"""Of a right and a wrong answer, two siblings."""


@pytest.mark.parametrize("name", preset_names())
def test_loss_of_every_preset_by_hand(name: str) -> None:
    assert float(loss_of(preset(name)).loss) == pytest.approx(BY_HAND[name], rel=1e-6)


@pytest.mark.parametrize("name", preset_names())
def test_advantages_of_every_preset_by_hand(name: str) -> None:
    """From rewards 1 and 0; neither answer is overlong."""
    config = preset(name)
    rewards = shaped_rewards([1.0, 0.0], [3, 2], config)
    graded = advantages(rewards, [0, 0], config.advantage, ddof=config.ddof)
    assert graded.advantage_S.tolist() == pytest.approx(ADVANTAGES[name], rel=1e-12)


def test_what_the_presets_of_the_lessons_set_beside_the_objective() -> None:
    assert preset("sloppy_verifier").reward == "sloppy"
    assert (preset("no_leash_10x").lr_factor, preset("no_leash_20x").lr_factor) == (10, 20)
    dapo = preset("dapo")
    assert (dapo.dynamic_sampling, dapo.max_rounds, dapo.overlong_cache) == (True, 3, 0.2)


def test_delta_bounds_the_ratio_of_bad_tokens() -> None:
    config = replace(preset("rloo"), delta=1.5)
    assert float(loss_of(config).loss) == pytest.approx((-(1.2 + 1 + 0.8) / 3 + 0.5 * (1.5 + 0.8) / 2) / 2, rel=1e-6)


@pytest.mark.parametrize("name", preset_names())
def test_first_update_has_ratio_one(name: str) -> None:
    loss = loss_of(preset(name), has_old=False)
    assert loss.ratio_T.tolist() == [1.0] * 5 and loss.clip_side_T.tolist() == [0] * 5
    if name in ("gspo", "rloo"):  # mean of -A over completions
        assert float(loss.loss) == pytest.approx(-(A + B) / 2, rel=1e-6)


def test_clip_sides() -> None:
    """rho > 1.2 binds where A > 0, rho < 0.8 where A < 0; a ratio on the other side is nobody's clip."""
    assert loss_of(preset("rloo")).clip_side_T.tolist() == [1, 0, 0, 0, -1]


@pytest.mark.parametrize(("kl", "expected"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", k3(0.5))])
def test_kl_estimators(kl: str, expected: float) -> None:
    kl_T = loss_of(replace(preset("grpo"), kl=kl)).kl_T  # pyright: ignore[reportArgumentType]
    assert kl_T is not None
    assert float(kl_T[0]) == 0.0 and float(kl_T[2]) == pytest.approx(expected, rel=1e-6)


def test_k3_of_the_lesson() -> None:
    assert k3(math.exp(-1.0 + 1.0)) == 0 and round(k3(math.exp(-1.5 + 1.0)), 4) == 0.1065


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [("sequence", [1 / 6, 0, 1 / 12, 1 / 30]), ("token", [1 / 16] * 4), ("constant", [1 / 36] * 4)],
)
def test_weights_count_those_that_take_part(normaliser: Normaliser, expected: list[float]) -> None:
    """Lengths 2, 7, 4, 10 without the 7: three completions, 16 tokens, room for 3 x 12."""
    takes_part_S = torch.tensor([True, False, True, True])
    weight_S = token_weights(normaliser, torch.tensor([2, 7, 4, 10]), takes_part_S, 12)
    assert weight_S.dtype == torch.float64
    assert weight_S.tolist() == [w if part else 0.0 for w, part in zip(expected, takes_part_S.tolist(), strict=True)]


@pytest.mark.parametrize("normaliser", ["sequence", "token", "constant"])
def test_nobody_takes_part(normaliser: Normaliser) -> None:
    assert token_weights(normaliser, torch.tensor([2, 7]), torch.tensor([False, False]), 12).tolist() == [0.0, 0.0]


def test_unknown_normaliser() -> None:
    with pytest.raises(ValueError, match="sequence, token or constant, got 'mean'"):
        token_weights("mean", torch.tensor([1]), torch.tensor([True]), 1)  # pyright: ignore[reportArgumentType]


def test_every_option_of_the_objective_is_passed_on() -> None:
    config = Config(
        surrogate="clip", ratio="sequence", eps_low=0.1, eps_high=0.3, delta=2.0, beta=0.5, kl="k2", entropy_coef=0.25
    )
    objective = objective_of(config)
    for name in ("surrogate", "ratio", "eps_low", "eps_high", "delta", "beta", "kl", "entropy_coef"):
        assert getattr(objective, name) == getattr(config, name)
