"""The reference: frozen, and moved only as asked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparkgrpo.trainer.reference import frozen_copy, move_reference

Make = Callable[..., Any]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", [0.25, 1.0])
def test_moved_in_place_by_the_mix(make_decoder: Make, move: Make, dtype: torch.dtype, mix: float) -> None:
    policy = make_decoder(dtype=dtype)
    reference = frozen_copy(policy)
    move(policy, 0.5, seed=1)
    before = [p.clone() for p in reference.parameters()]
    kept = [p.clone() for p in policy.parameters()]
    addresses = [p.data_ptr() for p in reference.parameters()]
    move_reference(reference, policy, mix)
    for p, old, new in zip(reference.parameters(), before, policy.parameters(), strict=True):
        assert p.equal((old.float() + mix * (new.float() - old.float())).to(dtype)) or mix < 1
        torch.testing.assert_close(p.float(), (1 - mix) * old.float() + mix * new.float(), rtol=1e-2, atol=1e-2)
        assert mix < 1 or p.equal(new)
    assert [p.data_ptr() for p in reference.parameters()] == addresses
    assert all(p.equal(old) for p, old in zip(policy.parameters(), kept, strict=True))
    assert not any(p.requires_grad for p in reference.parameters())


def test_a_run_with_a_moving_reference(configured: Make, record: Make, tmp_path: Any) -> None:
    """Replaced by the policy after every second step: the KL of the step after that is exactly 0 again."""
    values = {"sync_every": 2, "beta": 0.2, "steps": 5, "eval_every": 0}
    run = record(tmp_path / "run").train(configured(tmp_path / "run", **values))
    kl = [row["kl_max"] for row in run.rows("metrics")]
    assert kl[0] == kl[2] == kl[4] == 0.0 and kl[1] > 0 and kl[3] > 0
    names = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert names == {"step_000005"} and (run.folder / "checkpoints" / "step_000005" / "reference.safetensors").exists()
