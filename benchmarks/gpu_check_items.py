"""The groups of gpu_check.py: each is a list of items, an item yields findings as it makes them.

T rows, V vocabulary, D width. An item that raises becomes a finding with its traceback; the next item goes on.
"""

import json
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.comparison import Comparison, output_errors, run_comparison, sample_s
from benchmarks.device_probe import copy_gbps, product_tflops
from benchmarks.gpu_check_decode import decode_rates
from benchmarks.gpu_check_finding import LEFT_OUT, CheckContext, Finding, Found, Group
from benchmarks.head_case import HeadCase, logit_bound, make_head_case
from benchmarks.head_comparison import GRADIENT_BOUND, head_comparison
from benchmarks.record import write_result
from benchmarks.small_ops import SMALL_OPS, adamw_comparison, small_comparison
from benchmarks.table import render
from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.head_plan import Design, plan_linear_grpo
from sparkgrpo.kernels.linear_grpo import linear_grpo, linear_grpo_reference
from sparkgrpo.kernels.linear_logprob import linear_logprob

BF16, FP32 = torch.bfloat16, torch.float32
V_QWEN, V_QWEN_VALID = 151_936, 151_665
"""Rows of the head, and len(tokenizer)."""
OBJECTIVES = {
    "clip k3": GrpoObjective(beta=0.04),
    "clip delta": GrpoObjective(delta=2.0),
    "cispo k2": GrpoObjective(surrogate="cispo", beta=0.04, kl="k2"),
    "entropy k1": GrpoObjective(entropy_coef=0.01, beta=0.04, kl="k1"),
    "sequence": GrpoObjective(ratio="sequence", eps_low=0.01, eps_high=0.01),
}


def run_group(name: str, context: CheckContext) -> None:
    """Runs a group's items and appends each finding to the file at once."""
    with context.lines.open("a") as lines:

        def write(finding: Finding) -> None:
            lines.write(json.dumps(finding.as_json()) + "\n")
            lines.flush()

        for item in GROUPS[name].items:
            try:
                for title, ok, text, figures in item(context):
                    write(Finding(group=name, item=title, ok=ok, text=text, figures=figures))
            except Exception as error:  # the finding says what happened; the next item goes on
                text = f"{type(error).__name__}: {error}"[:300]
                write(Finding(group=name, item=item.__name__, ok=False, text=text, detail=traceback.format_exc()))


def _clocks() -> str | None:
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment(context: CheckContext) -> Iterator[Found]:
    """Rates of today, with the clocks before and after."""
    before = _clocks()
    rates = {
        "copy_gbps": copy_gbps(context.device, is_quick=context.is_quick),
        "bf16_tflops": product_tflops(context.device, BF16, is_quick=context.is_quick),
    }
    text = f"copy {rates['copy_gbps']:.0f} GB/s, bf16 product {rates['bf16_tflops']:.1f} TFLOP/s"
    yield "rates", None, text, {**rates, "clocks_before": before, "clocks_after": _clocks()}


def _call(
    case: HeadCase, objective: GrpoObjective, design: Design, *, has_index: bool = True
) -> dict[str, torch.Tensor]:
    bounds_S1 = torch.arange(0, case.shape.T + 1, case.shape.seq_tokens, dtype=torch.int32)
    out = linear_grpo(
        case.hidden_TD, case.weight_VD, case.target_T, case.advantage_T, case.token_weight_T, objective=objective,
        old_logprob_T=case.ref_T, ref_logprob_T=case.anchor_T, anchor_logprob_T=case.anchor_T,
        cu_seqlens_S1=bounds_S1 if objective.ratio == "sequence" else None,
        active_idx_N=case.active_idx_N if has_index else None, design=design,
    )  # fmt: skip
    dhidden_TD, dweight_VD = torch.autograd.grad(out.loss, (case.hidden_TD, case.weight_VD))
    values = {"loss": out.loss.detach(), "logprob": out.logprob_T, "dhidden": dhidden_TD, "dweight": dweight_VD}
    return values if out.entropy_T is None else {**values, "entropy": out.entropy_T}


