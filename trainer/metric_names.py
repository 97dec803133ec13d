"""What our metrics are called elsewhere, and how theirs differ from ours."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherName:
    """A metric under another trainer's name."""

    name: str
    difference: str = ""
    """How its meaning or computation differs; empty: the same."""


TRL: Mapping[str, OtherName] = {
    "reward_mean": OtherName("reward"),
    "reward_std": OtherName("reward_std", "TRL divides by n - 1"),
    "frac_zero_std": OtherName("frac_reward_zero_std", "TRL counts a standard deviation close to 0"),
    "len_mean": OtherName("completions/mean_length"),
    "len_max": OtherName("completions/max_length"),
    "frac_truncated": OtherName("completions/clipped_ratio", "TRL: the last id is no end of sequence"),
    "kl_mean": OtherName("kl", "TRL multiplies by the ratio"),
    "entropy_mean": OtherName("entropy"),
    "clip_frac": OtherName("clip_ratio/region_mean"),
    "clip_frac_low": OtherName("clip_ratio/low_mean"),
    "clip_frac_high": OtherName("clip_ratio/high_mean"),
    "logprob_gap_mean": OtherName("sampling/sampling_logp_difference/mean"),
    "logprob_gap_max": OtherName("sampling/sampling_logp_difference/max"),
    "t_step": OtherName("step_time", "TRL does not wait for the device"),
    "num_tokens_total": OtherName("num_tokens"),
    "loss": OtherName("loss"),
    "grad_norm": OtherName("grad_norm"),
    "lr": OtherName("learning_rate"),
    "part/": OtherName("rewards/*/mean", "TRL: one a reward function"),
}
"""TRL 1.16."""

VERL: Mapping[str, OtherName] = {
    "reward_mean": OtherName("critic/score/mean"),
    "len_mean": OtherName("response_length/mean"),
    "len_max": OtherName("response_length/max"),
    "frac_truncated": OtherName("response_length/clip_ratio"),
    "kl_mean": OtherName("actor/kl_loss", "of the loss's estimator; verl's ppo_kl is old against new"),
    "entropy_mean": OtherName("actor/entropy"),
    "clip_frac": OtherName("actor/pg_clipfrac"),
    "loss": OtherName("actor/pg_loss", "ours holds the penalties too"),
    "grad_norm": OtherName("actor/grad_norm"),
    "lr": OtherName("actor/lr"),
    "logprob_gap_mean": OtherName("rollout_corr/kl", "a KL there, a mean of absolute differences here"),
    "t_step": OtherName("timing_s/step"),
    "t_gen": OtherName("timing_s/gen"),
}

PRIME_RL: Mapping[str, OtherName] = {
    "reward_mean": OtherName("reward/mean"),
    "len_mean": OtherName("seq_len/mean", "prompt and answer there"),
    "frac_truncated": OtherName("is_truncated/mean"),
    "entropy_mean": OtherName("entropy/all/mean"),
    "logprob_gap_mean": OtherName("mismatch_kl/all/mean", "a KL there, a mean of absolute differences here"),
    "t_step": OtherName("time/step"),
}

NAMES: Mapping[str, Mapping[str, OtherName]] = {"trl": TRL, "verl": VERL, "prime-rl": PRIME_RL}


def other_name(names: Mapping[str, OtherName], key: str) -> OtherName | None:
    """The other trainer's name of one of our keys, or None where it has none."""
    if key in names:
        return names[key]
    for ours, other in names.items():
        if ours.endswith("/") and key.startswith(ours):
            return OtherName(other.name.replace("*", key.removeprefix(ours)), other.difference)
    return None


def our_name(names: Mapping[str, OtherName], key: str) -> str | None:
    """Our key for another trainer's name, or None where we have none."""
    for ours, other in names.items():
        if other.name == key:
            return ours
        begin, star, end = other.name.partition("*")
        if star and key.startswith(begin) and key.endswith(end) and len(key) > len(begin) + len(end):
            return ours + key[len(begin) : len(key) - len(end)]
    return None
