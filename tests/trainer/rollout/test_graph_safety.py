"""Whether a decode step may be captured in a CUDA graph, answered without a GPU; each checker is proved on a fault.

A capture records launches with their addresses and numbers. So every step of a bucket must run the same operations with
the same shapes and numbers, read nothing on the host, allocate nothing by content, and find its tensors in place.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sparkgrpo.kernels import dispatch
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.rollout import graphs, step
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Sampling

KERNELS = Path(inspect.getfile(dispatch)).parent
REFUSED_OPS = {
    "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "unique_dim", "_unique2",
    "bincount", "lift_fresh", "multinomial", "rand", "randn", "randint", "bernoulli", "uniform_", "normal_",
    "exponential_",
}  # fmt: skip
REFUSED_CALLS = {"item", "tolist", "cpu", "numpy", "nonzero", "print", "float", "int", "bool"}
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [7, 9]]


def signature(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return ("tensor", tuple(x.shape), x.stride(), x.dtype, x.device)
    return tuple(signature(y) for y in x) if isinstance(x, list | tuple) else repr(x)


class StepTrace(TorchDispatchMode):
    """Every operation with its shapes and numbers, and those that no capture survives."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in REFUSED_OPS:
            self.refused.append(name)
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(i is not None and i.dtype == torch.bool for i in indices):
            self.refused.append(f"{name} with a mask")
        self.ops.append((str(func), signature(args), signature(sorted(kwargs.items()))))
        return func(*args, **kwargs)