def _truth(case: HeadCase, objective: GrpoObjective) -> dict[str, torch.Tensor]:
    hidden_TD, weight_VD = (x.detach().double().requires_grad_() for x in (case.hidden_TD, case.weight_VD))
    bounds_S1 = torch.arange(0, case.shape.T + 1, case.shape.seq_tokens, dtype=torch.int32)
    out = linear_grpo_reference(
        hidden_TD, weight_VD, case.target_T, case.advantage_T.double(), case.token_weight_T.double(),
        objective=objective, old_logprob_T=case.ref_T.double(), ref_logprob_T=case.anchor_T.double(),
        cu_seqlens_S1=bounds_S1,
    )  # fmt: skip
    dhidden_TD, dweight_VD = torch.autograd.grad(out.loss, (hidden_TD, weight_VD))
    values = {"loss": out.loss.detach(), "logprob": out.logprob_T.detach(), "dhidden": dhidden_TD}
    return {**values, "dweight": dweight_VD, **({} if out.entropy_T is None else {"entropy": out.entropy_T.detach()})}


def correctness(context: CheckContext) -> Iterator[Found]:
    """Every design and objective at 256 rows against float64."""
    for dtype in (BF16, FP32):
        case = make_head_case(context.shape(256, 32_768, 896, dtype, 0.5), context.device)
        nats, bound = logit_bound(case), GRADIENT_BOUND[dtype]
        bounds = {"logprob": nats, "entropy": 10 * nats, "dhidden": bound, "dweight": bound}
        for name, objective in OBJECTIVES.items():
            truth = _truth(case, objective)
            for design in context.designs:
                title = f"{design}, {name}, {str(dtype)[6:]}"
                try:
                    errors = output_errors(_call(case, objective, design), truth)
                except Exception as error:  # one design's failure says nothing of the others
                    yield title, False, f"{type(error).__name__}: {error}"[:300], {"trace": traceback.format_exc()}
                    continue
                ok = all(errors[key] <= bounds[key] for key in bounds)
                yield title, ok, "  ".join(f"{key} {errors[key]:.0e}" for key in bounds), errors


def bits(context: CheckContext) -> Iterator[Found]:
    """The same bits from a second run; and a row's log-prob whatever the rows beside it."""
    case = make_head_case(context.shape(4096, V_QWEN, 896, BF16, 0.5), context.device)
    for design in context.designs:
        first, second = (_call(case, OBJECTIVES["clip k3"], design) for _ in range(2))
        unlike = [name for name in first if not torch.equal(first[name], second[name])]
        yield f"repeat {design}", not unlike, f"unlike: {', '.join(unlike) or 'nothing'}", {}
    with torch.no_grad():
        whole = linear_logprob(case.hidden_TD, case.weight_VD, case.target_T).logprob_T
        for num in (1, 64):
            part = linear_logprob(case.hidden_TD[:num], case.weight_VD, case.target_T[:num]).logprob_T
            gap = (part - whole[:num]).abs().max().item()
            yield f"linear_logprob, {num} of {case.shape.T} rows", gap == 0, f"largest gap {gap:.1e} nats", {"gap": gap}


def host_syncs(context: CheckContext) -> Iterator[Found]:
    """No host sync in forward or backward when the active rows are given."""
    case = make_head_case(context.shape(2048, 32_768, 896, BF16, 0.5), context.device)
    for design in context.designs:
        _call(case, OBJECTIVES["clip k3"], design)  # compiles
        if context.device.type != "cuda":
            yield f"sync {design}", None, "needs CUDA", {}
            continue
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            _call(case, OBJECTIVES["clip k3"], design)
            yield f"sync {design}", True, "none", {}
        except RuntimeError as error:
            yield f"sync {design}", False, str(error)[:300], {"trace": traceback.format_exc()}
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _median_s(step: Callable[[], object], device: torch.device) -> float:
    def run() -> dict[str, torch.Tensor]:
        step()
        return {}

    sample_s(run, device)
    return median(sample_s(run, device) for _ in range(5))


