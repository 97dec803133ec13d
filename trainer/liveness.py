"""Whether a run still goes, ended, or died without saying so; read from its folder alone."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sparkgrpo.trainer.dashboard import duration, number
from sparkgrpo.trainer.run_reader import RunRecord

MIN_SILENCE_S = 60.0
DIED = "ended without a stop event"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """How it stands with a run."""

    is_over: bool
    """No line will come any more: it ended, or its process is gone."""
    status: str
    """As run.json says, but that it may still say "running" of a run that died: then DIED."""
    text: str
    """Said in a few words; empty while it goes."""


def liveness(record: RunRecord, *, now_unix_s: float | None = None) -> Liveness:
    """Judge by run.json, by the time of the last line, and by the process that wrote it.

    A run without a stop event is over when it has been silent for max(60 s, 5 median steps) and its process is gone or
    belonged to another boot of the machine.
    """
    step = int(number(record.steps[-1].get("step")) or 0) if record.steps else 0
    if record.status in ("finished", "stopped", "failed"):
        error = record.run.get("error")
        why = f": {error}" if record.status == "failed" and error else ""
        way_on = (
            f"; go on with: {resume_command(record)}" if record.status != "finished" and _has_checkpoint(record) else ""
        )
        return Liveness(is_over=True, status=record.status, text=f"{record.status} after step {step}{why}{way_on}")
    silent_s = (time.time() if now_unix_s is None else now_unix_s) - _last_sign_unix_s(record)
    steps_s = [t for row in record.steps[-20:] if (t := number(row.get("t_step"))) is not None]
    patience_s = max(MIN_SILENCE_S, 5 * median(steps_s)) if steps_s else MIN_SILENCE_S
    if silent_s <= patience_s:
        return Liveness(is_over=False, status=record.status, text="")
    if _is_alive(record):
        return Liveness(
            is_over=False, status=record.status, text=f"no line for {duration(silent_s)}; its process is alive"
        )
    way_on = f"resume with {resume_command(record)}" if _has_checkpoint(record) else "no checkpoint was saved"
    status = DIED if record.status == "running" else record.status
    return Liveness(is_over=True, status=status, text=f"{DIED} at step {step}; {way_on}")


def resume_command(record: RunRecord) -> str:
    """The command line that goes on with a run."""
    return f"sparkgrpo train --resume {record.folder}"


def _has_checkpoint(record: RunRecord) -> bool:
    return any(row.get("event") == "checkpoint" for row in record.events)


def _last_sign_unix_s(record: RunRecord) -> float:
    rows = [record.run, *record.steps[-1:], *record.events[-1:]]
    return max((t for row in rows if (t := number(row.get("t_unix_s"))) is not None), default=0.0)


def _is_alive(record: RunRecord) -> bool:
    pid = record.run.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    recorded = record.run.get("boot_id")
    try:
        if recorded is not None and recorded != _BOOT_ID.read_text().strip():
            return False
    except OSError:
        pass  # no boot ids on this system: the process id alone has to tell
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
