"""The step itself: what it never makes, what it passes on, and what it counts."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.loop import GrpoLoop
from sparkgrpo.trainer.metrics import PHASES
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score, Task
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions
from sparkgrpo.trainer.tasks.rewarded import RewardedTask
from sparkgrpo.trainer.tasks.user import RewardFunctions
from sparkgrpo.trainer.update import Updater


class Parity(Echo):
    """Pays by the parity of the last token; every third completion of a batch is not scored."""

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """1 or 0, or None."""
        rewards = [None if s % 3 == 2 else float(c.token_ids[-1] % 2) for s, c in enumerate(completions)]
        return [Score(reward=r, parts={"parity": r or 0.0}, reason="ok" if r else "wrong_value") for r in rewards]


def loop_of(
    model: Decoder, task: Task, *, num_valid: int, stop_ids: tuple[int, ...] = (), **values: object
) -> GrpoLoop:
    config = Config(task="echo", **values)  # pyright: ignore[reportArgumentType]
    clock = PhaseClock(model.device, PHASES)
    reference = frozen_copy(model) if config.beta else None
    return GrpoLoop(
        config,
        task=task,
        heldout=task.heldout(4),
        dialogue=Dialogue(None),
        engine=RolloutEngine(
            model, stop_ids=stop_ids, num_valid=num_valid, max_rows=64, max_new_tokens=config.max_new_tokens
        ),
        updater=Updater(
            model, reference, MasterAdamW(model, config), config,
            num_valid=num_valid, tokens_per_micro_batch=1 << 14, clock=clock,
        ),
        clock=clock,
    )  # fmt: skip


def test_no_tensor_holds_all_logits(make_decoder: Callable[..., Decoder], op_watch: Any) -> None:
    """S x L x V elements: 16 completions x 64 tokens x 20,000 words. Rollout, reference, old policy, loss, backward."""
    S, L, V = 16, 64, 20_000
    loop = loop_of(
        make_decoder(vocab_size=V, scale=1.0, num_layers=1, width=16), Echo(EchoOptions(num_tokens=4)), num_valid=V,
        prompts_per_step=4, group_size=4, max_new_tokens=L, inner_epochs=2,
    )  # fmt: skip
    with op_watch:
        loop.clock.start_step()
        metrics = loop.step(1).metrics
    assert metrics["num_tokens"] == S * L and metrics["num_updates"] == 2 and metrics["frac_tokens_trained"] == 1.0
    assert any("backward" in name for name, _ in op_watch.calls), "the backward pass must be seen"
    assert S * V <= op_watch.largest < S * L * V, op_watch.largest_from
    with op_watch:
        torch.add(torch.zeros(S, L, 1), torch.zeros(V))  # what would be found
    assert op_watch.largest == S * L * V


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_the_batch_that_is_trained_on(
    make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, mask_truncated: bool
) -> None:
    """Prompts, tokens, log-probs, advantages and who takes part, as the rollout and the task gave them."""
    loop = loop_of(
        make_decoder(), Parity(EchoOptions(num_tokens=5)), num_valid=33, stop_ids=tuple(range(8)), seed=1,
        prompts_per_step=3, group_size=10, max_new_tokens=6, mask_truncated=mask_truncated, lr=1e-3, warmup_steps=10,
    )  # fmt: skip
    seen: list[tuple[TrainBatch, list[bool], float]] = []

    def update(batch: TrainBatch, takes_part_S: torch.Tensor, lr: float) -> dict[str, object]:
        seen.append((batch, takes_part_S.tolist(), lr))
        return {"loss": 7.0}

    monkeypatch.setattr(loop.updater, "update", update)
    loop.clock.start_step()
    result = loop.step(4)
    ((batch, takes_part, lr),) = seen
    assert lr == pytest.approx(4e-4) and result.metrics["loss"] == 7.0 and result.metrics["step"] == 4
    asked = [problem.columns["answer"] for problem in loop.task.problems(1, 9, 3)]
    assert list(batch.prompts) == [[token] for token in asked], "problems 9 to 11 of the stream of five"
    assert batch.prompt_of_row_S == tuple(n for n in range(3) for _ in range(10))
    assert batch.token_R.tolist() == [token for c in result.completions for token in c.token_ids]
    assert batch.length_S == tuple(len(c.token_ids) for c in result.completions)
    assert len(batch.logprob_R) == len(batch.token_R) and batch.advantage_S.tolist() == list(result.advantages)
    is_truncated = [c.is_truncated for c in result.completions]
    assert any(is_truncated) and not all(is_truncated)
    expected = [s % 3 != 2 and not (mask_truncated and is_truncated[s]) for s in range(30)]
    assert takes_part == expected
    assert [problem.identity for problem in result.problems] == [f"echo:{n}" for n in asked for _ in range(10)]
    assert result.num_prompt_tokens == 3 and result.metrics["num_tokens"] == len(batch.token_R)
    assert (result.metrics["num_prompts"], result.metrics["group_size"]) == (3, 10)


def test_a_step_depends_on_its_number_alone(make_decoder: Callable[..., Decoder]) -> None:
    """Not on the steps before, so a resumed run samples the same; and each step samples anew."""
    task = Parity(EchoOptions(num_tokens=5))
    shape = {"prompts_per_step": 5, "group_size": 4, "max_new_tokens": 6, "lr": 1e-9}
    loop, other = (loop_of(make_decoder(), task, num_valid=33, **shape) for _ in range(2))
    tokens = [[c.token_ids for c in loop.step(step).completions] for step in (1, 2, 3)]
    assert [c.token_ids for c in other.step(3).completions] == tokens[2]
    assert len({str(step) for step in tokens}) == 3
    seeded = loop_of(make_decoder(), task, num_valid=33, seed=1, **shape)
    assert [c.token_ids for c in seeded.step(1).completions] != tokens[0]


def test_reasons_once_seen_are_counted_ever_after(
    make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Parity(EchoOptions(num_tokens=5))
    loop = loop_of(make_decoder(), task, num_valid=33, prompts_per_step=5, group_size=4, max_new_tokens=2)
    first = loop.step(1).metrics
    assert 0 < float(str(first["reason/ok"])) < 1

    def nothing(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        return [Score(reward=0.0, parts={}, reason="no_answer") for _ in completions]

    monkeypatch.setattr(task, "reward", nothing)
    second = loop.step(2).metrics
    assert second["reason/ok"] == second["reason/wrong_value"] == 0.0 and second["reason/no_answer"] == 1.0
    assert "reason/no_answer" not in first


def test_evaluation_is_the_same_twice_and_strict(make_decoder: Callable[..., Decoder]) -> None:
    """Greedy, or sampled with one key; judged by `verify`, which knows nothing of the parity that is paid."""
    loop = loop_of(
        make_decoder(), Parity(EchoOptions(num_tokens=5)), num_valid=33, prompts_per_step=5, max_new_tokens=3
    )
    first, second = loop.evaluate(), loop.evaluate()
    assert first == second and len(first.scores) == 4
    assert {score.reason for score in first.scores} <= {"ok", "wrong_value"}
    loop.config = replace(loop.config, eval_temperature=1.0)
    sampled = loop.evaluate()
    assert sampled == loop.evaluate() and sampled != first


def test_a_strict_check_that_gives_out_is_a_warning(
    make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Parity(EchoOptions(num_tokens=5))
    loop = loop_of(make_decoder(), task, num_valid=33, prompts_per_step=5, group_size=4, max_new_tokens=2)
    loop.step(1)

    def broken(problem: Problem, completion: Completion) -> Score:
        raise ZeroDivisionError

    monkeypatch.setattr(task, "verify", broken)
    result = loop.step(2)
    assert any("no verdict for 20 of 20 completions" in warning for warning in result.warnings)
    assert loop.evaluate().accuracy is None


def test_truncated_completions_can_earn_nothing_in_any_task(make_decoder: Callable[..., Decoder]) -> None:
    """No stop ids: every completion is cut."""
    task = Parity(EchoOptions(num_tokens=5))
    shape: dict[str, Any] = {"prompts_per_step": 5, "group_size": 4, "max_new_tokens": 2, "num_valid": 33}
    kept = loop_of(make_decoder(), task, **shape).step(1)
    cut = loop_of(make_decoder(), task, **shape, truncated_reward="zero").step(1)
    assert {score.reward for score in kept.scores} == {0.0, 1.0, None}
    assert {score.reward for score in cut.scores} == {0.0, None} and not any(cut.advantages)


def test_a_strict_check_that_gives_out_takes_no_reward_of_functions_with_it(
    make_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Parity(EchoOptions(num_tokens=5))
    with contextlib.closing(RewardFunctions(
        [lambda completions, **_: [0.5] * len(completions)],
        columns=task.columns, is_plain=True, timeout_s=5, warn=print,
    )) as functions:  # fmt: skip
        rewarded = RewardedTask(task, functions, num_steps=2)
        loop = loop_of(make_decoder(), rewarded, num_valid=33, prompts_per_step=5, group_size=4, max_new_tokens=2)
        loop.step(1)

        def broken(problem: Problem, completion: Completion) -> Score:
            raise ZeroDivisionError

        monkeypatch.setattr(task, "verify", broken)
        result = loop.step(2)
    assert {(score.reward, score.reason) for score in result.scores} == {(0.5, "scored")}
    assert ["no verdict for 20 of 20" in warning for warning in result.warnings] == [True], "told, and once"
