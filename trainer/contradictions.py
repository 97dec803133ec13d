"""Settings that are each in range and do not go together, and names from elsewhere: what is said, and the way out.

Part of `config.py` in a file of its own; it knows nothing but values, so that a mistake is found before PyTorch loads.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkgrpo.trainer.config import Config

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that may get an adapter, by their names in PEFT."""
ALL_LINEAR = "all-linear"

_FULL_SOFTMAX = (
    "training samples and scores under the full softmax, since a filter would bias every ratio: leave it out, and "
    "lower temperature for surer answers"
)
NAMES_ELSEWHERE = {
    "top_p": _FULL_SOFTMAX,
    "top_k": _FULL_SOFTMAX,
    "min_p": _FULL_SOFTMAX,
    "batch_size": "a batch is prompts_per_step x group_size completions, so the groups always fill it: set those two",
    "per_device_train_batch_size": "a batch is prompts_per_step x group_size completions: set those two",
    "gradient_accumulation_steps": "micro-batches are cut by tokens and change no result: tokens_per_micro_batch",
    "num_generations": "here it is group_size",
    "num_iterations": "here it is inner_epochs",
    "max_completion_length": "here it is max_new_tokens",
    "max_steps": "here it is steps",
    "learning_rate": "here it is lr",
    "epsilon": "here it is eps_low and eps_high",
    "epsilon_high": "here it is eps_high",
    "loss_type": "here a preset, or normaliser, surrogate and ratio",
    "scale_rewards": "here it is advantage: group, mean or batch",
    "mask_truncated_completions": "here it is mask_truncated",
    "gradient_checkpointing": "here it is activation_checkpointing",
    "sync_ref_model": "here it is sync_every and sync_mix",
    "train_dataset": "here it is dataset",
    "output_dir": "here it is run_dir",
}
"""Options that people bring along from other trainers, and what to do in their place."""


