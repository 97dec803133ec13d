"""Comparisons of the ops that bandwidth limits: RMSNorm, SwiGLU, rotary, AdamW, and log-probs of existing logits.

Each is a forward and a backward (AdamW: a step), against PyTorch's own ops, the compiler and Liger's kernels. The bytes
are the compulsory ones: every input read once, every output written once, in both directions.

T tokens, D width, F width of the MLP, H heads, E head width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.comparison import Comparison, Implementation, Outputs, Step
from sparkgrpo.kernels.adamw import adamw, adamw_reference
from sparkgrpo.kernels.rms_norm import rms_norm, rms_norm_reference
from sparkgrpo.kernels.rotary import rotary, rotary_reference
from sparkgrpo.kernels.swiglu import swiglu, swiglu_reference
from sparkgrpo.kernels.token_logprob import token_logprob, token_logprob_reference

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]
EPS = 1e-6
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
"""Relative L2: bf16 rounds the result (2^-9), peers also what lies between."""


@dataclass(frozen=True, kw_only=True)
class SmallCase:
    """Operands; the first `num_grads` have gradients, called by the names given."""

    inputs: Tensors
    grad_names: tuple[str, ...]
    dy: torch.Tensor

    def first_rows(self, num_rows: int) -> "SmallCase":
        """The first rows of whatever has as many rows as the gradient that arrives."""
        total = self.dy.shape[0]
        inputs = tuple(x[:num_rows].detach() if x.shape[0] == total else x.detach() for x in self.inputs)
        for x in inputs[: len(self.grad_names)]:
            x.requires_grad_()
        return SmallCase(inputs=inputs, grad_names=self.grad_names, dy=self.dy[:num_rows])

    def double(self) -> "SmallCase":
        inputs = tuple(x.detach().double() if x.is_floating_point() else x for x in self.inputs)
        for x in inputs[: len(self.grad_names)]:
            x.requires_grad_()
        return SmallCase(inputs=inputs, grad_names=self.grad_names, dy=self.dy.double())


def differentiated(case: SmallCase, function: Function) -> Step:
    """Forward and backward of a function with one output."""
    wanted = case.inputs[: len(case.grad_names)]

    def step() -> Outputs:
        y = function(*case.inputs)
        gradients = torch.autograd.grad(y, wanted, case.dy)
        return {"y": y.detach(), **dict(zip(case.grad_names, gradients, strict=True))}

    return step


def compiled(case: SmallCase, function: Function) -> Step:
    torch._dynamo.reset()
    return differentiated(case, torch.compile(function, fullgraph=True, dynamic=False))


def _norm_peer(x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x_TD, weight_D.shape, weight_D, EPS)


def _swiglu_peer(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF) * up_TF


def _rotary_peer(qk_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    first, second = qk_THE.chunk(2, dim=-1)
    turned = torch.cat((first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E), -1)
    return turned.to(qk_THE.dtype)


def _logprob_peer(logits_TV: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
    logprob_TV = logits_TV.float().log_softmax(1)
    return logprob_TV.gather(1, target_T[:, None])[:, 0]


def _liger_norm(x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x_TD, weight_D, EPS, 0.0, "llama", False)


def _liger_swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return LigerSiLUMulFunction.apply(gate_TF.contiguous(), up_TF.contiguous())


@dataclass(frozen=True, kw_only=True)
class SmallOp:
    """An op with one output: who computes it, and what it must move."""

    ours: Function
    reference: Function
    eager: Function
    liger: Function | None = None
    grad_names: tuple[str, ...]
    passes: int
    """Times that a tensor of the largest operand's size is read or written, forward and backward together."""


SMALL_OPS = {
    "rms_norm": SmallOp(
        ours=lambda x, w: rms_norm(x, w, eps=EPS).y_TD,
        reference=lambda x, w: rms_norm_reference(x, w, eps=EPS).y_TD,
        eager=_norm_peer,
        liger=_liger_norm,
        grad_names=("dx", "dweight"),
        passes=5,  # x, y; x, dy, dx
    ),
    "swiglu": SmallOp(
        ours=swiglu,
        reference=swiglu_reference,
        eager=_swiglu_peer,
        liger=_liger_swiglu,
        grad_names=("dgate_up",),
        passes=4,  # gate_up, y (half); gate_up, dy (half), dgate_up
    ),
    "rotary": SmallOp(ours=rotary, reference=rotary_reference, eager=_rotary_peer, grad_names=("dqk",), passes=4),
    "token_logprob": SmallOp(
        ours=lambda z, y: token_logprob(z, y).logprob_T,
        reference=lambda z, y: token_logprob_reference(z, y).logprob_T,
        eager=_logprob_peer,
        grad_names=("dlogits",),
        passes=3,  # logits; logits, dlogits
    ),
}


