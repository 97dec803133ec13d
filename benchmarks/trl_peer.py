"""TRL's GRPOTrainer as a peer that is run step by step: the same weights, prompts, batch and reward as ours."""

import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.tasks.base import Completion
from sparkgrpo.trainer.tasks.registry import make_task, task_options


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerOptions:
    """What of TRL is set by the benchmark; the rest is its default."""

    num_steps: int
    is_bf16: bool = False
    """TRL's own default precision: autocast over fp32 weights."""
    given: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] | None = None
    """Prompt and completion ids that every step trains on in place of what it would generate."""
    gradient_checkpointing: bool = False
    """TRL's default is on; off is faster here."""


def trl_steps(folder: str, config: Config, options: PeerOptions) -> Iterator[float]:
    """Runs TRL's trainer in a thread of its own turn by turn: each `next` is one step, in seconds."""
    turn: queue.Queue[None] = queue.Queue()
    done: queue.Queue[float] = queue.Queue()
    trainer = _trainer(folder, config, options, turn, done)
    threading.Thread(target=trainer.train, daemon=True).start()
    for _ in range(options.num_steps):
        start = time.perf_counter()
        turn.put(None)
        yield done.get() - start


def _trainer(
    folder: str, config: Config, options: PeerOptions, turn: queue.Queue[None], done: queue.Queue[float]
) -> Any:  # noqa: ANN401  a GRPOTrainer, which is imported here
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = make_task("countdown", task_options(config))
    problems = task.problems(0, 0, config.prompts_per_step * options.num_steps)
    rows = Dataset.from_list([{"prompt": [dict(m) for m in p.prompt], "index": i} for i, p in enumerate(problems)])

    def reward(completions: list, index: list[int], **_: object) -> list[float]:
        if options.given is not None:
            return [float(i % 2) for i in range(len(completions))]  # every group is live, as on our side
        texts = [completion[0]["content"] for completion in completions]
        answers = [Completion(text=text, token_ids=(), is_truncated=False) for text in texts]
        scores = task.reward([problems[i] for i in index], answers)
        return [float(score.reward or 0.0) for score in scores]

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            turn.get()

        def on_step_end(self, *_: object, **__: object) -> None:
            done.put(time.perf_counter())

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=config.prompts_per_step * config.group_size,
        num_generations=config.group_size,
        max_completion_length=config.max_new_tokens,
        generation_kwargs={"min_new_tokens": config.max_new_tokens},
        max_steps=options.num_steps,
        beta=config.beta,
        loss_type="grpo",
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=options.is_bf16,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=folder, reward_funcs=reward, args=arguments, train_dataset=rows, callbacks=[TakeTurns()]
    )
    if options.given is not None:
        prompts, completions = ([list(ids) for ids in side] for side in options.given)
        texts = [[{"role": "assistant", "content": ""}] for _ in completions]
        rollout = (prompts, completions, None, texts, None, {}, None, None)
        vars(trainer)["_generate"] = lambda prompts: rollout
    return trainer
