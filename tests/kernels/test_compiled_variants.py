"""One compiled variant of a kernel serves every number of tokens, and every launch sets its options in one place.

A variant is what Triton compiles and caches: types, alignment and ones among the arguments, constexprs, options. A
child process, where kernels are decorated for a GPU, runs the launchers on CPU tensors with `launch` replaced by a
recorder of variants; nothing is compiled. The child is this file, run as a program.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton comes with Linux only")
tl = pytest.importorskip("triton.language")

from sparkgrpo.kernels import dispatch, triton_launch  # noqa: E402  after the skip
from sparkgrpo.kernels.compile_report import kernel_modules  # noqa: E402
from sparkgrpo.kernels.sass_report import load_cases  # noqa: E402

KERNELS = Path(triton_launch.__file__).parent
NUM_TOKENS = (16, 17, 18, 19, 31, 8191)
V, D = 80, 64
INTERNALS_MOVED = 3
"""Exit code of the child where this Triton has other internals than 3.6 to 3.9."""


@dataclass
class Recorder:
    """Stands in for `launch`; `variants` holds the cache key of each launch by kernel."""

    variants: dict[str, set[str]] = field(default_factory=dict)

    @functools.cached_property
    def backend(self) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend

        return make_backend(GPUTarget("cuda", 121, 32))

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: Mapping[str, Any],
        *,
        num_warps: int = triton_launch.ROW_WARPS,
        num_stages: int = 2,
    ) -> None:
        from triton.runtime.jit import compute_cache_key, create_function_from_signature

        bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        _, specialization, options = bind(*args, **constexprs, num_warps=num_warps, num_stages=num_stages)
        key = compute_cache_key({}, specialization, options)
        self.variants.setdefault(kernel.__name__, set()).add(key)


def leaf(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)


def run_rms_norm(T: int) -> None:
    """Without a residual, with one, and on heads that are a slice of a fused projection."""
    from sparkgrpo.kernels import rms_norm

    x_TD, weight_D = leaf(T, D), leaf(D)
    for residual_TD in (None, leaf(T, D)):
        y_TD, sum_TD = rms_norm.rms_norm(x_TD, weight_D, eps=1e-6, residual_TD=residual_TD)
        (y_TD.sum() + sum_TD.sum()).backward()
    rms_norm.rms_norm(leaf(T, 6 * D)[:, : 4 * D].view(T, 4, D), weight_D, eps=1e-6).y_TD.sum().backward()


def run_swiglu(T: int) -> None:
    from sparkgrpo.kernels import swiglu

    swiglu.swiglu(leaf(T, 2 * D)).sum().backward()


def run_rotary(T: int) -> None:
    from sparkgrpo.kernels import rotary

    angle_T1E = torch.zeros(T, 1, D // 2)
    rotary.rotary(leaf(T, 6 * D).view(T, 6, D)[:, :5], angle_T1E, angle_T1E).sum().backward()


def run_adamw(num_weights: int) -> None:
    """Any number of weights and of tensors, in place of tokens."""
    from sparkgrpo.kernels import adamw

    fp32 = [torch.zeros(num_weights) for _ in range(num_weights % 5 + 1)]
    rates = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    bf16 = [w.bfloat16() for w in fp32]
    adamw.adamw(fp32, fp32, fp32, fp32, bf16, step=num_weights, grad_scale=torch.ones(()), **rates)


def run_token_logprob(T: int) -> None:
    """With no option, then with all of them."""
    from sparkgrpo.kernels import token_logprob

    target_T, is_active_T = torch.zeros(T, dtype=torch.long), torch.ones(T, dtype=torch.bool)
    plain = token_logprob.token_logprob(leaf(T, V), target_T, want_entropy=False)
    plain.logprob_T.sum().backward()
    full = token_logprob.token_logprob(
        leaf(T, V), target_T, temperature=torch.ones(T), num_valid=V - 3, is_active_T=is_active_T
    )
    torch.stack(full[:2]).sum().backward()


def page_pool(*layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of 3 pages and 2 key heads."""
    pool = torch.zeros(2, *layers, 3, 16, 2, D, dtype=torch.bfloat16)
    return pool[0], pool[1]


def run_paged_attention(B: int) -> None:
    """Queries that are a slice of a fused projection; scratch that larger batches use, and none."""
    from sparkgrpo.kernels import paged_attention

    q_BHE, rows = (
        leaf(B, 6, D).detach()[:, :4],
        (torch.zeros(B, 20, dtype=torch.int32), torch.ones(B, dtype=torch.int32)),
    )
    scratch = paged_attention.AttentionScratch.allocate(
        max_rows=B + 3, num_heads=4, width=D, num_pages=20, device=torch.device("cpu")
    )
    for given in (scratch, None):
        paged_attention.paged_attention(q_BHE, *page_pool(), *rows, scratch=given)


