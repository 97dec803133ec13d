"""The configuration: defaults, types, ranges, combinations."""

import dataclasses
import math
from typing import Any

import pytest

from sparkgrpo.trainer.config import Config, UserError, describe_type, field_types


def test_defaults_are_the_lesson() -> None:
    config = Config()
    assert (config.prompts_per_step, config.group_size, config.max_new_tokens, config.steps) == (16, 8, 256, 200)
    assert (config.lr, config.beta, config.eps_low, config.eps_high, config.temperature) == (1e-6, 0.04, 0.2, 0.2, 1.0)
    assert (config.advantage, config.normaliser, config.surrogate, config.kl) == ("group", "sequence", "clip", "k3")


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", 0, "at least 1"),
        ("steps", "3", "an integer"),
        ("steps", True, "an integer"),
        ("steps", 1.0, "an integer"),
        ("lr", 0.0, "above 0 and at most 1"),
        ("lr", math.nan, "above 0 and at most 1"),
        ("lr", None, "a number"),
        ("temperature", 0.0, "at least 0.05 and finite"),
        ("temperature", math.inf, "at least 0.05 and finite"),
        ("eval_temperature", 0.01, "0 (greedy) or at least 0.05"),
        ("group_size", 65537, "at least 1 and at most 65536"),
        ("eps_low", 1.5, "at least 0 and at most 1"),
        ("eps_high", -0.1, "at least 0"),
        ("adam_beta2", 1.0, "at least 0 and below 1"),
        ("seed", 2**32, "at most 4294967295"),
        ("advantage", "grupo", "one of group, mean, batch, rloo, none"),
        ("plain", 1, "true or false"),
        ("model", 3, "text"),
        ("numbers", "5", "2, 3, 4 or a mix"),
        ("numbers", "2,,3", "2, 3, 4 or a mix"),
        ("delta", "x", "a number or none"),
        ("group_size", 0, "at least 1"),
    ],
)
def test_wrong_value_names_the_field_and_what_was_expected(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        Config(**{name: value})
    assert str(caught.value).startswith(f"{name}: expected ")
    assert expected in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("advantage", ["group", "mean", "batch", "rloo"])
def test_one_completion_has_no_siblings(advantage: str) -> None:
    with pytest.raises(UserError, match="group_size 2 or more"):
        Config(group_size=1, advantage=advantage)  # type: ignore[arg-type]


def test_one_completion_is_fine_without_baseline() -> None:
    assert Config(group_size=1, advantage="none").group_size == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mini_batches": 3}, "divisor of prompts_per_step 16"),
        ({"delta": 1.2}, r"above 1 \+ eps_high \(1.2\)"),
        ({"delta": 50.0, "eps_high": math.inf}, "lower eps_high"),
        ({"warmup_steps": 200, "lr_schedule": "cosine"}, "never begin"),
        ({"resume": "runs/a", "run_dir": "runs/b"}, "not together with resume"),
    ],
)
def test_wrong_combination(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(**values)  # type: ignore[arg-type]


def test_no_clip_and_mixes_are_accepted() -> None:
    config = Config(eps_low=1.0, eps_high=math.inf, numbers="2, 3", delta=None, max_grad_norm=math.inf)
    assert config.eps_high == math.inf


def test_every_type_has_words() -> None:
    assert all(describe_type(kind) for kind in field_types().values())
