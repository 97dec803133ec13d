"""Comparisons beside those of the small ops: a linear layer, attention over shared prompts, the draw of a token.

Linear and attention are forward and backward; the limit is their bare matrix products. A draw is one token and its
log-prob for every row; the limit is reading the logits once.

T tokens, D inputs, N outputs of a linear layer, H query heads, K key heads, E head width, P prompt, C completion, S
completions, B rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.comparison import Comparison, Implementation, Outputs, Step
from benchmarks.head_implementations import onednn_product, torch_product
from benchmarks.small_ops import SmallCase, differentiated
from sparkgrpo.kernels.cpu_products import has_onednn_products
from sparkgrpo.kernels.linear import linear, linear_reference
from sparkgrpo.kernels.prefix_attention import (
    TreeLayout,
    packed_starts,
    prefix_attention,
    prefix_attention_reference,
    tree_layout,
)
from sparkgrpo.kernels.sampling import sample_tokens

FP32_SUM = 1e-5
"""Relative L2 of fp32 sums of at most some thousand terms, in another order."""


def _linear_products(case: SmallCase, product: Callable[..., None]) -> Step:
    """y, dx and dweight as three products and nothing else."""
    x_TD, weight_ND = (x.detach() for x in case.inputs)
    y_TN, dx_TD, dweight_ND = torch.empty_like(case.dy), torch.empty_like(x_TD), torch.empty_like(weight_ND)

    def step() -> Outputs:
        product(y_TN, x_TD, weight_ND.T)
        product(dx_TD, case.dy, weight_ND)
        product(dweight_ND, case.dy.T, x_TD)
        return {}

    return step


def linear_comparison(T: int, D: int, N: int, device: torch.device) -> Comparison:
    """A linear layer in fp32."""
    generator = torch.Generator(device).manual_seed(0)
    x_TD, weight_ND, dy_TN = (
        torch.randn(shape, generator=generator, device=device) for shape in ((T, D), (N, D), (T, N))
    )
    case = SmallCase(inputs=(x_TD.requires_grad_(), weight_ND.requires_grad_()), grad_names=("dx", "dweight"), dy=dy_TN)
    check_case = case.first_rows(min(T - 1, 256))
    floors = {"bare products, torch.mm": torch_product}
    if device.type == "cpu" and has_onednn_products():
        floors["bare products, oneDNN"] = onednn_product
    rows = [
        Implementation(name="ours", make=partial(differentiated, function=linear), is_ours=True),
        Implementation(name="eager", make=partial(differentiated, function=F.linear)),
        *(
            Implementation(name=name, make=partial(_linear_products, product=product), truth=None, is_floor=True)
            for name, product in floors.items()
        ),
    ]
    return Comparison(
        op="linear",
        device=device,
        conditions={"T": T, "D": D, "N": N, "dtype": "float32"},
        case=case,
        check_case=check_case,
        truths={"op": differentiated(check_case.double(), linear_reference)()},
        bounds=dict.fromkeys(("y", "dx", "dweight"), FP32_SUM),
        peer_bounds=dict.fromkeys(("y", "dx", "dweight"), 1e-3),
        implementations=rows,
    )


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Prompts, each with G completions, all of one length (ragged ones are the tests' business)."""

    N: int
    G: int
    P: int
    C: int
    H: int
    K: int
    E: int


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Packed operands."""

    sizes: AttentionSizes
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dy_THE: torch.Tensor
    layout: TreeLayout
    row_SL: torch.Tensor = field(repr=False)
    """int64 [S, P + C]: packed tokens of every completion with a copy of its prompt."""
    place_T: torch.Tensor = field(repr=False)
    """int64 [T]: where a packed token stands first in row_SL, flat."""

    def double(self) -> "AttentionCase":
        qkv = tuple(x.detach().double().requires_grad_() for x in self.qkv)
        facts = {name: getattr(self, name) for name in ("sizes", "layout", "row_SL", "place_T")}
        return AttentionCase(qkv=(qkv[0], qkv[1], qkv[2]), dy_THE=self.dy_THE.double(), **facts)


def attention_case(sizes: AttentionSizes, device: torch.device) -> AttentionCase:
    """Operands by a fixed seed."""
    N, G, P, C = sizes.N, sizes.G, sizes.P, sizes.C
    trees = [n for n in range(N) for _ in range(G)]
    lengths = ([P] * N, [C] * (N * G), trees)
    prompt_start_N, completion_start_S, T = packed_starts(*lengths)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((T, sizes.H, sizes.E), (T, sizes.K, sizes.E), (T, sizes.K, sizes.E), (T, sizes.H, sizes.E))
    q, k, v, dy = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    rows = [
        [*range(prompt_start_N[n], prompt_start_N[n] + P), *range(start, start + C)]
        for n, start in zip(trees, completion_start_S, strict=True)
    ]
    row_SL = torch.tensor(rows, device=device)
    place_T = torch.empty(T, dtype=torch.int64, device=device)
    flat = row_SL.flatten().flip(0)  # of several places the first one is written last
    place_T[flat] = torch.arange(flat.numel() - 1, -1, -1, device=device)
    return AttentionCase(
        sizes=sizes,
        qkv=(q.requires_grad_(), k.requires_grad_(), v.requires_grad_()),
        dy_THE=dy,
        layout=tree_layout(*lengths, device=device),
        row_SL=row_SL,
        place_T=place_T,
    )


def _attended(case: AttentionCase, function: Callable[..., torch.Tensor]) -> Step:
    def step() -> Outputs:
        y_THE = function(case)
        grads = torch.autograd.grad(y_THE, case.qkv, case.dy_THE)
        return {"y": y_THE.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

    return step


def _repeated_prompts(case: AttentionCase) -> torch.Tensor:
    """One row a completion, its prompt computed again: what a batch of padded sequences does."""
    q, k, v = (x[case.row_SL].transpose(1, 2) for x in case.qkv)  # [S, H, L, E]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[case.place_T]


def _attention_products(case: AttentionCase) -> Step:
    """Scores and values forward, four products backward, prompts once and completions against prompt and own keys."""
    sizes = case.sizes
    S, H, E, P, C = sizes.N * sizes.G, sizes.H, sizes.E, sizes.P, sizes.C
    device = case.dy_THE.device
    parts = [
        (torch.randn(count * H, rows, E, device=device), torch.randn(count * H, keys, E, device=device))
        for count, rows, keys in ((sizes.N, P, P), (S, C, P + C))
    ]

    def step() -> Outputs:
        for rows, keys in parts:
            score = rows @ keys.mT
            _ = score @ keys, rows @ keys.mT, score.mT @ rows, score @ keys, score.mT @ rows
        return {}

    return step


def attention_comparison(sizes: AttentionSizes, device: torch.device) -> Comparison:
    """Attention over shared prompts in fp32."""
    small = AttentionSizes(N=2, G=2, P=min(sizes.P, 33), C=min(sizes.C, 17), H=sizes.H, K=sizes.K, E=sizes.E)
    case, check_case = attention_case(sizes, device), attention_case(small, device)

    def ours(case: AttentionCase) -> torch.Tensor:
        return prefix_attention(*case.qkv, case.layout)

    def reference(case: AttentionCase) -> torch.Tensor:
        return prefix_attention_reference(*case.qkv, case.layout)

    names = ("y", "dq", "dk", "dv")
    return Comparison(
        op="prefix_attention",
        device=device,
        conditions={**vars(sizes), "dtype": "float32"},
        case=case,
        check_case=check_case,
        truths={"op": _attended(check_case.double(), reference)()},
        bounds=dict.fromkeys(names, FP32_SUM),
        peer_bounds=dict.fromkeys(names, 1e-3),
        implementations=[
            Implementation(name="ours", make=partial(_attended, function=ours), is_ours=True),
            Implementation(
                name="eager", make=partial(_attended, function=_repeated_prompts), note="SDPA, a prompt a completion"
            ),
            Implementation(
                name="bare products",
                make=_attention_products,
                truth=None,
                is_floor=True,
                note="causal half not left out",
            ),
        ],
    )


@dataclass(frozen=True, kw_only=True)
class DrawCase:
    """Logits of a decode step."""

    logits_BV: torch.Tensor
    is_check: bool
    """Return how far each log-prob is from that of the drawn token in float64."""


def _drawn(case: DrawCase, draw: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Step:
    def step() -> Outputs:
        token_B, logprob_B = draw(case.logits_BV)
        if not case.is_check:
            return {}
        truth_BV = case.logits_BV.double().log_softmax(1)
        return {"logprob": logprob_B.double() - truth_BV.gather(1, token_B[:, None])[:, 0]}

    return step


def draw_comparison(B: int, V: int, device: torch.device, copy_gbps: float) -> Comparison:
    """One token a row with its log-prob, temperature 1; the draws themselves are tested statistically elsewhere."""
    generator = torch.Generator(device).manual_seed(0)
    logits_BV = 8 * torch.randn(B, V, generator=generator, device=device)
    uniform_2B = torch.rand(2, B, generator=generator, device=device)
    one = torch.ones(1, device=device)

    def ours(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = len(logits_BV)
        return sample_tokens(logits_BV, num_valid=V, inv_temperature_1=one, uniform_2B=uniform_2B[:, :num_rows])

    def eager(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_BV = logits_BV.log_softmax(1)
        token_B1 = torch.multinomial(logprob_BV.exp(), 1, generator=generator)
        return token_B1[:, 0], logprob_BV.gather(1, token_B1)[:, 0]

    num_check = min(B, 8)
    nats = 2.0**-24 * 4 * 60
    """Rounding of a few fp32 operations on numbers of up to 60 nats."""
    return Comparison(
        op="sample_tokens",
        device=device,
        conditions={"B": B, "V": V, "dtype": "float32"},
        case=DrawCase(logits_BV=logits_BV, is_check=False),
        check_case=DrawCase(logits_BV=logits_BV[:num_check], is_check=True),
        truths={"op": {"logprob": torch.zeros(num_check, dtype=torch.float64, device=device)}},
        bounds={"logprob": nats},
        peer_bounds={"logprob": 1e-3},
        implementations=[
            Implementation(name="ours", make=partial(_drawn, draw=ours), is_ours=True),
            Implementation(name="eager", make=partial(_drawn, draw=eager), note="log_softmax and multinomial"),
        ],
        num_bytes=4 * B * V,
        copy_gbps=copy_gbps,
    )