def run_rotate_and_write(B: int) -> None:
    from sparkgrpo.kernels import kv_cache

    qkv = leaf(B, 8, D).detach().split((4, 2, 2), 1)
    angle_B1E = torch.zeros(B, 1, D // 2)
    rows = torch.zeros(B, 20, dtype=torch.int32), torch.ones(B, dtype=torch.int32)
    kv_cache.rotate_and_write(*qkv, angle_B1E, angle_B1E, *page_pool(), *rows)


def run_write_pages(T: int) -> None:
    from sparkgrpo.kernels import kv_cache

    k_TKE, v_TKE = leaf(T, 8, D).detach()[:, 4:].split(2, 1)
    kv_cache.write_pages(k_TKE, v_TKE, *page_pool(), torch.zeros(T + 1, dtype=torch.long)[1:])


def run_copy_pages(num_copies: int) -> None:
    from sparkgrpo.kernels import kv_cache

    page_C = torch.zeros(num_copies, dtype=torch.long)
    kv_cache.copy_pages(*page_pool(4), page_C, page_C)


CHUNK_ROWS = 1001
"""So that chunks start at every alignment."""


def run_linear_logprob(T: int) -> None:
    from sparkgrpo.kernels import linear_logprob

    scores = linear_logprob.linear_logprob(
        leaf(T, D), leaf(V, D), torch.zeros(T, dtype=torch.long), anchor_logprob_T=torch.zeros(T),
        chunk_tokens=CHUNK_ROWS,
    )  # fmt: skip
    torch.stack(scores[:2]).sum().backward()


def run_linear_grpo(T: int, *, design: str) -> None:
    from sparkgrpo.kernels import linear_grpo
    from sparkgrpo.kernels.grpo_row_loss import GrpoObjective

    rows_T = torch.ones(T)
    result = linear_grpo.linear_grpo(
        leaf(T, D), leaf(V, D), torch.zeros(T, dtype=torch.long), rows_T, rows_T,
        objective=GrpoObjective(beta=0.1, entropy_coef=0.01), old_logprob_T=rows_T, ref_logprob_T=rows_T,
        anchor_logprob_T=rows_T, active_idx_N=torch.arange(T, dtype=torch.int32), chunk_tokens=CHUNK_ROWS,
        design=design,
    )  # fmt: skip
    result.loss.backward()


def run_sample_update(B: int) -> None:
    """Any number of slots in place of tokens: the first ones of a state, as a bucket runs them."""
    from sparkgrpo.kernels import sampling

    i32, C = torch.int32, 7
    sampling.sample_update(
        torch.zeros(B, 1088), num_valid=1061,
        token_B=torch.zeros(B, dtype=i32), context_len_B=torch.zeros(B, dtype=i32),
        prompt_len_B=torch.zeros(B, dtype=i32), row_id_B=torch.zeros(B, dtype=i32), stream_B=torch.zeros(B).long(),
        out_token_SC=torch.zeros(B + 1, C, dtype=i32), out_logprob_SC=torch.zeros(B + 1, C),
        num_new_S=torch.zeros(B + 1, dtype=i32), finish_S=torch.zeros(B + 1, dtype=torch.int8),
        num_alive_1=torch.zeros(1, dtype=i32), seed_1=torch.zeros(1).long(), inv_temperature_1=torch.ones(1),
        eos_ids_8=torch.zeros(8, dtype=i32), max_new_1=torch.zeros(1, dtype=i32),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _any_length_kernel(x_ptr, num_rows, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202  # pyright: ignore[reportInvalidTypeForm]
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, 0.0, mask=offs < num_rows)


@triton.jit
def _one_length_kernel(x_ptr, num_rows, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202  # pyright: ignore[reportInvalidTypeForm]
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, 0.0, mask=offs < num_rows)


def run_right(T: int) -> None:
    triton_launch.launch(_any_length_kernel, (1,), (torch.empty(T), T), {"BLOCK": 64})


def run_specialised_count(T: int) -> None:
    triton_launch.launch(_one_length_kernel, (1,), (torch.empty(T), T), {"BLOCK": 64})


def run_constexpr_count(T: int) -> None:
    triton_launch.launch(_any_length_kernel, (1,), (torch.empty(T), T), {"BLOCK": triton.next_power_of_2(T)})


def run_specialised_slice(T: int) -> None:
    triton_launch.launch(_any_length_kernel, (1,), (torch.empty(T)[T % 4 :], T), {"BLOCK": 64})


OPERATIONS: list[tuple[str, Callable[[int], None]]] = [
    ("rms_norm", run_rms_norm),
    ("swiglu", run_swiglu),
    ("rotary", run_rotary),
    ("adamw", run_adamw),
    ("token_logprob", run_token_logprob),
    ("paged_attention", run_paged_attention),
    ("rotate_and_write", run_rotate_and_write),
    ("write_pages", run_write_pages),
    ("copy_pages", run_copy_pages),
    ("linear_logprob", run_linear_logprob),
    ("linear_grpo, anchored", functools.partial(run_linear_grpo, design="anchored")),
    ("linear_grpo, chunked", functools.partial(run_linear_grpo, design="chunked")),
    ("linear_grpo, recompute", functools.partial(run_linear_grpo, design="recompute")),
    ("sample_update", run_sample_update),
]
"""A name, and what runs the op for a number of tokens; together they reach every kernel."""

FAULTS: list[tuple[str, Callable[[int], None]]] = [
    ("count without do_not_specialize", run_specialised_count),
    ("count as constexpr", run_constexpr_count),
    ("slice without do_not_specialize_on_alignment", run_specialised_slice),
]


class Outcome(NamedTuple):
    """What the child found."""

    variants: dict[str, dict[str, dict[str, list[str]]]]
    """Operation -> number of tokens -> kernel -> cache keys."""
    errors: dict[str, str]
    """Operation -> traceback, of those that raised."""


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    if done.returncode == INTERNALS_MOVED:
        pytest.skip(f"Triton {triton.__version__} computes its cache key in another way: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return Outcome(*json.loads(done.stdout))


@pytest.mark.parametrize("name", [name for name, _ in OPERATIONS] + ["right"])
def test_any_number_of_tokens_runs_the_same_variants(name: str, outcome: Outcome) -> None:
    assert name not in outcome.errors, outcome.errors[name]
    (num_first, first), *others = outcome.variants[name].items()
    assert first, "nothing was launched"
    for num_tokens, kernels in others:
        assert kernels.keys() == first.keys(), f"T {num_tokens} runs other kernels than T {num_first}"
        for kernel, keys in first.items():
            assert kernels[kernel] == keys, f"{kernel}: T {num_tokens} compiles other variants than T {num_first}"


@pytest.mark.parametrize("name", [name for name, _ in FAULTS])
def test_what_ties_a_variant_to_the_number_of_tokens_is_seen(name: str, outcome: Outcome) -> None:
    seen = {key for kernels in outcome.variants[name].values() for keys in kernels.values() for key in keys}
    assert len(seen) > 1


def test_the_operations_reach_every_kernel(outcome: Outcome) -> None:
    seen = {kernel for name, _ in OPERATIONS for kernels in outcome.variants[name].values() for kernel in kernels}
    compiled = {case.kernel.__name__ for module in kernel_modules() for case in load_cases(module, 121)}
    assert not compiled - seen, f"add an operation that launches {sorted(compiled - seen)} to OPERATIONS"


def source_trees() -> dict[str, ast.Module]:
    return {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(KERNELS.glob("*.py"))}


ATOMIC = ("sampling_kernels.py", "tl.atomic_add(num_alive_ptr, -1, mask=finish > 0, sem='relaxed')")
"""The one atomic there may be: it counts rows that finish, in integers, whose order cannot matter."""


def faults(file_name: str, tree: ast.Module) -> list[str]:
    """Launches past `launch`, run-time tuning, block pointers and atomics, each with its line."""
    allowed = {id(x.func) for x in ast.walk(tree) if isinstance(x, ast.Call) and (file_name, ast.unparse(x)) == ATOMIC}
    found = []
    for node in ast.walk(tree):
        place = f"{file_name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and file_name != "triton_launch.py":
            found.append(f"{place}: kernel[grid](...); go through launch, which sets FP fusion")
        elif isinstance(node, ast.Attribute) and node.attr in ("autotune", "make_block_ptr"):
            found.append(f"{place}: {node.attr}; tiles come from a table, operands from descriptors or pointers")
        elif isinstance(node, ast.Attribute) and node.attr.startswith("atomic_") and id(node) not in allowed:
            found.append(f"{place}: {node.attr}; sums have a fixed order")
    return found


def test_kernels_are_launched_in_one_place_and_neither_tuned_nor_atomic() -> None:
    assert [fault for name, tree in source_trees().items() for fault in faults(name, tree)] == []


@pytest.mark.parametrize(
    ("program", "num_found"),
    [
        ("kernel[grid](x, num_warps=4)", 1),
        ("kernel[(1,)](x)", 1),
        ("@triton.autotune(configs=[], key=[])\ndef f(): ...", 1),
        ("tl.make_block_ptr(x)", 1),
        ("tl.atomic_add(x, 1)", 1),
        (ATOMIC[1], 1),
        ("launch(kernel, grid, args, {})", 0),
        ("table[key](x) if False else table[key]", 1),
        ("table[key]", 0),
    ],
)
def test_faults_in_the_source_are_seen(program: str, num_found: int) -> None:
    assert len(faults("x_kernels.py", ast.parse(program))) == num_found


def main() -> None:
    """Print the variants of every operation as JSON."""
    recorder = Recorder()
    triton_launch.launch = recorder.launch  # before a kernel file is imported, which takes it by name
    dispatch.runs_triton = lambda device: True
    try:
        run_right(16)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(INTERNALS_MOVED)
    outcome = Outcome({}, {})
    for name, run in [*OPERATIONS, *FAULTS, ("right", run_right)]:
        of_operation = outcome.variants.setdefault(name, {})
        try:
            for num_tokens in NUM_TOKENS:
                recorder.variants = {}
                run(num_tokens)
                of_operation[str(num_tokens)] = {kernel: sorted(keys) for kernel, keys in recorder.variants.items()}
        except Exception:  # the test of this operation fails with it, those of the others go on
            outcome.errors[name] = traceback.format_exc()
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
