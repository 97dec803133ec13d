"""gpu_check's decode group: is a replayed graph the plain step, and how near to the bandwidth does a step come?

Qwen2.5-0.5B's shape with random weights. B sequences, G = 8 siblings a prompt of 100 tokens, all of them run to the
limit, so that every step is a full one.
"""

from collections.abc import Iterator

import torch

from benchmarks.device_probe import copy_gbps
from benchmarks.gpu_check_finding import CheckContext, Found
from sparkgrpo.trainer.model.decoder import DecoderConfig
from sparkgrpo.trainer.rollout.engine import RolloutEngine
from sparkgrpo.trainer.rollout.result import RolloutStats, Sampling

QWEN_HALF_B = DecoderConfig(
    family="qwen2", vocab_size=151_936, width=896, num_layers=24, num_heads=14, num_kv_heads=2, head_width=64,
    ffn_width=4864, rms_eps=1e-6, rope_theta=1e6, tie_embeddings=True, qkv_bias=True,
)  # fmt: skip
TINY = DecoderConfig(
    family="qwen2", vocab_size=304, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_width=16, ffn_width=96,
    rms_eps=1e-6, rope_theta=1e6, tie_embeddings=True, qkv_bias=True,
)  # fmt: skip
NUM_VALID = 151_665
PROMPT_TOKENS = 100
BATCHES = (1, 8, 64, 128, 256, 512)


def _run(engine: RolloutEngine, batch: int, num_new: int, prompt_tokens: int) -> RolloutStats:
    G = min(8, batch)
    prompts = [[(31 * n + i) % 300 for i in range(prompt_tokens)] for n in range(batch // G)]
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
    engine.generate(prompts, G, sampling, 0)  # compiles, and captures where graphs are
    return engine.generate(prompts, G, sampling, 1).stats


def decode_rates(context: CheckContext) -> Iterator[Found]:
    """The self-test; then milliseconds a step, tokens a second and GB/s of each batch, by graph and by plain steps."""
    from sparkgrpo.trainer.model.weights import random_model  # needs transformers, the other groups do not

    is_quick, is_cuda = context.is_quick, context.device.type == "cuda"
    config, dtype = (TINY, torch.float32) if is_quick else (QWEN_HALF_B, torch.bfloat16)
    num_new, prompt_tokens = (4, 20) if is_quick else (64, PROMPT_TOKENS)
    model = random_model(config, seed=0, dtype=dtype, device=context.device)
    gbps = copy_gbps(context.device, is_quick=is_quick)

    def engine(max_rows: int) -> RolloutEngine:
        return RolloutEngine(
            model, stop_ids=(), num_valid=min(NUM_VALID, config.vocab_size - 1), max_rows=max_rows, cache="paged",
            max_new_tokens=num_new,
        )  # fmt: skip

    why = engine(8).self_test()
    yield "graph self-test", why is None if is_cuda else None, why or "graph and plain step agree", {}
    for batch in BATCHES[:2] if is_quick else BATCHES:
        figures: dict[str, object] = {"batch": batch, "copy_gbps": gbps}
        for name in ("graph", "plain") if is_cuda else ("plain",):
            own = engine(batch)
            if name == "plain":
                own.capture = None
            stats = _run(own, batch, num_new, prompt_tokens)
            assert stats.num_steps == num_new - 1 and stats.decode_gbps is not None
            figures |= {
                f"{name}_ms_a_step": 1e3 * stats.t_decode_s / stats.num_steps,
                f"{name}_tok_per_s": batch * stats.num_steps / stats.t_decode_s,
                f"{name}_gbps": stats.decode_gbps,
                f"{name}_frac_of_copy": stats.decode_gbps / gbps,
                f"{name}_coverage": stats.graph_coverage,
            }
        shown = [f"{key} {value:.3g}" for key, value in figures.items() if isinstance(value, float)]
        yield f"decode B {batch}", None, ", ".join(shown), figures