def _operands(op: str, sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensors, torch.Tensor]:
    """Inputs, and the gradient that arrives."""
    generator = torch.Generator(device).manual_seed(0)
    T = sizes["T"]

    def randn(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    if op == "rms_norm":
        return (randn(T, sizes["D"]), randn(sizes["D"])), randn(T, sizes["D"])
    if op == "swiglu":
        return (randn(T, 2 * sizes["F"]),), randn(T, sizes["F"])
    if op == "rotary":
        H, E = sizes["H"], sizes["E"]
        angles = randn(T, 1, E // 2, kind=torch.float32)
        return (randn(T, H, E), angles.cos(), angles.sin()), randn(T, H, E)
    logits_TV = (8 * randn(T, sizes["V"], kind=torch.float32)).to(dtype)
    return (logits_TV, torch.randint(sizes["V"], (T,), generator=generator, device=device)), randn(
        T, kind=torch.float32
    )


def _implementations(op: SmallOp, device: torch.device, *, has_compile: bool) -> list[Implementation]:
    rows = [
        Implementation(name="ours", make=partial(differentiated, function=op.ours), is_ours=True),
        Implementation(name="eager", make=partial(differentiated, function=op.eager)),
    ]
    if has_compile:
        rows.append(Implementation(name="torch.compile", make=partial(compiled, function=op.eager)))
    if has_compile and op.liger is not None and device.type == "cuda":
        rows.append(Implementation(name="Liger", make=partial(differentiated, function=op.liger)))
    return rows


def small_comparison(
    op: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    device: torch.device,
    copy_gbps: float,
    *,
    has_compile: bool,
) -> Comparison:
    """`sizes`: T with D, F, (H, E) or V, as the op needs. `has_compile` adds torch.compile and, on CUDA, Liger."""
    spec = SMALL_OPS[op]
    inputs, dy = _operands(op, sizes, dtype, device)
    for x in inputs[: len(spec.grad_names)]:
        x.requires_grad_()
    case = SmallCase(inputs=inputs, grad_names=spec.grad_names, dy=dy)
    check_case = case.first_rows(min(256, sizes["T"]))
    truth = differentiated(check_case.double(), spec.reference)()
    bound = BOUND[dtype]
    largest_bytes = inputs[0].numel() * inputs[0].element_size()
    bounds = {"y": bound, **dict.fromkeys(spec.grad_names, bound)}
    return Comparison(
        op=op,
        device=device,
        conditions={**sizes, "dtype": str(dtype).removeprefix("torch.")},
        case=case,
        check_case=check_case,
        truths={"op": truth},
        bounds=bounds,
        peer_bounds={name: 0.1 for name in bounds},
        implementations=_implementations(spec, device, has_compile=has_compile),
        num_bytes=spec.passes * largest_bytes,
        copy_gbps=copy_gbps,
    )


@dataclass(frozen=True, kw_only=True)
class AdamwCase:
    """A parameter set: masters, gradients, two moments, bf16 copies, all of the same shapes."""

    lists: tuple[tuple[torch.Tensor, ...], ...]
    scale: torch.Tensor

    def copy(self, dtype: torch.dtype | None = None) -> tuple[list[torch.Tensor], ...]:
        return tuple([x.detach().clone().to(dtype or x.dtype) for x in tensors] for tensors in self.lists)


def _step_outputs(lists: Sequence[Sequence[torch.Tensor]]) -> Outputs:
    master, _, exp_avg, exp_avg_sq, _ = (torch.cat([x.flatten() for x in tensors[:1]]) for tensors in lists)
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _ours_adamw(case: AdamwCase) -> Step:
    lists = case.copy()

    def step() -> Outputs:
        adamw(*lists, **ADAMW, grad_scale=case.scale)
        return _step_outputs(lists)

    return step


def _torch_adamw(case: AdamwCase, *, is_fused: bool) -> Step:
    """torch.optim.AdamW on the masters, its clip factor multiplied in, and the copies written."""
    lists = case.copy()
    master, grad, exp_avg, exp_avg_sq, copies = lists
    for w, g in zip(master, grad, strict=True):
        w.grad = g * case.scale
    options = {"betas": (ADAMW["beta1"], ADAMW["beta2"]), **{k: ADAMW[k] for k in ("lr", "eps", "weight_decay")}}
    optimizer = torch.optim.AdamW(master, fused=is_fused, **options)
    for w, m, v in zip(master, exp_avg, exp_avg_sq, strict=True):
        count = torch.tensor(float(ADAMW["step"] - 1), device=w.device if is_fused else "cpu")
        optimizer.state[w] = {"step": count, "exp_avg": m, "exp_avg_sq": v}

    def step() -> Outputs:
        optimizer.step()
        torch._foreach_copy_(copies, master)
        return _step_outputs(lists)

    return step


def adamw_comparison(num_tensors: int, size: int, device: torch.device, copy_gbps: float) -> Comparison:
    """Tensors of `size` x `size` weights."""
    generator = torch.Generator(device).manual_seed(0)

    def tensors(scale: float) -> tuple[torch.Tensor, ...]:
        return tuple(scale * torch.randn(size, size, generator=generator, device=device) for _ in range(num_tensors))

    master, grad, exp_avg = tensors(0.05), tensors(1e-3), tensors(1e-3)
    exp_avg_sq, copies = tuple(m.square() + 1e-8 for m in tensors(1e-3)), tuple(w.bfloat16() for w in master)
    case = AdamwCase(lists=(master, grad, exp_avg, exp_avg_sq, copies), scale=torch.ones((), device=device))
    check_case = AdamwCase(lists=tuple(tensors[:1] for tensors in case.lists), scale=case.scale)
    wide = check_case.copy(torch.float64)
    adamw_reference(*wide, **ADAMW, grad_scale=case.scale)
    names = ("master", "exp_avg", "exp_avg_sq")
    return Comparison(
        op="adamw",
        device=device,
        conditions={"weights": num_tensors * size * size, "tensors": num_tensors},
        case=case,
        check_case=check_case,
        truths={"op": _step_outputs(wide)},
        bounds=dict.fromkeys(names, 1e-6),
        peer_bounds=dict.fromkeys(names, 1e-4),
        implementations=[
            Implementation(name="ours", make=_ours_adamw, is_ours=True),
            Implementation(
                name="eager", make=partial(_torch_adamw, is_fused=False), note="torch.optim, counts nothing"
            ),
            Implementation(name="torch fused", make=partial(_torch_adamw, is_fused=True), note="counts nothing"),
        ],
        is_in_place=True,
        num_bytes=30 * num_tensors * size * size,
        copy_gbps=copy_gbps,
    )
