"""Makes the small model that ships with the package: `python -m sparkgrpo.trainer.embedded.recipe --out FOLDER`.

Supervised warm-up on self-generated worked answers (`traces.py`) to training puzzles; the held-out puzzles never occur.
The model is transformers' own Qwen2, so the checkpoint owes nothing to our decoder and can test it.

Puzzles and teacher draw from Philox streams keyed by (seed, batch); the initial weights come from torch's generator.
The same machine, torch build, seed and number of threads give the same bits (deterministic algorithms are switched on);
another processor rounds differently and gives another, equally good model.

Letters: B rows (one puzzle each), L longest row in tokens, M supervised tokens, V vocabulary, D width.
"""

import argparse
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sparkgrpo.trainer.embedded.tokenizer_build import END, MAX_NUMBER, PAD, build_tokenizer
from sparkgrpo.trainer.embedded.traces import HASTY, NO, PATIENT, YES, Teacher, chains, worked_answer
from sparkgrpo.trainer.model.chat import encode_chat
from sparkgrpo.trainer.tasks.base import KeyedDraws, Message, Problem, stream_key
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions

log = logging.getLogger(__name__)

NUMBERS = (2, *(3,) * 17, 4, 4)
"""Puzzle mix: 5 % with two numbers, 85 % with three (the default task), 10 % with four."""

CODE_PERIODS = (2, 3, 4, 5, 7, 10, 11, 13, 20, 25, 40, 50, 80, 100, 150, 200, 300, 400, 600, 800, 1200, 1600)
CODE_LOG_RATES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of the warm-up with one teacher. Optimisers start afresh; rates rise, stay and fall to 1 %."""

    teacher: Teacher
    num_steps: int
    """Optimiser steps."""
    num_answers: int
    """Worked answers to each puzzle; its prompt is computed once."""
    matrix_lr: float
    """Peak learning rate of Muon, for the weight matrices of the blocks."""
    other_lr: float
    """Peak learning rate of AdamW, for embeddings, norms and biases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The warm-up. The defaults made the weights that ship."""

    seed: int = 0
    """Key of puzzles, teacher and initial weights."""
    phases: tuple[Phase, ...] = (
        Phase(teacher=HASTY, num_steps=2200, num_answers=8, matrix_lr=0.02, other_lr=3e-3),
        Phase(teacher=PATIENT, num_steps=700, num_answers=5, matrix_lr=0.01, other_lr=1.5e-3),
        Phase(teacher=HASTY, num_steps=300, num_answers=8, matrix_lr=0.004, other_lr=6e-4),
    )
    """Sums and format; searching on without repeats; giving up again."""
    num_puzzles: int = 12
    """B, puzzles a step."""
    checked_weight: float = 3.0
    """Loss weight of values and verdicts, which have one right answer, against 1 for the teacher's free choices."""
    warmup_steps: int = 100
    """Steps of linear rise of the rates."""
    decay_frac: float = 0.6
    """Share of a phase over which the rates fall linearly."""
    num_threads: int = 2
    """CPU threads; part of the recipe, since sums are split over them."""


@dataclass(frozen=True, slots=True)
class WarmupBatch:
    """Rows of one prompt and its worked answers side by side; an answer sees the prompt and itself."""

    token_BL: torch.Tensor
    position_BL: torch.Tensor
    is_seen_B1LL: torch.Tensor
    """Query, key: whether the query may look at the key."""
    source_M: torch.Tensor
    """Flat index into [B * L] of the position that predicts each supervised token."""
    label_M: torch.Tensor


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """1.1M weights. Four layers: copy the operands, look the sum up, compare it, decide."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )


def token_id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The id of a text that is one token."""
    (only_id,) = tokenizer.encode(text, add_special_tokens=False)
    return only_id


