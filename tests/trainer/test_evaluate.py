"""Held-out accuracy: what is asked of the engine, who judges, and the line of evals.jsonl."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sparkgrpo.trainer.config import Config, UserError
from sparkgrpo.trainer.dialogue import PURPOSE_EVAL, Dialogue, derived_key
from sparkgrpo.trainer.evaluate import Evaluation, evaluate
from sparkgrpo.trainer.model.decoder import Decoder, DecoderConfig
from sparkgrpo.trainer.model.weights import random_model
from sparkgrpo.trainer.reward_check import RewardCheck
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Rollout, Sampling
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions

GREEDY = Config(max_new_tokens=4, seed=3)
SAMPLED = Config(max_new_tokens=4, seed=3, eval_temperature=1.0)


def evaluation_of(reasons: list[str], lengths: list[int], truncated: list[bool]) -> Evaluation:
    return Evaluation(
        problems=[Problem(prompt=(n,), columns={}, identity=f"x:{n}") for n in range(len(reasons))],
        completions=[
            Completion(text="", token_ids=(1,) * length, is_truncated=is_truncated)
            for length, is_truncated in zip(lengths, truncated, strict=True)
        ],
        scores=[Score(reward=float(reason == "ok"), parts={}, reason=reason) for reason in reasons],
    )


def test_the_line_of_evals() -> None:
    evaluation = evaluation_of(
        ["ok", "no_answer", "ok", "wrong_value", "ok"], [3, 5, 4, 1, 2], [False, True] + [False] * 3
    )
    assert evaluation.accuracy == 0.6
    row = evaluation.row(20)
    assert row.pop("accuracy_se") == pytest.approx((0.6 * 0.4 / 5) ** 0.5)
    assert row == {
        "step": 20,
        "num_problems": 5,
        "accuracy": 0.6,
        "right_bits": "15",  # 1 0 1 0 1, the first problem the highest bit
        "reward_mean": 0.6,
        "len_mean": 3.0,
        "frac_truncated": 0.2,
        "reason/no_answer": 0.2,
        "reason/ok": 0.6,
        "reason/wrong_value": 0.2,
    }
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(("num_right", "bits"), [(0, "000"), (9, "1ff"), (1, "100")])
def test_right_bits_keep_their_leading_zeros(num_right: int, bits: str) -> None:
    evaluation = evaluation_of(["ok"] * num_right + ["no_answer"] * (9 - num_right), [1] * 9, [False] * 9)
    assert evaluation.row(0)["right_bits"] == bits


class PaidForNothing(Echo):
    """Its reward is worthless as a measure: it pays everybody."""

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        return [Score(reward=1.0, parts={}, reason="ok") for _ in completions]


class WatchedEngine(RolloutEngine):
    """Remembers what it was asked."""

    asked: tuple[list[list[int]], int, Sampling, int, Sequence[int] | None]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        G: int,
        sampling: Sampling,
        key: int,
        *,
        streams: Sequence[int] | None = None,
    ) -> Rollout:
        self.asked = ([list(prompt) for prompt in prompts], G, sampling, key, streams)
        return super().generate(prompts, G, sampling, key, streams=streams)


@pytest.fixture
def model() -> Decoder:
    config = DecoderConfig(
        family="llama",
        vocab_size=8,
        width=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        ffn_width=16,
        rms_eps=1e-6,
        rope_theta=1e4,
        max_position=12,
    )
    return random_model(config, seed=1)


def watched(model: Decoder) -> WatchedEngine:
    return WatchedEngine(model, stop_ids=(), num_valid=8, max_rows=3, max_new_tokens=4)


def test_every_problem_is_answered_once_and_judged_strictly(model: Decoder) -> None:
    engine, task = watched(model), PaidForNothing(EchoOptions(num_tokens=5))
    problems = task.heldout(5)
    evaluation = evaluate(engine, Dialogue(None), RewardCheck(task), problems, GREEDY)
    assert engine.asked == (
        [[0], [1], [2], [3], [4]],
        1,
        Sampling(temperature=0.0, max_new_tokens=4),
        derived_key(3, PURPOSE_EVAL, 0),
        None,
    )
    assert evaluation.problems == problems
    assert [len(completion.token_ids) for completion in evaluation.completions] == [4] * 5
    right = [c.token_ids[0] == n for n, c in enumerate(evaluation.completions)]
    assert [score.is_right for score in evaluation.scores] == right
    assert evaluation.accuracy == sum(right) / 5 < 1, "what training pays has no say"


def test_a_problem_is_answered_alike_in_any_company(model: Decoder) -> None:
    """Sampled evaluations too: the stream is the problem's index and the key does not change from step to step."""
    task = Echo(EchoOptions(num_tokens=5))

    def answers(count: int, config: Config = SAMPLED) -> list[tuple[int, ...]]:
        evaluation = evaluate(watched(model), Dialogue(None), RewardCheck(task), task.heldout(count), config)
        return [completion.token_ids for completion in evaluation.completions]

    five = answers(5)
    assert answers(5) == five and answers(2) == five[:2]
    assert len(set(five)) == 5
    assert answers(5, replace(SAMPLED, seed=4)) != five


