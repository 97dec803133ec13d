"""The comparisons of linear layers, shared-prompt attention and draws: everybody computes the same thing."""

import pytest
import torch

from benchmarks.comparison import Comparison, output_errors
from benchmarks.layer_ops import AttentionSizes, attention_comparison, draw_comparison, linear_comparison

CPU = torch.device("cpu")
COMPARISONS = {
    "linear": lambda: linear_comparison(300, 16, 24, CPU),
    "attention": lambda: attention_comparison(AttentionSizes(N=2, G=3, P=5, C=4, H=4, K=2, E=8), CPU),
    "draw": lambda: draw_comparison(9, 301, CPU, 10.0),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_everybody_computes_the_same(name: str) -> None:
    compared: Comparison = COMPARISONS[name]()
    for implementation in compared.implementations:
        outputs = implementation.make(compared.check_case)()
        if implementation.truth is None:
            assert not outputs
            continue
        errors = output_errors(outputs, compared.truths["op"])
        assert set(compared.bounds) <= set(errors)
        assert all(errors[key] <= compared.bounds[key] for key in compared.bounds), (implementation.name, errors)


def test_a_draws_wrong_log_prob_is_seen() -> None:
    """The error is that of the drawn token, whichever it is."""
    compared = draw_comparison(4, 7, CPU, 10.0)
    ours = compared.implementations[0].make(compared.check_case)()
    assert float(ours["logprob"].abs().max()) < 1e-5
    off = {"logprob": ours["logprob"] + 0.01}
    assert output_errors(off, compared.truths["op"])["logprob"] > compared.bounds["logprob"]
