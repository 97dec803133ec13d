"""The script that puts TRL beside ours, as it is started; the clocks in TRL's step; summaries of learning curves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning_curve import reached, summary_of
from benchmarks.trl_peer import PeerStep
from benchmarks.versus_trl import memory_part, options_of, shape_of, step_part

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--steps", "1", "--prompts", "2", "--group-size", "2", "--max-new-tokens", "4")


def a_step(t_step: float, num_tokens: int = 8) -> dict[str, object]:
    seconds = {"t_gen": t_step / 2, "t_other": t_step / 2, "t_step": t_step}
    return {"seconds": seconds, "num_tokens": num_tokens, "reward_mean": 0.0}


def test_ratios_are_of_the_same_round() -> None:
    """The second round ran on a machine twice as slow: no ratio may mix the rounds."""
    found = {"ours/fp32": [a_step(1.0), a_step(2.0)], "trl/fp32": [a_step(3.0), a_step(6.0)]}
    result = step_part(["ours/fp32"], ["trl/fp32"], lambda part, names: found)
    assert result["ratios"] == {"trl/fp32 over ours/fp32": {"median": 3.0, "min": 3.0, "max": 3.0}}
    sides: Any = result["sides"]
    assert sides["ours/fp32"]["median_s"] == 1.5 and sides["ours/fp32"]["tok_per_s_of_generation"] == 8 / 0.75


def test_what_cannot_run_is_said_and_stops_nobody() -> None:
    def child(part: str, names: list[str]) -> dict | str:
        if names[-1] == "trl/liger":
            return "RuntimeError: no driver"
        return {name: [a_step(1.0)] for name in names} if part == "step" else {"peak_bytes": 8}

    step: Any = step_part(["ours/fp32"], ["trl/liger", "trl/fp32"], child)
    assert step["cannot_run"] == {"trl/liger": "RuntimeError: no driver"} and set(step["sides"]) == {
        "ours/fp32",
        "trl/fp32",
    }
    memory = memory_part(["ours/fp32"], ["trl/liger", "trl/fp32"], child)
    assert memory["ratios"] == {"ours/fp32 over trl/fp32": {"peak_bytes": 1.0}}
    assert memory["cannot_run"] == step["cannot_run"]


def test_options_reach_the_batch() -> None:
    config = shape_of(options_of(["--prompts", "3", "--group-size", "5", "--seed", "7"]))
    assert (config.prompts_per_step, config.group_size, config.seed, config.precision) == (3, 5, 7, "fp32")


def curve(*points: tuple[float, float, float]) -> list[dict[str, float]]:
    return [{"seconds": s, "tokens": t, "accuracy": a} for s, t, a in points]


def test_a_target_is_reached_at_an_evaluation() -> None:
    ours = curve((0, 0, 0.3), (10, 100, 0.5), (20, 200, 0.7))
    peer = curve((0, 0, 0.3), (40, 100, 0.6), (80, 200, 0.65))
    summary = summary_of({"ours": ours, "trl": peer}, 0.6)
    assert reached(ours, 0.6) == ours[2] and reached(ours, 0.9) is None
    assert (summary["ours_seconds_to_target"], summary["trl_seconds_to_target"]) == (20, 40)
    assert summary["seconds_ratio"] == 2.0
    assert summary["at_equal_seconds"] == {"budget": 20, "ours": 0.7, "trl": 0.3}
    assert summary["at_equal_tokens"] == {"budget": 200, "ours": 0.7, "trl": 0.65}


def test_a_target_that_is_not_reached_is_no_number() -> None:
    flat = curve((0, 0, 0.3), (10, 100, 0.3))
    summary = summary_of({"ours": flat, "trl": flat}, 0.6)
    assert summary["ours_seconds_to_target"] is None and summary["seconds_ratio"] is None


@pytest.mark.trl
def test_steps_beside_trl(tmp_path: Path) -> None:
    """As a person starts it; a peer's step must add up and have made every token."""
    pytest.importorskip("trl")
    command = [sys.executable, "-m", "benchmarks.versus_trl", *TINY, "--peers", "fp32", "--parts", "step"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("versus_trl_step_embedded.json")
    sides = json.loads(path.read_text())["sides"]
    for side in ("ours/fp32", "trl/fp32"):
        split = dict(sides[side]["split_s"])
        t_step = split.pop("t_step")
        split.pop("t_unaccounted", None)
        assert sides[side]["num_tokens"] == 2 * 2 * 4
        assert abs(sum(split.values()) - t_step) < 0.01 * t_step
        assert all(split[key] > 0 for key in ("t_gen", "t_ref", "t_train", "t_opt"))


@pytest.mark.trl
def test_the_peers_failure_arrives(tmp_path: Path) -> None:
    """A step that raises in TRL's thread raises here, and nobody waits for ever."""
    pytest.importorskip("trl")
    from benchmarks.trl_peer import PeerOptions, TrlPeer
    from sparkgrpo.trainer.machine import EMBEDDED, model_source

    config = shape_of(options_of(["--prompts", "2", "--group-size", "2", "--max-new-tokens", "4"]))
    peer = TrlPeer(model_source(EMBEDDED), config, PeerOptions(num_steps=2))

    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("broken on purpose")

    vars(peer.trainer)["_calculate_rewards"] = broken
    with pytest.raises(ArithmeticError, match="on purpose"):
        peer.step()


def test_a_step_keeps_its_facts() -> None:
    assert PeerStep(**a_step(1.0)).seconds["t_step"] == 1.0
