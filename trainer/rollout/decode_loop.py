"""The loop around the decode step: until no row is alive, dropping finished rows on the way.

On a CPU the number of live rows is read after every step, at no cost. On a GPU reading it would stop the device, so it
is copied to the host behind each step and looked at one step late: one surplus step at the end, in which every slot is
parked, and no wait anywhere.

Letters: B slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparkgrpo.trainer.rollout.graphs import Runner, bucket_for
from sparkgrpo.trainer.rollout.result import RolloutStats
from sparkgrpo.trainer.rollout.state import DecodeState

FRAC_ALIVE_TO_COMPACT = 7 / 8
"""On a CPU finished rows are dropped once fewer than this share of the slots is alive: a drop copies the cache of the
rest."""


@dataclass(slots=True)
class Meter:
    """Running sums of one `generate`."""

    between_steps: Callable[[], None] | None = None
    """Called with every step that is counted."""
    t_prefill_s: float = 0.0
    t_decode_s: float = 0.0
    num_steps: int = 0
    num_compactions: int = 0
    num_waves: int = 0
    num_alive_slots: int = 0
    num_slots: int = 0
    num_cache_tokens: int = 0
    """Tokens whose keys and values some step had to read."""

    def stepped(self, num_alive: int, num_slots: int) -> None:
        """Count one decode step."""
        if self.between_steps is not None:
            self.between_steps()
        self.num_steps += 1
        self.num_alive_slots += num_alive
        self.num_slots += num_slots

    def read(self, prompt_len_N: Sequence[int], length_NG: torch.Tensor, *, is_shared: bool) -> None:
        """Count the context that the steps of a finished wave read.

        A row of n tokens took n - 1 steps, the i-th of them over its prompt and i own tokens. is_shared: a prompt is
        read once for all siblings that still run.
        """
        steps_NG = length_NG.long() - 1
        own = int((steps_NG * (steps_NG + 1) // 2).sum())
        times_N = steps_NG.amax(1) if is_shared else steps_NG.sum(1)
        self.num_cache_tokens += own + int((times_N * torch.tensor(prompt_len_N)).sum())

    def stats(
        self,
        num_prompt_tokens: int,
        num_new_tokens: int,
        *,
        weight_bytes: int,
        logit_bytes: int,
        token_bytes: int,
        runner: Runner,
        has_graphs: bool,
    ) -> RolloutStats:
        """What the rollout measured.

        Args:
            weight_bytes: Read by every step. logit_bytes: Written and read again for every slot. token_bytes: Keys and
                values of one token in all layers.
        """
        num_decode_bytes = self.num_steps * weight_bytes + self.num_slots * logit_bytes
        num_decode_bytes += self.num_cache_tokens * token_bytes
        return RolloutStats(
            num_decode_bytes=num_decode_bytes,
            graph_coverage=runner.num_replayed / max(runner.num_steps, 1) if has_graphs else None,
            t_capture_s=runner.t_capture_s,
            t_prefill_s=self.t_prefill_s,
            t_decode_s=self.t_decode_s,
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            num_steps=self.num_steps,
            num_compactions=self.num_compactions,
            num_waves=self.num_waves,
            frac_slots_alive=self.num_alive_slots / self.num_slots if self.num_slots else 1.0,
        )


class LatePoll:
    """The number of live rows, one step late: a copy to pinned memory and an event behind each step."""

    def __init__(self, num_alive_1: torch.Tensor) -> None:
        self._num_alive_1 = num_alive_1
        self._is_cuda = num_alive_1.device.type == "cuda"
        self._copies = [torch.empty(1, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._is_cuda else []
        self._turn = 0

    def record(self) -> None:
        """Have the number copied once all that is queued has run."""
        self._copies[self._turn].copy_(self._num_alive_1, non_blocking=True)
        if self._is_cuda:
            self._events[self._turn].record()
        self._turn = 1 - self._turn

    def read_previous(self) -> int:
        """The number at the record before the last; waits for that one alone."""
        if self._is_cuda:
            self._events[self._turn].synchronize()
        return int(self._copies[self._turn])


def decode_exactly(state: DecodeState, runner: Runner, num_rows: int, meter: Meter) -> None:
    """The loop of a CPU: only live rows take part, give or take an eighth."""
    num_slots = num_rows
    while num_alive := int(state.num_alive_1):  # the one host read of a step
        if num_alive <= FRAC_ALIVE_TO_COMPACT * num_slots:
            state.compact(num_slots, num_alive)
            num_slots = num_alive
            meter.num_compactions += 1
        runner.step(num_slots)
        meter.stepped(num_alive, num_slots)


def decode_in_buckets(
    state: DecodeState, runner: Runner, num_rows: int, meter: Meter, *, max_rows: int, max_new_tokens: int
) -> None:
    """The loop of a GPU: sizes from a fixed set, each a captured graph; the host queues and never waits for a step."""
    poll, bucket = LatePoll(state.num_alive_1), bucket_for(num_rows, max_rows)
    poll.record()  # behind the prefill, which drew the first token
    num_alive = num_rows
    for _ in range(max_new_tokens - 1):  # by then every row has met its limit
        runner.step(bucket)
        meter.stepped(num_alive, bucket)
        poll.record()
        num_alive = poll.read_previous()
        if not num_alive:
            break
        if (smaller := bucket_for(num_alive, max_rows)) < bucket:
            state.compact(bucket, smaller)
            bucket = smaller
            meter.num_compactions += 1
