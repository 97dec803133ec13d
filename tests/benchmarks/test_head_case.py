"""The head's operands, and that everybody who is compared computes the same thing."""

import math

import pytest
import torch

from benchmarks.comparison import output_errors
from benchmarks.head_case import HeadCase, HeadShape, head_truths, make_head_case
from benchmarks.head_implementations import grpo_implementations, onednn_product, score_implementations
from benchmarks.small_ops import SMALL_OPS, adamw_comparison, small_comparison
from sparkgrpo.kernels.head_chunks import PRODUCT_ROWS

CPU = torch.device("cpu")
SHAPE = HeadShape(T=64, V=301, D=48, dtype=torch.float32, frac_active=0.5, seq_tokens=16)


@pytest.fixture(scope="module")
def case() -> HeadCase:
    return make_head_case(SHAPE, CPU)


def test_largest_logits_are_those_of_a_trained_model(case: HeadCase) -> None:
    largest_T = (case.hidden_TD @ case.weight_VD.T).detach().amax(1)
    assert float(largest_T.min()) > 20 and float(largest_T.max()) < 45
    assert float(case.anchor_T.mean()) > -4, "targets are likely tokens"


def test_dead_sequences_have_no_weight(case: HeadCase) -> None:
    assert case.is_active_T.view(4, 16).float().mean(1).tolist() == [1, 0, 1, 0]
    assert math.isclose(float(case.token_weight_T.sum()), 1.0, rel_tol=1e-6)
    first = case.first_rows(32)
    assert math.isclose(float(first.token_weight_T.sum()), 1.0, rel_tol=1e-6)
    assert first.active_idx_N.tolist() == list(range(16))


@pytest.mark.parametrize("name", [i.name for i in grpo_implementations(CPU, has_peers=True)])
def test_everybody_computes_the_same(case: HeadCase, name: str) -> None:
    rows = {i.name: i for i in grpo_implementations(CPU, has_peers=True)}
    implementation = rows[name]
    if name == "torch.compile":
        pytest.skip("eager's function, compiled: slow and torch's own business")
    if name.startswith("TRL"):
        pytest.importorskip("trl")
    outputs = implementation.make(case)()
    if implementation.truth is None:
        assert not outputs
        return
    errors = output_errors(outputs, head_truths(case)[implementation.truth])
    assert {"loss", "dhidden", "dweight"} <= set(errors)
    assert max(errors.values()) < 1e-3  # fp32 logits of 40 nats: 2^-24 x 40 x a few roundings


def test_scoring_agrees(case: HeadCase) -> None:
    truth = head_truths(case)["op"]
    for implementation in score_implementations(CPU, has_peers=False):
        if implementation.truth is not None:
            assert max(output_errors(implementation.make(case)(), truth).values()) < 1e-3


@pytest.mark.parametrize(
    "shape", [(5, 3, 2 * PRODUCT_ROWS + 7), (2 * PRODUCT_ROWS + 7, 5, 3), (5, 2 * PRODUCT_ROWS + 7, 3)]
)
def test_the_floors_products_are_whole(shape: tuple[int, int, int]) -> None:
    """A floor that skipped a block would be a lie about the limit."""
    M, K, N = shape
    a_MK, b_KN = torch.randn(M, K), torch.randn(K, N)
    out_MN = torch.full((M, N), float("nan"))
    onednn_product(out_MN, a_MK, b_KN)
    torch.testing.assert_close(out_MN.double(), a_MK.double() @ b_KN.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("op", SMALL_OPS)
def test_small_ops_agree(op: str) -> None:
    sizes = {"T": 5, "D": 8, "F": 8, "H": 2, "E": 8, "V": 11}
    compared = small_comparison(op, sizes, torch.float32, CPU, 10.0, has_compile=False)
    for implementation in compared.implementations:
        errors = output_errors(implementation.make(compared.check_case)(), compared.truths["op"])
        assert set(errors) == set(compared.bounds) and max(errors.values()) < 1e-5


def test_adamw_agrees() -> None:
    compared = adamw_comparison(2, 8, CPU, 10.0)
    for implementation in compared.implementations:
        errors = output_errors(implementation.make(compared.check_case)(), compared.truths["op"])
        assert len(errors) == 3 and max(errors.values()) < 1e-6
