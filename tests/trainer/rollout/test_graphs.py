"""The graph runner on a CPU: a stand-in for the capture shows what is recorded, when, and with which slots parked."""

from collections.abc import Callable

import pytest
import torch

from sparkgrpo.trainer.rollout.decode_loop import LatePoll
from sparkgrpo.trainer.rollout.graphs import BUCKETS, EagerRunner, GraphRunner, bucket_for


class Fake:
    """A state of eight slots, a step that marks what it ran on, and a capture that runs the step as CUDA would."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.tensors = {"context_len_B": torch.arange(1, 9, dtype=torch.int32), "weight": torch.zeros(3)}
        self.steps: list[tuple[int, list[int]]] = []
        self.captures: list[list[int]] = []
        self.reports: list[str] = []
        self.fails_at = fails_at
        self.runner = GraphRunner(
            self.step, lambda: self.tensors, self.tensors["context_len_B"], self.capture, self.reports.append
        )

    def step(self, num_slots: int) -> None:
        self.steps.append((num_slots, self.tensors["context_len_B"].tolist()))

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captures.append(self.tensors["context_len_B"].tolist())
        if len(self.captures) == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        for _ in range(3):
            run()
        return run


AT_MOST_512 = [(1, 1), (3, 4), (33, 64), (97, 128), (385, 512), (512, 512)]
OTHERS = [(5, 6, 6), (6, 6, 6), (700, 2000, 768), (1500, 2000, 2000)]


@pytest.mark.parametrize(("num_rows", "max_rows", "bucket"), [*((n, 512, b) for n, b in AT_MOST_512), *OTHERS])
def test_bucket(num_rows: int, max_rows: int, bucket: int) -> None:
    assert bucket_for(num_rows, max_rows) == bucket


def test_buckets_hold_every_number_of_rows() -> None:
    for max_rows in (1, 7, 64, 1000, 1024, 3000):
        for num_rows in range(1, max_rows + 1):
            assert num_rows <= bucket_for(num_rows, max_rows) <= max_rows
    assert list(BUCKETS) == sorted(BUCKETS)


def test_each_bucket_is_captured_once_with_every_slot_parked() -> None:
    fake = Fake()
    fake.runner.begin()
    for num_slots in (8, 8, 4, 8, 4):
        fake.runner.step(num_slots)
    assert fake.captures == [[0] * 8] * 2 and fake.runner.buckets == (8, 4)
    alive = list(range(1, 9))
    replays = [(n, context) for n, context in fake.steps if context == alive]
    assert [n for n, _ in replays] == [8, 8, 4, 8, 4]  # all others ran parked
    assert all(context == [0] * 8 for _, context in fake.steps if context != alive) and len(fake.steps) == 5 + 6
    assert fake.runner.num_steps == fake.runner.num_replayed == 5 and fake.runner.t_capture_s > 0
    fake.runner.begin()
    fake.runner.step(8)
    assert fake.runner.num_steps == 1 and len(fake.captures) == 2 and fake.reports == []


def test_a_capture_that_fails_is_said_once_and_costs_no_row() -> None:
    fake = Fake(fails_at=2)
    fake.runner.begin()
    for num_slots in (8, 4, 4, 8, 2):
        fake.runner.step(num_slots)
    assert fake.runner.num_steps == 5 and fake.runner.num_replayed == 2  # the graph that exists is still used
    assert len(fake.captures) == 2 and len(fake.reports) == 1
    assert (
        "without CUDA graphs" in fake.reports[0]
        and "capturing 4 rows failed (RuntimeError: operation not" in fake.reports[0]
    )
    assert "more" not in fake.reports[0] and fake.tensors["context_len_B"].tolist() == list(range(1, 9))


def test_a_mistake_of_our_own_is_not_taken_for_a_failed_capture() -> None:
    fake = Fake()
    fake.runner._step = lambda num_slots: [][1]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(IndexError):
        fake.runner.step(8)
    assert fake.tensors["context_len_B"].tolist() == list(range(1, 9))


def test_a_tensor_that_moved_is_named_before_the_rollout() -> None:
    fake = Fake()
    fake.runner.begin()
    fake.runner.step(8)
    fake.tensors["weight"].add_(1)
    fake.runner.begin()  # in place: fine
    fake.tensors["weight"] = fake.tensors["weight"].clone()
    with pytest.raises(RuntimeError, match=r"these have moved: weight; change weights in place \(copy_\)"):
        fake.runner.begin()
    del fake.tensors["weight"]
    with pytest.raises(RuntimeError, match="these have moved: weight"):
        fake.runner.begin()


def test_eager_runner_counts() -> None:
    steps: list[int] = []
    runner = EagerRunner(steps.append)
    for _ in range(2):
        runner.begin()
        runner.step(3)
        runner.step(2)
        assert runner.num_steps == 2 and runner.num_replayed == 0
    assert steps == [3, 2, 3, 2]


def test_late_poll_is_one_step_behind() -> None:
    num_alive_1 = torch.tensor([5], dtype=torch.int32)
    poll = LatePoll(num_alive_1)
    poll.record()
    for now, before in ((4, 5), (4, 4), (1, 4), (0, 1), (0, 0)):
        num_alive_1.fill_(now)
        poll.record()
        assert poll.read_previous() == before
