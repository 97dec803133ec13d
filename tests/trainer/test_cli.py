"""The command line: one message and exit code 2 for a person's mistake, one JSON object as the last line."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sparkgrpo.trainer import cli, machine
from sparkgrpo.trainer.config import Config, field_types
from sparkgrpo.trainer.dashboard import RunView
from sparkgrpo.trainer.runlog import RunLog


class FakeLoop:
    """Stands in for trainer/run.py: records the configuration, trains nothing."""

    def __init__(self) -> None:
        self.config = Config()
        self.user_set: Mapping[str, object] = {}
        self.is_stopped = self.is_out_of_memory = False
        self.error: BaseException | None = None

    def train(self, config: Config, *, user_set: Mapping[str, object], view: RunView) -> SimpleNamespace:
        self.config, self.user_set = config, user_set
        if self.error is not None:
            raise self.error
        view.start({"run_dir": config.run_dir, "steps": config.steps})
        view.step({"step": 1, "reward_mean": 0.5})
        return SimpleNamespace(
            run_dir=Path(config.run_dir or config.resume),
            steps=config.steps,
            eval_before=0.25,
            eval_after=0.5,
            wall_s=1.23456,
            is_stopped=self.is_stopped,
            is_out_of_memory=self.is_out_of_memory,
        )

    def evaluate_command(self, config: Config) -> dict[str, object]:
        self.config = config
        return {"model": config.model, "accuracy": 0.5}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLoop:
    fake = FakeLoop()
    module = ModuleType("sparkgrpo.trainer.run")
    module.train, module.evaluate_command = fake.train, fake.evaluate_command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(machine, "model_recipe", lambda model: {"lr": 0.001, "max_new_tokens": 64})
    monkeypatch.setattr(machine, "choose_device", lambda device: machine.torch.device("cpu"))
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def refused(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused: exit code 2, nothing on stdout, one line on stderr, which is returned."""

    def run(*arguments: str) -> str:
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("sparkgrpo: ") and err.count("\n") == 1
        return err

    return run


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])


