"""Checkers of others: verl's contract and reasoning-gym, behind walls, a fresh fork for each completion."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.tasks.base import Completion, Score, StepObserver, start_scoring
from sparkgrpo.trainer.tasks.confined_call import Answer, ConfinedFunctions
from sparkgrpo.trainer.tasks.countdown import make_problem
from sparkgrpo.trainer.tasks.gym import Gym
from sparkgrpo.trainer.tasks.user import RewardFunctions, TrainerState

SCORER = """
import os, time
NUM_CALLS = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global NUM_CALLS
    NUM_CALLS += 1
    if solution_str == "raise": raise KeyError("x")
    if solution_str == "hang": time.sleep(100)
    if solution_str == "exit": os._exit(3)
    if solution_str == "write": open(extra_info["target"], "w").write("x")
    if solution_str == "text": return "1.0"
    if solution_str == "nan": return {"score": float("nan")}
    if solution_str == "poison":
        NUM_CALLS = 1000
    if solution_str == "count": return NUM_CALLS
    if solution_str == "number": return True
    return {"score": len(solution_str), "acc": 0.5, "pred": "text", "truth_is": float(ground_truth == 6)}
"""


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardFunctions]:
    folder = tmp_path_factory.mktemp("verl")
    (folder / "scorer_of_test.py").write_text(SCORER)
    found = RewardFunctions(
        [f"verl:{folder / 'scorer_of_test.py'}:compute_score"],
        columns=frozenset({"nums", "target"}),
        is_plain=False,
        timeout_s=1.0,
        warn=print,
    )
    yield found
    found.close()


def scored(scorer: RewardFunctions, *texts: str, columns: dict[str, Any] | None = None) -> list[Score]:
    problem = make_problem([1, 2, 3], 6)
    if columns is not None:
        problem = type(problem)(prompt=problem.prompt, columns=columns, identity="x")
    answers = [Completion(text=text, token_ids=(1,), is_truncated=False) for text in texts]
    verdict = Score(reward=0.0, parts={}, reason="wrong_value")
    state = TrainerState(global_step=3, max_steps=9)
    return list(scorer.score([problem] * len(texts), answers, [verdict] * len(texts), state).scores)


def test_numbers_dictionaries_and_parts(scorer: RewardFunctions) -> None:
    first, second = scored(scorer, "abc", "number", columns={"answer": 6})
    assert first.reward == 3.0 and first.parts == {"compute_score": 3.0, "acc": 0.5, "truth_is": 1.0}
    assert second.reward == 1.0
    (score,) = scored(scorer, "abc", columns={"reward_model": {"ground_truth": 6}, "data_source": "x"})
    assert score.parts["truth_is"] == 1.0


def test_one_completion_cannot_touch_another(scorer: RewardFunctions) -> None:
    """Each call is the first of its process."""
    assert [score.reward for score in scored(scorer, "count", "poison", "count", "count")] == [1.0, 6.0, 1.0, 1.0]


def test_what_goes_wrong_costs_its_row(scorer: RewardFunctions, tmp_path: Path) -> None:
    target = tmp_path / "written"
    scores = scored(
        scorer, "ok", "raise", "hang", "exit", "write", "text", "nan", "ok",
        columns={"answer": 6, "extra_info": {"target": str(target)}},
    )  # fmt: skip
    assert [score.reward for score in scores] == [2.0, *[None] * 6, 2.0]
    assert {score.reason for score in scores[1:7]} == {"reward_error"}
    assert not target.exists()


def test_a_checker_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"there is no file /\S+/nowhere\.py; expected verl:file\.py:function"):
        RewardFunctions(["verl:nowhere.py:f"], columns=frozenset(), is_plain=False, timeout_s=1, warn=print)
    with pytest.raises(
        UserError,
        match=r"^confined functions no_such_module:f: they cannot be loaded: ModuleNotFoundError: No m",
    ):
        RewardFunctions(["verl:no_such_module:f"], columns=frozenset(), is_plain=False, timeout_s=1, warn=print)


def test_confined_functions_answer_in_order_and_leave_no_process(tmp_path: Path) -> None:
    (tmp_path / "plain_functions.py").write_text("def twice(x):\n    return [x, {'a': (x, 2)}, None]\n")
    with ConfinedFunctions(["plain_functions:twice"], folders=[str(tmp_path)], call_s=5.0) as confined:
        answers = confined.call([("plain_functions:twice", (n,)) for n in range(20)])
        pids = confined._pool.pids()
    assert [(answer.status, answer.value) for answer in answers] == [
        ("ok", [n, {"a": (n, 2)}, None]) for n in range(20)
    ]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class TestGym:
    """Skipped without the extra `gym`."""

    @pytest.fixture
    def gym(self) -> Iterator[Callable[[str], Gym]]:
        pytest.importorskip("reasoning_gym")
        made: list[Gym] = []

        def make(dataset: str) -> Gym:
            made.append(Gym(dataset))
            return made[-1]

        yield make
        for task in made:
            task.close()

    def test_entries_are_drawn_by_key_and_split(self, gym: Callable[[str], Gym]) -> None:
        task = gym("chain_sum")
        whole = task.problems(0, 0, 60)
        assert whole == task.problems(0, 0, 7) + task.problems(0, 7, 53) and whole != task.problems(1, 0, 60)
        held = {problem.identity for problem in task.heldout(30)}
        assert len(held) == 30 and not held & {problem.identity for problem in whole}
        assert all(set(problem.columns) == task.columns for problem in whole)

    def test_answers_are_scored_behind_walls(
        self, gym: Callable[[str], Gym], completion: Callable[..., Completion], tmp_path: Path
    ) -> None:
        task = gym("string_insertion")  # its score evaluates the answer as Python
        problem = task.problems(0, 0, 1)[0]
        poison = f"<answer>[open({str(tmp_path / 'written')!r}, 'w').write('x')]</answer>"
        texts = [f"<answer>{problem.columns['answer']}</answer>", "none", "<answer> </answer>", poison]
        scores = task.reward([problem] * 4, [completion(text) for text in texts])
        assert [score.reason for score in scores[:3]] == ["ok", "no_answer", "empty"]
        assert scores[0].reward == 1.0 and not scores[3].is_right and not (tmp_path / "written").exists()
        assert task.verify(problem, completion(texts[0])).reward == 1.0

    def test_unknown_and_refused_data_sets(self, gym: Callable[[str], Gym]) -> None:
        with pytest.raises(UserError, match="did you mean gym:chain_sum"):
            gym("chain_sums")


class FakeConfined:
    """Answers as told, by the text of the answer block."""

    def __init__(self, told: dict[str, Answer]) -> None:
        self.told, self.num_calls, self.num_restarts = told, 0, 0

    def call(self, calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[Answer]:
        self.num_calls += 1
        return [self.told.get(str(arguments[3]), Answer("ok", 1.0)) for _, arguments in calls]

    def close(self) -> None:
        pass


@pytest.fixture
def fake_gym(monkeypatch: pytest.MonkeyPatch) -> Gym:
    """The task around a library that is not there, with one data set of sums."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")

    def create_dataset(name: str, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"question": f"{seed} + 1", "answer": seed + 1}]

    package.create_dataset, factory.DATASETS = create_dataset, {"sums": None}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    return Gym("sums")


