"""gpu_check's step group: whole GRPO steps of Qwen2.5-0.5B's shape by the trainer's own loop, with their split.

Random weights, prompts of random ids, rewards by the parity of the first token, so that hardly a group is dead. No
tokenizer and no download; completions run to the limit. Beside each phase: tokens a second, and the products' TFLOP/s
of reference and update as a share of what a square product reaches.
"""

from collections.abc import Iterator, Sequence
from statistics import median

import torch

from benchmarks.device_probe import product_tflops
from benchmarks.gpu_check_decode import NUM_VALID, QWEN_HALF_B, TINY
from benchmarks.gpu_check_finding import CheckContext, Found
from sparkgrpo.kernels.philox import philox_words
from sparkgrpo.profiling.memory import peak_bytes
from sparkgrpo.profiling.phases import PhaseClock, clock_error
from sparkgrpo.trainer.budget import plan_training
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.loop import GrpoLoop
from sparkgrpo.trainer.metrics import PHASES, MetricValue
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.weights import random_model
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.tasks.base import OK, Completion, Problem, Score
from sparkgrpo.trainer.update import Updater

PROMPT_TOKENS, NUM_STEPS = 100, 3
MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean nats between sampler and trainer: random weights give logits of about 1, hidden states are rounded to bf16."""


class ParityTask:
    """Prompts of ready token ids; right where the first token is even. See `Task` for the contract of its methods."""

    name: str = "parity"
    columns: frozenset[str] = frozenset()
    reasons: tuple[str, ...] = ("odd", OK)
    num_problems: int | None = None

    def __init__(self, prompt_tokens: int, vocabulary: int) -> None:
        self.prompt_tokens, self.vocabulary = prompt_tokens, vocabulary

    def _problem(self, seed: int, place: int) -> Problem:
        words = [word for i in range(-(-self.prompt_tokens // 4)) for word in philox_words(seed, place, i, 0, 0)]
        ids = tuple(word % self.vocabulary for word in words[: self.prompt_tokens])
        return Problem(prompt=ids, columns={}, identity=f"parity:{seed}:{place}")

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return [self._problem(seed, place) for place in range(start, start + count)]

    def heldout(self, count: int) -> list[Problem]:
        return [self._problem(1 << 20, place) for place in range(count)]

    def verify(self, problem: Problem, completion: Completion) -> Score:
        is_even = completion.token_ids[0] % 2 == 0
        return Score(reward=float(is_even), parts={}, reason=OK if is_even else "odd")

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        return [self.verify(problem, answer) for problem, answer in zip(problems, completions, strict=True)]


def _loop(config: Config, model: Decoder, prompt_tokens: int) -> GrpoLoop:
    """The trainer's loop around a model without a tokenizer, sized by the trainer's own plan."""
    num_valid = min(NUM_VALID, model.config.vocab_size - 1)
    task, clock = ParityTask(prompt_tokens, num_valid), PhaseClock(model.device, PHASES)
    plan = plan_training(config, model, num_valid=num_valid, longest_prompt=prompt_tokens)
    updater = Updater(
        model, frozen_copy(model), MasterAdamW(model, config), config,
        num_valid=num_valid, tokens_per_micro_batch=plan.tokens_per_micro_batch, clock=clock,
    )  # fmt: skip
    engine = RolloutEngine(
        model, stop_ids=(), num_valid=num_valid, max_rows=plan.max_rows, max_new_tokens=config.max_new_tokens
    )
    heldout, dialogue = task.heldout(1), Dialogue(None)
    return GrpoLoop(
        config, task=task, heldout=heldout, dialogue=dialogue, engine=engine, updater=updater, clock=clock
    )  # fmt: skip


def _product_flops(config: Config, model: Decoder, prompt_tokens: int) -> float:
    """Of reference (2 a weight and token) and update (6); head rows are the completion tokens alone."""
    num_head = model.head_VD.numel()
    num_body = sum(p.numel() for p in model.parameters()) - model.embed_VD.numel()
    if model.lm_head_VD is not None:
        num_body -= num_head
    rows = config.prompts_per_step * config.group_size * config.max_new_tokens
    return 8.0 * (num_body * (rows + config.prompts_per_step * prompt_tokens) + num_head * rows)


def _faults(metrics: dict[str, MetricValue], seconds: dict[str, float], dtype: torch.dtype, number: int) -> list[str]:
    """What must hold of a healthy step and does not."""
    gap = metrics["logprob_gap_mean"]
    checks = {
        "the gradient was not finite": metrics["skipped_steps"] == 0,
        "no weight moved": metrics["frac_params_changed"] != 0,
        "KL before the first update is not exactly 0": number > 1 or metrics["kl_mean"] == 0,
        f"sampler and trainer differ by {gap} nats": isinstance(gap, float) and gap <= MAX_GAP[dtype],
        f"{clock_error(seconds)}": clock_error(seconds) is None,
    }
    return [f"step {number}: {fault}" for fault, is_right in checks.items() if not is_right]


def whole_steps(context: CheckContext) -> Iterator[Found]:
    """Three steps, the first one compiles and captures; figures are the later ones' medians."""
    is_quick, device = context.is_quick, context.device
    shape, dtype = (TINY, torch.float32) if is_quick else (QWEN_HALF_B, torch.bfloat16)
    prompt_tokens = 12 if is_quick else PROMPT_TOKENS
    config = Config(
        prompts_per_step=2 if is_quick else 16,
        group_size=4 if is_quick else 8,
        max_new_tokens=4 if is_quick else 256,
        eval_problems=1,
        lr=1e-5,
    )
    model = random_model(shape, seed=0, dtype=dtype, device=device)
    loop = _loop(config, model, prompt_tokens)
    faults, steps = [], []
    for number in range(1, NUM_STEPS + 1):
        loop.clock.start_step()
        metrics = loop.step(number).metrics
        seconds = loop.clock.end_step()
        faults += _faults(metrics, seconds, dtype, number)
        steps.append({**{k: v for k, v in metrics.items() if isinstance(v, float)}, **seconds})
    num_tokens = config.prompts_per_step * config.group_size * config.max_new_tokens
    split = {key: median(step[key] for step in steps[1:]) for key in (*PHASES, "t_step")}
    learning_s = split["t_ref"] + split["t_train"]
    tflops = _product_flops(config, model, prompt_tokens) / learning_s / 1e12
    rate = product_tflops(device, dtype, is_quick=is_quick)
    figures: dict[str, object] = {
        **split,
        "first_step_s": steps[0]["t_step"],
        "tok_per_s": num_tokens / split["t_gen"],
        "decode_gbps": steps[-1].get("decode_gbps"),
        "graph_coverage": steps[-1].get("graph_coverage"),
        "update_tflops": tflops,
        "update_frac_of_product": tflops / rate,
        "logprob_gap_mean": steps[-1]["logprob_gap_mean"],
        "peak_bytes": peak_bytes(device),
        "batch": f"{config.prompts_per_step} x {config.group_size} x {config.max_new_tokens}",
    }
    parts = ", ".join(f"{key} {split[key]:.3f}" for key in PHASES if split[key])
    text = f"{split['t_step']:.3f} s: {parts}; {num_tokens / split['t_gen']:,.0f} tokens/s, "
    text += f"update {tflops:.1f} TFLOP/s ({100 * tflops / rate:.0f} % of a product)"
    yield f"GRPO step {figures['batch']}", not faults, "; ".join([*faults, text]), figures
