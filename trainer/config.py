"""The configuration of a run: one frozen record, checked once, whose docstrings are the text of ``--help``.

Values come in layers (``settings.py``): these defaults, the recipe beside the model, a preset, a YAML file, the command
line. The defaults are those of the lesson for Qwen2.5-0.5B-Instruct.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Literal

from sparkgrpo.trainer.contradictions import contradiction, lora_targets_problem
from sparkgrpo.trainer.task_config import TaskConfig, task_value_problem

MIN_TEMPERATURE = 0.05  # that of rollout/engine.py, which loads PyTorch: the command line is checked before that
GROUP_BASELINES = ("group", "mean", "batch", "rloo")  # advantages that compare a completion with its siblings


class UserError(ValueError):
    """A mistake of the person at the keyboard. The text says what was expected, what came and what to do.

    The command line prints the text alone and exits with 2. Any other exception is our bug and keeps its traceback.

    Args:
        text: One sentence.
        details: What stands behind it, such as the traceback of a user's function; a run keeps it in events.jsonl.
    """

    def __init__(self, text: str = "", *, details: str = "") -> None:
        super().__init__(text)
        self.details = details


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(TaskConfig):
    """Every choice of a run. `UserError` for a value of the wrong type, out of range, or at odds with another."""

    model: str = "auto"
    """Model to train: a Hugging Face folder, a hub name, a FILE.gguf, "embedded", or "auto": Qwen2.5-0.5B-Instruct on a
    CUDA machine that has it cached or can reach it, else the small embedded model."""

    task: str = "countdown"
    """Task that makes the problems and judges the answers."""

    numbers: str = "3"
    """Numbers in a Countdown puzzle: 2 (easy), 3, 4 (hard), or a mix such as "2,3"."""

    preset: str = "grpo"
    """Named objective: sets advantage, normaliser, surrogate, ratio, clip range and beta."""

    seed: int = 0
    """Key of every random number of the run; 0 to 4294967295."""

    steps: int = 200
    """Training steps; at least 1. A step samples one batch and updates on it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; "auto": CUDA if there is one."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; masters and optimiser states stay fp32. "auto": bf16 on CUDA, fp32 on the CPU."""

    num_threads: int = 0
    """CPU threads of PyTorch; 0: PyTorch's own choice."""

    prompts_per_step: int = 16
    """Problems per step (groups); at least 1."""

    group_size: int = 8
    """Completions per problem, G; at least 2, or 1 with advantage "none"; at most 65536."""

    max_new_tokens: int = 256
    """Cap on the length of a completion, tokens; at least 1."""

    max_prompt_tokens: int = 0
    """Longest prompt, tokens; at least 0, and 0 is what the model takes beside max_new_tokens."""

    long_prompts: Literal["refuse", "drop"] = "refuse"
    """A training prompt that is too long: "refuse" ends the run with its index; "drop" takes the next problem of the
    stream and counts it."""

    temperature: float = 1.0
    """Sampling temperature of training; at least 0.05."""

    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by fresh problems before the update (DAPO)."""

    max_rounds: int = 3
    """Rounds of fresh problems in a step with dynamic_sampling, at least 1; the batch then goes on smaller."""

    overlong_cache: float = 0.0
    """Share of max_new_tokens at its end over which a soft penalty falls from 0 to -1, added to the reward (DAPO: 0.2);
    0 to 1, and 0 is no penalty."""

    reward_shift: float = 0.0
    """Added to every reward; with 5, right and wrong pay 6 and 5. A baseline takes it out again."""

    advantage: Literal["group", "mean", "batch", "rloo", "none"] = "group"
    """Advantage of a completion. "group": (r - mean) / (std + 1e-4) of its group; "mean": r - mean; "batch": r - mean,
    over the std of the batch; "rloo": r - mean of the siblings; "none": r."""

    ddof: int = 0
    """Standard deviations of "group" and "batch" divide by n - ddof: 0 is the population's, 1 the sample's (TRL)."""

    normaliser: Literal["sequence", "token", "constant"] = "sequence"
    """Weight of a token in the loss: "sequence": 1 / (completions x its length); "token": 1 / all tokens; "constant":
    1 / (completions x max_new_tokens)."""

    surrogate: Literal["clip", "cispo"] = "clip"
    """Policy loss: "clip" is PPO's clipped minimum; "cispo" weights log-probabilities by the detached, capped ratio."""

    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or per sequence: exp of the mean log-ratio (GSPO)."""

    eps_low: float = 0.2
    """The ratio is clipped below 1 - eps_low; 0 to 1, and 1 is no lower clip."""

    eps_high: float = 0.2
    """The ratio is clipped above 1 + eps_high; 0 to inf, and inf is no upper clip."""

    delta: float | None = None
    """Upper bound on the ratio where the advantage is negative, with surrogate "clip"; above 1 + eps_high, or none."""

    beta: float = 0.04
    """Weight of the KL penalty to the reference model; at least 0, and 0 keeps no reference at all."""

    sync_every: int = 0
    """Steps between moves of the reference towards the policy; at least 0, and 0 keeps the reference as it was."""

    sync_mix: float = 1.0
    """Share of the policy in such a move; above 0, and 1 replaces the reference by the policy."""

    kl: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator, with d = reference - policy log-probability: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat; at least 0."""

    mask_truncated: bool = False
    """Leave completions that hit max_new_tokens out of the loss."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Log-probabilities that the ratio starts from: "trainer" scores them where they are needed; "rollout" takes the
    sampler's, so that the ratio holds the mismatch between sampler and trainer too."""

    importance_cap: float | None = None
    """Weight every token by min(trainer / sampler probability, this cap), or none; above 0. Costs one more forward."""

    inner_epochs: int = 1
    """Passes over each batch; at least 1. With 1 pass and 1 mini-batch the first ratio is exactly 1."""

    mini_batches: int = 1
    """Optimiser updates per pass; at least 1, and prompts_per_step must be a multiple of it."""

    lr: float = 1e-6
    """Learning rate of AdamW after warm-up; above 0, at most 1."""

    lr_factor: float = 1.0
    """The learning rate is multiplied by this, wherever lr was set; above 0. For presets."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling from step to step and 0 after the last."""

    warmup_steps: int = 0
    """Steps of linear warm-up of the learning rate; at least 0."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment; 0 to below 1."""

    adam_beta2: float = 0.999
    """Decay of Adam's second moment; 0 to below 1."""

    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment; above 0."""

    weight_decay: float = 0.0
    """Decoupled weight decay; at least 0."""

    max_grad_norm: float = 1.0
    """The gradient is scaled down to this global norm; above 0, and inf is no clipping."""

    tokens_per_micro_batch: int = 0
    """Packed tokens per forward and backward pass; at least 0, and 0 chooses from the memory there is."""

    activation_checkpointing: bool = False
    """Keep one hidden state a block and compute blocks again in the backward pass: less memory, a third more time."""

    attention: Literal["sdpa", "flash"] = "sdpa"
    """Attention of training: PyTorch's, or flash-attn's (extra "flash"; CUDA and bf16)."""

    lora_rank: int = 0
    """Rank of LoRA adapters (extra "lora"); at least 0, and 0 trains all weights. Adapters want a larger lr: 1e-5 to
    1e-4."""

    lora_alpha: float = 32.0
    """The adapters' product is scaled by lora_alpha / lora_rank; above 0."""

    lora_targets: str = "all-linear"
    """What gets adapters: "all-linear", or some of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj."""

    eval_every: int = 20
    """Steps between evaluations; at least 0, and 0 evaluates at the two ends only."""

    eval_problems: int = 200
    """Held-out problems per evaluation; at least 1."""

    eval_temperature: float = 0.0
    """Temperature of evaluation; 0, which is greedy, or at least 0.05."""

    num_samples: int = 4
    """Held-out completions kept in samples.jsonl at each evaluation; at least 0."""

    checkpoint_every: int = 0
    """Steps between checkpoints; at least 0, and 0 saves at the end only."""

    keep_checkpoints: int = 2
    """Newest checkpoints kept on disk; at least 1."""

    run_dir: str = ""
    """Folder of the run, new or empty; default runs/<time>_<task>_<preset>_s<seed>."""

    resume: str = ""
    """Run folder to go on with, from its last checkpoint."""

    plain: bool = False
    """One plain line per step in place of the live view."""

    sink: str = ""
    """Loggers that get every line too: tensorboard, trackio, wandb, or some with commas (extras of the same names)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            problem = value_problem(field.name, getattr(self, field.name))
            if problem:
                raise UserError(f"{field.name}: {problem}")
        fault = contradiction(typing.cast(typing.Any, self))  # a checker sees this file under two names
        if fault:
            raise UserError(fault)


def value_problem(name: str, value: object) -> str | None:
    """What is wrong with ``value`` for the field ``name`` (type or range), as "expected ..., got ...", or None."""
    kind = field_types()[name]
    if not _is_of_type(value, kind):
        return f"expected {describe_type(kind)}, got {value!r}"
    if name in _RANGES and isinstance(value, (int, float)) and not _RANGES[name].holds(value):
        return f"expected {_RANGES[name].text}, got {value!r}"
    if name == "numbers" and not set(str(value).replace(" ", "").split(",")) <= {"2", "3", "4"}:
        return f'expected 2, 3, 4 or a mix such as "2,3", got {value!r}'
    if name == "lora_targets":
        return lora_targets_problem(str(value))
    return task_value_problem(name, value)


def field_types() -> dict[str, object]:
    """The type of every field of `Config`, by name: int, float, str, bool, a `Literal`, or ``float | None``."""
    return {field.name: field.type for field in dataclasses.fields(Config)}


def choices(kind: object) -> tuple[str, ...]:
    """The allowed words of a `Literal` type, else an empty tuple."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def is_optional(kind: object) -> bool:
    """Whether None is a value of this type."""
    return isinstance(kind, types.UnionType) and types.NoneType in typing.get_args(kind)


