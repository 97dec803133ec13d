"""What is added to a task's reward before the advantages: a shift, and DAPO's soft penalty for overlong answers.

    penalty(L) = 0 for L <= M - C,   ((M - C) - L) / C beyond,   so -1 at L = M        C = overlong_cache x M

L is the completion's length, M is max_new_tokens. Source: DAPO (arXiv:2503.14476), equation 13.
"""

from collections.abc import Sequence

from sparkgrpo.trainer.config import Config


def overlong_penalty(length: int, max_new_tokens: int, cache_tokens: float) -> float:
    """0 to -1, for a completion of so many tokens; exactly 0 without a cache."""
    too_many = length - (max_new_tokens - cache_tokens)
    return -too_many / cache_tokens if cache_tokens > 0 and too_many > 0 else 0.0


def shaped_rewards(rewards: Sequence[float | None], lengths: Sequence[int], config: Config) -> list[float | None]:
    """The rewards that advantages are made of; an unscored completion stays unscored."""
    cache_tokens = config.overlong_cache * config.max_new_tokens
    return [
        None
        if reward is None
        else reward + config.reward_shift + overlong_penalty(length, config.max_new_tokens, cache_tokens)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
