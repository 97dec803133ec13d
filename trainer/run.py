"""A whole run: put the parts together, train (`live_run.py`), close them again; and the same for an evaluation."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from sparkgrpo.profiling.environment import describe
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.profiling.recorder import StepRecorder
from sparkgrpo.trainer.budget import KV_TERM, MemoryPlan, plan_evaluation, plan_training
from sparkgrpo.trainer.checkpoint import Progress, newer_but_damaged
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dashboard import RunView
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.evaluate import evaluate
from sparkgrpo.trainer.flash_attention import load_varlen
from sparkgrpo.trainer.instruments import Instruments
from sparkgrpo.trainer.live_run import Run
from sparkgrpo.trainer.loop import GrpoLoop
from sparkgrpo.trainer.machine import choose_device, choose_model, choose_precision, model_source
from sparkgrpo.trainer.memory_budget import checked_budget
from sparkgrpo.trainer.metrics import PHASES, SPANS
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.lora import add_lora, is_adapter_folder, load_merged
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, stop_ids
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.problem_stream import ProblemStream
from sparkgrpo.trainer.readers import Readers, report_of
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.resume import restore, starting_point
from sparkgrpo.trainer.reward_check import RewardCheck
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.state import MAX_STOP_IDS
from sparkgrpo.trainer.runlog import RunLog
from sparkgrpo.trainer.score import ForwardOptions
from sparkgrpo.trainer.stop_flag import stop_flag
from sparkgrpo.trainer.tasks.base import Problem, Task, TaskOpening
from sparkgrpo.trainer.tasks.registry import evaluation_task, run_task
from sparkgrpo.trainer.train_result import TrainResult
from sparkgrpo.trainer.update import Updater

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS_LOOKED_AT = 64
"""Training prompts measured at start for memory plan and length check; a too long one is refused when it comes."""


def train(
    config: Config,
    *,
    user_set: Mapping[str, object],
    view: RunView,
    task: Task | None = None,
    reward_functions: Sequence[str | Callable[..., object]] = (),
    recorder: StepRecorder | None = None,
) -> TrainResult:
    """Train as configured, or go on with the run that `config.resume` names.

    Args:
        user_set: What the person set, for run.json.
        view: Shows the run; it is closed by the caller.
        task: An object in place of the task that the configuration names; closed here.
        reward_functions: In place of the reward that the configuration names.
        recorder: Records some steps; the run ends with them, and saves nothing.

    Raises:
        UserError: A mistake in the configuration, a model or folder that cannot be used, a run that diverged.
    """
    with run_task(config, user_set, warn=view.note, task=task, functions=reward_functions) as opening:
        return _train(config, opening, user_set=user_set, view=view, recorder=recorder)


def _train(
    config: Config,
    opening: TaskOpening,
    *,
    user_set: Mapping[str, object],
    view: RunView,
    recorder: StepRecorder | None,
) -> TrainResult:
    checkpoint, begun_s = starting_point(config)
    device = _set_up(config)
    model_name, _ = choose_model(config, device)
    # Under LoRA a checkpoint holds the adapters alone.
    source = model_source(model_name) if checkpoint is None or config.lora_rank else str(checkpoint)
    view.note(checked_budget(config, source, DTYPES[choose_precision(config.precision, device)], device))
    loaded = _load(config, device, source)
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
    with (
        log,
        Instruments(device, loop.updater.shape, recorder) as instruments,
        stop_flag() as is_asked_to_stop,
        Readers(config, log, view, step=progress.step) as readers,
    ):
        run = Run(
            config=config,
            loaded=loaded,
            loop=loop,
            log=log,
            view=view,
            readers=readers,
            progress=progress,
            instruments=instruments,
            begun_s=begun_s,
        )
        run.begin(model_name)
        missing = len(heldout_problems(loop.task, config)) - len(loop.heldout)
        for note in (*loaded.notes, *_heldout_notes(missing), *opening.notes):
            view.note(note)
        run.train(is_asked_to_stop)
        result = TrainResult(
            run_dir=str(log.folder),
            steps=progress.step,
            eval_before=progress.eval_before,
            eval_after=progress.eval_after if progress.eval_step == progress.step else None,
            wall_s=run.wall_s,
            is_stopped=progress.step < config.steps,
            is_out_of_memory=run.is_out_of_memory,
        )
        facts = {key: getattr(result, key) for key in ("steps", "eval_before", "eval_after", "wall_s")}
        log.finish("stopped" if result.is_stopped else "finished", facts | instruments.facts_after(run.warn))
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
        stream = ProblemStream(config, task, dialogue, loaded.model.config)
        problems = stream.fitting(asked := heldout_problems(task, config))
        longest_prompt = max(map(len, dialogue.prompts(problems, loaded.model.config, config.max_new_tokens)))
        plan = plan_evaluation(config, loaded.model, num_valid=loaded.num_valid, longest_prompt=longest_prompt)
        engine = build_engine(loaded, plan, max_new_tokens=config.max_new_tokens)
        check = RewardCheck(task, truncated_reward=config.truncated_reward)
        evaluation = evaluate(engine, dialogue, check, problems, config)
    row = evaluation.row(0)
    notes = [*_heldout_notes(len(asked) - len(problems)), *check.take_faults()]
    return {
        "model": model_name,
        "task": config.task,
        **{key: row[key] for key in ("num_problems", "accuracy", "accuracy_se")},
        **evaluation.report,
        **({"notes": notes} if notes else {}),
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
    clock = PhaseClock(device, PHASES, SPANS)
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
    """The problems of every evaluation; `UserError` where the task has fewer, or none."""
    try:
        problems = task.heldout(config.eval_problems)
    except ValueError as error:
        raise UserError(f"eval_problems: {error}") from None
    if not problems:
        raise UserError("task: heldout gave no problem; an evaluation needs at least one")
    return problems


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


def _heldout_notes(missing: int) -> list[str]:
    return [f"{missing} held-out problems are left out: their prompts are too long"] if missing > 0 else []
