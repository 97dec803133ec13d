"""A whole run: put the parts together, train, evaluate, write the run folder, stop cleanly, go on later."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkgrpo.profiling.environment import describe, versions
from sparkgrpo.profiling.memory import peak_bytes
from sparkgrpo.profiling.phases import PhaseClock, clock_error
from sparkgrpo.trainer.budget import KV_TERM, MemoryPlan, plan_evaluation, plan_training
from sparkgrpo.trainer.checkpoint import (
    Progress,
    latest_checkpoint,
    newer_but_damaged,
    save_checkpoint,
    save_reference,
    weights_sha256,
)
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dashboard import RunView
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.evaluate import evaluate
from sparkgrpo.trainer.flash_attention import load_varlen
from sparkgrpo.trainer.loop import GrpoLoop, StepResult
from sparkgrpo.trainer.machine import choose_device, choose_model, choose_precision, model_source
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.lora import add_lora, is_adapter_folder, load_merged
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, stop_ids
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.problem_stream import ProblemStream
from sparkgrpo.trainer.readers import Readers, report_of
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.resume import restore
from sparkgrpo.trainer.reward_check import MAX_UNSCORED_STEPS
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.state import MAX_STOP_IDS
from sparkgrpo.trainer.runlog import RunLog
from sparkgrpo.trainer.samples import group_samples, heldout_samples
from sparkgrpo.trainer.score import ForwardOptions
from sparkgrpo.trainer.settings import config_sha256
from sparkgrpo.trainer.stop_flag import StopFlag, stop_flag
from sparkgrpo.trainer.tasks.base import Problem, Task, TaskOpening
from sparkgrpo.trainer.tasks.registry import evaluation_task, run_task
from sparkgrpo.trainer.update import Updater

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_SKIPPED_IN_A_ROW = 3
PROMPTS_LOOKED_AT = 64
"""Training prompts measured at start for memory plan and length check; a too long one is refused when it comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a run ended."""

    run_dir: str
    steps: int
    """Steps done, from the beginning of the run."""
    eval_before: float | None
    """Held-out accuracy before step 1, a fraction; None for a task without a strict check."""
    eval_after: float | None
    """Held-out accuracy after the last step; None where it is not known: a stop does not wait for an evaluation."""
    wall_s: float
    is_stopped: bool
    """Asked to stop (Ctrl-C, SIGTERM) before the last step; the checkpoint is there to go on from."""


def train(
    config: Config,
    *,
    user_set: Mapping[str, object],
    view: RunView,
    task: Task | None = None,
    reward_functions: Sequence[str | Callable[..., object]] = (),
) -> TrainResult:
    """Train as configured, or go on with the run that `config.resume` names.

    Args:
        user_set: What the person set, for run.json.
        view: Shows the run; it is closed by the caller.
        task: An object in place of the task that the configuration names; closed here.
        reward_functions: In place of the reward that the configuration names.

    Raises:
        UserError: A mistake in the configuration, a model or folder that cannot be used, a run that diverged.
    """
    with run_task(config, user_set, warn=view.note, task=task, functions=reward_functions) as opening:
        return _train(config, opening, user_set=user_set, view=view)


def _train(config: Config, opening: TaskOpening, *, user_set: Mapping[str, object], view: RunView) -> TrainResult:
    start = time.monotonic()
    device = _set_up(config)
    model_name, _ = choose_model(config, device)
    checkpoint = latest_checkpoint(Path(config.resume)) if config.resume else None
    # Under LoRA a checkpoint holds the adapters alone.
    base = model_source(model_name)
    loaded = _load(config, device, base if checkpoint is None or config.lora_rank else str(checkpoint))
    loop = build_loop(config, loaded, opening.task)
    environment = {**describe(device, Path(__file__)), **opening.facts}
    if checkpoint is None:
        progress = Progress()
        log = RunLog.create(config, user_set=user_set, environment=environment)
    else:
        progress = restore(loop, loaded, checkpoint)
        for fault in newer_but_damaged(Path(config.resume)):
            view.note(f"{fault}; going on from {checkpoint.name}")
        log = RunLog.reopen(config, step=progress.step, environment=environment)
    with log, stop_flag() as is_asked_to_stop, Readers(config, log, view, step=progress.step) as readers:
        run = Run(config=config, loaded=loaded, loop=loop, log=log, view=view, readers=readers, progress=progress)
        run.begin(model_name)
        for note in opening.notes:
            view.note(note)
        run.train(is_asked_to_stop)
        is_stopped = progress.step < config.steps
        result = TrainResult(
            run_dir=str(log.folder),
            steps=progress.step,
            eval_before=progress.eval_before,
            eval_after=progress.eval_after if progress.eval_step == progress.step else None,
            wall_s=time.monotonic() - start,
            is_stopped=is_stopped,
        )
        facts = {key: getattr(result, key) for key in ("steps", "eval_before", "eval_after", "wall_s")}
        log.finish("stopped" if is_stopped else "finished", facts)
    report_of(log, view)
    return result


def evaluate_command(config: Config) -> dict[str, object]:
    """`sparkgrpo eval`: held-out accuracy of a model, with its standard error. `UserError` as for `train`."""
    start = time.monotonic()
    device = _set_up(config)
    model_name, _ = choose_model(config, device)
    loaded = _load(config, device, model_source(model_name))
    with evaluation_task(config) as task:
        dialogue = Dialogue(loaded.tokenizer)
        problems = heldout_problems(task, config)
        longest_prompt = _longest_prompt(config, loaded, dialogue, problems)
        plan = plan_evaluation(config, loaded.model, num_valid=loaded.num_valid, longest_prompt=longest_prompt)
        engine = build_engine(loaded, plan, max_new_tokens=config.max_new_tokens)
        evaluation = evaluate(engine, dialogue, task, problems, config)
    row = evaluation.row(0)
    return {
        "model": model_name,
        "task": config.task,
        **{key: row[key] for key in ("num_problems", "accuracy", "accuracy_se")},
        **evaluation.report,
        "wall_s": round(time.monotonic() - start, 3),
    }


def build_loop(config: Config, loaded: LoadedModel, task: Task) -> GrpoLoop:
    """Engine, reference, optimiser and loop around a loaded model, sized to the memory there is.

    Raises:
        UserError: A prompt that is too long, a batch that cannot fit, more held-out problems than there are.
    """
    dialogue = Dialogue(loaded.tokenizer)
    stream = ProblemStream(config, task, dialogue, loaded.model.config)
    heldout = stream.fitting(heldout_problems(task, config))
    seen_at_start = [*map(dialogue.prompt_ids, heldout), *stream.draw(0, PROMPTS_LOOKED_AT).prompts]
    model, device, dtype = loaded.model, loaded.model.device, loaded.model.dtype
    forward = ForwardOptions(recomputes=config.activation_checkpointing, varlen=load_varlen(config, device, dtype))
    lora = add_lora(loaded, config) if config.lora_rank else None
    policy = model if lora is None else lora.policy
    plan = plan_training(config, policy, num_valid=loaded.num_valid, longest_prompt=max(map(len, seen_at_start)))
    reference = None if config.beta == 0 else frozen_copy(model) if lora is None else lora.base
    clock = PhaseClock(device, PHASES)
    updater = Updater(
        policy,
        reference,
        MasterAdamW(policy, config),
        config,
        num_valid=loaded.num_valid,
        tokens_per_micro_batch=plan.tokens_per_micro_batch,
        clock=clock,
        forward=forward,
    )
    decoder = model if lora is None else lora.decoder
    engine = build_engine(loaded, plan, max_new_tokens=config.max_new_tokens, model=decoder)
    return GrpoLoop(
        config, task=task, heldout=heldout, dialogue=dialogue, engine=engine, updater=updater, clock=clock, lora=lora
    )


def build_engine(
    loaded: LoadedModel, plan: MemoryPlan, *, max_new_tokens: int, model: Decoder | None = None
) -> RolloutEngine:
    """The sampler of a loaded model, or of another decoder with its tokenizer.

    Raises:
        UserError: More stop ids than it holds.
    """
    ids = stop_ids(loaded.generation_config, loaded.hf_config, loaded.tokenizer)
    if len(ids) > MAX_STOP_IDS:
        raise UserError(f"{loaded.source}: expected at most {MAX_STOP_IDS} end-of-sequence ids, got {len(ids)}: {ids}")
    engine = RolloutEngine(
        loaded.model if model is None else model,
        stop_ids=ids,
        num_valid=loaded.num_valid,
        max_rows=plan.max_rows,
        max_new_tokens=max_new_tokens,
        kv_budget_bytes=plan.terms[KV_TERM],
    )
    engine.self_test()
    return engine


def heldout_problems(task: Task, config: Config) -> list[Problem]:
    """The problems of every evaluation; `UserError` where the task has fewer."""
    try:
        return task.heldout(config.eval_problems)
    except ValueError as error:
        raise UserError(f"eval_problems: {error}") from None


def _set_up(config: Config) -> torch.device:
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    return choose_device(config.device)


def _load(config: Config, device: torch.device, source: str) -> LoadedModel:
    """The model of this name, or the base that a folder of adapters names, with these merged into it."""
    dtype = DTYPES[choose_precision(config.precision, device)]
    if is_adapter_folder(source):
        return load_merged(Path(source).expanduser(), dtype=dtype, device=device)
    return load_model(source, dtype=dtype, device=device)


def _longest_prompt(config: Config, loaded: LoadedModel, dialogue: Dialogue, problems: Sequence[Problem]) -> int:
    return max(map(len, dialogue.prompts(problems, loaded.model.config, config.max_new_tokens)))


@dataclass(kw_only=True, slots=True)
class Run:
    """A run that lives: its parts, and how far it is."""

    config: Config
    loaded: LoadedModel
    loop: GrpoLoop
    log: RunLog
    view: RunView
    readers: Readers
    progress: Progress
    saved_step: int = -1
    """Step of the newest checkpoint of this process."""

    def begin(self, model_name: str) -> None:
        """Tell the run folder and the view what runs."""
        config, model = self.config, self.loaded.model
        num_params = sum(p.numel() for p in model.parameters())
        identities = "\n".join(problem.identity for problem in self.loop.heldout)
        facts: dict[str, object] = {"eval_sha256": hashlib.sha256(identities.encode()).hexdigest()}
        if self.progress.step == 0:
            facts["model"] = {"name": model_name, "num_params": num_params, "weights_sha256": weights_sha256(model)}
        self.log.update(facts)
        self.readers.open(
            {
                "model": model_name,
                "device": model.device.type,
                "precision": str(model.dtype).removeprefix("torch."),
                "first_step": self.progress.step + 1,
                "num_params": num_params,
            }
        )
        for note in (*self.loaded.notes, *_heldout_notes(config, self.loop)):
            self.view.note(note)

    def train(self, is_asked_to_stop: StopFlag) -> None:
        """All steps that are left, with their evaluations and checkpoints; a stop is saved and not evaluated."""
        config, progress = self.config, self.progress
        try:
            if progress.eval_step < 0:
                self._evaluate()
                progress.eval_before = progress.eval_after
            self.loop.clock.start_step()
            while progress.step < config.steps and not is_asked_to_stop:
                self._step()
            if not is_asked_to_stop and progress.eval_step != progress.step:  # a stopped run that has no step left
                self._evaluate()
        except FloatingPointError as error:
            raise UserError(f"after step {progress.step}: {error}; {self._way_on()}") from None
        if is_asked_to_stop and self.saved_step != progress.step:
            self._save()

    def _step(self) -> None:
        config, progress = self.config, self.progress
        result = self.loop.step(progress.step + 1)
        progress.step += 1
        progress.num_tokens_total += result.num_prompt_tokens + sum(len(c.token_ids) for c in result.completions)
        progress.skipped_steps = self.loop.updater.optim.skipped_steps
        progress.num_extra_problems = self.loop.num_extra_problems
        progress.num_prompts_dropped = self.loop.num_prompts_dropped
        is_last = progress.step == config.steps
        if is_last or _is_multiple(progress.step, config.eval_every):
            self._evaluate()
            self._keep_training_group(result)
        is_hopeless = self.loop.updater.optim.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW
        is_blind = self.loop.unscored_in_a_row >= MAX_UNSCORED_STEPS
        if is_last or is_hopeless or is_blind or _is_multiple(progress.step, config.checkpoint_every):
            self._save()
        self._log_step(result)
        if is_hopeless:
            raise FloatingPointError(f"the gradient was not finite {MAX_SKIPPED_IN_A_ROW} times in a row")
        if is_blind:
            raise UserError(
                f"after step {progress.step}: no completion could be scored {MAX_UNSCORED_STEPS} steps in a row; "
                f"{' '.join(result.warnings[-1:])}; mend the reward and go on with --resume {self.log.folder}"
            )

    def _evaluate(self) -> None:
        step = self.progress.step
        evaluation = self.loop.evaluate()
        self.progress.eval_after, self.progress.eval_step = evaluation.accuracy, step
        row = evaluation.row(step)
        self.log.evaluation(row)
        self.readers.evaluation(row)
        for sample in heldout_samples(evaluation, step, self.config.num_samples):
            self._keep_sample(sample)

    def _keep_training_group(self, result: StepResult) -> None:
        G = self.config.group_size
        group = group_samples(
            result.problems[0],
            result.completions[:G],
            result.scores[:G],
            result.advantages[:G],
            self.progress.step,
            {column: values[:G] for column, values in result.extras.items()},
        )
        for sample in group:
            self._keep_sample(sample)

    def _keep_sample(self, sample: Mapping[str, object]) -> None:
        self.log.sample(sample)
        self.view.sample(sample)

    def _log_step(self, result: StepResult) -> None:
        """Write the step's line. The clock goes on at once, so the writing is the next step's `t_other`."""
        seconds = self.loop.clock.end_step()
        self.loop.clock.start_step()
        num_tokens = result.metrics["num_tokens"]
        assert isinstance(num_tokens, int)
        line = {
            **result.metrics,
            "t_unix_s": time.time(),
            "num_tokens_total": self.progress.num_tokens_total,
            "mem_peak_bytes": peak_bytes(self.loaded.model.device),
            "tok_per_s": num_tokens / seconds["t_gen"],
            **seconds,
        }
        self.log.metrics(line)
        self.readers.step(line)
        error = clock_error(seconds)
        for text in (*result.warnings, *([] if error is None else [error])):
            self.log.event("warning", {"step": self.progress.step, "text": text})
        for text in result.warnings:
            self.view.note(text)

    def _save(self) -> None:
        updater, progress = self.loop.updater, self.progress
        progress.seen_reasons = sorted(self.loop.seen_reasons)
        is_moving = updater.reference is not None and self.config.sync_every > 0
        if updater.reference is not None and self.loop.lora is None and not is_moving:
            save_reference(self.log.folder / "checkpoints", updater.reference)
        path = save_checkpoint(
            self.log.folder / "checkpoints",
            progress,
            loaded=self.loaded,
            optim=updater.optim,
            facts={"config_sha256": config_sha256(self.config), "versions": versions()},
            keep=self.config.keep_checkpoints,
            lora=self.loop.lora,
            moving_reference=updater.reference if is_moving else None,
        )
        self.saved_step = progress.step
        self.log.event("checkpoint", {"step": progress.step, "path": str(path.relative_to(self.log.folder))})

    def _way_on(self) -> str:
        """What to do about weights that diverged."""
        cure = "lower --lr or --max-grad-norm and start again"
        return cure if self.saved_step < 0 else f"{cure}; the last checkpoint is that of step {self.saved_step}"


def _heldout_notes(config: Config, loop: GrpoLoop) -> list[str]:
    missing = len(heldout_problems(loop.task, config)) - len(loop.heldout)
    return [f"{missing} held-out problems are left out: their prompts are too long"] if missing > 0 else []


def _is_multiple(step: int, every: int) -> bool:
    """Whether something that is done every so many steps (0: never) is due."""
    return every > 0 and step % every == 0
