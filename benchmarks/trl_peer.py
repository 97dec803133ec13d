"""TRL's GRPOTrainer as a peer that is run step by step: the same weights, prompts, batch and reward as ours.

The trainer runs in a thread of its own and waits for its turn before every step, so that it can alternate with others
in one process. Its step is split as ours is, by timing the methods that it consists of.
"""

import queue
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.tasks.base import Completion
from sparkgrpo.trainer.tasks.registry import make_task, task_options


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerOptions:
    """What of TRL is set by the benchmark; the rest is its default, which has the chunked log-probs of a fused head."""

    num_steps: int
    is_bf16: bool = False
    """TRL's own default precision: autocast over fp32 weights."""
    gradient_checkpointing: bool = False
    """TRL's default is on; off is faster where the memory is there."""
    micro_batch_rows: int = 8
    """Most completions of a micro-batch, of which the batch is a multiple; 8 is TRL's default."""
    has_continuous_batching: bool = False
    """Generation by transformers' continuous batching in place of `generate`."""
    has_liger: bool = False
    """Liger's Triton kernels for the layers."""
    has_vllm: bool = False
    """Generation by vLLM in the same process (CUDA)."""
    is_full_length: bool = True
    """Every completion runs to the token limit; else it stops where the model stops it."""
    given: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] | None = None
    """Prompt and completion ids that every step trains on in place of what it would generate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStep:
    """What one step of TRL took and did."""

    seconds: dict[str, float]
    """t_gen, t_reward, t_ref, t_train, t_opt, t_other and t_step, their sum."""
    num_tokens: int
    """Completion tokens."""
    reward_mean: float


class TrlPeer:
    """A GRPOTrainer that takes a step at each call.

    Args:
        folder: A Hugging Face folder with the weights.
        config: Prompts, G, lengths, beta, lr and seed are taken from it; the task is Countdown.
        device: Where it runs.
    """

    def __init__(self, folder: str, config: Config, options: PeerOptions, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._spans: dict[str, float] = defaultdict(float)
        self._rewards: list[float] = []
        self._num_tokens = 0
        self._trained_at = 0.0
        self._num_left = options.num_steps
        self._open: list[str] = []
        """Spans that are open now, outermost first."""
        self._turn: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[float | BaseException] = queue.Queue()
        self.trainer = self._make(folder, config, options)
        if options.given is not None:
            self._give(*options.given)
        self._measure()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def step(self) -> PeerStep:
        """The next step; raises what the trainer raised."""
        if not self._thread.is_alive():
            self._thread.start()
        self._spans.clear()
        self._rewards, self._num_tokens = [], 0
        start = time.perf_counter()
        self._turn.put(None)
        end = self._done.get()
        self._num_left -= 1
        if self._num_left == 0 or isinstance(end, BaseException):
            self._thread.join()  # a thread inside torch while the interpreter ends takes the process down
        if isinstance(end, BaseException):
            raise end
        spans, t_step = self._spans, end - start
        seconds = {
            "t_gen": spans["generate"],
            "t_reward": spans["reward"],
            "t_ref": spans["ref"],
            "t_train": spans["train"] - spans["prepare"],
            "t_opt": spans["opt"],
        }
        seconds |= {"t_other": t_step - sum(seconds.values()), "t_step": t_step}
        reward_mean = sum(self._rewards) / max(1, len(self._rewards))
        return PeerStep(seconds=seconds, num_tokens=self._num_tokens, reward_mean=reward_mean)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The present weights under Hugging Face's names."""
        return self.trainer.model.state_dict()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:  # handed to whoever waits for the step
            self._done.put(error)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _clock(
        self,
        method: str,
        span: str,
        *,
        is_counted: Callable[[], bool] = lambda: True,
        after: Callable[[Any], None] = lambda out: None,
    ) -> None:
        """Put a clock around a method of the trainer."""
        inner = getattr(self.trainer, method)

        def run(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            if not is_counted():
                return inner(*args, **kwargs)
            self._open.append(span)
            start = self._now()
            out = inner(*args, **kwargs)
            self._spans[span] += self._now() - start
            self._open.pop()
            after(out)
            return out

        vars(self.trainer)[method] = run

    def _measure(self) -> None:
        def count_tokens(out: tuple[Any, ...]) -> None:
            self._num_tokens += sum(map(len, out[1]))

        def note_time(_: object) -> None:
            self._trained_at = self._now()

        self._clock("_generate", "generate", after=count_tokens)
        self._clock("_calculate_rewards", "reward")
        # Before the update it scores for the reference (and the old policy, with several updates), in it for the loss.
        is_before = lambda: "prepare" in self._open  # noqa: E731
        self._clock("_get_per_token_logps_and_entropies", "ref", is_counted=is_before)
        self._clock("_generate_and_score_completions", "prepare")
        self._clock("training_step", "train", after=note_time)

    def _give(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
        texts = [[{"role": "assistant", "content": ""}] for _ in completions]
        rollout = (
            [list(ids) for ids in prompts],
            [list(ids) for ids in completions],
            None,
            texts,
            None,
            {},
            None,
            None,
        )
        vars(self.trainer)["_generate"] = lambda prompts: rollout

    def _callback(self) -> Any:  # noqa: ANN401  transformers is imported here
        from transformers import TrainerCallback

        peer = self

        class TakeTurns(TrainerCallback):
            def on_step_begin(self, *_: object, **__: object) -> None:
                peer._turn.get()

            def on_optimizer_step(self, *_: object, **__: object) -> None:
                peer._spans["opt"] += peer._now() - peer._trained_at

            def on_step_end(self, *_: object, **__: object) -> None:
                peer._done.put(peer._now())

        return TakeTurns()

    def _make(self, folder: str, config: Config, options: PeerOptions) -> Any:  # noqa: ANN401
        from datasets import Dataset
        from trl import GRPOTrainer

        task = make_task("countdown", task_options(config))
        problems = task.problems(config.seed, 0, config.prompts_per_step * options.num_steps)
        rows = [
            {"prompt": [dict(m) for m in p.prompt if not isinstance(m, int)], "index": i}
            for i, p in enumerate(problems)
        ]

        def reward(completions: list, index: list[int], **_: object) -> list[float]:
            if options.given is not None:
                return [float(i % 2) for i in range(len(completions))]  # every group is live, as on our side
            texts = [completion[0]["content"] for completion in completions]
            answers = [Completion(text=text, token_ids=(), is_truncated=False) for text in texts]
            scores = task.reward([problems[i] for i in index], answers)
            self._rewards = [float(score.reward or 0.0) for score in scores]
            return self._rewards

        return GRPOTrainer(
            model=folder,
            reward_funcs=cast("Any", reward),
            args=_arguments(config, options, is_cpu=self.device.type == "cpu"),
            train_dataset=Dataset.from_list(rows),
            callbacks=[self._callback()],
        )


def _arguments(config: Config, options: PeerOptions, *, is_cpu: bool) -> Any:  # noqa: ANN401  a GRPOConfig
    from trl import GRPOConfig

    num_rows = config.prompts_per_step * config.group_size
    largest = min(options.micro_batch_rows, num_rows)
    micro_batch = next(rows for rows in range(largest, 0, -1) if num_rows % rows == 0)
    forced = {"generation_kwargs": {"min_new_tokens": config.max_new_tokens}} if options.is_full_length else {}
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3} if options.has_vllm else {}
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        seed=config.seed,
        shuffle_dataset=False,  # our order
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_rows // micro_batch,
        num_generations=config.group_size,
        max_completion_length=config.max_new_tokens,
        max_steps=options.num_steps,
        beta=config.beta,
        loss_type="grpo",
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=options.is_bf16,
        use_liger_kernel=options.has_liger,
        use_transformers_continuous_batching=options.has_continuous_batching,
        use_cpu=is_cpu,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **forced,
        **vllm,
    )
