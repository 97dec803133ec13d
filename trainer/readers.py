"""Who reads along with a run: the view, other loggers, diagnosis; and the report at its end. None can end a run."""

from collections.abc import Mapping
from typing import Self

from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dashboard import RunView
from sparkgrpo.trainer.diagnosis.live import LiveDiagnosis, verdict_event, verdict_sentence
from sparkgrpo.trainer.report import write_report
from sparkgrpo.trainer.run_reader import read_record
from sparkgrpo.trainer.runlog import RunLog
from sparkgrpo.trainer.settings import config_json
from sparkgrpo.trainer.sinks import make_sinks


class Readers:
    """The readers of one run; they are told after the run folder.

    Args:
        log: Gets verdicts and warnings as events. view: Gets them as notes.
        step: Steps done before this process; what was logged after them is about to be done again.
    """

    def __init__(self, config: Config, log: RunLog, view: RunView, *, step: int) -> None:
        self._config, self._log, self._view = config, log, view
        self._sinks = make_sinks(config.sink, log.folder, self._warn)
        record = read_record(log.folder)
        steps, evals = ([row for row in rows if int(str(row["step"])) <= step] for rows in (record.steps, record.evals))
        self._diagnosis = LiveDiagnosis(config_json(config), steps=steps, evals=evals, warn=self._warn)

    def open(self, facts: Mapping[str, object]) -> None:
        """The run begins: its run.json is whole. Facts are those of `RunView.start` that the configuration lacks."""
        config = config_json(self._config)
        chosen = {name: config[name] for name in ("steps", "eval_every")}
        self._view.start({"run_dir": str(self._log.folder), **facts, **chosen, "config": config})
        self._sinks.open(read_record(self._log.folder).run)

    def step(self, line: Mapping[str, object]) -> None:
        """A line of metrics.jsonl was written."""
        self._view.step(line)
        self._sinks.step(line)
        for verdict in self._diagnosis.step(line, is_last=line.get("step") == self._config.steps):
            self._log.event("verdict", {"step": line.get("step"), **verdict_event(verdict)})
            self._view.note(verdict_sentence(verdict))

    def evaluation(self, row: Mapping[str, object]) -> None:
        """A line of evals.jsonl was written."""
        self._view.evaluation(row)
        self._sinks.evaluation(row)
        self._diagnosis.evaluation(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._sinks.close()

    def _warn(self, text: str) -> None:
        self._log.event("warning", {"text": text})
        self._view.note(text)


def report_of(log: RunLog, view: RunView) -> None:
    """Write report.html and say where; a run that is done is not lost for a page that could not be made."""
    try:
        view.note(f"report: {write_report(log.folder, log.folder / 'report.html')}")
    except Exception as error:
        view.note(f"no report ({type(error).__name__}: {error}); the run folder has everything")