def test_a_batch_of_the_gym_is_scored_together_and_only_the_newest_is_kept(
    fake_gym: Gym, completion: Callable[..., Completion]
) -> None:
    confined = FakeConfined({"2": Answer("ok", 0.5)})
    fake_gym._confined = confined  # type: ignore[assignment]
    problem = fake_gym.problems(0, 0, 1)[0]
    for batch in range(3):
        answers = [completion(f"{batch} <answer>{n}</answer>") for n in range(4)]
        start_scoring(fake_gym, [problem] * 4, answers)
        assert [fake_gym.verify(problem, answer).reward for answer in answers] == [1.0, 1.0, 0.0, 1.0]
        assert [score.reward for score in fake_gym.reward([problem] * 4, answers)] == [1.0, 1.0, 0.5, 1.0]
        assert confined.num_calls == batch + 1 and len(fake_gym._scored) == 4


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (Answer("timeout", None), "no score for 2 of 3 answers; timeout"),
        (Answer("exception", "Traceback\n  line\nKeyError: 'x'"), """exception: "KeyError: 'x'\""""),
        (Answer("ok", 3.0), "its score_answer gave 3.0, expected a number from 0 to 1"),
    ],
)
def test_why_the_gym_could_not_score_is_told_once(
    fake_gym: Gym, completion: Callable[..., Completion], answer: Answer, cause: str
) -> None:
    fake_gym._confined = FakeConfined({"1": answer, "2": answer})  # type: ignore[assignment]
    problem = fake_gym.problems(0, 0, 1)[0]
    answers = [completion(f"<answer>{n}</answer>") for n in range(3)]
    fake_gym.reward([problem] * 3, answers)
    assert isinstance(fake_gym, StepObserver)
    (warning,) = fake_gym.take_report().warnings
    assert warning.startswith("task gym:sums: ") and cause in warning
    assert not fake_gym.take_report().warnings


def test_the_gym_s_countdown_is_refused() -> None:
    with pytest.raises(UserError, match=r"evaluates answers as Python; use ours: countdown \(--task countdown\)"):
        Gym("countdown")


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"needs the package reasoning-gym: pip install 'sparkgrpo\[gym\]'"):
        Gym("chain_sum")
