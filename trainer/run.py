"""A whole run: put the parts together, train, evaluate, write the run folder, stop cleanly, go on later."""

import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkgrpo.profiling.environment import describe
from sparkgrpo.profiling.memory import peak_bytes
from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.budget import plan_memory
from sparkgrpo.trainer.checkpoint import (
    latest_checkpoint,
    read_state,
    restore_optimiser,
    restore_reference,
    save_checkpoint,
    save_reference,
)
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dashboard import RunView
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.evaluate import Evaluation
from sparkgrpo.trainer.loop import GrpoLoop, StepResult
from sparkgrpo.trainer.machine import choose_device, choose_model, choose_precision, model_source
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.model.families import check_length
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, stop_ids
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.runlog import RunLog
from sparkgrpo.trainer.samples import group_samples, heldout_samples
from sparkgrpo.trainer.tasks.base import Task
from sparkgrpo.trainer.tasks.registry import make_task, task_options
from sparkgrpo.trainer.update import Updater

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_SKIPPED_IN_A_ROW = 3
PROMPTS_LOOKED_AT = 64
"""Training prompts measured at start for the memory plan and the length check; a longer one later is refused by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a run ended."""

    run_dir: str
    steps: int
    """Steps done, from the beginning of the run."""
    eval_before: float
    """Held-out accuracy before step 1, a fraction."""
    eval_after: float
    """Held-out accuracy after the last step."""
    wall_s: float
    is_stopped: bool
    """Asked to stop (Ctrl-C, SIGTERM) before the last step; the checkpoint is there to go on from."""


@dataclass(slots=True)
class Run:
    """The parts of a run that lives."""

    config: Config
    loaded: LoadedModel
    reference: Decoder | None
    optim: MasterAdamW
    loop: GrpoLoop
    clock: PhaseClock
    log: RunLog
    view: RunView
    eval_before: float | None = None
    eval_after: float | None = None
    num_tokens_total: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


def train(config: Config, *, user_set: Mapping[str, object], view: RunView) -> TrainResult:
    """Train as configured, or go on with the run that `config.resume` names.

    Args:
        user_set: What the person set, for run.json.
        view: Shows the run; it is closed by the caller.

    Raises:
        UserError: A mistake in the configuration, a model or folder that cannot be used.
    """
    start = time.monotonic()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    checkpoint = latest_checkpoint(Path(config.resume)) if config.resume else None
    model_name, _ = choose_model(config, device)
    loaded = load_model(
        str(checkpoint or model_source(model_name)),
        dtype=DTYPES[choose_precision(config.precision, device)],
        device=device,
    )
    task = make_task(config.task, task_options(config))
    loop, optim, reference, clock = build_loop(config, loaded, task)
    first_step = 1
    state: Mapping[str, object] = {}
    if checkpoint:
        state = read_state(checkpoint)
        restore_optimiser(checkpoint, optim)
        if reference is not None:
            restore_reference(Path(config.resume), reference)
        first_step = int(str(state["step"])) + 1
        log = RunLog.reopen(config, step=first_step - 1, environment=describe(device, Path(__file__)))
    else:
        log = RunLog.create(config, user_set=user_set, environment=describe(device, Path(__file__)))
    with log, stop_flag() as is_asked_to_stop:
        run = Run(
            config=config, loaded=loaded, reference=reference, optim=optim, loop=loop, clock=clock, log=log, view=view
        )
        num_params = sum(p.numel() for p in loaded.model.parameters())
        log.update({"model": {"name": model_name, "num_params": num_params}})
        view.start(
            {
                "run_dir": str(log.folder),
                "model": model_name,
                "device": device.type,
                "precision": str(loaded.model.dtype).removeprefix("torch."),
                "steps": config.steps,
                "first_step": first_step,
                "eval_every": config.eval_every,
                "num_params": num_params,
            }
        )
        for note in loaded.notes:
            view.note(note)
        _restore_counters(run, state)
        last_step = _train_steps(run, first_step, is_asked_to_stop)
        assert run.eval_before is not None and run.eval_after is not None
        result = TrainResult(
            run_dir=str(log.folder),
            steps=last_step,
            eval_before=run.eval_before,
            eval_after=run.eval_after,
            wall_s=time.monotonic() - start,
            is_stopped=last_step < config.steps,
        )
        log.finish("stopped" if result.is_stopped else "finished", dataclasses.asdict(result))
    return result


def evaluate_command(config: Config) -> dict[str, object]:
    """`sparkgrpo eval`: held-out accuracy of a model, with its standard error."""
    start = time.monotonic()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    model_name, _ = choose_model(config, device)
    loaded = load_model(
        model_source(model_name), dtype=DTYPES[choose_precision(config.precision, device)], device=device
    )
    loop, *_ = build_loop(config, loaded, make_task(config.task, task_options(config)))
    row = loop.evaluate().row(0)
    return {
        "model": model_name,
        "task": config.task,
        "num_problems": row["num_problems"],
        "accuracy": row["accuracy"],
        "accuracy_se": row["accuracy_se"],
        "wall_s": round(time.monotonic() - start, 3),
    }


