"""The command line: ``sparkgrpo COMMAND``; here ``train`` and ``eval``, the other commands in commands/.

Every field of `Config` is an option with its docstring as help. argparse rather than a library that builds the
configuration itself (tyro was tried): values come in layers, so what counts is which options were given; options and
YAML share one converter, so a wrong value reads the same in both; and one message is all that a mistake prints.

A person's mistake ends with one message on stderr and exit code 2. PyTorch is imported after the options are checked.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from sparkgrpo.trainer.config import GROUP_BASELINES, Config, UserError, choices, field_types, is_optional
from sparkgrpo.trainer.dashboard import make_view
from sparkgrpo.trainer.hostile_text import visible_text
from sparkgrpo.trainer.option_parser import OptionParser, new_parser, parse_options
from sparkgrpo.trainer.runlog import check_new_folder, read_run
from sparkgrpo.trainer.settings import field_docs, nearest, preset_names, resolve, resolve_resume
from sparkgrpo.trainer.sinks import check_sinks

OUT_OF_MEMORY = 4
"""Exit code of a run that ended because memory ran out; it is saved and can be resumed."""
SECTIONS: tuple[tuple[str, str], ...] = (
    ("what to train", "model lora_rank lora_alpha lora_targets task numbers preset seed steps"),
    (
        "task and reward",
        "reward reward_weights reward_timeout_s truncated_reward format_reward single_answer max_number max_target "
        "xmlcount_floor data prompt_column answer_column checker heldout_frac flexible sandbox unsafe_sandbox",
    ),
    ("machine", "device precision num_threads tokens_per_micro_batch activation_checkpointing attention"),
    (
        "rollout",
        "prompts_per_step group_size max_new_tokens max_prompt_tokens long_prompts temperature dynamic_sampling "
        "max_rounds overlong_cache reward_shift",
    ),
    (
        "objective",
        "advantage ddof normaliser surrogate ratio eps_low eps_high delta beta sync_every sync_mix kl entropy_coef "
        "mask_truncated old_logprobs importance_cap inner_epochs mini_batches",
    ),
    ("optimiser", "lr lr_factor lr_schedule warmup_steps adam_beta1 adam_beta2 adam_eps weight_decay max_grad_norm"),
    ("evaluation", "eval_every eval_problems eval_temperature num_samples"),
    ("run folder and view", "run_dir resume checkpoint_every keep_checkpoints plain sink"),
)
_EVAL_FIELDS = (
    "model task numbers max_number max_target data prompt_column answer_column checker heldout_frac flexible "
    "sandbox unsafe_sandbox eval_problems max_new_tokens max_prompt_tokens long_prompts eval_temperature seed device "
    "precision num_threads"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. A bug of ours keeps its traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"sparkgrpo: {visible_text(str(error), 2000)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sparkgrpo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again as it exits
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        raise UserError(f"expected a command: {_command_list()}; sparkgrpo --help says more")
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"sparkgrpo {importlib.metadata.version('sparkgrpo')}")
        return 0
    if name not in _COMMANDS:
        raise UserError(f"unknown command {name!r}; the commands are {_command_list()}{nearest(name, _COMMANDS)}")
    return _COMMANDS[name][0](rest)


def _overview() -> str:
    lines = ["usage: sparkgrpo COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:12}{summary}" for name, (_, summary) in _COMMANDS.items()]
    return "\n".join([*lines, "", "sparkgrpo COMMAND --help lists the options."])


def train_config(arguments: list[str]) -> tuple[Config, dict[str, object], list[str]]:
    """What `sparkgrpo train ARGUMENTS` would run: the configuration without any "auto" left, what the person set, and
    sentences about the choices made. `UserError` for a mistake."""
    options = parse_options(_train_parser(), arguments)
    config_file = options.pop("config", None)
    return settled(options, None if config_file is None else str(config_file))


def _train(arguments: list[str]) -> int:
    config, user_set, notes = train_config(arguments)
    if not config.resume:
        check_new_folder(Path(config.run_dir))
    check_sinks(config.sink)
    from sparkgrpo.trainer.run import train  # imports PyTorch and transformers: seconds, after all cheap checks

    view = make_view(config.plain)
    try:
        for note in notes:
            view.note(note)
        result = train(config, user_set=user_set, view=view)
        if result.is_stopped:
            why = "memory ran out, " if result.is_out_of_memory else ""
            view.note(
                f"{why}stopped after step {result.steps}, saved; go on with: sparkgrpo train --resume {result.run_dir}"
            )
    finally:
        view.close()
    summary = {
        "run_dir": str(result.run_dir),
        "steps": result.steps,
        "eval_before": result.eval_before,
        "eval_after": result.eval_after,
        "wall_s": round(result.wall_s, 3),
    }
    print(json.dumps(summary), flush=True)
    return OUT_OF_MEMORY if result.is_out_of_memory else 0


def _evaluate(arguments: list[str]) -> int:
    config, _, notes = settled(parse_options(_eval_parser(), arguments), None)
    from sparkgrpo.trainer.run import evaluate_command

    print("\n".join(notes[:1]), flush=True)
    print(json.dumps(evaluate_command(config)), flush=True)
    return 0


def settled(options: dict[str, object], config_file: str | None) -> tuple[Config, dict[str, object], list[str]]:
    """The configuration without any "auto" left, what the person set, and sentences about the choices made."""
    resume = options.pop("resume", None)
    if resume is not None:
        if config_file is not None:
            raise UserError("--config: cannot change when a run is resumed")
        config, user_set = resolve_resume(str(resume), options, read_run(Path(str(resume))))
    else:
        config, user_set = resolve(options, config_file=config_file)

    # PyTorch, half a second or more: every mistake that can be found without it has been found by now.
    from sparkgrpo.trainer import machine
    from sparkgrpo.trainer.tasks.registry import check_settings

    device = machine.choose_device(config.device)
    model, why = machine.choose_model(config, device)
    if resume is None:
        config, user_set = resolve(options, config_file=config_file, recipe=machine.model_recipe(model))
    check_settings(config, user_set)
    config = replace(
        config,
        model=model,
        device=device.type,  # pyright: ignore[reportArgumentType]
        precision=machine.choose_precision(config.precision, device),  # pyright: ignore[reportArgumentType]
        run_dir=config.run_dir if config.run_dir or config.resume else _new_run_dir(config),
    )
    return config, user_set, [why, *_notes_about_objective(config)]


def _notes_about_objective(config: Config) -> list[str]:
    if config.inner_epochs * config.mini_batches > 1 or config.advantage not in GROUP_BASELINES:
        return []
    return ["with one update a batch and centred advantages the loss stays near 0 whatever is learnt: watch the reward"]


def _new_run_dir(config: Config) -> str:
    task = re.sub(r"\W+", "-", config.task)  # "gym:sudoku", "mine.py:MyTask"
    name = f"runs/{time.strftime('%Y-%m-%d_%H%M')}_{task}_{config.preset}_s{config.seed}"
    number = 1
    while Path(name if number == 1 else f"{name}_{number}").exists():
        number += 1
    return name if number == 1 else f"{name}_{number}"


def _train_parser() -> OptionParser:
    parser = new_parser("train", _COMMANDS["train"][1])
    parser.description = (
        f"{parser.description} The embedded model has a recipe of its own in place of the defaults below of "
        "lr, steps, prompts_per_step, group_size and max_new_tokens."
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a file; options given here win over it")
    for title, names in SECTIONS:
        group = parser.add_argument_group(title)
        for name in names.split():
            _add_option(group, name, f"--{name.replace('_', '-')}")
    return parser


def _eval_parser() -> OptionParser:
    parser = new_parser("eval", _COMMANDS["eval"][1])
    for name in _EVAL_FIELDS.split():
        short = ("--temperature",) if name == "eval_temperature" else ()  # there is no other temperature here
        _add_option(parser, name, *short, f"--{name.replace('_', '-')}")
    return parser


def _add_option(group: argparse._ActionsContainer, name: str, *option: str) -> None:
    kind = field_types()[name]
    default = next(field.default for field in fields(Config) if field.name == name)
    text = field_docs()[name]
    if name == "preset":
        text += f" One of {', '.join(preset_names())}."
    if kind is bool:
        group.add_argument(*option, dest=name, action=argparse.BooleanOptionalAction, help=text.replace("%", "%%"))
        return
    default_text = "" if default == "" else f" Default: {'none' if default is None else default}."
    metavar = _metavar(kind)
    group.add_argument(*option, dest=name, metavar=metavar, help=(text + default_text).replace("%", "%%"))


def _metavar(kind: object) -> str:
    if choices(kind):
        return "{" + ",".join(choices(kind)) + "}"
    return "INT" if kind is int else "TEXT" if kind is str else "NUMBER|none" if is_optional(kind) else "NUMBER"


def _command_list() -> str:
    return ", ".join(_COMMANDS)


def _in_module(name: str) -> Callable[[list[str]], int]:
    """The ``main`` of ``commands/<name>.py``, imported when it is called: no command pays for another's imports."""

    def run(arguments: list[str]) -> int:
        return importlib.import_module(f"sparkgrpo.trainer.commands.{name}").main(arguments)

    return run


# In the order of `sparkgrpo --help`. A command of its own file: "watch": (_in_module("watch"), "...").
_COMMANDS: Mapping[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "Train a model with GRPO on a task whose answers can be checked."),
    "eval": (_evaluate, "Measure a model's accuracy on held-out problems."),
    "profile": (_in_module("profile"), "Record a few steps of a run and report where the time goes: -- train ..."),
    "doctor": (_in_module("doctor"), "Check what a run needs on this machine, by trying each of it."),
    "watch": (_in_module("watch"), "Follow a run on the terminal, while it goes or afterwards."),
    "diagnose": (_in_module("diagnose"), "Say what a run suffers from, since when, and what to do."),
    "report": (_in_module("report"), "Write one HTML file that shows a run."),
    "compare": (_in_module("compare"), "Lay runs over each other: settings, accuracy, time."),
    "experiment": (_in_module("experiment"), "Repeat an experiment of the lessons and say whether it came out so."),
    "convert": (_in_module("convert"), "Write a run's metrics under the names of another trainer, or read TRL's log."),
}
