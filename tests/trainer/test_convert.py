"""Names elsewhere, there and back; TRL's own log keys; what cannot be mapped is said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.convert import convert_from_trl, convert_to
from sparkgrpo.trainer.diagnose import diagnose
from sparkgrpo.trainer.metric_names import NAMES, TRL, other_name, our_name
from sparkgrpo.trainer.metrics import metric_of
from sparkgrpo.trainer.run_reader import read_record

LINE = {
    "v": 1, "step": 3, "reward_mean": 0.5, "reward_std": 0.4, "frac_zero_std": 0.25, "len_mean": 30.0, "t_step": 2.0,
    "part/correct": 0.5, "kl_mean": None, "num_right": [1, 2], "frac_right": 0.5, "lr": 1e-6, "t_gen": 1.0,
}  # fmt: skip


def test_every_name_of_ours_is_in_the_schema_and_none_comes_twice() -> None:
    for names in NAMES.values():
        assert all(metric_of(key) is not None for key in names)
        assert len({other.name for other in names.values()}) == len(names)


def test_names_with_a_part() -> None:
    other = other_name(TRL, "part/correct")
    assert other is not None and other.name == "rewards/correct/mean"
    assert our_name(TRL, "rewards/correct/mean") == "part/correct"
    assert our_name(TRL, "rewards//mean") is None and other_name(TRL, "hack_gap") is None


@pytest.mark.parametrize("target", ["trl", "verl", "prime-rl"])
def test_to(make_run_folder: Callable[..., Path], tmp_path: Path, target: str) -> None:
    done = convert_to(read_record(make_run_folder(metrics=[LINE])), target, tmp_path / "out")
    text = (tmp_path / "out").read_text()
    row = json.loads(text)["log_history"][0] if target == "trl" else json.loads(text)
    assert row["step"] == 3 and row[NAMES[target]["reward_mean"].name] == 0.5 and None not in row.values()
    assert "frac_right" in done.left_out and "num_right" not in done.left_out
    assert set(done.mapped) | set(done.left_out) | {"v", "step", "num_right", "kl_mean"} == set(LINE)


def test_there_and_back(
    make_run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, state, back = make_run_folder(metrics=[LINE]), tmp_path / "trainer_state.json", tmp_path / "back"
    assert main(["convert", str(source), "--to", "trl", "-o", str(state)]) == 0
    assert "no counterpart: frac_right, t_gen" in capsys.readouterr().out
    assert main(["convert", str(state), "--from", "trl", "-o", str(back)]) == 0
    (row,) = read_record(back).steps
    assert {key: row[key] for key in ("reward_mean", "frac_zero_std", "len_mean", "part/correct", "lr")} == {
        key: LINE[key] for key in ("reward_mean", "frac_zero_std", "len_mean", "part/correct", "lr")
    }
    assert main(["report", str(back)]) == main(["watch", str(back)]) == 0


def trl_log(num_steps: int) -> list[dict[str, object]]:
    """As GRPOTrainer writes it: several updates a batch, KL of a bf16 reference, an evaluation and a summary."""
    log: list[dict[str, object]] = [
        {"loss": 0.01, "reward": 0.5, "reward_std": 0.1, "frac_reward_zero_std": 0.98, "kl": 0.002, "step": s,
         "clip_ratio/region_mean": 0.01, "completions/mean_length": 50.0, "completions/clipped_ratio": 0.0,
         "epoch": 0.1, "entropy": 1.0, "rewards/f/mean": 0.5, "cosmic_rays": 3}
        for s in range(1, num_steps + 1)
    ]  # fmt: skip
    return [*log, {"eval_reward": 0.4, "step": num_steps}, {"train_runtime": 9.0, "step": num_steps, "total_flos": 0}]


def test_a_log_of_trl_is_diagnosed_without_what_it_does_not_know(tmp_path: Path) -> None:
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": trl_log(40)}), encoding="utf-8-sig")  # as Windows tools save it
    done = convert_from_trl(state, tmp_path / "run")
    assert done.num_steps == 40 and "cosmic_rays" in done.left_out
    diagnosis = diagnose(read_record(tmp_path / "run"))
    assert [v.id for v in diagnosis.counting("warn")] == ["dead_groups"]
    assert "another trainer" in diagnosis.off["identity_broken"] and "clipping" in diagnosis.checked


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"log_history": 3}', '{"log_history": [1, {"step": 2}]}'])
def test_what_is_no_log(tmp_path: Path, content: str) -> None:
    state = tmp_path / "trainer_state.json"
    state.write_text(content)
    with pytest.raises(UserError, match=r"trainer_state\.json: (not JSON|expected)"):
        convert_from_trl(state, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_used_folder_is_left_alone(make_run_folder: Callable[..., Path], tmp_path: Path) -> None:
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": trl_log(2)}))
    used = make_run_folder(metrics=[LINE])
    with pytest.raises(UserError, match="not empty"):
        convert_from_trl(state, used)
    assert read_record(used).steps == [LINE]
