"""Rules against runs made up: healthy ones raise no error, sick ones are named as planted and alone."""

import pytest

from sparkgrpo.trainer.diagnose import diagnose_rows
from sparkgrpo.trainer.diagnosis.simulated_runs import DISEASES, simulated_run
from sparkgrpo.trainer.metrics import METRICS


def test_healthy_runs_raise_no_error() -> None:
    warned = 0
    for seed in range(60):
        run = simulated_run(seed)
        found = diagnose_rows(run.steps, run.evals, run.config).counting("warn", is_active_only=False)
        assert not [v.id for v in found if v.severity == "error"], seed
        warned += bool(found) and not run.is_truncated_often
    assert warned <= 5


@pytest.mark.parametrize("family", DISEASES)
def test_sick_runs_are_named_as_planted(family: str) -> None:
    alone = 0
    for seed in range(8):
        run = simulated_run(seed, family)
        found = diagnose_rows(run.steps, run.evals, run.config).counting("warn", is_active_only=False)
        alone += [v.id for v in found] == [run.disease]
    assert alone >= 7, family


def test_simulated_rows_have_the_keys_of_real_ones() -> None:
    known = {metric.key for metric in METRICS} | {"frac_reward_error", "reason/ok", "reason/wrong_value"}
    assert set(simulated_run(0).steps[5]) <= known
    assert simulated_run(3).steps == simulated_run(3).steps
    with pytest.raises(ValueError, match="expected one of starved"):
        simulated_run(0, "flu")
