"""Layers of settings: order, conversion, errors that name the place."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from sparkgrpo.trainer.config import Config, UserError, field_types
from sparkgrpo.trainer.settings import (
    CHANGEABLE_ON_RESUME,
    config_json,
    config_sha256,
    field_docs,
    preset_names,
    read_preset,
    read_yaml,
    resolve,
    resolve_resume,
)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_nothing_given_is_the_defaults() -> None:
    assert resolve({}) == (Config(), {})


def test_each_layer_wins_over_the_one_before(yaml_file: Path) -> None:
    yaml_file.write_text("lr: 0.004\nsteps: 40\n", encoding="utf-8-sig")  # Windows tools mark files
    recipe = {"lr": 0.001, "steps": 10, "beta": 0.5, "seed": 7, "max_new_tokens": 80}
    options = {"preset": "dr_grpo", "steps": "50"}
    config, user_set = resolve(options, config_file=str(yaml_file), recipe=recipe)
    assert config.max_new_tokens == 80  # recipe over defaults
    assert (config.beta, config.advantage) == (0.0, "mean")  # preset over recipe
    assert config.lr == 0.004  # file over recipe
    assert config.steps == 50  # option over file
    assert user_set == {"lr": 0.004, "steps": 50, "preset": "dr_grpo"}


def test_file_wins_over_the_preset_that_it_names(yaml_file: Path) -> None:
    yaml_file.write_text("preset: gspo\neps_low: 0.1\n")
    config, _ = resolve({}, config_file=str(yaml_file))
    assert (config.preset, config.ratio, config.eps_low, config.eps_high) == ("gspo", "sequence", 0.1, 4e-4)


def test_default_preset_leaves_the_recipe_alone() -> None:
    assert resolve({}, recipe={"beta": 0.0})[0].beta == 0.0
    assert resolve({"preset": "grpo"}, recipe={"beta": 0.0})[0].beta == 0.04


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("lr: 1e-6", "lr", 1e-6),  # a string to YAML 1.1
        ("lr: 1.0e-6", "lr", 1e-6),
        ("beta: 0", "beta", 0.0),
        ("numbers: 3", "numbers", "3"),
        ('numbers: "2,3"', "numbers", "2,3"),
        ("delta: null", "delta", None),
        ("delta: none", "delta", None),
        ("delta: 4", "delta", 4.0),
        ("eps_high: .inf", "eps_high", math.inf),
        ("advantage: none\ngroup_size: 1", "advantage", "none"),
        ("plain: true", "plain", True),
        ("# only a comment", "steps", 200),
    ],
)
def test_yaml_values(yaml_file: Path, line: str, name: str, value: object) -> None:
    yaml_file.write_text(line)
    found = getattr(resolve({}, config_file=str(yaml_file))[0], name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lerning_rate: 1", "unknown key 'lerning_rate'"),
        ("group_sise: 8", "did you mean 'group_size'?"),
        ("lr: fast", "lr: expected a number, got 'fast'"),
        ("lr:", "lr: expected a number, got None"),
        ("steps: 2.5", "steps: expected an integer, got 2.5"),
        ("steps: [1]", r"steps: expected an integer, got \[1\]"),
        ("plain: 1", "plain: expected true or false, got 1"),
        ("model: yes", "model: expected text, got True"),
        ("advantage: grupp", "did you mean 'group'?"),
        ("steps: 0", "steps: expected at least 1"),
        ("lr: 1\nlr: 2", "'lr' is given twice"),
        ("- lr", "expected lines of"),
        ("just text", "expected lines of"),
        ("a: [", "not a YAML file"),
        ("\x00\x01", "not a YAML file"),
        ("1: 2", "unknown key 1"),
        ("!!python/object/apply:os.system [ls]", "not a YAML file"),
    ],
)
def test_wrong_file_names_itself_and_the_key(yaml_file: Path, content: str, message: str) -> None:
    yaml_file.write_text(content)
    with pytest.raises(UserError, match=message.replace("?", r"\?")) as caught:
        read_yaml(yaml_file)
    assert str(caught.value).startswith(f"{yaml_file}: ")
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing.yaml: cannot read it \(No such file"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(UserError, match="cannot read it"):
        read_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(UserError, match="not a YAML file"):
        read_yaml(tmp_path / "latin.yaml")


def test_wrong_option_names_the_option() -> None:
    with pytest.raises(UserError, match=r"^--max-new-tokens: expected an integer, got 'many'$"):
        resolve({"max_new_tokens": "many"})


def test_presets() -> None:
    published = {"cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce", "rloo"}
    lessons = {"constant_normaliser", "no_baseline", "no_baseline_5_6", "no_leash_10x", "no_leash_20x", "rewards_5_6"}
    assert set(preset_names()) == published | lessons | {"sloppy_verifier"}
    for name in preset_names():
        Config(preset=name, **read_preset(name))  # type: ignore[arg-type]
    defaults = config_json(Config())
    assert all(defaults[key] == value for key, value in read_preset("grpo").items())
    objective = read_preset("grpo").keys()
    for name in published:
        assert objective <= read_preset(name).keys(), "a preset that leaves a key out would inherit it from the recipe"
    for name in lessons:
        assert len(read_preset(name)) <= 2, "an experiment changes one thing, and takes the rest as it was"


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"one of cispo, .* got 'drgrpo'; did you mean 'dr_grpo'"):
        resolve({"preset": "drgrpo"})


def test_every_field_has_a_docstring() -> None:
    docs = field_docs()
    assert set(docs) == set(field_types())
    assert all(doc.endswith(".") and "\n" not in doc for doc in docs.values())


def test_config_survives_json() -> None:
    config = Config(eps_high=math.inf, lr=3e-5, delta=None, model="embedded", run_dir="runs/a")
    recorded = json.loads(json.dumps(config_json(config), allow_nan=False))
    resumed, user_set = resolve_resume("runs/a", {}, {"config": recorded, "user_set": {"lr": 3e-5}})
    assert (resumed.eps_high, resumed.lr, resumed.resume, resumed.run_dir) == (math.inf, 3e-5, "runs/a", "")
    assert user_set == {"lr": 3e-5}
    assert config_sha256(resumed) == config_sha256(config)


def test_hash_sees_what_decides_results() -> None:
    assert config_sha256(Config(lr=2e-6)) != config_sha256(Config())
    assert config_sha256(Config(plain=True, keep_checkpoints=5)) == config_sha256(Config())


def test_resume_changes_little() -> None:
    run = {"config": config_json(Config()), "user_set": {}}
    config, user_set = resolve_resume("runs/a", {"steps": "300", "plain": True}, run)
    assert (config.steps, config.plain, user_set) == (300, True, {"steps": 300, "plain": True})
    with pytest.raises(UserError, match=r"--lr: cannot change when a run is resumed; what can: .*--steps"):
        resolve_resume("runs/a", {"lr": "1", "steps": "300"}, run)
    with pytest.raises(UserError, match="expected the config"):
        resolve_resume("runs/a", {}, {})
    assert set(field_types()) >= CHANGEABLE_ON_RESUME


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", "auto_is_no_file.py:f,mine.py:f"),
        ("reward", "verl:mine.py:f"),
        ("task", "mine.py:Task"),
        ("checker", "mine.py:f"),
        ("data", "mine.py"),
        ("model", "folder/mine"),
    ],
)
def test_resume_from_another_folder_never_takes_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "folder" / "mine").mkdir(parents=True)
        (tmp_path / folder / "mine.py").touch()
    config = dataclasses.replace(Config(), **{name: value})
    run = {"config": config_json(config), "user_set": {}, "started_in": str(tmp_path / "a")}
    monkeypatch.chdir(tmp_path / "b")
    message = rf"^{name}: \S+ was given in the folder {tmp_path}/a, and here, .* cd {tmp_path}/a and --resume \S+/run$"
    with pytest.raises(UserError, match=message):
        resolve_resume("run", {}, run)
    monkeypatch.chdir(tmp_path / "a")
    assert getattr(resolve_resume("run", {}, run)[0], name) == value
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cd "):
        resolve_resume("run", {}, run)


def test_resume_from_another_folder_keeps_names_that_are_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model="owner/model", data="owner/rows", reward="package.module:f", task="gsm8k")
    run = {"config": config_json(config), "user_set": {}, "started_in": str(tmp_path)}
    monkeypatch.chdir("/")
    assert resolve_resume("run", {}, run)[0].data == "owner/rows"


def test_resume_finds_a_model_under_home_again() -> None:
    run = {"config": config_json(Config(model="~/models/a")), "user_set": {}}
    assert resolve_resume("runs/a", {}, run)[0].model == str(Path.home() / "models" / "a")