def test_train_ends_with_one_json_object(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--steps", "3", "--run-dir", "here"]) == 0
    out, err = capsys.readouterr()
    lines = out.rstrip("\n").split("\n")
    assert json.loads(lines[-1]) == {
        "run_dir": "here",
        "steps": 3,
        "eval_before": 0.25,
        "eval_after": 0.5,
        "wall_s": 1.235,
    }
    assert lines[0].startswith("model embedded: there is no CUDA device")
    assert any(line.startswith("step 1/3") for line in lines)
    assert err == ""


def test_nothing_is_left_to_auto(loop: FakeLoop) -> None:
    assert cli.main(["train", "--seed=5"]) == 0
    config = loop.config
    assert (config.model, config.device, config.precision, config.seed) == ("embedded", "cpu", "fp32", 5)
    assert config.run_dir.startswith("runs/2") and config.run_dir.endswith("_countdown_grpo_s5")
    assert (config.lr, config.max_new_tokens, config.steps) == (0.001, 64, 200)  # recipe, recipe, default
    assert loop.user_set == {"seed": 5}


def test_second_run_of_a_minute_gets_its_own_folder(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.time, "strftime", lambda form: "2026-11-29_1412")
    assert cli._new_run_dir(Config()) == "runs/2026-11-29_1412_countdown_grpo_s0"
    Path("runs/2026-11-29_1412_countdown_grpo_s0").mkdir(parents=True)
    assert cli._new_run_dir(Config()) == "runs/2026-11-29_1412_countdown_grpo_s0_2"


@pytest.mark.parametrize("option", ["--max-new-tokens", "--max_new_tokens"])
@pytest.mark.parametrize("form", ["{} 7", "{}=7"])
def test_dashes_and_underscores(loop: FakeLoop, option: str, form: str) -> None:
    assert cli.main(["train", *form.format(option).split(), "--run_dir=my_runs/a_b"]) == 0
    assert (loop.config.max_new_tokens, loop.config.run_dir) == (7, "my_runs/a_b")


def test_flags_lists_and_layers(loop: FakeLoop) -> None:
    Path("s.yaml").write_text("lr: 0.5\nplain: true\nsteps: 9\n")
    options = "--config s.yaml --preset gspo --no-plain --mask-truncated --delta none --eps-high inf --steps 4"
    assert cli.main(["train", *options.split()]) == 0
    config = loop.config
    assert (config.lr, config.plain, config.mask_truncated, config.steps, config.ratio) == (
        0.5,
        False,
        True,
        4,
        "sequence",
    )
    assert config.eps_high == float("inf") and config.eps_low == 3e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected a command: train, eval"),
        ("wach", "unknown command 'wach'; the commands are train, eval, profile, doctor, watch, diagnose, report,"),
        ("wach", "did you mean 'watch'?"),
        ("watch", "the following arguments are required: RUN"),
        ("watch nowhere", "nowhere: not a run folder"),
        ("diagnose nowhere", "nowhere: no such folder"),
        ("diagnose used", "used: not a run folder"),
        ("diagnose used --fail-on never", "--fail-on: expected warn or error, got 'never'"),
        ("report used --outpt x", "unknown option '--outpt'; did you mean '--output'?"),
        ("compare used", "used: not a run folder"),
        (
            "compare used used --over stp",
            "--over: expected one of step, tokens, seconds, got 'stp'; did you mean 'step'?",
        ),
        ("experiment tois", "unknown experiment 'tois'"),
        ("experiment toy --seeds none", "--seeds: expected an integer of at least 1, got 'none'"),
        ("convert used --to tlr -o x", "--to: expected one of trl, verl, prime-rl, got 'tlr'; did you mean 'trl'?"),
        ("convert used -o x", "expected --to {trl,verl,prime-rl}, or --from trl"),
        ("train --sink tensorbord", "sink: expected some of tensorboard, trackio, wandb, got 'tensorbord'"),
        ("trian", "did you mean 'train'?"),
        ("train --max-new-token 3", "unknown option '--max-new-token'; did you mean '--max-new-tokens'?"),
        ("train --max_new_token=3", "unknown option '--max-new-token=3'; did you mean '--max-new-tokens'?"),
        ("train --zzz", "unknown option '--zzz'; sparkgrpo train --help lists the options"),
        ("train here", "unknown argument 'here'"),
        ("train --steps", "--steps: expected one argument"),
        ("train --steps many", "--steps: expected an integer, got 'many'"),
        ("train --steps 0", "--steps: expected at least 1, got 0"),
        ("train --lr x", "--lr: expected a number, got 'x'"),
        ("train --advantage grupp", "did you mean 'group'?"),
        ("train --device gpu", "--device: expected one of auto, cpu, cuda, got 'gpu'"),
        ("train --group-size 1", "expected group_size 2 or more"),
        ("train --group-size 0", "--group-size: expected at least 1"),
        ("train --preset dr-grpo", "did you mean 'dr_grpo'?"),
        ("train --task cuontdown", "did you mean 'countdown'?"),
        ("train --numbers 9", "--numbers: expected 2, 3, 4"),
        ("train --config missing.yaml", "missing.yaml: cannot read it (No such file or directory)"),
        ("train --config bad.yaml", "bad.yaml: not a YAML file"),
        ("train --config key.yaml", "key.yaml: unknown key 'max_new_token'; did you mean 'max_new_tokens'?"),
        ("train --run-dir used", "used is not empty; choose another --run-dir, or go on with that run: --resume used"),
        ("train --resume used", "used: not a run folder"),
        ("train --resume used --lr 1", "used: not a run folder"),
        ("train --resume a --config s.yaml", "--config: cannot change when a run is resumed"),
        ("eval --steps 3", "unknown option '--steps'"),
        ("eval --temperature x", "--eval-temperature: expected a number"),
    ],
)
def test_mistakes(refused: Callable[..., str], arguments: str, message: str) -> None:
    Path("bad.yaml").write_text("a: [")
    Path("key.yaml").write_text("max_new_token: 1")
    Path("used").mkdir()
    Path("used/file").write_text("")
    assert message in refused(*arguments.split())


