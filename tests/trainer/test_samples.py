"""Rows of samples.jsonl."""

import json

from sparkgrpo.trainer.evaluate import Evaluation
from sparkgrpo.trainer.samples import group_samples, heldout_samples, sample_row
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score

CHAT = Problem(
    prompt=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3"}),
    columns={"answer": 5},
    identity="sum:2,3",
)
RIGHT = Completion(text="<answer>5</answer>", token_ids=(9, 8, 7), is_truncated=False)
CUT = Completion(text="well, let", token_ids=(1, 2, 3, 4), is_truncated=True)
SCORES = [
    Score(reward=1.0, parts={"correct": 1.0}, reason="ok"),
    Score(reward=None, parts={}, reason="verifier_timeout"),
]


def test_a_row_says_what_was_asked_written_and_judged() -> None:
    row = sample_row(CHAT, RIGHT, SCORES[0], step=20, split="train", index=3, advantage=-0.5)
    assert row == {
        "sample_id": "20-train-3",
        "step": 20,
        "split": "train",
        "problem": "sum:2,3",
        "prompt": "2+3",  # the last message; what comes before is the same in every row
        "completion": "<answer>5</answer>",
        "num_tokens": 3,
        "reward": 1.0,
        "parts": {"correct": 1.0},
        "reason": "ok",
        "finish": "stop",
        "advantage": -0.5,
    }


def test_a_row_that_was_cut_and_not_scored_is_json_too() -> None:
    row = sample_row(CHAT, CUT, SCORES[1], step=0, split="heldout", index=0)
    assert (row["finish"], row["reward"], row["advantage"]) == ("length", None, None)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_a_prompt_of_ready_ids_is_shown_as_ids() -> None:
    problem = Problem(prompt=(4, 0), columns={}, identity="echo:4")
    assert sample_row(problem, RIGHT, SCORES[0], step=0, split="train", index=0)["prompt"] == "(4, 0)"


def test_heldout_samples_are_the_first_problems_every_time() -> None:
    problems = [Problem(prompt=(n,), columns={}, identity=f"echo:{n}") for n in range(3)]
    evaluation = Evaluation(problems=problems, completions=[RIGHT, CUT, RIGHT], scores=[*SCORES, SCORES[0]])
    rows = list(heldout_samples(evaluation, 40, 2))
    assert [row["sample_id"] for row in rows] == ["40-heldout-0", "40-heldout-1"]
    assert [row["problem"] for row in rows] == ["echo:0", "echo:1"]
    assert [row["finish"] for row in rows] == ["stop", "length"]
    assert len(list(heldout_samples(evaluation, 40, 9))) == 3
    assert not list(heldout_samples(evaluation, 40, 0))


def test_a_training_group_is_shown_whole_with_its_advantages() -> None:
    rows = list(group_samples(CHAT, [RIGHT, CUT], SCORES, [0.7, -0.7], 5))
    assert [(row["sample_id"], row["advantage"]) for row in rows] == [("5-train-0", 0.7), ("5-train-1", -0.7)]
    assert {row["problem"] for row in rows} == {"sum:2,3"}
