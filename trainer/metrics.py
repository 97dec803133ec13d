"""What a line of metrics.jsonl means, as data, and the numbers that follow from the rewards and texts of one batch.

The batch is the one sampled by the weights after step - 1 updates. *Right* is ``ok`` by the reward, *strictly right* is
``ok`` by the strict check. A group is *dead* when its rewards have max == min exactly (never judged by std), or when
fewer than two of its members were scored. A token mean runs over the completion tokens that take part in the loss.
Null means "not known" and never 0; a missing key is null.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

REWARD_ERROR = "reward_error"
"""Reason code of a completion whose reward could not be had, in every task."""
SCORED = "scored"
"""Reason code of a completion that reward functions scored and no strict check judged."""
MANY_ANSWERS = "many_answers"
"""The part that says whether a text has several answer blocks; its mean is logged as `frac_many_answers`."""
SCHEMA_VERSION = 1
"""``v`` of every line. Keys are added freely; a changed meaning raises it."""

MetricValue = float | int | list[int] | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One key of metrics.jsonl. A key that ends in "/" stands for all keys that begin with it."""

    key: str
    definition: str
    unit: str = ""


METRICS: tuple[Metric, ...] = (
    Metric("v", "version of the meaning of the keys"),
    Metric("step", "1, 2, ...; after a resume a step may come twice, and the later line wins"),
    Metric("t_unix_s", "time of writing", "s"),
    Metric("num_prompts", "groups in the batch"),
    Metric("group_size", "completions per group, G"),
    Metric("num_rounds", "rounds of sampling in this step; 1 without dynamic sampling"),
    Metric(
        "num_prompts_trained",
        "groups kept for the update; dynamic sampling that ran out of rounds keeps fewer",
    ),
    Metric("num_prompts_dropped", "training prompts passed over so far for being too long"),
    Metric("num_updates", "optimiser updates in this step"),
    Metric("lr", "learning rate of the last update"),
    Metric("num_tokens", "completion tokens of the batch", "tokens"),
    Metric("num_tokens_total", "prompt and completion tokens since the start", "tokens"),
    Metric("reward_mean", "mean reward over the scored completions"),
    Metric("reward_std", "population std of the reward over the scored completions"),
    Metric("reward_std_within", "mean over groups of their population std: is there anything to learn?"),
    Metric("reward_best_mean", "mean over groups of their best reward"),
    Metric("part/", "mean of a named part of the reward over the completions that have it"),
    Metric("metric/", "what reward functions logged under this name: mean over the batch"),
    Metric("reason/", "share of completions with this reason code; absent when it was never seen", "fraction"),
    Metric("frac_right", "right / scored completions; null where no task judges what is scored", "fraction"),
    Metric("frac_many_answers", "completions with several answer blocks / all; null for other tasks", "fraction"),
    Metric("num_right", "right completions of every group, in order"),
    Metric("frac_right_strict", "strictly right completions / all; null for a task without strict check", "fraction"),
    Metric("hack_gap", "frac_right - frac_right_strict; null like it"),
    Metric("frac_zero_std", "dead groups / groups = frac_all_right + frac_all_wrong", "fraction"),
    Metric("frac_all_right", "dead groups with every scored member right / groups", "fraction"),
    Metric("frac_all_wrong", "all other dead groups / groups", "fraction"),
    Metric("frac_zero_std_floor", "p^G + (1-p)^G with p = frac_right; null if more than two rewards occur", "fraction"),
    Metric("frac_unique", "mean over groups of distinct completions / G", "fraction"),
    Metric(
        "frac_dead_identical", "dead groups of one and the same completion / dead groups; null without any", "fraction"
    ),
    Metric(
        "frac_reward_error",
        "completions whose reward raised or was not finite, unscored, / all",
        "fraction",
    ),
    Metric("num_reward_restarts", "scoring processes that missed a deadline or died, and were replaced"),
    Metric("len_mean", "mean length of a completion", "tokens"),
    Metric("len_max", "longest completion", "tokens"),
    Metric("len_right_mean", "mean length of right completions; null without any", "tokens"),
    Metric("len_wrong_mean", "mean length of the others; null without any", "tokens"),
    Metric("frac_truncated", "completions that ended at the token limit / all", "fraction"),
    Metric("frac_truncated_right", "completions that ended at the token limit and are right / all", "fraction"),
    Metric("kl_mean", "k3 to the reference in the first pass; exactly 0 at step 1; null with beta 0", "nats/token"),
    Metric("kl_max", "largest k3 of a token; null with beta 0", "nats"),
    Metric("entropy_mean", "full softmax at the sampling temperature; null if no pass computed it", "nats/token"),
    Metric("clip_frac", "tokens where the clip binds, mean over updates; exactly 0 with one update", "fraction"),
    Metric("clip_frac_low", "tokens where the lower clip binds", "fraction"),
    Metric("clip_frac_high", "tokens where the upper clip binds", "fraction"),
    Metric("ratio_max", "largest importance ratio; exactly 1 with one update"),
    Metric("logprob_gap_mean", "mean |rollout - trainer| log-probability at the same weights", "nats"),
    Metric("logprob_gap_p99", "its 99th percentile", "nats"),
    Metric("logprob_gap_max", "its maximum", "nats"),
    Metric("logprob_gap_signed", "mean of rollout - trainer log-probability", "nats"),
    Metric("importance_mean", "mean capped trainer / sampler probability; null without importance_cap"),
    Metric("frac_importance_capped", "tokens at the cap; null without importance_cap", "fraction"),
    Metric("loss", "the loss; near 0 on purpose when advantages are centred and there is one update"),
    Metric("grad_norm", "global norm of the gradient before clipping; null if the step was skipped"),
    Metric("frac_params_changed", "weights whose stored value moved", "fraction"),
    Metric("frac_tokens_trained", "completion tokens with a non-zero gradient / those of the groups kept", "fraction"),
    Metric("skipped_steps", "steps skipped so far for a non-finite gradient"),
    Metric("num_nonfinite", "values of this line that were not finite and became null"),
    Metric("nonfinite", "their keys"),
    Metric("t_step", "wall time of the step", "s"),
    Metric("t_gen", "sampling the completions", "s"),
    Metric("t_gen_prefill", "inside t_gen: the prompts", "s"),
    Metric("t_gen_decode", "inside t_gen: the completions", "s"),
    Metric("t_reward", "scoring the completions", "s"),
    Metric("t_old", "log-probabilities before the first update; 0 with one update", "s"),
    Metric("t_ref", "log-probabilities of the reference; 0 with beta 0", "s"),
    Metric("t_train", "forward and backward", "s"),
    Metric("t_train_backward", "inside t_train: the backward pass", "s"),
    Metric("t_opt", "gradient clip, optimiser, copy of the weights", "s"),
    Metric("t_eval", "evaluation on held-out problems", "s"),
    Metric("t_other", "data, packing, logging, checkpoint", "s"),
    Metric("t_unaccounted", "t_step minus the sum of the phases: the error of the clock", "s"),
    Metric("frac_slots_alive", "decode slots with a row that still ran / all slots of the decode steps", "fraction"),
    Metric("tok_per_s", "completion tokens / t_gen", "tokens/s"),
    Metric("decode_gbps", "bytes that the decode steps have to move / t_gen_decode", "GB/s"),
    Metric("train_tflops", "flops of t_train, from the model's shapes and the tokens that ran / t_train", "TFLOP/s"),
    Metric("frac_decode_roofline", "decode_gbps / read bandwidth of the probe; null in a cache", "fraction"),
    Metric("frac_train_roofline", "train_tflops / matrix product rate of the probe", "fraction"),
    Metric("graph_coverage", "decode steps that replayed a CUDA graph / all; null on a CPU", "fraction"),
    Metric("mem_peak_bytes", "peak memory of the device; on the CPU, peak resident memory of the process", "bytes"),
    Metric("mem_reserved_bytes", "taken by the allocator of the device; null on a CPU", "bytes"),
    Metric("mem_available_min_bytes", "lowest memory available to the host during the step", "bytes"),
    Metric("sm_clock_mhz", "clock of the device; null where the driver does not say", "MHz"),
    Metric("temp_c", "temperature of the device; null where the driver does not say", "degrees C"),
    Metric("power_w", "power of the device; null where the driver does not say", "W"),
)