def describe_type(kind: object) -> str:
    """A field type in words, for messages: "an integer", "one of strict, sloppy"."""
    if choices(kind):
        return "one of " + ", ".join(choices(kind))
    if is_optional(kind):
        return "a number or none"
    return {int: "an integer", float: "a number", str: "text", bool: "true or false"}[typing.cast(type, kind)]


def _is_of_type(value: object, kind: object) -> bool:
    if choices(kind):
        return isinstance(value, str) and value in choices(kind)
    if value is None:
        return is_optional(kind)
    if kind is bool or kind is str:
        return isinstance(value, typing.cast(type, kind))
    # True is an int to Python, but never what the person meant.
    allowed = (int,) if kind is int else (int, float)
    return isinstance(value, allowed) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float = math.inf
    is_low_in: bool = True
    is_high_in: bool = True

    def holds(self, value: float) -> bool:
        """Whether the value lies inside; NaN never does."""
        above = value >= self.low if self.is_low_in else value > self.low
        below = value <= self.high if self.is_high_in else value < self.high
        return above and below

    @property
    def text(self) -> str:
        """The range in words."""
        low = f"at least {self.low:g}" if self.is_low_in else f"above {self.low:g}"
        if math.isinf(self.high):
            return low + ("" if self.is_high_in else " and finite")
        return low + (f" and at most {self.high:.10g}" if self.is_high_in else f" and below {self.high:.10g}")


