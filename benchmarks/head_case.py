"""Operands of the head's comparisons, like a trained model's: largest logits of 25 to 40 nats, few likely tokens.

Logits of N(0, 1) would hide rounding: at 30 nats bf16 has steps of 1/8. Hidden states are solved for: each row gets
16 rivals among 100 frequent words, one near the wanted logit and the rest falling off by 0.8 nat each.

T rows, V vocabulary, D width, K rivals. Sequences of `seq_tokens` rows share an advantage; every (1 / frac_active)-th
sequence counts, the others have weight 0.
"""

from dataclasses import dataclass, replace

import torch

from benchmarks.comparison import Outputs
from sparkgrpo.kernels.grpo_row_loss import GrpoObjective
from sparkgrpo.kernels.linear_grpo import linear_grpo_reference

OBJECTIVE = GrpoObjective(beta=0.04)
NUM_RIVALS, NUM_WORDS = 16, 100
BLOCK_ROWS = 1024
CHECK_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Names a case. Hashable, and what a table says of it."""

    T: int
    V: int
    D: int
    dtype: torch.dtype
    frac_active: float = 1.0
    seq_tokens: int = 64

    def conditions(self) -> dict[str, object]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {"T": self.T, "f": self.frac_active, "V": self.V, "D": self.D, "dtype": dtype}


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """Operands on the device."""

    shape: HeadShape
    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    target_T: torch.Tensor
    advantage_T: torch.Tensor
    is_active_T: torch.Tensor
    anchor_T: torch.Tensor
    ref_T: torch.Tensor
    active_idx_N: torch.Tensor

    @property
    def token_weight_T(self) -> torch.Tensor:
        """The mean over the tokens that count."""
        return self.is_active_T / self.is_active_T.sum()

    def first_rows(self, num_rows: int) -> "HeadCase":
        """The case of the first rows alone; the weight is the same."""
        num_rows = min(num_rows, self.shape.T)
        names = ("hidden_TD", "target_T", "advantage_T", "is_active_T", "anchor_T", "ref_T")
        rows = {name: getattr(self, name)[:num_rows].detach() for name in names}
        rows["hidden_TD"].requires_grad_()
        active_idx_N = self.active_idx_N[: int(rows["is_active_T"].sum())]
        return replace(self, shape=replace(self.shape, T=num_rows), active_idx_N=active_idx_N, **rows)


def _rival_rows(
    weight_VD: torch.Tensor, num_rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows whose logits of their rivals are as wanted (the shortest such vector), and a target each."""
    device, K = weight_VD.device, min(NUM_RIVALS, weight_VD.shape[1] // 16)
    num_words = min(NUM_WORDS, weight_VD.shape[0])
    rival_TK = torch.rand(num_rows, num_words, generator=generator, device=device).argsort(1)[:, :K]
    largest_T1 = 25 + 15 * torch.rand(num_rows, 1, generator=generator, device=device)
    noise_TK = 0.5 * torch.randn(num_rows, K, generator=generator, device=device)
    wanted_TK = largest_T1 - (0.8 * torch.arange(K, device=device) + noise_TK)
    rows_TKD = weight_VD[rival_TK].float()
    weights_TK1 = torch.linalg.solve(rows_TKD @ rows_TKD.mT, wanted_TK[..., None])
    hidden_TD = (rows_TKD.mT @ weights_TK1)[..., 0]
    chosen_T1 = torch.multinomial(wanted_TK.softmax(1), 1, generator=generator)
    return hidden_TD, rival_TK.gather(1, chosen_T1)[:, 0]


def make_head_case(shape: HeadShape, device: torch.device) -> HeadCase:
    """Operands by a fixed seed. Anchors and reference are the policy's own log-probs with noise, as in training.

    One update a batch: the old policy is the present one, so that its ratio is 1 in everybody's arithmetic. Against
    log-probs of another arithmetic a peer that rounds its logits would be clipped at random.
    """
    generator = torch.Generator(device).manual_seed(0)
    weight_VD = (torch.randn(shape.V, shape.D, generator=generator, device=device) / shape.D**0.5).to(shape.dtype)
    hidden, target, logprob = [], [], []
    for start in range(0, shape.T, BLOCK_ROWS):
        rows_CD, target_C = _rival_rows(weight_VD, min(BLOCK_ROWS, shape.T - start), generator)
        rows_CD = rows_CD.to(shape.dtype)
        for part_CD, part_C in zip(rows_CD.split(128), target_C.split(128), strict=True):
            logits_CV = (part_CD @ weight_VD.T).float()
            logprob.append(logits_CV.gather(1, part_C[:, None])[:, 0] - logits_CV.logsumexp(1))
        hidden.append(rows_CD)
        target.append(target_C)
    logprob_T = torch.cat(logprob)

    def noisy(scale: float) -> torch.Tensor:
        return logprob_T + scale * torch.randn(shape.T, generator=generator, device=device)

    sequence_T = torch.arange(shape.T, device=device) // shape.seq_tokens
    advantage_S = torch.randn(-(-shape.T // shape.seq_tokens), generator=generator, device=device)
    is_active_T = sequence_T % round(1 / shape.frac_active) == 0
    return HeadCase(
        shape=shape,
        hidden_TD=torch.cat(hidden).requires_grad_(),
        weight_VD=weight_VD.requires_grad_(),
        target_T=torch.cat(target),
        advantage_T=advantage_S[sequence_T],
        is_active_T=is_active_T,
        anchor_T=noisy(0.01),
        ref_T=noisy(0.1),
        active_idx_N=is_active_T.nonzero()[:, 0].int(),
    )


def head_truths(case: HeadCase, *, has_gradients: bool = True, has_ce: bool = True) -> dict[str, Outputs]:
    """Float64 outputs of a small case: of the GRPO loss ("op"), and of the mean cross entropy ("ce").

    Without gradients: log-prob and entropy alone, which is all that scoring gives, at a third of the work.
    """
    hidden_TD = case.hidden_TD.detach().double().requires_grad_(has_gradients)
    weight_VD = case.weight_VD.detach().double().requires_grad_(has_gradients)
    out = linear_grpo_reference(
        hidden_TD,
        weight_VD,
        case.target_T,
        case.advantage_T.double(),
        case.token_weight_T.double(),
        objective=OBJECTIVE,
        ref_logprob_T=case.ref_T.double(),
    )
    # Rows that do not count are 0 in ours and computed by peers: their values are compared where they count.
    active = case.active_idx_N.long()
    op = {"loss": out.loss.detach(), "logprob": out.logprob_T[active].detach()}
    if out.entropy_T is not None:
        op["entropy"] = out.entropy_T[active].detach()
    if not has_gradients:
        return {"op": op}
    dhidden_TD, dweight_VD = torch.autograd.grad(out.loss, (hidden_TD, weight_VD))
    truths: dict[str, Outputs] = {"op": {**op, "dhidden": dhidden_TD, "dweight": dweight_VD}}
    if has_ce:
        losses = torch.nn.functional.cross_entropy(hidden_TD @ weight_VD.T, case.target_T)
        dhidden_TD, dweight_VD = torch.autograd.grad(losses, (hidden_TD, weight_VD))
        truths["ce"] = {"loss": losses.detach(), "dhidden": dhidden_TD, "dweight": dweight_VD}
    return truths


def logit_bound(case: HeadCase) -> float:
    """Nats that a log-prob may be off: D fp32 additions as a random walk, and the rounding of the result."""
    unit = 2.0**-24
    largest = (case.hidden_TD.detach().abs().float() @ case.weight_VD.detach().abs().float().T).max().item()
    return 0.5 * unit * case.shape.D**0.5 * largest + 4 * unit * 40