SPANS = ("t_train_backward",)
"""Parts of phases that the clock times apart."""

EVAL_METRICS: tuple[Metric, ...] = (
    Metric("v", "version of the meaning of the keys"),
    Metric("step", "updates before it: 0, every eval_every, the last"),
    Metric("num_problems", "held-out problems, the same at every step"),
    Metric("accuracy", "right answers by the strict check / problems it could judge", "fraction"),
    Metric("accuracy_se", "standard error of it by the number of judged problems", "fraction"),
    Metric("accuracy_flexible", "gsm8k: right where the last number of the text counts / problems", "fraction"),
    Metric("constant_guess", "gsm8k: right if every answer were the most frequent one in training", "fraction"),
    Metric("heldout_family_accuracy", "word problems: accuracy on families that training never has", "fraction"),
    Metric("right_bits", "hexadecimal, a bit a problem in their order: runs and steps compare pairwise"),
    Metric("reward_mean", "mean reward of the strict check"),
    Metric("len_mean", "mean length of an answer", "tokens"),
    Metric("frac_truncated", "answers that ended at the token limit / all", "fraction"),
    Metric("reason/", "share of answers with this reason code", "fraction"),
)
"""The keys of evals.jsonl."""

PHASES = ("t_gen", "t_reward", "t_old", "t_ref", "t_train", "t_opt", "t_eval", "t_other")
"""The phases that add up to t_step, in the order of a step."""


