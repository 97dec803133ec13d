"""What the hardware allows and what a model's step asks of it: peak rates by device, bytes and flops from shapes.

    decode    bytes of a step = weights (head once, no embedding gather) + KV bytes of every context token
                                + 8 bytes a logit (fp32, written and read)
    training  flops = 2 P a token and 2 V D a head row, and 4 H E a pair of query and key in each layer, all times 3
              for forward and backward

Only work that must be done is counted: prompts once, dead groups not, recomputation not. So a share of a limit is a
lower bound, and one above 100 % is a fault of the count, of the clock or of the limit: it is refused, not reported.

Letters: V vocabulary, D width, P parameters of the layers' products, H query heads, E head width.
"""

from dataclasses import dataclass

MAX_SHARE = 1.05
"""A probe's own noise is 5 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLimits:
    """Peak rates of a device, as its maker or owners publish them."""

    name: str
    """Part of the device's name by which it is recognised."""
    read_gbps: float
    """1e9 bytes a second."""
    bf16_tflops: float
    """Dense, fp32 accumulation."""
    source: str
    date: str
    """When the source was read."""


LIMITS = (
    DeviceLimits(
        name="GB10", read_gbps=273, bf16_tflops=125, date="2026-11",
        source="NVIDIA, nominal (1 PFLOP sparse FP4 halved thrice); owners measured 231-234 GB/s and 91-97 TFLOP/s",
    ),
    DeviceLimits(name="H200", read_gbps=4800, bf16_tflops=989, source="NVIDIA datasheet, SXM", date="2026-11"),
    DeviceLimits(name="H100", read_gbps=3350, bf16_tflops=989, source="NVIDIA datasheet, SXM", date="2026-11"),
    DeviceLimits(name="A100", read_gbps=2039, bf16_tflops=312, source="NVIDIA datasheet, 80 GB SXM", date="2026-11"),
    DeviceLimits(
        name="RTX 4090", read_gbps=1008, bf16_tflops=165, source="NVIDIA, Ada whitepaper, fp32 accumulation",
        date="2026-11",
    ),
    DeviceLimits(
        name="RTX 5090", read_gbps=1792, bf16_tflops=210, date="2026-11",
        source="NVIDIA, Blackwell whitepaper, fp32 accumulation: a quarter of 838 sparse",
    ),
)  # fmt: skip
NOT_THE_SXM_CARD = ("PCIE", "NVL", "40GB", "LAPTOP", "RTX 4090 D", "RTX 5090 D")
"""Devices of a listed name with other rates: their limits are not known here."""


