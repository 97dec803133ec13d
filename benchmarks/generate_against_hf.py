"""Generation against Hugging Face `generate`: same weights, prompts, sampling and lengths, alternating.

    python -m benchmarks.generate_against_hf [MODEL] [--precision fp32] [--rounds 3]

MODEL is a folder or a GGUF file; the embedded model by default. 64 sequences, 8 prompts x 8 siblings, each with a
length of its own (lognormal, mean a third of the cap), forced on both sides by the stop id, so that both make the same
number of tokens. Temperature 1, no filters. Both give the log-prob of every token: ours as always, HF through
`output_logits`, which GRPO would need and `generate` does not give otherwise. The file holds both times, tokens a
second, and for ours the cost of a token at 8 to 128 sequences a wave.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.record import RESULTS, write_result
from sparkgrpo.kernels.sampling import sample_update
from sparkgrpo.trainer.dialogue import Dialogue
from sparkgrpo.trainer.machine import EMBEDDED, model_source
from sparkgrpo.trainer.model.weights import LoadedModel, load_model, save_model
from sparkgrpo.trainer.rollout import step
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import Sampling
from sparkgrpo.trainer.run import DTYPES
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 8, 8, 144
NUM_SEQUENCES_A_WAVE = (8, 16, 32, 64, 128)


def lengths_of(num_rows: int, max_new_tokens: int) -> torch.Tensor:
    """int64 [S]: lognormal with a mean of about a third of the cap, at least 1, one of them at the cap."""
    rng = torch.Generator().manual_seed(0)
    length_S = (max_new_tokens / 3.6 * torch.randn(num_rows, generator=rng).mul(0.6).exp()).long()
    length_S = length_S.clamp(1, max_new_tokens)
    length_S[0] = max_new_tokens
    return length_S


class ForcedLengths:
    """In the place of `sample_update`: a row's token number length_S[row] is the stop id, and none before it is."""

    def __init__(self, length_S: torch.Tensor, stop_id: int) -> None:
        self.length_S, self.stop_id = length_S, stop_id

    def __call__(self, logits_BV: torch.Tensor, **state: Any) -> None:  # noqa: ANN401
        num_new_B = state["context_len_B"] - state["prompt_len_B"] + 1
        is_last_B = num_new_B >= self.length_S[state["row_id_B"].long()]
        logits_BV[:, self.stop_id] = torch.where(is_last_B, 1e4, -torch.inf)
        sample_update(logits_BV, **state)


