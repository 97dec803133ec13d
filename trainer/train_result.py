"""How a run ended, for whoever started it."""

from dataclasses import dataclass


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
    """Seconds from the call to the end, over all sessions of a run that went on; of a session that was killed, those
    up to its last checkpoint."""
    is_stopped: bool
    """Ended before the last step: asked to (Ctrl-C, SIGTERM), or memory ran out; a checkpoint is there."""
    is_out_of_memory: bool
    """Ended because memory fell below the floor."""