def number_codes() -> torch.Tensor:
    """Start of the embeddings of 0..MAX_NUMBER, [401, 64], mean square 0.5.

    Cosine and sine of n at several periods, and of log(n + 1) at several rates: a sum turns the first by an angle, a
    product the second, which a gated layer learns in a few hundred steps.
    """
    number_N1 = torch.arange(MAX_NUMBER + 1, dtype=torch.float32)[:, None]
    turns = 2 * math.pi * number_N1 / torch.tensor(CODE_PERIODS)
    log_turns = torch.log1p(number_N1) * torch.tensor(CODE_LOG_RATES)
    return torch.cat([turns.cos(), turns.sin(), log_turns.cos(), log_turns.sin()], dim=1)


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """The model before the warm-up: normal weights of deviation 0.02, and the number codes at the same scale."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(model_config(tokenizer))
    ids = torch.tensor([token_id(tokenizer, str(number)) for number in range(MAX_NUMBER + 1)])
    codes = number_codes() * (0.02 * math.sqrt(2))
    with torch.no_grad():
        model.model.embed_tokens.weight[ids, : codes.shape[1]] = codes
    return model


def answer_ids(
    problem: Problem, teacher: Teacher, count: int, tokenizer: PreTrainedTokenizerFast, draws: KeyedDraws
) -> list[list[int]]:
    """Token ids of `count` worked answers to one puzzle, each with its end token."""
    nums, target = cast(Sequence[int], problem.columns["nums"]), cast(int, problem.columns["target"])
    options = chains(nums)
    texts = [worked_answer(options, target, teacher, draws) for _ in range(count)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [[*ids, token_id(tokenizer, END)] for ids in cast(list[list[int]], encoded)]


def pack(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]], pad_id: int) -> WarmupBatch:
    """One row a prompt: the prompt, then its answers, each at the positions that follow the prompt."""
    num_rows = len(prompts)
    length = max(len(p) + sum(map(len, group)) for p, group in zip(prompts, answers, strict=True))
    token_BL = torch.full((num_rows, length), pad_id)
    position_BL = torch.zeros((num_rows, length), dtype=torch.long)
    part_BL = torch.full((num_rows, length), -1)  # -1 padding, 0 prompt, 1.. answers
    source, label = [], []
    for row, (prompt, group) in enumerate(zip(prompts, answers, strict=True)):
        start = 0
        for part, ids in enumerate([prompt, *group]):
            end, first = start + len(ids), 0 if part == 0 else len(prompt)
            token_BL[row, start:end] = torch.tensor(ids)
            position_BL[row, start:end] = torch.arange(first, first + len(ids))
            part_BL[row, start:end] = part
            if part:
                source += [row * length + i for i in (len(prompt) - 1, *range(start, end - 1))]
                label += ids
            start = end
    is_same_BLL = part_BL[:, :, None] == part_BL[:, None, :]
    is_seen_BLL = (is_same_BLL | (part_BL[:, None, :] == 0)).tril()
    return WarmupBatch(token_BL, position_BL, is_seen_BLL[:, None], torch.tensor(source), torch.tensor(label))


def warmup_batch(
    task: Countdown, step: int, phase: Phase, recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> WarmupBatch:
    """The batch of a step, counted over all phases."""
    problems = task.problems(recipe.seed, step * recipe.num_puzzles, recipe.num_puzzles)
    draws = KeyedDraws(stream_key("embedded", "teacher", recipe.seed), step)
    prompts = [encode_chat(tokenizer, cast(Sequence[Message], problem.prompt)) for problem in problems]
    answers = [answer_ids(problem, phase.teacher, phase.num_answers, tokenizer, draws) for problem in problems]
    return pack(prompts, answers, token_id(tokenizer, PAD))


def loss_weights(batch: WarmupBatch, checked_weight: float, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Weight of each supervised token, [M], 1 on average: `checked_weight` times as much for values and verdicts."""
    verdicts = torch.tensor([token_id(tokenizer, text) for text in (YES, NO)])
    is_value_M = batch.token_BL.flatten()[batch.source_M] == token_id(tokenizer, "=")
    is_verdict_M = torch.isin(batch.label_M, verdicts)
    weight_M = torch.where(is_value_M | is_verdict_M, checked_weight, 1.0)
    return weight_M / weight_M.mean()


def warmup_loss(model: Qwen2ForCausalLM, batch: WarmupBatch, weight_M: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross-entropy of the supervised tokens, nats.

    The products are in bf16: twice the speed of fp32 on a processor with AVX512-BF16. Weights stay fp32.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_BLD = model.model(
            input_ids=batch.token_BL, position_ids=batch.position_BL, attention_mask=batch.is_seen_B1LL
        ).last_hidden_state
        logits_MV = model.lm_head(hidden_BLD.flatten(0, 1)[batch.source_M])
    loss_M = F.cross_entropy(logits_MV.float(), batch.label_M, reduction="none")
    return (loss_M * weight_M).mean()


def rate_factor(step: int, num_steps: int, recipe: Recipe) -> float:
    """Learning rate over its peak at a step of a phase: rise, plateau, linear fall."""
    left = (num_steps - step) / num_steps
    return min(1.0, (step + 1) / recipe.warmup_steps, left / recipe.decay_frac + 0.01)


def optimizers(model: Qwen2ForCausalLM, phase: Phase) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the blocks, AdamW for the rest, each with its peak rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    muon = torch.optim.Muon(matrices, lr=phase.matrix_lr, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=phase.other_lr, betas=(0.9, 0.98), weight_decay=0.01)
    return [(muon, phase.matrix_lr), (adamw, phase.other_lr)]


def train_phase(
    model: Qwen2ForCausalLM, phase: Phase, first_step: int, recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Change the model's weights by the steps of one phase."""
    task = Countdown(CountdownOptions(numbers=NUMBERS))
    steppers = optimizers(model, phase)
    start_s = time.perf_counter()
    for step in range(phase.num_steps):
        batch = warmup_batch(task, first_step + step, phase, recipe, tokenizer)
        loss = warmup_loss(model, batch, loss_weights(batch, recipe.checked_weight, tokenizer))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak_lr in steppers:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * rate_factor(step, phase.num_steps, recipe)
            optimizer.step()
        if step % 50 == 0 or step == phase.num_steps - 1:
            log.info("step %d loss %.4f nats %.0f s", first_step + step, loss.item(), time.perf_counter() - start_s)


def warm_up(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """The model after all phases."""
    torch.set_num_threads(recipe.num_threads)
    torch.use_deterministic_algorithms(True)
    model = new_model(tokenizer, recipe.seed).train()
    first_step = 0
    for phase in recipe.phases:
        train_phase(model, phase, first_step, recipe, tokenizer)
        first_step += phase.num_steps
    return model.eval()


def save(folder: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the Hugging Face folder: config, weights (fp32 safetensors), tokenizer, generation config."""
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=token_id(tokenizer, END), pad_token_id=token_id(tokenizer, PAD)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the embedded model: supervised warm-up on worked answers.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, in Hugging Face format")
    parser.add_argument("--seed", type=int, default=Recipe().seed)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = build_tokenizer()
    save(arguments.out, warm_up(Recipe(seed=arguments.seed), tokenizer), tokenizer)


if __name__ == "__main__":
    main()
