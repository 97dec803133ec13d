"""How long a row alone may take, after its batch was late."""

from contextlib import closing
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks import user
from sparkgrpo.trainer.tasks.base import UNVERIFIED, Completion, Problem
from sparkgrpo.trainer.tasks.user import RewardFunctions, TrainerState


def test_a_row_alone_gets_a_quarter_of_the_deadline(tmp_path: Path) -> None:
    """An even share, 0.3 s, is too little for a call that costs the same for one row as for all."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def starts(completions):\n"
        "    time.sleep(1000 if len(completions) > 1 else 0.4)\n"
        "    return [1.0] * len(completions)\n"
    )
    reference = f"{tmp_path}/slow.py:starts"
    found = RewardFunctions([reference], columns=frozenset(), is_plain=True, timeout_s=2.4, warn=print)
    asked = [Completion(text="a", token_ids=(), is_truncated=False)] * 8
    with closing(found):
        later = TrainerState(global_step=4, max_steps=9)
        result = found.score([Problem(prompt=(1,), columns={}, identity="p")] * 8, asked, [UNVERIFIED] * 8, later)
    assert [score.reward for score in result.scores] == [1.0] * 8, result.warnings


@pytest.mark.parametrize(("timeout_s", "num_rows"), [(60.0, 128), (3.0, 8), (0.1, 4), (1.0, 128), (600.0, 1)])
def test_rows_that_hang_leave_the_others_their_share(timeout_s: float, num_rows: int) -> None:
    end_s = left_s = 2 * timeout_s + user.RERUN_GRACE_S
    share_s = max(timeout_s / num_rows, min(timeout_s, user.MIN_ROW_S))
    limits = []
    for num_left in range(num_rows, 0, -1):
        limits.append(user._row_s(timeout_s, num_rows, num_left, left_s))
        left_s -= limits[-1]
    assert limits[0] == max(share_s, timeout_s / 4) and min(limits) >= share_s
    assert sum(limits) <= max(end_s, num_rows * share_s) + 1e-6