def test_a_prompt_too_long_for_the_model_is_named(model: Decoder) -> None:
    task = Echo(EchoOptions(num_tokens=5))
    with pytest.raises(
        UserError, match=r"echo:0: expected prompt and completion within the model's 12 positions, got 13"
    ):
        evaluate(watched(model), Dialogue(None), RewardCheck(task), task.heldout(5), replace(GREEDY, max_new_tokens=12))


def test_the_weights_as_they_are_now(model: Decoder) -> None:
    task, engine = Echo(EchoOptions(num_tokens=5)), watched(model)
    model.head_VD.data.copy_(model.embed_VD.data)
    for layer in model.layers:
        layer.o_weight.data.zero_()
        layer.down_weight.data.zero_()
    assert evaluate(engine, Dialogue(None), RewardCheck(task), task.heldout(5), GREEDY).accuracy == 1.0
    model.head_VD.data.neg_()
    assert evaluate(engine, Dialogue(None), RewardCheck(task), task.heldout(5), GREEDY).accuracy == 0.0


class FailsLater(Echo):
    """Its strict check gives out once it has worked; its reward pays everybody."""

    is_broken = False

    def verify(self, problem: Problem, completion: Completion) -> Score:
        if self.is_broken:
            raise ZeroDivisionError
        return super().verify(problem, completion)

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        return [Score(reward=1.0, parts={}, reason="ok") for _ in completions]


def test_a_strict_check_that_gives_out_leaves_accuracy_unknown(model: Decoder) -> None:
    """It neither ends the run nor lets the reward stand in for it."""
    task = FailsLater(EchoOptions(num_tokens=5))
    check = RewardCheck(task)
    assert evaluate(watched(model), Dialogue(None), check, task.heldout(5), GREEDY).accuracy is not None
    task.is_broken = True
    evaluation = evaluate(watched(model), Dialogue(None), check, task.heldout(5), GREEDY)
    assert evaluation.accuracy is None and evaluation.row(4)["reason/reward_error"] == 1.0
    assert "no verdict for 5 of 5" in check.take_faults()[0]


def test_what_could_not_be_judged_does_not_make_accuracy_surer() -> None:
    evaluation = evaluation_of(["ok", "wrong_value", "ok", "ok"], [1] * 4, [False] * 4)
    failed = [Score(reward=None, parts={}, reason="reward_error")] * 2
    row = replace(evaluation, scores=[*evaluation.scores[:2], *failed]).row(0)
    assert (row["accuracy"], row["accuracy_se"]) == (0.5, pytest.approx((0.25 / 2) ** 0.5))