def traced_steps(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> dict[int, list[StepTrace]]:
    """The traces of every decode step that `run` takes, by bucket."""
    traces: dict[int, list[StepTrace]] = {}
    original = graphs.EagerRunner.step

    def traced(runner: graphs.EagerRunner, num_slots: int) -> None:
        with StepTrace() as trace:
            original(runner, num_slots)
        traces.setdefault(num_slots, []).append(trace)

    monkeypatch.setattr(graphs.EagerRunner, "step", traced)
    run()
    return traces


def paged_engine(model: Decoder) -> RolloutEngine:
    stop_ids = (0, 5, 10, 15, 20)
    return RolloutEngine(
        model, stop_ids=stop_ids, num_valid=model.config.vocab_size, max_rows=32, max_new_tokens=20, cache="paged"
    )


def test_every_step_of_a_bucket_runs_the_same_operations(
    exact_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows finish and slots are compacted on the way; two rollouts, so that nothing of the first lingers."""
    engine = paged_engine(exact_model())

    def run() -> None:
        for key in (1, 2):
            engine.generate(PROMPTS, 8, Sampling(max_new_tokens=20), key)

    traces = traced_steps(run, monkeypatch)
    assert len(traces) > 2 and max(map(len, traces.values())) > 2
    for bucket, steps in traces.items():
        assert len(steps[0].ops) > 50
        for trace in steps:
            assert trace.refused == [], bucket
            assert trace.ops == steps[0].ops, bucket


@pytest.mark.parametrize("fault", ["reads", "counts", "sizes"])
def test_planted_faults_are_seen(
    fault: str, exact_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls, original = paged_engine(exact_model()), [], step.sample_update

    def faulty(logits_BV: torch.Tensor, **values: Any) -> None:
        calls.append(0)
        if fault == "reads":
            bool(values["context_len_B"].any())
        elif fault == "counts":
            logits_BV = logits_BV + len(calls) * 0.0
            torch.mul(logits_BV, len(calls))
        else:
            logits_BV[values["context_len_B"] > 0].sum()
        original(logits_BV, **values)

    monkeypatch.setattr(step, "sample_update", faulty)
    traces = traced_steps(lambda: engine.generate(PROMPTS, 8, Sampling(max_new_tokens=20), 1), monkeypatch)  # pyright: ignore[reportArgumentType]
    is_refused = any(trace.refused for steps in traces.values() for trace in steps)
    is_changing = any(trace.ops != steps[0].ops for steps in traces.values() for trace in steps)
    assert is_changing if fault == "counts" else is_refused


def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], list[Any]]]:
    """Sends all ops to the interpreter; the list gets every launch: kernel, grid and what is no tensor."""
    pytest.importorskip("triton", reason="Triton comes with Linux only")
    from sparkgrpo.kernels import triton_launch

    if not triton_launch.is_interpreted():
        pytest.skip("Triton's interpreter is off where a GPU is: the tests marked gpu run there")
    launches: list[tuple[str, tuple[int, ...], list[Any]]] = []
    original = triton_launch.launch

    def record(kernel: Any, grid: Any, args: Any, constexprs: Any, **options: Any) -> None:
        numbers = [x for x in args if not isinstance(x, torch.Tensor)]
        launches.append((kernel.__name__, grid, [repr(numbers), repr(constexprs), repr(options)]))
        with _disable_current_modes():  # the interpreter copies its arguments: that is no part of the step
            original(kernel, grid, args, constexprs, **options)

    for path in sorted(KERNELS.glob("*_kernels.py")):
        module = importlib.import_module(f"sparkgrpo.kernels.{path.stem}")
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", record)
    monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda device: True)
    return launches


@pytest.mark.parametrize("family", ["qwen3"])  # heads of 16: the kernels take no narrower ones
def test_launches_of_a_bucket_repeat(make_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed or a length handed over as a number would be frozen in the graph."""
    launches = by_triton(monkeypatch)
    engine, by_bucket = paged_engine(make_models(torch.float32)[1]), {}
    original = graphs.EagerRunner.step

    def recorded(runner: graphs.EagerRunner, num_slots: int) -> None:
        launches.clear()
        original(runner, num_slots)
        by_bucket.setdefault(num_slots, []).append(list(launches))

    monkeypatch.setattr(graphs.EagerRunner, "step", recorded)
    for key in (1, 2):
        engine.generate(PROMPTS, 4, Sampling(max_new_tokens=12), key)
    assert len(by_bucket) > 1
    for steps in by_bucket.values():
        assert len(steps[0]) > 8 and all(launched == steps[0] for launched in steps)


@pytest.mark.parametrize("family", ["qwen3"])
def test_kernels_give_the_tokens_of_the_torch_path(make_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ladder's last rung without a GPU: norms, rotation and cache, paged attention, gated MLP and sampling."""
    _, model = make_models(torch.float32)
    options = {"stop_ids": (0, 5), "num_valid": 33, "max_rows": 16, "max_new_tokens": 10, "cache": "paged"}
    prompts = [[3, 1, 4, 1, 5] * 4, [9], [2, 6, 5]]  # one longer than a page
    want = RolloutEngine(model, **options).generate(prompts, 4, Sampling(max_new_tokens=10), 3)
    launches = by_triton(monkeypatch)
    got = RolloutEngine(model, **options).generate(prompts, 4, Sampling(max_new_tokens=10), 3)
    assert got.rows() == want.rows() and len({name for name, *_ in launches}) >= 7
    torch.testing.assert_close(got.logprob_T, want.logprob_T, rtol=0, atol=1e-5)


def test_a_step_does_not_read_scratch_or_pages_that_nobody_owns(
    make_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in page 0, in free pages and in all scratch before every step: the same tokens and log-probs."""
    _, model = make_models(torch.float32)
    engine = paged_engine(model)
    want = engine.generate(PROMPTS, 4, Sampling(max_new_tokens=12), 3)
    original = graphs.EagerRunner.step

    def poisoned(runner: graphs.EagerRunner, num_slots: int) -> None:
        state = engine._state
        assert state is not None
        cache: Any = state.cache
        owned = {page for pages in cache.plan.row_pages for page in pages}
        free = torch.tensor([page for page in range(cache.pool.num_pages) if page not in owned])
        cache.k_pages[:, free] = cache.v_pages[:, free] = float("nan")
        for x in (cache.scratch.top_P, cache.scratch.total_P, cache.scratch.acc_PE, state.logits_BV):
            x.fill_(float("nan"))
        original(runner, num_slots)

    monkeypatch.setattr(graphs.EagerRunner, "step", poisoned)
    got = engine.generate(PROMPTS, 4, Sampling(max_new_tokens=12), 3)
    assert torch.equal(got.token_T, want.token_T) and torch.equal(got.logprob_T, want.logprob_T)


def calls_in(source: str) -> set[str]:
    """Names of all that is called."""
    nodes = [node.func for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.Call)]
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes}


def test_the_source_of_the_step_reads_nothing_on_the_host() -> None:
    assert not calls_in(inspect.getsource(step)) & REFUSED_CALLS
    assert calls_in("x.item()\nint(y)") & REFUSED_CALLS == {"item", "int"}