def metric_of(key: str) -> Metric | None:
    """The definition of a key of metrics.jsonl, or None for a key that is not in the schema."""
    return next((m for m in METRICS if key == m.key or (m.key.endswith("/") and key.startswith(m.key))), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The S completions of one step after scoring; every sequence has length S and shares one order.

    Raises ValueError when the lengths differ.
    """

    group_ids: Sequence[int]
    """Group of each completion; members need not be adjacent, and equal prompts may be two groups."""
    rewards: Sequence[float | None]
    """Reward; None: unscored."""
    is_right: Sequence[bool]
    """Right by the reward."""
    is_right_strict: Sequence[bool | None] | None
    """Right by the strict check; None for a task without one, and where it could not judge."""
    reasons: Sequence[str]
    """Reason code."""
    parts: Sequence[Mapping[str, float]]
    """Named parts of the reward."""
    lengths: Sequence[int]
    """Completion tokens."""
    is_truncated: Sequence[bool]
    """Ended at the token limit."""
    texts: Sequence[Hashable]
    """What makes two completions the same: the token ids as a tuple, or the text."""

    def __post_init__(self) -> None:
        columns = (self.rewards, self.is_right, self.reasons, self.parts, self.lengths, self.is_truncated, self.texts)
        strict = () if self.is_right_strict is None else (self.is_right_strict,)
        sizes = sorted({len(column) for column in (self.group_ids, *columns, *strict)})
        if len(sizes) != 1 or sizes[0] == 0:
            raise ValueError(f"expected columns of one length, at least 1; got lengths {sizes}")


def batch_metrics(batch: Batch, *, seen_reasons: Collection[str] = ()) -> dict[str, MetricValue]:
    """The metrics that follow from rewards, lengths and texts alone.

    Args:
        batch: the scored completions.
        seen_reasons: codes seen earlier in the run; those absent from this batch are logged as 0, not left out.
    """
    return _reward_metrics(batch) | _share_metrics(batch, seen_reasons) | _group_metrics(batch) | _length_metrics(batch)


def _reward_metrics(batch: Batch) -> dict[str, MetricValue]:
    groups = [scored for rows in _rows_of_groups(batch) if (scored := _scored(batch, rows))]
    everything = [reward for scored in groups for reward in scored]
    return {
        "reward_mean": _mean(everything),
        "reward_std": _std(everything),
        "reward_std_within": _mean([_std_of(scored) for scored in groups]),
        "reward_best_mean": _mean([max(scored) for scored in groups]),
    }


def _share_metrics(batch: Batch, seen_reasons: Collection[str]) -> dict[str, MetricValue]:
    judged = zip(batch.is_right, batch.rewards, batch.reasons, strict=True)
    scored = [right for right, reward, reason in judged if reward is not None and reason != SCORED]
    frac_right = _mean(scored)
    strict = _mean([right for right in batch.is_right_strict or () if right is not None])
    names = sorted({name for parts in batch.parts for name in parts} - {MANY_ANSWERS})
    codes = sorted({*batch.reasons, *seen_reasons})
    return {
        "frac_right": frac_right,
        "frac_right_strict": strict,
        "hack_gap": None if frac_right is None or strict is None else frac_right - strict,
        "frac_many_answers": _mean([parts[MANY_ANSWERS] for parts in batch.parts if MANY_ANSWERS in parts]),
        **{f"part/{name}": _mean([parts[name] for parts in batch.parts if name in parts]) for name in names},
        "frac_reward_error": batch.reasons.count(REWARD_ERROR) / len(batch.reasons),
        **{f"reason/{code}": batch.reasons.count(code) / len(batch.reasons) for code in codes},
    }


def _group_metrics(batch: Batch) -> dict[str, MetricValue]:
    groups = _rows_of_groups(batch)
    scored_rows = [[row for row in rows if batch.rewards[row] is not None] for rows in groups]
    dead = [is_dead([batch.rewards[row] for row in rows]) for rows in groups]
    all_right = [
        dead_now and bool(rows) and all(batch.is_right[row] for row in rows)
        for dead_now, rows in zip(dead, scored_rows, strict=True)
    ]
    distinct = [len({batch.texts[row] for row in rows}) for rows in groups]
    identical = [number == 1 for number, dead_now in zip(distinct, dead, strict=True) if dead_now]
    return {
        "num_right": [sum(batch.is_right[row] for row in rows) for rows in scored_rows],
        "frac_zero_std": fmean(dead),
        "frac_all_right": fmean(all_right),
        "frac_all_wrong": fmean(dead_now and not right for dead_now, right in zip(dead, all_right, strict=True)),
        "frac_zero_std_floor": _dead_floor(batch, [len(rows) for rows in scored_rows]),
        "frac_unique": fmean(number / len(rows) for number, rows in zip(distinct, groups, strict=True)),
        "frac_dead_identical": _mean(identical),
    }


def is_dead(rewards: Sequence[float | None]) -> bool:
    """Whether a group teaches nothing: fewer than two scored members, or all their rewards exactly equal."""
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) < 2 or max(scored) == min(scored)


def _length_metrics(batch: Batch) -> dict[str, MetricValue]:
    right = [length for length, is_right in zip(batch.lengths, batch.is_right, strict=True) if is_right]
    wrong = [length for length, is_right in zip(batch.lengths, batch.is_right, strict=True) if not is_right]
    return {
        "len_mean": _mean(batch.lengths),
        "len_max": max(batch.lengths),
        "len_right_mean": _mean(right),
        "len_wrong_mean": _mean(wrong),
        "frac_truncated": _mean(batch.is_truncated),
        "frac_truncated_right": _mean([cut and ok for cut, ok in zip(batch.is_truncated, batch.is_right, strict=True)]),
    }


def _dead_floor(batch: Batch, scored_sizes: Sequence[int]) -> float | None:
    """Lower bound on the share of dead groups if all prompts were equally hard: mean over groups of p^G + (1-p)^G."""
    sizes = [size for size in scored_sizes if size > 0]
    if not sizes or len({reward for reward in batch.rewards if reward is not None}) > 2:
        return None
    p = sum(ok for ok, reward in zip(batch.is_right, batch.rewards, strict=True) if reward is not None) / sum(sizes)
    return fmean(p**size + (1 - p) ** size for size in sizes)


def _rows_of_groups(batch: Batch) -> list[list[int]]:
    """Row indices of every group, groups in the order of their first row."""
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids):
        rows_of.setdefault(group, []).append(row)
    return list(rows_of.values())


def _scored(batch: Batch, rows: Sequence[int]) -> list[float]:
    return [reward for row in rows if (reward := batch.rewards[row]) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _std_of(values: Sequence[float]) -> float:
    """Population std; exactly 0 for equal values, whose mean need not equal them in floating point."""
    if max(values) == min(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _std(values: Sequence[float]) -> float | None:
    return _std_of(values) if values else None
