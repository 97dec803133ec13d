"""One step's sampling: a round of problems, and with dynamic sampling more rounds in place of its dead groups.

A group whose rewards are all equal gives no gradient. DAPO replaces such groups by fresh problems until the batch is
full; here for at most `max_rounds` more rounds, after which the batch goes on smaller. Dead is judged by the task's own
rewards: the overlong penalty may still tell the members of such a group apart, but not by what the task asks.

What was sampled is logged whole, dead groups included; `is_kept_N` says which groups are trained on.

Letters: N groups sampled in all rounds, S completions of theirs. Source: DAPO (arXiv:2503.14476), section 3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.metrics import is_dead
from sparkgrpo.trainer.problem_stream import Drawn, ProblemStream
from sparkgrpo.trainer.rollout.result import Rollout, RolloutStats
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Completions of some problems, judged; one entry a completion unless said otherwise."""

    drawn: Drawn
    rollout: Rollout
    asked: Sequence[Problem]
    completions: Sequence[Completion]
    scores: Sequence[Score]
    """By the reward."""
    verdicts: Sequence[Score]
    """By the strict check."""

    def is_live_N(self) -> list[bool]:
        """Of each of its groups, whether two rewards differ."""
        rewards_N: list[list[float | None]] = [[] for _ in self.drawn.problems]
        for n, score in zip(self.rollout.prompt_of_row_S.tolist(), self.scores, strict=True):
            rewards_N[n].append(score.reward)
        return [not is_dead(rewards) for rewards in rewards_N]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """All rounds of a step, joined in order."""

    prompts: Sequence[Sequence[int]]
    rollout: Rollout
    asked: Sequence[Problem]
    completions: Sequence[Completion]
    scores: Sequence[Score]
    verdicts: Sequence[Score]
    is_kept_N: Sequence[bool]
    """Groups that are trained on: all of them without dynamic sampling."""
    num_rounds: int
    end: int
    """Index of the next problem of the stream."""
    num_dropped: int
    """Problems passed over for a too long prompt."""


def sample_batch(config: Config, stream: ProblemStream, start: int, run_round: Callable[[Drawn], Round]) -> Sampled:
    """Draw problems from this place on and have them answered, round after round.

    Args:
        run_round: Answers and judges the problems of one round.

    Raises:
        UserError: As `ProblemStream.draw`.
    """
    rounds: list[Round] = []
    is_kept_N: list[bool] = []
    place, missing = start, config.prompts_per_step
    for _ in range(1 + config.max_rounds if config.dynamic_sampling else 1):
        done = run_round(stream.draw(place, missing))
        rounds.append(done)
        place = done.drawn.end
        is_kept_N += done.is_live_N() if config.dynamic_sampling else [True] * missing
        missing = config.prompts_per_step - sum(is_kept_N)
        if not missing:
            break
    return Sampled(
        prompts=[prompt for done in rounds for prompt in done.drawn.prompts],
        rollout=joined([done.rollout for done in rounds]),
        asked=[problem for done in rounds for problem in done.asked],
        completions=[completion for done in rounds for completion in done.completions],
        scores=[score for done in rounds for score in done.scores],
        verdicts=[verdict for done in rounds for verdict in done.verdicts],
        is_kept_N=is_kept_N,
        num_rounds=len(rounds),
        end=place,
        num_dropped=sum(done.drawn.num_dropped for done in rounds),
    )


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of the prompts of all, in order; a single one as it is."""
    if len(rollouts) == 1:
        return rollouts[0]
    prompt_of_row, num_prompts = [], 0
    for rollout in rollouts:
        prompt_of_row.append(rollout.prompt_of_row_S + num_prompts)
        num_prompts += int(rollout.prompt_of_row_S[-1]) + 1
    return Rollout(
        token_T=torch.cat([rollout.token_T for rollout in rollouts]),
        logprob_T=torch.cat([rollout.logprob_T for rollout in rollouts]),
        length_S=torch.cat([rollout.length_S for rollout in rollouts]),
        finish_S=torch.cat([rollout.finish_S for rollout in rollouts]),
        prompt_of_row_S=torch.cat(prompt_of_row),
        sampling=rollouts[0].sampling,
        stats=_summed([rollout.stats for rollout in rollouts]),
    )


def _summed(stats: Sequence[RolloutStats]) -> RolloutStats:
    """Counts and times added; shares weighted by what they are shares of."""
    num_slots = sum(s.num_new_tokens / s.frac_slots_alive for s in stats if s.frac_slots_alive)
    num_steps = sum(s.num_steps for s in stats)
    num_new_tokens = sum(s.num_new_tokens for s in stats)
    coverages = [(s.graph_coverage, s.num_steps) for s in stats if s.graph_coverage is not None]
    return RolloutStats(
        t_prefill_s=sum(s.t_prefill_s for s in stats),
        t_decode_s=sum(s.t_decode_s for s in stats),
        num_prompt_tokens=sum(s.num_prompt_tokens for s in stats),
        num_new_tokens=num_new_tokens,
        num_steps=num_steps,
        num_compactions=sum(s.num_compactions for s in stats),
        num_waves=sum(s.num_waves for s in stats),
        frac_slots_alive=num_new_tokens / num_slots if num_slots else stats[0].frac_slots_alive,
        num_decode_bytes=sum(s.num_decode_bytes for s in stats),
        graph_coverage=sum(c * n for c, n in coverages) / num_steps if coverages and num_steps else None,
        t_capture_s=sum(s.t_capture_s for s in stats),
    )
