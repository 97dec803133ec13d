"""Going on with a run: whether it may, and what a checkpoint puts back beside the weights."""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

from sparkgrpo.trainer.checkpoint import (
    REFERENCE_FILE,
    Progress,
    latest_checkpoint,
    read_progress,
    restore_optimiser,
    restore_reference,
    weights_sha256,
)
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.loop import GrpoLoop
from sparkgrpo.trainer.model.weights import LoadedModel
from sparkgrpo.trainer.runlog import read_run


def starting_point(config: Config) -> tuple[Path | None, float]:
    """Where a run starts: its checkpoint, None for a new one, and when it began by the monotonic clock, in seconds.

    A run that goes on began earlier, by the time that its run.json knows it to have taken.

    Raises:
        UserError: `config.resume` names no run, one without a checkpoint, or one that has nothing left to do.
    """
    now = time.monotonic()
    if not config.resume:
        return None, now
    checkpoint = latest_checkpoint(Path(config.resume))
    run = read_run(Path(config.resume))
    _check_steps_left(config, read_progress(checkpoint), run)
    return checkpoint, now - (number(run.get("wall_s")) or 0.0)


def _check_steps_left(config: Config, progress: Progress, run: Mapping[str, object]) -> None:
    """`UserError` for a run that has nothing left to do; asked before anything is loaded, and nothing is written.

    A run that did its steps and did not end may still do so: one that was stopped before its evaluation, where --steps
    now says that no step is left, and one that died between its last checkpoint and its end.
    """
    recorded = run.get("config")
    planned = recorded.get("steps") if isinstance(recorded, Mapping) else None
    is_unevaluated = run.get("status") == "stopped" and progress.eval_step != progress.step
    is_open = run.get("status") != "finished" and (config.steps == planned or is_unevaluated)
    if config.steps > progress.step or (config.steps == progress.step and is_open):
        return
    raise UserError(
        f"steps: expected more than the steps that {config.resume} has done, got {config.steps}; it is at step "
        f"{progress.step} of {planned}: a larger number goes on, such as --steps {2 * progress.step}"
    )


def heldout_sha256(loop: GrpoLoop) -> str:
    """Hash of the identities of the held-out problems, in order: what run.json keeps as eval_sha256."""
    return hashlib.sha256("\n".join(problem.identity for problem in loop.heldout).encode()).hexdigest()


def _check_heldout(loop: GrpoLoop, run_dir: Path) -> None:
    """Accuracies before and after belong to the same problems: `UserError` where the task now holds out others."""
    recorded = read_run(run_dir).get("eval_sha256")
    if recorded is not None and recorded != heldout_sha256(loop):
        raise UserError(
            f"task: expected the held-out problems that {run_dir} was evaluated on, got others; put the data of that "
            "time back to go on, or start a new run"
        )


def restore(loop: GrpoLoop, loaded: LoadedModel, checkpoint: Path) -> Progress:
    """Fill a new loop in place with everything beside the weights, which were loaded from the checkpoint already.

    Under LoRA the base was loaded, and the adapters are filled here.

    Raises:
        UserError: Something is missing or damaged, a base that is not the one the adapters were trained on, held-out
            problems that are not those of the run's evaluations.
    """
    _check_heldout(loop, checkpoint.parents[1])
    updater, progress = loop.updater, read_progress(checkpoint)
    if loop.lora is not None:
        _check_base(loaded, checkpoint.parents[1])
        loop.lora.restore(checkpoint)
    elif updater.reference is not None:
        own = checkpoint if (checkpoint / REFERENCE_FILE).is_file() else None
        restore_reference(checkpoint.parent, updater.reference, own)
    restore_optimiser(checkpoint, updater.optim)
    updater.optim.skipped_steps = progress.skipped_steps
    loop.seen_reasons |= set(progress.seen_reasons)
    loop.num_extra_problems = progress.num_extra_problems
    loop.num_prompts_dropped = progress.num_prompts_dropped
    return progress


def _check_base(loaded: LoadedModel, run_dir: Path) -> None:
    """Adapters belong to the weights that they were trained on: `UserError` where the name now means others."""
    facts = read_run(run_dir).get("model")
    recorded = facts.get("weights_sha256") if isinstance(facts, Mapping) else None
    if recorded != weights_sha256(loaded.model):
        raise UserError(
            f"{loaded.source}: expected the weights that the adapters of {run_dir} were trained on, got others; put "
            "the model of that time back to go on"
        )