def build_loop(
    config: Config, loaded: LoadedModel, task: Task
) -> tuple[GrpoLoop, MasterAdamW, Decoder | None, PhaseClock]:
    """Engine, optimiser and loop around a loaded model, sized to the memory there is."""
    dialogue = Dialogue(loaded.tokenizer)
    problems = [*task.heldout(config.eval_problems), *task.problems(config.seed, 0, PROMPTS_LOOKED_AT)]
    longest_prompt = max(len(dialogue.prompt_ids(problem)) for problem in problems)
    check_length(loaded.model.config, longest_prompt + config.max_new_tokens)
    plan = plan_memory(config, loaded.model, num_valid=loaded.num_valid, longest_prompt=longest_prompt)
    clock = PhaseClock(loaded.model.device, PHASES)
    reference = frozen_copy(loaded.model) if config.beta > 0 else None
    optim = MasterAdamW(loaded.model, config)
    engine = RolloutEngine(
        loaded.model,
        stop_ids=stop_ids(loaded.generation_config, loaded.hf_config, loaded.tokenizer),
        num_valid=loaded.num_valid,
        max_rows=plan.max_rows,
        max_new_tokens=config.max_new_tokens,
    )
    updater = Updater(
        loaded.model,
        reference,
        optim,
        config,
        num_valid=loaded.num_valid,
        tokens_per_micro_batch=plan.tokens_per_micro_batch,
        clock=clock,
    )
    loop = GrpoLoop(config, task=task, dialogue=dialogue, engine=engine, updater=updater, clock=clock)
    return loop, optim, reference, clock


def _train_steps(run: Run, first_step: int, is_asked_to_stop: "StopFlag") -> int:
    """All steps with their evaluations and checkpoints; returns the last step that was done."""
    config = run.config
    step = first_step - 1
    if run.eval_before is None:
        run.clock.start_step()
        _evaluate(run, 0)
        run.eval_before = run.eval_after
    while step < config.steps and not is_asked_to_stop:
        step += 1
        run.clock.start_step()
        result = run.loop.step(step)
        is_last = step == config.steps or bool(is_asked_to_stop)
        if is_last or (config.eval_every and step % config.eval_every == 0):
            _evaluate(run, step)
            for row in _training_group(run, result, step):
                run.log.sample(row)
                run.view.sample(row)
        if is_last or (config.checkpoint_every and step % config.checkpoint_every == 0):
            _save(run, step)
        _log_step(run, result)
        if run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise FloatingPointError(
                f"the gradient was not finite {MAX_SKIPPED_IN_A_ROW} steps in a row (step {step}); lower --lr and "
                "start again, or resume from the last checkpoint"
            )
    return step


def _evaluate(run: Run, step: int) -> Evaluation:
    evaluation = run.loop.evaluate()
    row = evaluation.row(step)
    run.eval_after = evaluation.accuracy
    run.log.evaluation(row)
    run.view.evaluation(row)
    for sample in heldout_samples(evaluation, step, run.config.num_samples):
        run.log.sample(sample)
        run.view.sample(sample)
    return evaluation


def _training_group(run: Run, result: StepResult, step: int) -> Iterator[dict[str, object]]:
    G = run.config.group_size
    yield from group_samples(result.problems[0], result.completions[:G], result.scores[:G], result.advantages[:G], step)


def _log_step(run: Run, result: StepResult) -> None:
    metrics = dict(result.metrics)
    num_prompt_tokens, num_skipped = metrics.pop("num_prompt_tokens"), metrics.pop("num_skipped")
    num_tokens = metrics["num_tokens"]
    assert isinstance(num_prompt_tokens, int) and isinstance(num_skipped, int) and isinstance(num_tokens, int)
    run.num_tokens_total += num_prompt_tokens + num_tokens
    run.skipped_steps += num_skipped
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if num_skipped else 0
    seconds = run.clock.end_step()
    metrics |= {
        "t_unix_s": time.time(),
        "num_tokens_total": run.num_tokens_total,
        "skipped_steps": run.skipped_steps,
        "mem_peak_bytes": peak_bytes(run.loaded.model.device),
        "tok_per_s": num_tokens / seconds["t_gen"],
        **seconds,
    }
    run.log.metrics(metrics)
    run.view.step(metrics)


def _save(run: Run, step: int) -> None:
    if run.reference is not None:
        save_reference(run.log.folder, run.reference)
    state = {
        "eval_before": run.eval_before,
        "eval_after": run.eval_after,
        "num_tokens_total": run.num_tokens_total,
        "skipped_steps": run.skipped_steps,
        "seen_reasons": sorted(run.loop.seen_reasons),
    }
    path = save_checkpoint(
        run.log.folder, step=step, loaded=run.loaded, optim=run.optim, state=state, keep=run.config.keep_checkpoints
    )
    run.log.event("checkpoint", {"step": step, "path": str(path.relative_to(run.log.folder))})


def _restore_counters(run: Run, state: Mapping[str, object]) -> None:
    if state:
        before, after = state["eval_before"], state["eval_after"]
        assert isinstance(before, float) and isinstance(after, float)
        run.eval_before, run.eval_after = before, after
        run.num_tokens_total = int(str(state["num_tokens_total"]))
        run.skipped_steps = int(str(state["skipped_steps"]))
        run.loop.seen_reasons |= set(str(state["seen_reasons"]))


class StopFlag:
    """False until a signal asked the run to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def __bool__(self) -> bool:
        return self.is_set


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """SIGINT and SIGTERM set the flag: the step in hand is finished and saved. A second one interrupts at once."""
    flag = StopFlag()

    def ask(signum: int, frame: object) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    previous = {}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, ask)
    except ValueError:  # not the main thread (a notebook's worker): signals stay as they are
        previous = {}
    try:
        yield flag
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
