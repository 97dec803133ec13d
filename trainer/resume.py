"""Going on with a run: what a checkpoint puts back beside the weights."""

from collections.abc import Mapping
from pathlib import Path

from sparkgrpo.trainer.checkpoint import (
    REFERENCE_FILE,
    Progress,
    read_progress,
    restore_optimiser,
    restore_reference,
    weights_sha256,
)
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.loop import GrpoLoop
from sparkgrpo.trainer.model.weights import LoadedModel
from sparkgrpo.trainer.runlog import read_run


def restore(loop: GrpoLoop, loaded: LoadedModel, checkpoint: Path) -> Progress:
    """Fill a new loop in place with everything beside the weights, which were loaded from the checkpoint already.

    Under LoRA the base was loaded, and the adapters are filled here.

    Raises:
        UserError: Something is missing or damaged, or a base that is not the one the adapters were trained on.
    """
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