_COUNT, _FROM_ZERO = _Range(1), _Range(0)
_FINITE, _POSITIVE = _Range(0, is_high_in=False), _Range(0, is_low_in=False, is_high_in=False)
_DECAY = _Range(0, 1, is_high_in=False)
_RANGES = {
    "seed": _Range(0, 2**32 - 1),
    "steps": _COUNT,
    "num_threads": _FROM_ZERO,
    "prompts_per_step": _COUNT,
    "group_size": _Range(1, 1 << 16),
    "max_new_tokens": _COUNT,
    "max_prompt_tokens": _FROM_ZERO,
    "temperature": _Range(MIN_TEMPERATURE, is_high_in=False),
    "max_rounds": _COUNT,
    "overlong_cache": _Range(0, 1),
    "reward_shift": _Range(-math.inf, is_low_in=False, is_high_in=False),
    "ddof": _Range(0, 1),
    "eps_low": _Range(0, 1),
    "eps_high": _FROM_ZERO,
    "delta": _POSITIVE,
    "beta": _FINITE,
    "sync_every": _FROM_ZERO,
    "sync_mix": _Range(0, 1, is_low_in=False),
    "importance_cap": _POSITIVE,
    "entropy_coef": _FINITE,
    "inner_epochs": _COUNT,
    "mini_batches": _COUNT,
    "lr": _Range(0, 1, is_low_in=False),
    "lr_factor": _POSITIVE,
    "warmup_steps": _FROM_ZERO,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "adam_eps": _POSITIVE,
    "weight_decay": _FINITE,
    "max_grad_norm": _Range(0, is_low_in=False),
    "tokens_per_micro_batch": _FROM_ZERO,
    "lora_rank": _FROM_ZERO,
    "lora_alpha": _POSITIVE,
    "eval_every": _FROM_ZERO,
    "eval_problems": _COUNT,
    "eval_temperature": _FINITE,
    "num_samples": _FROM_ZERO,
    "checkpoint_every": _FROM_ZERO,
    "keep_checkpoints": _COUNT,
    "reward_timeout_s": _POSITIVE,
    "format_reward": _Range(0, 0.1),
    "max_number": _Range(2, 999),
    "max_target": _Range(2, 999_999),
    "xmlcount_floor": _Range(-math.inf, 0),
    "heldout_frac": _Range(0, 0.9),
}
