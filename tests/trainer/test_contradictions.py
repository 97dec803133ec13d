"""Settings that do not go together, and names from other trainers: each refused with the way out."""

import pytest

from sparkgrpo.trainer import cli
from sparkgrpo.trainer.config import Config, UserError, field_types
from sparkgrpo.trainer.contradictions import LORA_TARGETS, NAMES_ELSEWHERE, lora_targets, name_elsewhere
from sparkgrpo.trainer.settings import check_layer


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync_every": 5, "beta": 0.0}, "with beta 0 there is no reference to move: expected beta above 0"),
        ({"sync_every": 5, "lora_rank": 4}, "under LoRA the reference .* cannot move: expected sync_every 0"),
        ({"importance_cap": 2.0, "old_logprobs": "rollout"}, "holds the mismatch .* expected importance_cap none"),
        ({"dynamic_sampling": True, "advantage": "none"}, "groups of equal rewards teach too"),
        ({"ddof": 1, "advantage": "mean"}, "divides by no standard deviation: expected ddof 0"),
        ({"ddof": 1, "advantage": "rloo"}, "divides by no standard deviation"),
        ({"lora_rank": 8, "model": "some/Model.Q4.GGUF"}, "is a GGUF file: name the folder or hub model"),
        ({"lr": 0.1, "lr_factor": 20.0}, "lr_factor: expected lr x lr_factor of at most 1, got 0.1 x 20"),
        ({"lora_targets": "q_proj,x_proj"}, 'lora_targets: expected "all-linear" or some of q_proj,'),
        ({"lora_targets": "all-linear,q_proj"}, "lora_targets: expected"),
        ({"lora_targets": ""}, "lora_targets: expected"),
        ({"ddof": 2}, "ddof: expected at least 0 and at most 1"),
        ({"importance_cap": 0.0}, "importance_cap: expected above 0 and finite"),
        ({"importance_cap": float("inf")}, "importance_cap: expected above 0 and finite"),
        ({"sync_mix": 0.0}, "sync_mix: expected above 0 and at most 1"),
        ({"overlong_cache": 1.5}, "overlong_cache: expected at least 0 and at most 1"),
        ({"reward_shift": float("nan")}, "reward_shift: expected"),
        ({"reward_shift": float("inf")}, "reward_shift: expected"),
        ({"max_rounds": 0}, "max_rounds: expected at least 1"),
        ({"lr_factor": 0.0}, "lr_factor: expected above 0"),
        ({"long_prompts": "cut"}, "long_prompts: expected one of refuse, drop"),
    ],
)
def test_refused_with_the_way_out(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"sync_every": 5, "sync_mix": 0.6},
        {"importance_cap": 2.0, "inner_epochs": 2},
        {"old_logprobs": "rollout"},
        {"dynamic_sampling": True, "advantage": "rloo"},
        {"ddof": 1, "advantage": "batch"},
        {"lora_rank": 8, "beta": 0.0, "model": "folder"},
        {"reward_shift": -3.0},
        {"overlong_cache": 1.0, "mask_truncated": True},
    ],
)
def test_accepted(values: dict[str, object]) -> None:
    Config(**values)  # type: ignore[arg-type]


def test_targets() -> None:
    assert lora_targets("all-linear") == LORA_TARGETS
    assert lora_targets("v_proj, q_proj") == ("q_proj", "v_proj")


@pytest.mark.parametrize("option", ["--top-p", "--top_p=0.9", "--top-k"])
def test_filters_of_the_softmax_are_refused_in_training(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *option.split(), *([] if "=" in option else ["0.9"])]) == 2
    assert "training samples and scores under the full softmax" in capsys.readouterr().err


def test_batch_size_says_what_fills_a_batch() -> None:
    with pytest.raises(UserError, match="unknown key 'batch_size'; a batch is prompts_per_step x group_size"):
        check_layer("a.yaml", {"batch_size": 12})


def test_names_from_elsewhere_are_not_ours_and_point_at_ours() -> None:
    assert not NAMES_ELSEWHERE.keys() & field_types().keys()
    assert name_elsewhere("--num-generations=8") == "; here it is group_size" and name_elsewhere("--lr") == ""
