"""Other loggers that get each line of metrics.jsonl too: TensorBoard, trackio, Weights & Biases.

Called after the line is on disk. The run folder stays the truth: a logger that raises is switched off with one warning,
and none can end a run. Each package is an extra of its own and is imported when it is asked for.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.hostile_text import visible_text
from sparkgrpo.trainer.settings import nearest

_NOT_CURVES = frozenset(("v", "step", "t_unix_s"))


class Sink(Protocol):
    """One logger."""

    def open(self, run: Mapping[str, object]) -> None:
        """The run begins or goes on; ``run`` is the content of run.json."""
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step, or of an evaluation under ``eval/``; all finite."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class TensorBoardSink:
    """Event files in ``<run>/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, run: Mapping[str, object]) -> None:
        """Begin a file; the configuration becomes a text."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(self._folder / "tensorboard"))
        config = run.get("config")
        if isinstance(config, Mapping):
            lines = [f"    {key}: {value}" for key, value in config.items()]  # indented: a block of code in Markdown
            self._writer.add_text("config", "\n".join(lines), 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a number."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()


class TrackioSink:
    """The local dashboard of Hugging Face; project "sparkgrpo", one run by its id."""

    def __init__(self, folder: Path) -> None:
        self._module: Any = None

    def open(self, run: Mapping[str, object]) -> None:
        """Begin or go on with the run of this id."""
        import trackio  # pyright: ignore[reportMissingImports]

        self._module = trackio
        config = run.get("config")
        trackio.init(
            project="sparkgrpo",
            name=str(run.get("run_id")),
            config=dict(config) if isinstance(config, Mapping) else {},
            resume="allow",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """All numbers at once."""
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is still under way."""
        if self._module is not None:
            self._module.finish()


class WandbSink:
    """Weights & Biases; project "sparkgrpo", files in the run folder. Its own settings say whether it goes online."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None

    def open(self, run: Mapping[str, object]) -> None:
        """Begin or go on with the run of this id."""
        import wandb  # pyright: ignore[reportMissingImports]

        config = run.get("config")
        self._run = wandb.init(
            project="sparkgrpo",
            name=str(run.get("run_id")),
            id="".join(c if c.isalnum() or c in "-_." else "-" for c in str(run.get("run_id")))[:100],
            resume="allow",
            dir=str(self._folder),
            config=dict(config) if isinstance(config, Mapping) else {},
            settings=wandb.Settings(console="off"),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """All numbers at once; an evaluation belongs to the step before it, which W&B would otherwise have closed."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


_SINKS: Mapping[str, tuple[type, str]] = {
    "tensorboard": (TensorBoardSink, "tensorboard"),
    "trackio": (TrackioSink, "trackio"),
    "wandb": (WandbSink, "wandb"),
}
"""By name: the class and the module that its extra brings."""


class Sinks:
    """The loggers of a run; none raises. Made by `make_sinks`.

    Args:
        warn: Gets one sentence for each logger that is switched off.
    """

    def __init__(self, sinks: Mapping[str, Sink], warn: Callable[[str], None]) -> None:
        self._sinks = dict(sinks)
        self._warn = warn

    def open(self, run: Mapping[str, object]) -> None:
        """Pass on, guarded."""
        self._each(lambda sink: sink.open(run))

    def step(self, line: Mapping[str, object]) -> None:
        """Pass on the numbers of a line of metrics.jsonl, guarded."""
        self._write(line, "")

    def evaluation(self, row: Mapping[str, object]) -> None:
        """Pass on the numbers of a line of evals.jsonl as ``eval/...``, guarded."""
        self._write(row, "eval/")

    def close(self) -> None:
        """Pass on, guarded; a second close does nothing."""
        self._each(lambda sink: sink.close())
        self._sinks = {}

    def _write(self, row: Mapping[str, object], prefix: str) -> None:
        step = row.get("step")
        if not self._sinks or not isinstance(step, int):
            return
        numbers = {
            prefix + key: float(value)
            for key, value in row.items()
            if key not in _NOT_CURVES and isinstance(value, (int, float)) and math.isfinite(value)
        }
        self._each(lambda sink: sink.write(step, numbers))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:
                del self._sinks[name]
                reason = visible_text(f"{type(error).__name__}: {error}", 300)
                self._warn(f"{name} is switched off ({reason}); the run goes on, its metrics.jsonl has everything")


def make_sinks(names: str, folder: Path, warn: Callable[[str], None]) -> Sinks:
    """The loggers of ``--sink``, not yet open.

    Args:
        names: Names with commas between; empty: none.
        folder: The run folder.

    Raises:
        UserError: An unknown name, or a package that is not installed.
    """
    return Sinks({name: _SINKS[name][0](folder) for name in check_sinks(names)}, warn)


def check_sinks(names: str) -> list[str]:
    """The names of ``--sink``, each once. `UserError` for an unknown one, or one whose package is not installed."""
    import importlib.util

    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in _SINKS:
            raise UserError(f"sink: expected some of {', '.join(_SINKS)}, got {name!r}{nearest(name, _SINKS)}")
        if importlib.util.find_spec(_SINKS[name][1]) is None:
            raise UserError(f"sink: {name} is not installed; pip install 'sparkgrpo[{name}]'")
    return chosen