def our_run(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], G: int, length_S: torch.Tensor, stop_id: int, key: int
) -> tuple[float, int]:
    """Seconds and tokens of one rollout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "sample_update", ForcedLengths(length_S, stop_id))
        start = time.perf_counter()
        rollout = engine.generate(prompts, G, Sampling(max_new_tokens=int(length_S.max())), key)
        seconds = time.perf_counter() - start
    assert torch.equal(rollout.length_S.long(), length_S)
    return seconds, int(length_S.sum())


def hf_run(
    hf_model: "PreTrainedModel", prompts: Sequence[Sequence[int]], G: int, length_S: torch.Tensor, stop_id: int
) -> tuple[float, int]:
    """The same by `generate`, prompts padded on the left."""
    from transformers import LogitsProcessor, LogitsProcessorList

    longest = max(map(len, prompts))
    ids = torch.tensor([[stop_id] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    class Force(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            is_last = input_ids.shape[1] - longest + 1 >= length_S
            scores[:, stop_id] = torch.where(is_last, 1e4, -torch.inf)
            return scores

    start = time.perf_counter()
    out = hf_model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=G,
        max_new_tokens=int(length_S.max()), eos_token_id=stop_id, pad_token_id=stop_id,
        logits_processor=LogitsProcessorList([Force()]), output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    new_SC = out.sequences[:, longest:]
    for column, logits_SV in enumerate(out.logits):  # the log-probs that GRPO needs
        logits_SV.float().log_softmax(1).gather(1, new_SC[:, column : column + 1])
    seconds = time.perf_counter() - start
    assert new_SC.shape == (len(length_S), int(length_S.max()))
    return seconds, int(length_S.sum())


def cost_by_sequences(
    make_engine: Callable[[], RolloutEngine], prompts: Sequence[Sequence[int]], stop_id: int, rounds: int
) -> dict[str, float]:
    """Microseconds of a generated token, by sequences in one wave; the sizes take turns, medians."""
    engine, seconds = make_engine(), {num: [] for num in NUM_SEQUENCES_A_WAVE}
    for key in range(rounds + 1):
        for num, kept in seconds.items():
            length_S = lengths_of(num, MAX_NEW_TOKENS)
            many = [prompts[n % len(prompts)] for n in range(num // GROUP_SIZE)]
            time_s, num_tokens = our_run(engine, many, GROUP_SIZE, length_S, stop_id, key)
            if key:
                kept.append(time_s / num_tokens)
    return {str(num): 1e6 * median(kept) for num, kept in seconds.items()}


def prompts_of(loaded: LoadedModel) -> list[list[int]]:
    """Countdown puzzles in the model's chat template."""
    problems = Countdown(CountdownOptions()).problems(0, 0, NUM_PROMPTS)
    return [Dialogue(loaded.tokenizer).prompt_ids(problem) for problem in problems]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=EMBEDDED, help="a folder or a GGUF file")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32", help="of both sides")
    parser.add_argument("--hf-precision", choices=tuple(DTYPES), default=None, help="of Hugging Face's, if another")
    parser.add_argument("--rounds", type=int, default=3, help="measured turns, after one of warm-up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    loaded = load_model(model_source(options.model), dtype=DTYPES[options.precision], device="cpu")
    hf_precision = options.hf_precision or options.precision
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), loaded)
        hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[hf_precision])
    prompts, stop_id = prompts_of(loaded), loaded.tokenizer.eos_token_id
    assert isinstance(stop_id, int)
    length_S = lengths_of(NUM_PROMPTS * GROUP_SIZE, MAX_NEW_TOKENS)

    def make_engine() -> RolloutEngine:
        return RolloutEngine(
            loaded.model, stop_ids=(stop_id,), num_valid=loaded.num_valid, max_rows=max(NUM_SEQUENCES_A_WAVE),
            max_new_tokens=MAX_NEW_TOKENS,
        )  # fmt: skip

    engine, ours_s, hf_s = make_engine(), [], []
    for key in range(options.rounds + 1):
        ours_s.append(our_run(engine, prompts, GROUP_SIZE, length_S, stop_id, key)[0])
        with torch.no_grad():
            hf_s.append(hf_run(hf_model, prompts, GROUP_SIZE, length_S, stop_id)[0])
        print(f"turn {key}: ours {ours_s[-1]:.2f} s, Hugging Face {hf_s[-1]:.2f} s", flush=True)
    ratios = [b / a for a, b in zip(ours_s[1:], hf_s[1:], strict=True)]
    num_tokens = int(length_S.sum())
    content = {
        "conditions": {
            "model": Path(options.model).stem, "precision": {"ours": options.precision, "hf": hf_precision},
            "sequences": f"{NUM_PROMPTS} prompts x {GROUP_SIZE}", "max_new_tokens": MAX_NEW_TOKENS,
            "num_tokens": num_tokens, "threads": torch.get_num_threads(),
        },
        "ours_s": ours_s[1:], "hf_s": hf_s[1:], "ratio_median": median(ratios), "ratio_min": min(ratios),
        "ours_tok_per_s": num_tokens / median(ours_s[1:]), "hf_tok_per_s": num_tokens / median(hf_s[1:]),
        "us_a_token_by_sequences": cost_by_sequences(make_engine, prompts, stop_id, options.rounds),
    }  # fmt: skip
    name = f"generate_against_hf_{Path(options.model).stem.lower()[:24]}_{options.precision}_{hf_precision}"
    path = write_result(name, torch.device("cpu"), content, folder=options.results)
    print(f"Hugging Face / ours: median {median(ratios):.2f}, least {min(ratios):.2f}; written to {path}")
    print("microseconds a token by sequences:", {k: round(v, 1) for k, v in content["us_a_token_by_sequences"].items()})


if __name__ == "__main__":
    main()