def name_elsewhere(word: str) -> str:
    """``"; here it is group_size"`` for an option of another trainer, such as "--num-generations", else nothing."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    return f"; {NAMES_ELSEWHERE[name]}" if name in NAMES_ELSEWHERE else ""


def lora_targets(text: str) -> tuple[str, ...]:
    """The projections that a text names, in the order of LORA_TARGETS."""
    if text.strip() == ALL_LINEAR:
        return LORA_TARGETS
    named = {word.strip() for word in text.split(",")}
    return tuple(name for name in LORA_TARGETS if name in named)


def lora_targets_problem(text: str) -> str | None:
    """What is wrong with such a text, or None."""
    unknown = {word.strip() for word in text.split(",")} - {*LORA_TARGETS, ALL_LINEAR}
    is_mixed = ALL_LINEAR in text and text.strip() != ALL_LINEAR
    if not unknown and not is_mixed:
        return None
    return f'expected "{ALL_LINEAR}" or some of {",".join(LORA_TARGETS)}, got {text!r}'


def contradiction(config: "Config") -> str | None:
    """The first pair of settings that do not go together, with the way out; None where all do."""
    return next(filter(None, (check(config) for check in _CHECKS)), None)


def _group_without_siblings(config: "Config") -> str | None:
    if config.group_size > 1:
        return None
    if config.advantage != "none":
        return (
            f'group_size: 1 completion has no siblings to compare with, and advantage "{config.advantage}" needs them: '
            'expected group_size 2 or more, or advantage "none" (preset reinforce)'
        )
    return None


def _batch_that_does_not_divide(config: "Config") -> str | None:
    if config.prompts_per_step % config.mini_batches == 0:
        return None
    return f"mini_batches: expected a divisor of prompts_per_step {config.prompts_per_step}, got {config.mini_batches}"


def _delta(config: "Config") -> str | None:
    if config.delta is None:
        return None
    if config.delta <= 1 + config.eps_high:
        return (
            f"delta: expected a bound above 1 + eps_high ({1 + config.eps_high:g}), got {config.delta:g}: "
            "raise delta or lower eps_high"
        )
    if config.surrogate != "clip":
        return f'delta: belongs to surrogate "clip", got surrogate "{config.surrogate}": expected delta none'
    return None


def _eval_temperature(config: "Config") -> str | None:
    from sparkgrpo.trainer.config import MIN_TEMPERATURE

    if 0 < config.eval_temperature < MIN_TEMPERATURE:
        return f"eval_temperature: expected 0 (greedy) or at least {MIN_TEMPERATURE}, got {config.eval_temperature}"
    return None


def _schedule_that_never_begins(config: "Config") -> str | None:
    if config.warmup_steps >= config.steps and config.lr_schedule != "constant":
        return (
            f"warmup_steps: expected fewer than steps ({config.steps}), got {config.warmup_steps}: "
            f'the "{config.lr_schedule}" schedule would never begin'
        )
    return None


def _two_folders(config: "Config") -> str | None:
    if config.resume and config.run_dir:
        return "run_dir: not together with resume, which writes into the folder it goes on with"
    return None


def _no_walls(config: "Config") -> str | None:
    if config.sandbox == "basic" and not config.unsafe_sandbox:
        return (
            'sandbox: "basic" puts no walls around programs that the model writes: they could read, change and send '
            'your files; expected "strict" or "bwrap", or --unsafe-sandbox beside it if you accept that'
        )
    return None


def _reference_that_is_not_there(config: "Config") -> str | None:
    if not config.sync_every:
        return None
    if config.beta == 0:
        return "sync_every: with beta 0 there is no reference to move: expected beta above 0, or sync_every 0"
    if config.lora_rank:
        return (
            "sync_every: under LoRA the reference is the model without its adapters and cannot move: "
            "expected sync_every 0, or lora_rank 0"
        )
    return None


def _ratio_applied_twice(config: "Config") -> str | None:
    if config.importance_cap is None or config.old_logprobs == "trainer":
        return None
    return (
        'importance_cap: with old_logprobs "rollout" the ratio holds the mismatch between sampler and trainer already: '
        'expected importance_cap none, or old_logprobs "trainer"'
    )


def _dead_groups_that_teach(config: "Config") -> str | None:
    if config.dynamic_sampling and config.advantage == "none":
        return (
            'dynamic_sampling: under advantage "none" groups of equal rewards teach too, so there is nothing to '
            "replace: expected another advantage, or no dynamic_sampling"
        )
    return None


def _spread_that_nobody_divides_by(config: "Config") -> str | None:
    if config.ddof and config.advantage not in ("group", "batch"):
        return (
            f'ddof: advantage "{config.advantage}" divides by no standard deviation: expected ddof 0, or advantage '
            '"group" or "batch"'
        )
    return None


def _adapters_on_a_quantised_file(config: "Config") -> str | None:
    if config.lora_rank and config.model.lower().endswith(".gguf"):
        return (
            f"lora_rank: adapters are saved with the name of a model that PEFT can load, and {config.model} is a "
            "GGUF file: name the folder or hub model it was made from, or train all weights (lora_rank 0)"
        )
    return None


def _rate_out_of_range(config: "Config") -> str | None:
    if config.lr * config.lr_factor > 1:
        return f"lr_factor: expected lr x lr_factor of at most 1, got {config.lr:g} x {config.lr_factor:g}"
    return None


_CHECKS: tuple[Callable[["Config"], str | None], ...] = (
    _group_without_siblings,
    _batch_that_does_not_divide,
    _delta,
    _eval_temperature,
    _schedule_that_never_begins,
    _two_folders,
    _no_walls,
    _reference_that_is_not_there,
    _ratio_applied_twice,
    _dead_groups_that_teach,
    _spread_that_nobody_divides_by,
    _adapters_on_a_quantised_file,
    _rate_out_of_range,
)
