"""Dynamic sampling: dead groups replaced by fresh problems, and what a step says of it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sparkgrpo.profiling.phases import PhaseClock
from sparkgrpo.trainer.batching import TrainBatch
from sparkgrpo.trainer.config import Config
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.loop import GrpoLoop
from sparkgrpo.trainer.metrics import PHASES, metric_of
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.optim import MasterAdamW
from sparkgrpo.trainer.reference import frozen_copy
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score
from sparkgrpo.trainer.tasks.echo import Echo, EchoOptions
from sparkgrpo.trainer.update import Updater

Make = Callable[..., Any]
G = 4


class LiveEvery(Echo):
    """Problems 0, 1, 2, ... of which every `period`-th has a live group; `seen` keeps the order of the questions."""

    def __init__(self, period: int) -> None:
        super().__init__(EchoOptions(num_tokens=30))
        self.period, self.seen = period, []

    def problems(self, seed: int, start: int, count: int) -> list[Problem]:
        places = range(start, start + count)
        return [Problem(prompt=(i % 30, 1), columns={"place": i}, identity=f"echo:{i}") for i in places]

    def reward(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        places = [int(str(problem.columns["place"])) for problem in problems]
        self.seen.append(places[::G])
        is_live = [self.period > 0 and place % self.period == 0 for place in places]
        rewards = [float(s % G == 0) if live else 1.0 for s, live in enumerate(is_live)]
        return [Score(reward=reward, parts={}, reason="ok" if reward else "wrong_value") for reward in rewards]

    def verify(self, problem: Problem, completion: Completion) -> Score:
        return Score(reward=0.0, parts={}, reason="wrong_value")


def loop_of(model: Decoder, task: Echo, **values: Any) -> GrpoLoop:
    chosen = {"prompts_per_step": 4, "group_size": G, "max_new_tokens": 6, "beta": 0.0, "lr": 1e-3} | values
    config = Config(task="echo", **chosen)
    clock = PhaseClock(model.device, PHASES)
    reference = frozen_copy(model) if config.beta else None
    return GrpoLoop(
        config,
        task=task,
        heldout=task.heldout(2),
        dialogue=Dialogue(None),
        engine=RolloutEngine(model, stop_ids=(3, 4, 5), num_valid=33, max_rows=64, max_new_tokens=6),
        updater=Updater(
            model, reference, MasterAdamW(model, config), config, num_valid=33, tokens_per_micro_batch=1 << 14,
            clock=clock,
        ),
        clock=clock,
    )  # fmt: skip


def run(loop: GrpoLoop, step: int, batches: list[TrainBatch] | None = None) -> Any:
    original = loop.updater.update

    def update(batch: TrainBatch, takes_part_S: torch.Tensor, lr: float) -> Any:
        if batches is not None:
            batches.append(batch)
        assert len(takes_part_S) == len(batch.length_S)
        return original(batch, takes_part_S, lr)

    loop.updater.update = update  # type: ignore[method-assign]
    loop.clock.start_step()
    result = loop.step(step)
    loop.updater.update = original  # type: ignore[method-assign]
    return result


def test_off_means_one_round_and_all_groups(make_decoder: Make) -> None:
    task = LiveEvery(2)
    result = run(loop_of(make_decoder(), task), 1)
    assert task.seen == [[0, 1, 2, 3]]
    assert (result.metrics["num_rounds"], result.metrics["num_prompts"], result.metrics["num_prompts_trained"]) == (
        1,
        4,
        4,
    )
    assert result.metrics["frac_zero_std"] == 0.5


def test_dead_groups_are_replaced_until_the_batch_is_full(make_decoder: Make) -> None:
    """Every second problem is live: rounds of 4, 2 and 1 problems."""
    task, batches = LiveEvery(2), []
    loop = loop_of(make_decoder(), task, dynamic_sampling=True)
    result = run(loop, 1, batches)
    assert task.seen == [[0, 1, 2, 3], [4, 5], [6]]
    metrics = result.metrics
    assert (metrics["num_rounds"], metrics["num_prompts"], metrics["num_prompts_trained"]) == (3, 7, 4)
    assert metrics["frac_zero_std"] == pytest.approx(3 / 7), "counted before they are dropped"
    (batch,) = batches
    assert list(batch.prompts) == [[0, 1], [2, 1], [4, 1], [6, 1]]
    assert batch.prompt_of_row_S == tuple(n for n in range(4) for _ in range(G))
    kept = [c for c, p in zip(result.completions, result.problems, strict=True) if p.columns["place"] % 2 == 0]
    assert batch.token_R.tolist() == [token for c in kept for token in c.token_ids]
    assert batch.length_S == tuple(len(c.token_ids) for c in kept) and len(batch.logprob_R) == len(batch.token_R)
    assert (batch.advantage_S != 0).all()
    by_place = zip(result.problems, result.advantages, strict=True)
    assert all((advantage != 0) == (p.columns["place"] % 2 == 0) for p, advantage in by_place)
    assert all(metric_of(key) is not None for key in metrics)
    run(loop, 2)
    assert task.seen[3] == [7, 8, 9, 10], "the next step goes on behind what was used"


def test_the_number_of_rounds_is_bounded_and_the_batch_goes_on_smaller(make_decoder: Make) -> None:
    task, batches = LiveEvery(8), []
    loop = loop_of(make_decoder(), task, dynamic_sampling=True, max_rounds=2, mini_batches=4, inner_epochs=2)
    metrics = run(loop, 1, batches).metrics
    assert task.seen == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (metrics["num_rounds"], metrics["num_prompts"], metrics["num_prompts_trained"]) == (3, 10, 2)
    assert len(batches[0].prompts) == 2 and metrics["num_updates"] == 4, "two mini-batches have nothing in them"
    assert metrics["frac_tokens_trained"] == 1.0


def test_nothing_but_dead_groups_is_no_update(make_decoder: Make) -> None:
    model = make_decoder()
    before = [p.clone() for p in model.parameters()]
    result = run(loop_of(model, LiveEvery(0), dynamic_sampling=True, max_rounds=1), 1)
    assert (result.metrics["num_prompts_trained"], result.metrics["num_updates"]) == (0, 0)
    assert result.metrics["num_prompts"] == 8 and set(result.advantages) == {0.0}
    assert all(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("advantage", ["group", "batch", "rloo", "mean"])
def test_what_is_trained_is_what_the_live_groups_alone_would_train(make_decoder: Make, advantage: str) -> None:
    """The same problems as a batch of their own: same weights afterwards, so nothing of the dead groups counts."""

    class OnlyLive(LiveEvery):
        def problems(self, seed: int, start: int, count: int) -> list[Problem]:
            return [super(OnlyLive, self).problems(seed, 2 * i, 1)[0] for i in range(start, start + count)]

    dynamic, plain = make_decoder(), make_decoder()
    values = {"dynamic_sampling": True, "advantage": advantage, "beta": 0.1}
    loop = loop_of(dynamic, LiveEvery(2), **values)
    kept = run(loop, 1)
    other = loop_of(plain, OnlyLive(1), **(values | {"dynamic_sampling": False}))
    original = other.engine.generate

    def generate(prompts: Any, g: int, sampling: Any, key: int, *, streams: Sequence[int]) -> Any:
        return original(prompts, g, sampling, key, streams=[2 * place for place in streams])

    other.engine.generate = generate  # type: ignore[method-assign]  the randomness that the other run called by place
    run(other, 1)
    assert kept.metrics["num_prompts"] == 7
    for ours, theirs in zip(dynamic.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_metrics_of_several_rounds_are_sums(make_decoder: Make) -> None:
    result = run(loop_of(make_decoder(), LiveEvery(2), dynamic_sampling=True), 1)
    assert result.metrics["num_tokens"] == sum(len(c.token_ids) for c in result.completions)
    assert result.num_prompt_tokens == 14 and len(result.metrics["num_right"]) == 7
    assert 0 < result.metrics["frac_slots_alive"] <= 1


def test_the_penalty_does_not_hide_a_dead_group(make_decoder: Make) -> None:
    """By what the task asks all are right; that some are overlong does not make the group worth keeping."""
    loop = loop_of(make_decoder(), LiveEvery(0), dynamic_sampling=True, max_rounds=1, overlong_cache=1.0)
    result = run(loop, 1)
    assert result.metrics["num_prompts_trained"] == 0
    lengths = {len(c.token_ids) for c in result.completions}
    assert len(lengths) > 1 and (result.metrics["reward_std"] or 0) > 0, "else nothing was shown"


def test_unscored_steps_are_counted_in_a_row(make_decoder: Make) -> None:
    task = LiveEvery(2)
    loop = loop_of(make_decoder(), task)
    good = task.reward
    run(loop, 1)
    task.reward = lambda problems, completions: [][:0]  # type: ignore[method-assign]
    result = run(loop, 2)
    assert loop.unscored_in_a_row == 1 and result.metrics["frac_reward_error"] == 1.0
    assert result.metrics["reward_mean"] is None and result.metrics["num_updates"] == 0
    assert "expected a reward for each of 16 completions, got 0" in result.warnings[0]
    run(loop, 3)
    assert loop.unscored_in_a_row == 2
    task.reward = good  # type: ignore[method-assign]
    assert run(loop, 4).warnings == [] and loop.unscored_in_a_row == 0