def gradient_products(context: CheckContext) -> Iterator[Found]:
    """Do both gradient products keep the bf16 rate when their result is fp32, and at an odd vocabulary?"""
    for V in (301, 296) if context.is_quick else (V_QWEN, V_QWEN_VALID):
        yield from _gradient_products_at(context, V)


def _gradient_products_at(context: CheckContext, V: int) -> Iterator[Found]:
    C, D = (64, 48) if context.is_quick else (4096, 896)
    exp_CV = torch.rand(C, V, device=context.device).to(BF16)
    rows_CD, weight_VD = (torch.randn(n, D, device=context.device).to(BF16) for n in (C, V))
    for name, a, b in (("dhidden", exp_CV, weight_VD), ("dweight", exp_CV.T, rows_CD)):
        rates = {}
        for dtype in (BF16, FP32):
            options: dict[str, Any] = {} if dtype == BF16 or context.device.type == "cpu" else {"out_dtype": dtype}
            seconds = _median_s(lambda a=a, b=b, options=options: torch.mm(a, b, **options), context.device)
            rates[f"{str(dtype)[6:]}_tflops"] = 2 * C * V * D / seconds / 1e12
        text = f"bf16 out {rates['bfloat16_tflops']:.1f}, fp32 out {rates['float32_tflops']:.1f} TFLOP/s"
        yield f"product {name} V {V}", None, text, rates


def tile_share(context: CheckContext) -> Iterator[Found]:
    """eps: the rate of the scoring tile over cuBLAS' product; it decides the design."""
    for D in (896, 1536, 2048):
        case = make_head_case(context.shape(4096, V_QWEN, D, BF16), context.device)
        hidden_TD, weight_VD = case.hidden_TD.detach(), case.weight_VD.detach()
        product_s = _median_s(lambda h=hidden_TD, w=weight_VD: h @ w.T, context.device)
        with torch.no_grad():
            score_s = _median_s(
                lambda c=case: linear_logprob(c.hidden_TD, c.weight_VD, c.target_T, anchor_logprob_T=c.anchor_T),
                context.device,
            )
        figures = {"D": D, "eps": product_s / score_s, "product_s": product_s, "score_s": score_s}
        yield f"eps at D {D}", None, f"{product_s / score_s:.2f} ({1e3 * score_s:.2f} ms scoring)", figures


def peak_bytes(context: CheckContext) -> Iterator[Found]:
    """Extra bytes at the peak against what the plan promises."""
    case = make_head_case(context.shape(8192, V_QWEN, 896, BF16), context.device)
    for design in context.designs:
        if context.device.type != "cuda":
            yield f"peak {design}", None, "needs CUDA", {}
            continue
        plan = plan_linear_grpo(
            case.shape.T, case.shape.V, case.shape.D, objective=OBJECTIVES["clip k3"], dtype=BF16,
            device=context.device, needs_dweight=True, design=design,
        )  # fmt: skip
        _call(case, OBJECTIVES["clip k3"], design)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _call(case, OBJECTIVES["clip k3"], design)
        peak = torch.cuda.max_memory_allocated() - before
        figures = {"peak_bytes": peak, "plan_bytes": plan.num_bytes}
        # autograd hands dweight on in the weight's dtype, beside the plan's fp32 one
        limit = 1.02 * plan.num_bytes + case.weight_VD.numel() * case.weight_VD.element_size()
        text = f"{peak / 2**20:.0f} MiB, plan {plan.num_bytes / 2**20:.0f} MiB + dweight in bf16"
        yield f"peak {design}", peak <= limit, text, figures


OpCase = tuple[str, Callable[[], Comparison]]
"""An op, and what makes one of its cases."""


