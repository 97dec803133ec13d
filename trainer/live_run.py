"""A run that lives: steps, with their evaluations, checkpoints and log lines, until it ends or is asked to stop."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sparkgrpo.profiling.environment import versions
from sparkgrpo.profiling.watchdog import MemoryFloorReached
from sparkgrpo.trainer.checkpoint import Progress, save_checkpoint, save_reference, weights_sha256
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dashboard import RunView
from sparkgrpo.trainer.instruments import Instruments
from sparkgrpo.trainer.loop import GrpoLoop, StepResult
from sparkgrpo.trainer.model.weights import LoadedModel
from sparkgrpo.trainer.readers import Readers
from sparkgrpo.trainer.resume import heldout_sha256
from sparkgrpo.trainer.reward_check import MAX_UNSCORED_STEPS
from sparkgrpo.trainer.runlog import RunLog
from sparkgrpo.trainer.samples import group_samples, heldout_samples
from sparkgrpo.trainer.settings import config_sha256
from sparkgrpo.trainer.stop_flag import StopFlag
from sparkgrpo.trainer.tasks.base import NOT_APPLICABLE

MAX_SKIPPED_IN_A_ROW = 3


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
    instruments: Instruments
    begun_s: float
    """When it began by the monotonic clock: earlier for a run that goes on, by the time that it had taken before."""
    saved_step: int = -1
    """Step of the newest checkpoint of this process."""
    is_out_of_memory: bool = False
    """Memory fell below the floor, and the run ended for it."""

    @property
    def wall_s(self) -> float:
        """Seconds that the run took so far, over all its sessions."""
        return time.monotonic() - self.begun_s

    def begin(self, model_name: str) -> None:
        """Tell the run folder and the view what runs."""
        model = self.loaded.model
        num_params = sum(p.numel() for p in model.parameters())
        facts: dict[str, object] = {"eval_sha256": heldout_sha256(self.loop)}
        if self.progress.step == 0:
            facts["model"] = {"name": model_name, "num_params": num_params, "weights_sha256": weights_sha256(model)}
        self.log.update(facts | self.instruments.facts_before())
        self.instruments.attach(self.loop.clock, self.loop.engine)
        self.readers.open(
            {
                "model": model_name,
                "device": model.device.type,
                "precision": str(model.dtype).removeprefix("torch."),
                "first_step": self.progress.step + 1,
                "num_params": num_params,
            }
        )

    def train(self, is_asked_to_stop: StopFlag) -> None:
        """All steps that are left, with their evaluations and checkpoints; a stop is saved and not evaluated."""
        config, progress = self.config, self.progress
        try:
            if progress.eval_step < 0:
                self._evaluate()
                progress.eval_before = progress.eval_after
            self.loop.clock.start_step()
            while progress.step < config.steps and not is_asked_to_stop and not self.instruments.is_recorded:
                self._step()
            if not is_asked_to_stop and not self.instruments.is_recorded and progress.eval_step != progress.step:
                self._evaluate()  # a stopped run that has no step left
        except FloatingPointError as error:
            raise UserError(f"after step {progress.step}: {error}; {self._way_on()}") from None
        except UserError as error:
            if error.details:
                self._keep_traceback(error.details)
            raise UserError(f"{error}{self._saved_all_the_same()}", details=error.details) from None
        except MemoryFloorReached as error:
            self.is_out_of_memory = True
            self.warn(f"{error}: the step in hand was dropped")
        if (is_asked_to_stop or self.is_out_of_memory) and self.saved_step != progress.step:
            self._save()

    def _step(self) -> None:
        config, progress = self.config, self.progress
        result = self.loop.step(progress.step + 1)
        self.instruments.guard.step_done()
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
                f"{_why_unscored(result)}; mend the reward and go on with --resume {self.log.folder}"
            )

    def _evaluate(self) -> None:
        step = self.progress.step
        evaluation = self.loop.evaluate()
        self.progress.eval_after, self.progress.eval_step = evaluation.accuracy, step
        row = evaluation.row(step)
        self.log.evaluation(row)
        self.readers.evaluation(row)
        for text in self.loop.reward_check.take_faults():  # the last evaluation has no step behind it to tell them
            self.warn(text)
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
        measured, texts = self.instruments.step_metrics(result.metrics, seconds, flops=self.loop.updater.num_flops)
        so_far = {"t_unix_s": time.time(), "num_tokens_total": self.progress.num_tokens_total}
        line = {**result.metrics, **so_far, **seconds, **measured}
        self.log.metrics(line)
        self.readers.step(line)
        for text in texts:
            self.log.event("warning", {"step": self.progress.step, "text": text})
        for text in result.warnings:
            self.warn(text)
        for text in result.tracebacks:
            self._keep_traceback(text)

    def _keep_traceback(self, text: str) -> None:
        """Tell the events alone: people get the sentence that names the place."""
        self.log.event("traceback", {"step": self.progress.step, "text": text})

    def warn(self, text: str) -> None:
        """Tell the events and the view."""
        self.log.event("warning", {"step": self.progress.step, "text": text})
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
        self.log.update({"wall_s": self.wall_s})  # a session that is killed has no other chance to leave its time
        self.log.event("checkpoint", {"step": progress.step, "path": str(path.relative_to(self.log.folder))})

    def _saved_all_the_same(self) -> str:
        """Save the steps that are done before a mistake ends the run; what to add to its message."""
        if self.progress.step in (0, self.saved_step):
            return ""
        try:
            self._save()
        except UserError as error:  # the disk may be the mistake
            return f"; and the steps done could not be saved: {error}"
        return f"; step {self.saved_step} is saved: go on with --resume {self.log.folder}"

    def _way_on(self) -> str:
        """What to do about weights that diverged."""
        cure = "lower --lr or --max-grad-norm and start again"
        return cure if self.saved_step < 0 else f"{cure}; the last checkpoint is that of step {self.saved_step}"


def _why_unscored(result: StepResult) -> str:
    """Why a step has not one reward; a reward of None is no fault, so nothing warned of it."""
    if all(score.reason == NOT_APPLICABLE for score in result.scores):
        return "the rewards were all None"
    reasons = ", ".join(sorted({score.reason for score in result.scores}))
    return " ".join(result.warnings[-1:]) or f"the completions' reasons were {reasons}"


def _is_multiple(step: int, every: int) -> bool:
    """Whether something that is done every so many steps (0: never) is due."""
    return every > 0 and step % every == 0
