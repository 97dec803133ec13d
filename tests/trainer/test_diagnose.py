"""Each disease from rows made by hand, the conditions under which it is none, blame, exit codes, hostile input."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sparkgrpo.trainer.cli import main
from sparkgrpo.trainer.diagnose import RULES, diagnose_rows, exit_code
from sparkgrpo.trainer.diagnosis.rule import Diagnosis

Rows = list[dict[str, object]]
CONFIG: dict[str, object] = {
    "group_size": 8, "max_new_tokens": 100, "temperature": 1.0, "beta": 0.04, "inner_epochs": 1, "mini_batches": 1,
    "precision": "bf16", "advantage": "group", "ratio": "token",
}  # fmt: skip


def rows(num_steps: int = 60, **columns: object) -> Rows:
    """Healthy rows that neither learn nor suffer; a column is a value, or a function of the step."""
    still: dict[str, object] = {
        "v": 1, "num_prompts": 16, "group_size": 8, "num_tokens": 6400, "reward_mean": 0.4, "frac_right": 0.4,
        "frac_zero_std": 0.2, "frac_all_right": 0.1, "frac_all_wrong": 0.1, "frac_unique": 0.9, "len_mean": 50.0,
        "len_right_mean": 50.0, "len_wrong_mean": 50.0, "frac_truncated": 0.0, "entropy_mean": 1.0, "ratio_max": 1.0,
        "kl_mean": lambda step: 0.0 if step == 1 else 0.01, "clip_frac": 0.0, "grad_norm": 1.0, "num_nonfinite": 0,
        "frac_params_changed": 0.9, "logprob_gap_mean": 0.01, "logprob_gap_p99": 0.05, "skipped_steps": 0, "t_gen": 1.0,
    }  # fmt: skip
    return [
        {"step": s, **{key: value(s) if callable(value) else value for key, value in (still | columns).items()}}
        for s in range(1, num_steps + 1)
    ]


def evals(*accuracies: float, every: int = 20) -> Rows:
    return [
        {"step": i * every, "accuracy": a, "accuracy_se": 0.03, "num_problems": 200} for i, a in enumerate(accuracies)
    ]


def judged(steps: Rows, evaluations: Sequence[dict[str, object]] = (), **config: object) -> Diagnosis:
    return diagnose_rows(steps, evaluations, CONFIG | config)


def found(diagnosis: Diagnosis, severity: str = "warn") -> dict[str, str]:
    return {v.id: v.severity for v in diagnosis.counting(severity, is_active_only=False)}


def late(value: float, *, before: float = 0.0, begin: int = 25) -> Callable[[int], float]:
    return lambda step: value if step >= begin else before


def grow(low: float, high: float, begin: int = 15, end: int = 45) -> Callable[[int], float]:
    return lambda step: low + (high - low) * min(max((step - begin) / (end - begin), 0.0), 1.0)


def test_still_rows_are_healthy() -> None:
    assert found(judged(rows(), evals(0.4, 0.4, 0.4, 0.4)), "info") == {}


CASES: list[tuple[str, str, dict[str, object], list[float], dict[str, object]]] = [
    ("nonfinite", "warn", {"num_nonfinite": lambda s: int(s == 7)}, [], {}),
    ("nonfinite", "error", {"num_nonfinite": lambda s: int(s >= 58)}, [], {}),
    ("nonfinite", "error", {"skipped_steps": lambda s: max(0, s - 50)}, [], {}),
    ("verifier_errors", "warn", {"frac_reward_error": 0.02}, [], {}),
    ("verifier_errors", "error", {"frac_reward_error": 0.2}, [], {}),
    ("identity_broken", "error", {"kl_mean": 1e-6}, [], {}),
    ("identity_broken", "error", {"ratio_max": late(1.0001, before=1.0)}, [], {}),
    ("identity_broken", "error", {"clip_frac": late(0.01)}, [], {}),
    ("identical_siblings", "error", {"frac_unique": 1 / 8}, [], {}),
    ("not_moving", "error", {"frac_params_changed": 0.02}, [], {}),
    ("not_moving", "error", {"grad_norm": 0.0}, [], {}),
    ("engine_gap", "warn", {"logprob_gap_mean": 0.06}, [], {}),
    ("engine_gap", "error", {"logprob_gap_mean": 0.2}, [], {}),
    ("engine_gap", "error", {"logprob_gap_p99": 0.7}, [], {}),
    ("engine_gap", "warn", {"logprob_gap_mean": late(0.04, before=0.01)}, [], {}),
    ("engine_gap", "error", {"logprob_gap_mean": 2e-3}, [], {"precision": "fp32"}),
    ("greedy_is_broken", "warn", {}, [0.05, 0.06, 0.06], {}),
    ("truncation", "warn", {"frac_truncated": 0.2}, [], {}),
    ("truncation", "error", {"frac_truncated": 0.6}, [], {}),
    ("truncation", "error", {"frac_truncated": 0.97}, [], {}),
    ("dead_groups", "warn", {"frac_zero_std": 0.8, "frac_all_wrong": 0.7}, [], {}),
    ("dead_groups", "error", {"frac_zero_std": 0.97, "frac_all_wrong": 0.97}, [], {}),
    ("dead_groups", "error", {"frac_zero_std": lambda s: 1.0 if s < 5 else 0.2}, [], {}),
    (
        "entropy_collapse", "error",
        {"entropy_mean": grow(1.0, 0.05), "frac_unique": grow(0.9, 0.2), "frac_zero_std": grow(0.2, 0.9)}, [], {},
    ),
    ("entropy_blowup", "warn", {"entropy_mean": grow(1.0, 3.0)}, [], {}),
    ("entropy_blowup", "error", {"entropy_mean": grow(1.0, 3.0), "frac_right": grow(0.4, 0.1)}, [], {}),
    ("accuracy_collapse", "error", {"frac_right": late(0.05, before=0.4, begin=30)}, [0.4, 0.42, 0.05], {}),
    ("length_racing", "warn", {"len_mean": grow(30.0, 80.0)}, [0.4, 0.4, 0.4, 0.4], {}),
    (
        "length_racing", "error", {"len_mean": grow(30.0, 90.0), "frac_truncated": grow(0.0, 0.4)},
        [0.4, 0.4, 0.4, 0.4], {},
    ),
    ("kl_runaway", "error", {"kl_mean": lambda s: 0.0 if s == 1 else 0.01 * 1.15**s}, [], {}),
    ("clipping", "warn", {"clip_frac": 0.15}, [], {"inner_epochs": 2}),
    ("clipping", "error", {"clip_frac": 0.3}, [], {"mini_batches": 2}),
    ("reward_hacking", "warn", {"hack_gap": late(0.1)}, [], {}),
    ("reward_hacking", "error", {"hack_gap": late(0.3)}, [], {}),
    ("reward_hacking", "error", {"frac_right": grow(0.3, 0.95)}, [0.3, 0.3, 0.3, 0.3], {}),
    ("format_only", "warn", {"reward_mean": late(0.7, before=0.4, begin=40)}, [], {}),
    ("slow_machine", "warn", {"t_gen": late(2.0, before=1.0)}, [], {}),
]  # fmt: skip


@pytest.mark.parametrize(("disease", "severity", "columns", "accuracies", "config"), CASES)
def test_each_disease_is_named_alone(
    disease: str, severity: str, columns: dict[str, object], accuracies: list[float], config: dict[str, object]
) -> None:
    diagnosis = judged(rows(80 if disease == "format_only" else 60, **columns), evals(*accuracies), **config)
    assert found(diagnosis) == {disease: severity}
    verdict = next(v for v in diagnosis.verdicts if v.id == disease)
    assert verdict.text and verdict.cures and verdict.evidence
    assert 1 <= verdict.first_step <= verdict.raised_step <= 80


def test_every_rule_has_a_case_or_a_test_of_its_own() -> None:
    others = {"plateau", "kl_strangled", "clip_one_sided", "grad_spikes", "memory_low"}
    assert {rule.id for rule in RULES} == {case[0] for case in CASES} | others


def test_information() -> None:
    flat = judged(rows(120), evals(*[0.4] * 7))
    assert found(flat, "info") == {"plateau": "info"}
    strangled = rows(130, kl_mean=lambda s: 0.0 if s == 1 else 1e-5)
    assert found(judged(strangled), "info") == {"kl_strangled": "info"}
    spike = judged(rows(grad_norm=lambda s: 50.0 if s == 40 else 1.0))
    assert found(spike, "info") == {"grad_spikes": "info"}
    one_sided = rows(clip_frac_low=0.05, clip_frac_high=0.01, entropy_mean=grow(1.0, 0.4))
    assert found(judged(one_sided, inner_epochs=2), "info") == {"clip_one_sided": "info"}


def test_spikes_count_when_it_hurts() -> None:
    spiky = rows(grad_norm=lambda s: 50.0 if s > 40 and s % 3 == 0 else 1.0, frac_right=late(0.1, before=0.4, begin=40))
    assert found(judged(spiky)) == {"grad_spikes": "warn"}


def test_memory_floor() -> None:
    low = rows(mem_available_min_bytes=18 * 2**30)
    diagnosis = diagnose_rows(low, (), CONFIG, run={"hardware": {"is_integrated": True}})
    assert found(diagnosis) == {"memory_low": "warn"}
    assert "memory_low" in diagnose_rows(low, (), CONFIG).off
    assert found(diagnose_rows(low, (), CONFIG, run={"memory_floor_bytes": 2**30})) == {}


@pytest.mark.parametrize(
    ("columns", "accuracies"),
    [
        # Much of what looks sick is how learning looks.
        ({"frac_right": grow(0.2, 0.9, 1, 60), "kl_mean": lambda s: 0.0 if s == 1 else 0.05 * s}, [0.2, 0.5, 0.8, 0.9]),
        (
            {
                "frac_right": grow(0.2, 0.9, 1, 60), "entropy_mean": grow(1.0, 0.05), "frac_unique": grow(0.9, 0.2),
                "frac_zero_std": grow(0.2, 0.9), "frac_all_right": grow(0.1, 0.9),
            },
            [0.2, 0.5, 0.8, 0.9],
        ),
        ({"len_mean": grow(30.0, 90.0), "frac_right": grow(0.2, 0.8)}, [0.2, 0.4, 0.6, 0.8]),
        ({"frac_truncated": grow(0.9, 0.0, 1, 60)}, []),
        ({"kl_mean": lambda s: 30.0 if s == 40 else 0.0 if s == 1 else 0.01}, []),  # one spike
        ({"frac_right": late(0.0, before=0.4, begin=59)}, []),  # two steps
    ],
)  # fmt: skip
def test_what_is_no_disease(columns: dict[str, object], accuracies: list[float]) -> None:
    assert found(judged(rows(**columns), evals(*accuracies))) == {}


def test_problems_solved_by_training_are_no_disease_and_easy_ones_are() -> None:
    dead = {"frac_zero_std": grow(0.2, 0.85, 5, 25), "frac_all_right": grow(0.1, 0.85, 5, 25)}
    assert found(judged(rows(120, frac_right=grow(0.2, 0.95, 5, 25), **dead), evals(0.2, 0.9, 0.95))) == {}
    easy = rows(120, frac_right=0.96, frac_zero_std=0.85, frac_all_right=0.85)
    diagnosis = judged(easy, evals(0.95, 0.95, 0.95))
    assert found(diagnosis) == {"dead_groups": "warn"}
    assert "too easy" in diagnosis.verdicts[0].text and "harder" in diagnosis.verdicts[0].cures[0]


def test_what_follows_from_another_does_not_count() -> None:
    racing = rows(
        80, len_mean=grow(30.0, 95.0), frac_truncated=grow(0.0, 0.7), frac_zero_std=grow(0.2, 0.97), frac_all_wrong=0.9
    )
    diagnosis = judged(racing, evals(0.4, 0.4, 0.38, 0.4, 0.4))
    assert found(diagnosis) == {"length_racing": "error"}
    causes = {v.id: v.because_of for v in diagnosis.verdicts if v.severity != "info"}
    assert causes == {"length_racing": None, "truncation": "length_racing", "dead_groups": "truncation"}
    assert [v.id for v in diagnosis.verdicts[:3]] == ["length_racing", "truncation", "dead_groups"]


def test_off_rules_say_why() -> None:
    off = judged(rows(kl_mean=None), beta=0.0).off
    assert off["kl_runaway"] == "no KL is measured (beta 0)"
    assert "one update" in off["clipping"] and off["greedy_is_broken"] == "no evaluation"
    assert "one ratio a sequence" in judged(rows(), inner_epochs=2, ratio="sequence").off["clipping"]


def test_exit_codes() -> None:
    assert exit_code(judged(rows(10)), "error") == 3
    assert exit_code(judged(rows(10, num_nonfinite=1)), "error") == 1
    assert exit_code(judged(rows()), "warn") == 0
    warned = judged(rows(frac_truncated=0.2))
    assert (exit_code(warned, "warn"), exit_code(warned, "error")) == (1, 0)
    cleared = judged(rows(60, num_nonfinite=lambda s: int(s in (5, 6, 7))))
    assert found(cleared) == {"nonfinite": "error"} and exit_code(cleared, "error") == 0


def test_verdicts_do_not_look_ahead() -> None:
    whole = rows(80, frac_truncated=late(0.6, begin=30))
    for num_steps in (20, 33, 34, 40, 60):
        ids = found(judged(whole[:num_steps]))
        assert ("truncation" in ids) == (num_steps >= 40), num_steps  # 6 of 10 values, five steps in a row


@pytest.mark.parametrize(
    "steps", [[], rows(1), [{"v": 1, "step": 1}], [{"v": 1, "step": s, "frac_right": "x"} for s in range(50)]]
)
def test_sparse_rows_do_not_raise(steps: Rows) -> None:
    assert found(judged(steps), "info") == {}


def test_samples_and_text_are_inert(make_run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\u202e<script>"
    steps = rows(frac_truncated=0.97, **{f"reason/{hostile}": 0.5})
    sample = {
        "v": 1,
        "sample_id": hostile,
        "step": 60,
        "finish": "length",
        "reason": hostile,
        "completion": "x" * 1_000_000,
    }
    folder = make_run_folder(run={"config": CONFIG}, metrics=steps, samples=[sample])
    assert main(["diagnose", str(folder)]) == 1
    output = capsys.readouterr().out
    assert "ERROR truncation" in output and "samples: \\x1b[2J\\u202e<script>" in output
    assert output.replace("\n", "").isprintable()
    assert main(["diagnose", str(folder), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["verdicts"][0]["id"] == "truncation" and content["exit_code"] == 1


def test_a_run_too_short(make_run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(make_run_folder(metrics=rows(5)))]) == 3
    assert "fewer than 20 steps" in capsys.readouterr().out
    assert main(["diagnose", str(make_run_folder("empty"))]) == 3
    assert "nothing to judge yet" in capsys.readouterr().out
