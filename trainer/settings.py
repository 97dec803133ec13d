"""Layers of settings: class defaults < recipe of the model < preset < YAML file < command line.

Every layer goes through one converter and one check, so a wrong value gets the same message wherever it was written,
with the place in front: the file, or the option.
"""

import ast
import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path

import yaml

from sparkgrpo.trainer.config import Config, UserError, choices, field_types, is_optional, value_problem
from sparkgrpo.trainer.contradictions import name_elsewhere
from sparkgrpo.trainer.started_in import check_folder

PRESET_FOLDER = Path(__file__).parent / "presets"

# What a resumed run may do differently: how long, how often, on what; never what is learnt from what.
CHANGEABLE_ON_RESUME = frozenset(
    ("steps", "eval_every", "checkpoint_every", "keep_checkpoints", "device", "num_threads", "tokens_per_micro_batch")
) | {"plain", "sink", "activation_checkpointing", "attention", "sandbox", "unsafe_sandbox"}
_WITHOUT_EFFECT_ON_RESULTS = frozenset(
    ("run_dir", "resume", "plain", "sink", "checkpoint_every", "keep_checkpoints", "num_samples", "sandbox")
) | {"unsafe_sandbox"}


def resolve(
    options: Mapping[str, object], *, config_file: str | None = None, recipe: Mapping[str, object] | None = None
) -> tuple[Config, dict[str, object]]:
    """Lay the settings over each other.

    Args:
        options: what the command line set, by field name; strings are converted to the type of the field.
        config_file: YAML file of ``--config``.
        recipe: settings that belong to the model (``train.yaml`` beside the embedded one).

    Returns:
        The checked configuration, and what the person set (file and options), by field name.

    Raises:
        UserError: a file cannot be read, or a key or value is wrong.
    """
    from_recipe = check_layer("recipe of the model", recipe or {})
    from_file = read_yaml(Path(config_file)) if config_file is not None else {}
    from_options = {name: _converted(name, value, f"--{name.replace('_', '-')}") for name, value in options.items()}
    user_set = from_file | from_options
    chosen = user_set.get("preset", from_recipe.get("preset"))
    from_preset = read_preset(str(chosen)) if chosen is not None else {}
    return Config(**(from_recipe | from_preset | user_set)), user_set  # pyright: ignore[reportArgumentType]


def resolve_resume(
    folder: str, options: Mapping[str, object], run: Mapping[str, object]
) -> tuple[Config, dict[str, object]]:
    """The configuration of a run that goes on: that of its ``run.json``, with the few options that may change.

    Args:
        folder: the run folder.
        options: what the command line set besides ``resume``.
        run: the content of ``run.json``.

    Raises:
        UserError: an option that cannot change, no configuration, or a relative path that means another file here.
    """
    fixed = sorted(set(options) - CHANGEABLE_ON_RESUME)
    if fixed:
        raise UserError(
            f"--{fixed[0].replace('_', '-')}: cannot change when a run is resumed; what can: "
            + ", ".join(f"--{name.replace('_', '-')}" for name in sorted(CHANGEABLE_ON_RESUME))
        )
    recorded, recorded_user_set = run.get("config"), run.get("user_set")
    if not isinstance(recorded, Mapping) or not isinstance(recorded_user_set, Mapping):
        raise UserError(f"{folder}/run.json: expected the config of a sparkgrpo run, found none")
    check_folder(folder, recorded, run.get("started_in"))
    origin = f"{folder}/run.json"
    changed = {name: _converted(name, value, f"--{name.replace('_', '-')}") for name, value in options.items()}
    values = check_layer(origin, recorded) | changed | {"resume": folder, "run_dir": ""}
    values["model"] = (
        str(Path(str(values["model"])).expanduser()) if str(values["model"])[:1] == "~" else values["model"]
    )
    return Config(**values), check_layer(origin, recorded_user_set) | changed  # pyright: ignore[reportArgumentType]


def read_yaml(path: Path) -> dict[str, object]:
    """Read a YAML file of settings, checked and converted; raises `UserError` that names the file and the key."""
    try:
        content = yaml.load(path.read_bytes(), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); expected a YAML file of settings") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f'{path}: expected lines of "key: value", got {type(content).__name__}')
    return check_layer(str(path), content)


def preset_names() -> tuple[str, ...]:
    """The presets that ship, in alphabetic order."""
    return tuple(sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml")))


def read_preset(name: str) -> dict[str, object]:
    """The settings of a preset by name; raises `UserError` that lists the presets and the nearest one."""
    if name not in preset_names():
        raise UserError(
            f"preset: expected one of {', '.join(preset_names())}, got {name!r}{nearest(name, preset_names())}"
        )
    return read_yaml(PRESET_FOLDER / f"{name}.yaml")


def check_layer(origin: str, layer: Mapping[str, object]) -> dict[str, object]:
    """Check and convert a mapping of settings; ``origin`` is the file, for the message."""
    for key in layer:
        if key not in field_types():
            raise UserError(
                f"{origin}: unknown key {key!r}{name_elsewhere(str(key)) or nearest(str(key), field_types())}"
            )
    return {name: _converted(name, value, f"{origin}: {name}") for name, value in layer.items()}


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'lr'?"``, or nothing when no known word is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


@functools.cache
def field_docs() -> dict[str, str]:
    """The docstring under every field of `Config`, on one line, by field name; for ``--help``."""
    docs: dict[str, str] = {}
    for part in (*Config.__bases__, Config):
        body = ast.parse(inspect.getsource(part)).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), (
                    statement.target.id
                )
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def config_json(config: Config) -> dict[str, object]:
    """The configuration as JSON values; an infinite number, which JSON lacks, is the text "inf"."""
    return {name: "inf" if value == math.inf else value for name, value in dataclasses.asdict(config).items()}


def config_sha256(config: Config) -> str:
    """Hash of the settings that decide the results (not where they are written or how they are shown)."""
    deciding = {name: value for name, value in config_json(config).items() if name not in _WITHOUT_EFFECT_ON_RESULTS}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; a setting written twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"key {twice!r} is given twice")
        return super().construct_mapping(node, deep)


def _converted(name: str, raw: object, origin: str) -> object:
    """The value of a field from text or YAML. YAML 1.1 reads 1e-6 as a string and ``numbers: 3`` as an integer."""
    kind = field_types()[name]
    value = _from_text(raw, kind) if isinstance(raw, str) else raw
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if kind is str else value if kind is int else float(value)
    problem = value_problem(name, value)
    if problem:
        hint = nearest(raw, choices(kind)) if isinstance(raw, str) else ""
        raise UserError(f"{origin}: {problem}{hint}")
    return value


def _from_text(text: str, kind: object) -> object:
    """The value that a text stands for, or the text itself when it stands for none (the check then says so)."""
    if is_optional(kind) and text.lower() in ("none", "null"):
        return None
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is str or choices(kind):
        return text
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        return text