def limits_of(device_name: str) -> DeviceLimits | None:
    """The published limits of a device by its name; None for one that is not listed, a CPU among them."""
    name = device_name.upper()
    if any(other in name for other in NOT_THE_SXM_CARD):
        return None
    return next((limits for limits in LIMITS if limits.name.upper() in name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a decoder's work depends on."""

    vocab_size: int
    """V: rows of the head that are computed."""
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    itemsize: int
    """Bytes of a weight and of a cached key's element."""

    @property
    def layer_params(self) -> int:
        """P: weights of the matrix products of all layers; norms and biases are left out (below 0.1 %)."""
        attention = self.width * self.head_width * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.width * self.ffn_width)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of a token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_width * self.itemsize

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights."""
        return (self.layer_params + self.vocab_size * self.width) * self.itemsize


def decode_bytes(shape: ModelShape, *, num_steps: int, num_context_tokens: int, num_rows: int) -> int:
    """Bytes that decode steps must move.

    Args:
        num_context_tokens: Sum over steps and rows of the context each row reads (a shared prompt counts once).
        num_rows: Sum over steps of the rows that are computed.
    """
    logits = 8 * shape.vocab_size * num_rows
    return num_steps * shape.weight_bytes + shape.kv_bytes_per_token * num_context_tokens + logits


def forward_flops(shape: ModelShape, *, num_tokens: int, num_head_rows: int, num_pairs: int) -> int:
    """Flops of one forward pass.

    Args:
        num_tokens: Packed tokens, prompts once.
        num_head_rows: Rows that meet the head.
        num_pairs: Pairs of a query and a key that it sees, per layer and head.
    """
    products = 2 * shape.layer_params * num_tokens
    head = 2 * shape.vocab_size * shape.width * num_head_rows
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_width * num_pairs
    return products + head + attention


def train_flops(
    shape: ModelShape, *, num_tokens: int, num_head_rows: int, num_pairs: int, is_frozen: bool = False
) -> int:
    """Flops of a forward and a backward pass: three times the forward's; twice where the weights get no gradient.

    Args:
        is_frozen: Only adapters are trained; theirs are not counted.
    """
    passes = 2 if is_frozen else 3
    return passes * forward_flops(shape, num_tokens=num_tokens, num_head_rows=num_head_rows, num_pairs=num_pairs)


def tree_pairs(prompt_lens: list[int], completions_of_prompt: list[list[int]]) -> int:
    """Pairs of query and key in trees of a prompt and its completions: each token sees its past and itself."""
    pairs = 0
    for prompt, completions in zip(prompt_lens, completions_of_prompt, strict=True):
        pairs += prompt * (prompt + 1) // 2
        pairs += sum(length * prompt + length * (length + 1) // 2 for length in completions)
    return pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rate over a limit."""

    value: float | None
    """None: not known, or refused."""
    fault: str | None = None
    """Why it was refused, and what to suspect."""


def decode_share(
    gbps: float, probe_gbps: float, spec_gbps: float | None, *, step_bytes: float, cache_bytes: int
) -> Share:
    """Share of the read probe that decoding reached.

    A model that fits the last cache is not bound by memory: there is no share then. One that fits in part may exceed
    the memory's rate by what the cache served; only beyond that is the count at fault.

    Args:
        gbps: Rate of decoding. probe_gbps: Read rate of today's probe. spec_gbps: Published rate, None if unknown.
        step_bytes: Bytes of one decode step. cache_bytes: Last cache of the device.
    """
    if step_bytes <= 2 * cache_bytes:
        return Share(value=None)
    share = gbps / probe_gbps
    if share <= 1:
        return Share(value=share)
    from_memory = gbps * (1 - cache_bytes / step_bytes)
    limit = max(probe_gbps, spec_gbps or 0.0)
    if from_memory <= MAX_SHARE * limit:
        return Share(value=None if share > MAX_SHARE else 1.0)
    suspect = "the bytes of a decode step (weights, keys and values, logits) or its time"
    if spec_gbps is None:
        suspect = f"the read probe, if something else ran beside it; then {suspect}"
    return Share(value=None, fault=_refused("decoding", f"{gbps:.4g} GB/s", f"{limit:.4g} GB/s", suspect))


def train_share(tflops: float, probe_tflops: float, spec_tflops: float | None) -> Share:
    """Share of the product probe that training reached; above it (and above the published rate) it is refused."""
    share = tflops / probe_tflops
    if share <= 1:
        return Share(value=share)
    limit = max(probe_tflops, spec_tflops or 0.0)
    if tflops <= MAX_SHARE * limit:
        return Share(value=None if share > MAX_SHARE else 1.0)
    suspect = "the tokens that ran, the flops of a token, or t_train"
    if spec_tflops is None:
        suspect = f"the product probe, if something else ran beside it; then {suspect}"
    return Share(value=None, fault=_refused("training", f"{tflops:.4g} TFLOP/s", f"{limit:.4g} TFLOP/s", suspect))


def _refused(what: str, rate: str, limit: str, suspect: str) -> str:
    return (
        f"{what} at {rate} is above the limit of {limit}, which cannot be: the share is left out; a bug of the count "
        f"or of a limit, suspect {suspect}"
    )