def test_hostile_argument_cannot_command_the_terminal(refused: Callable[..., str]) -> None:
    assert "\x1b" not in refused("train", "--\x1b[2J")


def test_device_without_cuda(refused: Callable[..., str], loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    assert "expected a CUDA device" in refused("train", "--device", "cuda", "--run-dir", "never-made")


def test_our_own_bug_keeps_its_traceback(loop: FakeLoop) -> None:
    loop.error = ValueError("not a mistake of the person")
    with pytest.raises(ValueError, match="not a mistake"):
        cli.main(["train"])


def test_interrupt_before_the_loop_is_ready(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.error = KeyboardInterrupt()
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "sparkgrpo: interrupted\n"


def test_a_stopped_run_says_how_to_go_on(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.is_stopped = True
    assert cli.main(["train", "--run-dir", "here"]) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert lines[-2].endswith("go on with: sparkgrpo train --resume here")
    assert json.loads(lines[-1])["run_dir"] == "here"


def test_a_run_without_memory_ends_with_a_code_of_its_own(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.is_stopped = loop.is_out_of_memory = True
    assert cli.main(["train", "--run-dir", "here"]) == 4
    out = capsys.readouterr().out
    assert "memory ran out, stopped after step" in out and "go on with: sparkgrpo train --resume here" in out


def test_resume_takes_the_recorded_configuration(
    loop: FakeLoop, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    recorded = Config(run_dir="old", lr=0.25, model="embedded", device="cpu", precision="fp32", preset="rloo")
    RunLog.create(recorded, user_set={"lr": 0.25}, environment={}).finish("stopped", {})
    assert cli.main(["train", "--resume", "old", "--steps", "300"]) == 0
    assert (loop.config.lr, loop.config.steps, loop.config.preset) == (0.25, 300, "rloo")
    assert (loop.config.resume, loop.config.run_dir) == ("old", "")
    assert loop.user_set == {"lr": 0.25, "steps": 300}
    assert last_line(capsys)["run_dir"] == "old"
    assert "--seed: cannot change when a run is resumed" in refused("train", "--resume", "old", "--seed", "1")


def test_loss_is_explained_where_it_says_nothing(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train"]) == 0
    assert "the loss stays near 0" in capsys.readouterr().out
    assert cli.main(["train", "--mini-batches", "2"]) == 0
    assert "the loss stays near 0" not in capsys.readouterr().out


def test_eval_ends_with_one_json_object(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--model some/model --numbers 4 --eval-problems 5 --temperature 0.5 --max_new_tokens 9 --long-prompts drop"
    )
    assert cli.main(["eval", *options.split()]) == 0
    assert last_line(capsys) == {"model": "some/model", "accuracy": 0.5}
    config = loop.config
    assert (config.numbers, config.eval_problems, config.eval_temperature, config.max_new_tokens) == ("4", 5, 0.5, 9)
    assert config.long_prompts == "drop"


def test_every_field_is_an_option_in_one_section() -> None:
    listed = [name for _, names in cli.SECTIONS for name in names.split()]
    assert sorted(listed) == sorted(field_types())


def help_text(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert "train" in overview and "eval" in overview
    train = help_text(["train", "--help"], capsys)
    assert all(f"--{name.replace('_', '-')}" in train for name in field_types())
    recipe = machine.model_recipe(machine.EMBEDDED)
    of_recipe = " ".join(train.split()).partition("has a recipe of its own")[2].partition(". ")[0]
    assert recipe and all(name in of_recipe for name in recipe), "the help names what the defaults are not for"
    assert "Default: 1e-06." in " ".join(train.split()) and "dr_grpo" in train
    assert "--temperature" in help_text(["eval", "--help"], capsys)


def test_help_and_mistakes_need_no_pytorch() -> None:
    program = """
import sys
from sparkgrpo.trainer.cli import main
assert main(["--help"]) == 0
assert main(["train", "--stesp", "3"]) == 2
assert main(["train", "--group-size", "1"]) == 2
heavy = {"torch", "transformers", "rich", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparkgrpo.trainer", "eval", "--stesp"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