def _timed(context: CheckContext, todo: Sequence[OpCase]) -> Iterator[Found]:
    """Runs comparisons while time is left; writes an op's file once all its cases are measured.

    Never in part: the file may stand in the place of a complete one.
    """
    missing = Counter(op for op, _ in todo)
    by_op: dict[str, list[dict[str, object]]] = {op: [] for op in missing}
    for op, make in todo:
        if time.monotonic() > context.deadline_s - 5:
            unwritten = [name for name, count in missing.items() if count]
            yield "case", None, f"{LEFT_OUT}; no file of {', '.join(unwritten)}", {}
            return
        comparison = make()
        run_comparison(comparison, implementation_s=0.02 if context.is_quick else 0.25)
        facts = comparison.as_json()
        by_op[op].append(facts)
        ours = [row for row in comparison.rows if row.is_ours]
        missing[op] -= any(row.median_s is not None for row in ours)
        if not missing[op]:
            content = {"conditions": {"command": "gpu_check"}, "cases": by_op[op]}
            write_result(op, context.device, content, folder=context.results)
        failures = [f"{row.name}: {row.failure}" for row in ours if row.failure]
        title = f"{op} " + " ".join(f"{k} {v}" for k, v in comparison.conditions.items())
        yield title, not failures, "; ".join(failures) + "\n" + render(comparison), facts


def head_cases(context: CheckContext) -> Iterator[Found]:
    """The case table of the head: T, active fraction and width."""
    cases = [(8192, 896, 1.0), (8192, 896, 0.5), (32_768, 896, 1.0), (2048, 896, 1.0), (8192, 1536, 1.0)]
    cases += [(8192, 2048, 1.0), (8192, 896, 0.25), (32_768, 896, 0.5), (2048, 896, 0.5), (2048, 896, 0.25)]
    cases += [(32_768, 896, 0.25)]
    if context.is_quick:
        cases = cases[:2]

    def make(op: str, T: int, D: int, frac_active: float) -> OpCase:
        shape = context.shape(T, V_QWEN, D, BF16, frac_active)
        is_compared = frac_active == 1.0 and T == 8192 and not context.is_quick
        return op, lambda: head_comparison(op, shape, context.device, has_peers=is_compared)

    todo = [make("linear_grpo", *case) for case in cases]
    todo.insert(2, make("linear_logprob", 8192, 896, 1.0))
    yield from _timed(context, todo)


def small_cases(context: CheckContext) -> Iterator[Found]:
    """Small ops: right, and what share of a copy's bandwidth."""
    is_quick = context.is_quick
    gbps = copy_gbps(context.device, is_quick=is_quick)
    T = 64 if is_quick else 16_384
    sizes = {
        "rms_norm": {"T": T, "D": 48 if is_quick else 896},
        "swiglu": {"T": T, "F": 48 if is_quick else 4864},
        "rotary": {"T": T, "H": 2 if is_quick else 16, "E": 64},
        "token_logprob": {"T": 16 if is_quick else 1024, "V": 301 if is_quick else V_QWEN},
    }
    has_compile = context.device.type == "cuda"

    def make(op: str, dtype: torch.dtype) -> OpCase:
        return op, lambda: small_comparison(op, sizes[op], dtype, context.device, gbps, has_compile=has_compile)

    todo = [make(op, dtype) for dtype in (BF16, FP32) for op in SMALL_OPS]
    num_tensors, size = (2, 32) if is_quick else (32, 2048)
    todo.insert(0, ("adamw", lambda: adamw_comparison(num_tensors, size, context.device, gbps)))
    yield from _timed(context, todo)


def whole_step(context: CheckContext) -> Iterator[Found]:
    """A whole GRPO step of Qwen2.5-0.5B's shape."""
    from benchmarks.gpu_check_step import whole_steps  # needs transformers, the kernels' groups do not

    yield from whole_steps(context)


GROUPS = {
    "environment": Group(items=(environment,), limit_s=30),
    "correctness": Group(items=(correctness,), limit_s=60),
    "head": Group(items=(tile_share, gradient_products, host_syncs, bits, peak_bytes), limit_s=60),
    "decode": Group(items=(decode_rates,), limit_s=90),
    "step": Group(items=(whole_step,), limit_s=70),
    "cases": Group(items=(head_cases,), limit_s=100),
    "small": Group(items=(small_cases,), limit_s=45),
}
"""In the order in which they are run. The time of all is bounded by the budget."""
