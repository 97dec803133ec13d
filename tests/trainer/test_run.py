"""A whole run on a tiny model: what is in its folder, and that the numbers are right."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparkgrpo.trainer import run
from sparkgrpo.trainer.checkpoint import checkpoints
from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.metrics import PHASES, metric_of
from sparkgrpo.trainer.model.weights import load_model
from sparkgrpo.trainer.run import evaluate_command
from sparkgrpo.trainer.runlog import read_run

RUN_KEYS = (
    "v", "run_id", "t_unix_s", "status", "command", "started_in", "config", "user_set", "config_sha256", "seed", "task",
    "model", "eval_sha256", "probe_before", "probe_after",
    "git", "versions", "hardware", "pid", "boot_id", "steps", "eval_before", "eval_after", "wall_s",
)  # fmt: skip
METRIC_KEYS = (
    "v", "step", "t_unix_s", "num_prompts", "group_size", "num_updates", "lr", "num_tokens", "num_tokens_total",
    "reward_mean", "reward_std", "reward_std_within", "reward_best_mean", "frac_right", "num_right",
    "frac_right_strict", "hack_gap", "frac_zero_std", "frac_all_right", "frac_all_wrong", "frac_zero_std_floor",
    "frac_unique", "len_mean", "len_max", "frac_truncated", "kl_mean", "kl_max", "entropy_mean", "clip_frac",
    "clip_frac_low", "clip_frac_high", "ratio_max", "logprob_gap_mean", "logprob_gap_p99", "logprob_gap_max",
    "logprob_gap_signed", "loss", "grad_norm", "frac_params_changed", "frac_tokens_trained", "skipped_steps",
    "num_nonfinite", "t_step", "t_gen_prefill", "t_gen_decode", *PHASES, "t_unaccounted", "frac_slots_alive",
    "tok_per_s", "decode_gbps", "graph_coverage", "mem_peak_bytes", "t_train_backward", "train_tflops",
    "frac_decode_roofline", "frac_train_roofline", "mem_reserved_bytes", "mem_available_min_bytes", "sm_clock_mhz",
    "temp_c", "power_w",
)  # fmt: skip


def test_files_of_the_run_folder(six: Any) -> None:
    names = {path.name for path in six.folder.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "evals.jsonl", "samples.jsonl", "events.jsonl", "checkpoints"} | {
        "report.html"
    }
    assert [path.name for path in checkpoints(six.folder / "checkpoints")] == [
        "step_000002",
        "step_000004",
        "step_000006",
    ]
    events = [(row["event"], row.get("step")) for row in six.rows("events") if row["event"] != "verdict"]
    assert events == [("start", None), *(("checkpoint", step) for step in (2, 4, 6)), ("stop", None)]


def test_run_json(six: Any) -> None:
    facts = read_run(six.folder)
    assert facts["status"] == "finished" and facts["steps"] == 6 and facts["user_set"] == {"seed": 3}
    assert facts.keys() == set(RUN_KEYS)
    model = facts["model"]
    assert isinstance(model, dict) and len(model["weights_sha256"]) == 64 and model["num_params"] > 20_000
    assert model["weights_sha256"] != six.hash_of(6)


def test_metrics(six: Any) -> None:
    """Every key of a run with a KL leash is in every line, and every key in a line is in the schema."""
    rows = six.rows("metrics")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert not [key for key in row if metric_of(key) is None]
        assert (
            not [key for key in METRIC_KEYS if key not in row]
            and row["num_nonfinite"] == 0
            and row["skipped_steps"] == 0
        )
    totals = [s.num_prompt_tokens + sum(len(c.token_ids) for c in s.completions) for s in six.steps]
    assert [row["num_tokens_total"] for row in rows] == list(itertools.accumulate(totals))
    rewards = {row["reward_mean"] for row in rows}
    assert len(rewards) > 1 and any(row["frac_zero_std"] != 1 for row in rows), "the fixture must have mixed groups"
    assert all(
        row["num_tokens"] == sum(len(c.token_ids) for c in s.completions)
        for row, s in zip(rows, six.steps, strict=True)
    )


def test_phases_add_up(six: Any) -> None:
    for row in six.rows("metrics"):
        seconds = {key: value for key, value in row.items() if key.startswith("t_") and isinstance(value, float)}
        assert sum(seconds[phase] for phase in PHASES) == pytest.approx(seconds["t_step"], rel=0.01)
        assert min(seconds[phase] for phase in ("t_gen", "t_reward", "t_ref", "t_train", "t_opt", "t_other")) > 0
        assert seconds["t_old"] == 0 and (seconds["t_eval"] > 0) == (int(str(row["step"])) % 2 == 0)
        assert 0 < seconds["t_gen_prefill"] + seconds["t_gen_decode"] <= seconds["t_gen"]


def test_first_step_is_on_policy_and_the_rollout_agrees_with_the_trainer(six: Any) -> None:
    """fp32: the sampler's log-probs are the trainer's to 1e-4, at every step: there is no stale copy of the weights."""
    rows = six.rows("metrics")
    assert rows[0]["kl_mean"] == rows[0]["kl_max"] == 0.0
    assert all(row["ratio_max"] == 1.0 and row["clip_frac"] == 0.0 for row in rows)
    assert all(0 <= float(str(row["logprob_gap_max"])) < 1e-4 for row in rows)
    assert float(str(rows[-1]["kl_mean"])) > 0


def test_evaluations_and_samples(six: Any) -> None:
    rows = six.rows("evals")
    assert [row["step"] for row in rows] == six.view.evaluations == [0, 2, 4, 6]
    for row in rows:
        right = bin(int(str(row["right_bits"]), 16)).count("1")
        assert row["num_problems"] == 6 and row["accuracy"] == right / 6
        assert row.keys() >= {"accuracy_se", "reward_mean", "len_mean", "frac_truncated"}
    assert six.result is not None
    assert (six.result.eval_before, six.result.eval_after) == (rows[0]["accuracy"], rows[-1]["accuracy"])
    samples = six.rows("samples")
    heldout, group = ([row for row in samples if row["split"] == split] for split in ("heldout", "train"))
    assert len(heldout) == 4 * 2 and len(group) == 3 * 4 and six.view.num_samples == 20
    assert len({row["sample_id"] for row in samples}) == 20
    for row in group[-4:]:
        assert row["problem"] == six.steps[-1].problems[0].identity and row["step"] == 6
    assert [row["advantage"] for row in group[-4:]] == list(six.steps[-1].advantages[:4])
    assert all(row["advantage"] is None and row["reason"] for row in heldout)
    assert [row["problem"] for row in heldout[:2]] == [row["problem"] for row in heldout[-2:]]


def test_the_view_is_told(six: Any) -> None:
    assert six.view.steps == [1, 2, 3, 4, 5, 6]
    facts = six.view.facts
    assert (facts["steps"], facts["first_step"], facts["eval_every"], facts["device"]) == (6, 1, 2, "cpu")
    assert facts["precision"] == "float32" and facts["run_dir"] == str(six.folder)


def test_transformers_loads_the_checkpoint(six: Any, naive_logits: Callable[..., torch.Tensor]) -> None:
    folder = six.folder / "checkpoints" / "step_000006"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(str(folder), dtype=torch.float32, device="cpu").model
    ids = AutoTokenizer.from_pretrained(folder)("Using the numbers 3, 7 and 4", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(naive_logits(ours, ids[0]), theirs(ids).logits[0], rtol=1e-4, atol=1e-5)


def test_evaluation_command_is_that_of_the_run_and_trains_nothing(
    six: Any, configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("an evaluation needs neither optimiser nor reference")

    for name in ("MasterAdamW", "frozen_copy", "plan_training"):
        monkeypatch.setattr(run, name, never)
    config = configured("", model=str(six.folder / "checkpoints" / "step_000006"))
    found, row = evaluate_command(config), six.rows("evals")[-1]
    assert found.keys() == {"model", "task", "num_problems", "accuracy", "accuracy_se", "wall_s"}
    assert [found[key] for key in ("num_problems", "accuracy", "accuracy_se")] == [
        row[key] for key in ("num_problems", "accuracy", "accuracy_se")
    ]
    with pytest.raises(UserError, match="eval_problems: 1000 held-out puzzles"):
        evaluate_command(dataclasses.replace(config, eval_problems=1000))
    with pytest.raises(UserError, match=r"held-out prompt 0: expected at most max_prompt_tokens 1, got"):
        evaluate_command(dataclasses.replace(config, max_prompt_tokens=1))
    with pytest.raises(UserError, match="held-out prompts are too long; raise --max-prompt-tokens"):
        evaluate_command(dataclasses.replace(config, max_prompt_tokens=1, long_prompts="drop"))
