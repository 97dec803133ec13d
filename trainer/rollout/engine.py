"""The rollout: N prompts become N G completions and the log-prob of every sampled token.

Every prompt is computed once and its keys are shared by its G siblings; all rows that fit run together; finished rows
are dropped. The weights are the trainer's own storage, so nothing is copied or rebuilt between an update and the next
rollout.

Letters: N prompts, G siblings, S = N G rows (row s = n G + g), T packed completion tokens, C most new tokens, B live
slots.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sparkgrpo.kernels.prefix_attention import TreeLayout, prefix_attention, prompt_rectangle, tree_layout
from sparkgrpo.kernels.sampling import INVALID, LENGTH
from sparkgrpo.trainer.model.decoder import Decoder, Rope, decoder_hidden, rotated
from sparkgrpo.trainer.rollout.state import MAX_STOP_IDS, DecodeState, allocate_state
from sparkgrpo.trainer.rollout.step import decode_step, finish_step

PREFILL_CHUNK_TOKENS = 8192
"""Tokens of one forward of the prefill, filler included."""
FRAC_ALIVE_TO_COMPACT = 7 / 8
"""Finished rows are dropped once fewer than this share of the slots is alive: a drop copies the cache of the rest."""
MIN_TEMPERATURE = 0.05
MAX_SIBLINGS = 1 << 16
MAX_STREAM = 1 << 47


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn. Training needs the full softmax: there is no top-k or top-p here."""

    temperature: float = 1.0
    """0 is greedy; else 0.05 or more."""
    max_new_tokens: int = 512
    """Completion tokens, the stop token included."""
    ignore_eos: bool = False
    """Go on to the limit: for benchmarks with forced lengths."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"expected temperature 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens of 1 or more, got {self.max_new_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """What a rollout measured; times in seconds."""

    t_prefill_s: float
    t_decode_s: float
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    num_compactions: int
    num_waves: int
    frac_slots_alive: float
    """Live rows per slot computed, over all decode steps; 1 when no work was wasted on finished rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Completions, packed row after row; the stop token counts, so every length is at least 1."""

    token_T: torch.Tensor
    """i32."""
    logprob_T: torch.Tensor
    """f32, nats, under the distribution sampled from."""
    length_S: torch.Tensor
    """i32."""
    finish_S: torch.Tensor
    """i8: STOP or LENGTH of `kernels/sampling.py`."""
    prompt_of_row_S: torch.Tensor
    """i32."""
    sampling: Sampling
    stats: RolloutStats

    def rows(self) -> list[tuple[int, ...]]:
        """Token ids of each completion, on the host."""
        lengths = self.length_S.tolist()
        return [tuple(piece.tolist()) for piece in self.token_T.cpu().split(lengths)]

    def is_truncated(self) -> list[bool]:
        """Which completions ran into the token limit."""
        return (self.finish_S == LENGTH).tolist()


def split_into_waves(num_prompts: int, G: int, max_rows: int) -> list[range]:
    """Ranges of prompts, whole groups, as few and as equal as max_rows allows.

    Raises:
        ValueError: One group does not fit.
    """
    groups_per_wave = max_rows // G
    if groups_per_wave < 1:
        raise ValueError(
            f"expected max_rows of at least one group of {G} completions, got {max_rows}: a group is never split; "
            "sample fewer completions a prompt or give the rollout more memory"
        )
    num_waves = -(-num_prompts // groups_per_wave)
    bounds = [wave * num_prompts // num_waves for wave in range(num_waves + 1)] if num_waves else [0]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


class RolloutEngine:
    """Generates with a model's own weights; buffers are allocated at first use and kept.

    Args:
        model: The decoder that is being trained; its weights are read where they lie.
        stop_ids: Token ids that end a completion.
        num_valid: len(tokenizer): head rows from there on are never sampled.
        max_rows: Most completions that decode together; more go in waves of whole groups.
        max_new_tokens: Most new tokens of any rollout.
        max_context: Longest prompt plus completion, tokens; what the checkpoint was made for where None.

    Raises:
        ValueError: num_valid beyond the head, more stop ids than a step compares, or a size below 1.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        stop_ids: tuple[int, ...],
        num_valid: int,
        max_rows: int,
        max_new_tokens: int,
        max_context: int | None = None,
    ) -> None:
        config = model.config
        if not 1 <= num_valid <= config.vocab_size:
            raise ValueError(f"expected num_valid of 1 to {config.vocab_size}, the rows of the head, got {num_valid}")
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"expected at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}: {stop_ids}")
        if max_rows < 1 or max_new_tokens < 1:
            raise ValueError(f"expected max_rows and max_new_tokens of 1 or more, got {max_rows} and {max_new_tokens}")
        self.model = model
        self.stop_ids = stop_ids
        self.num_valid = num_valid
        self.max_rows = max_rows
        self.max_new_tokens = max_new_tokens
        self.max_context = max_context or min(config.max_position, config.sliding_window or config.max_position)
        self._state: DecodeState | None = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        G: int,
        sampling: Sampling,
        key: int,
        *,
        streams: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample G completions of each prompt.

        Args:
            prompts: Token ids.
            key: 64-bit key of this rollout, from 0; the same key and streams give the same tokens in any batch.
            streams: What each prompt's randomness is called, below 2^47; its index by default.

        Raises:
            ValueError: An empty prompt, one too long for the model, ids outside the vocabulary, unlike counts, or
                limits beyond the engine's.
            FloatingPointError: Logits that were not finite, with the rows.
        """
        streams = range(len(prompts)) if streams is None else streams
        self._check(prompts, G, sampling, key, streams)
        waves = split_into_waves(len(prompts), G, self.max_rows)
        if self._state is None:
            self._state = allocate_state(
                self.model,
                max_rows=self.max_rows,
                max_new_tokens=self.max_new_tokens,
                num_valid=self.num_valid,
            )
        head_VD = self._head()
        meter = _Meter()
        pieces = []
        for wave in waves:
            wave_prompts, wave_streams = [prompts[n] for n in wave], [streams[n] for n in wave]
            self._begin(self._state, wave_prompts, wave_streams, G, sampling, key)
            self._prefill(self._state, wave_prompts, G, head_VD, meter)
            self._decode(self._state, len(wave) * G, head_VD, meter)
            pieces.append(_packed_results(self._state, len(wave) * G))
        token_T, logprob_T, length_S, finish_S = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        if (finish_S == INVALID).any():
            rows = (finish_S == INVALID).nonzero()[:, 0].tolist()
            raise FloatingPointError(f"the logits of rows {rows[:20]} were not finite; the weights may have diverged")
        return Rollout(
            token_T=token_T,
            logprob_T=logprob_T,
            length_S=length_S,
            finish_S=finish_S,
            prompt_of_row_S=torch.arange(len(prompts), dtype=torch.int32).repeat_interleave(G),
            sampling=sampling,
            stats=meter.stats(sum(map(len, prompts)), len(token_T)),
        )

    def _check(
        self, prompts: Sequence[Sequence[int]], G: int, sampling: Sampling, key: int, streams: Sequence[int]
    ) -> None:
        if not prompts:
            raise ValueError("expected at least one prompt, got none")
        if not 1 <= G <= MAX_SIBLINGS:
            raise ValueError(f"expected 1 to {MAX_SIBLINGS} completions a prompt, got {G}")
        if not 0 <= key < 1 << 64:
            raise ValueError(f"expected a key of 64 bits, 0 to 2^64 - 1, got {key}")
        if len(streams) != len(prompts):
            raise ValueError(f"expected one stream a prompt, got {len(streams)} for {len(prompts)} prompts")
        if not (min(streams) >= 0 and max(streams) < MAX_STREAM):
            raise ValueError(f"expected streams from 0 to 2^47 - 1, got {min(streams)} to {max(streams)}")
        if sampling.max_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"expected at most the {self.max_new_tokens} new tokens this engine was built for, "
                f"got max_new_tokens {sampling.max_new_tokens}"
            )
        vocab_size = self.model.config.vocab_size
        for n, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"expected every prompt to have a token, got an empty prompt at index {n}")
            if len(prompt) + sampling.max_new_tokens > self.max_context:
                raise ValueError(
                    f"expected prompt and completion within the model's {self.max_context} tokens, got "
                    f"{len(prompt)} + {sampling.max_new_tokens} at index {n}; lower max_new_tokens or drop the prompt"
                )
            low, high = min(prompt), max(prompt)
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"expected token ids of 0 to {vocab_size - 1}, got {low if low < 0 else high} in the prompt at "
                    f"index {n}: the tokenizer is not this model's"
                )

    def _head(self) -> torch.Tensor:
        """Head rows below num_valid. A CPU's bf16 product rounds the logits, so there the head is widened, once."""
        head_VD = self.model.head_VD.detach()[: self.num_valid]
        return head_VD.float() if head_VD.device.type == "cpu" else head_VD

    def _begin(
        self,
        state: DecodeState,
        prompts: list[Sequence[int]],
        streams: list[int],
        G: int,
        sampling: Sampling,
        key: int,
    ) -> None:
        """Fill the slots of a wave, siblings adjacent; everything else is parked."""
        num_rows = len(prompts) * G
        device = state.token_B.device
        prompt_len_B = torch.tensor([len(p) for p in prompts], dtype=torch.int32, device=device).repeat_interleave(G)
        stream_N = torch.tensor(streams, dtype=torch.int64, device=device) << 16
        state.context_len_B.zero_()
        state.context_len_B[:num_rows] = prompt_len_B
        state.prompt_len_B[:num_rows] = prompt_len_B
        state.row_id_B[:num_rows] = torch.arange(num_rows, dtype=torch.int32, device=device)
        state.stream_B[:num_rows] = (stream_N[:, None] + torch.arange(G, device=device)).flatten()
        state.num_alive_1.fill_(num_rows)
        state.seed_1.fill_(key - (1 << 64) if key >= 1 << 63 else key)
        state.inv_temperature_1.fill_(1 / sampling.temperature if sampling.temperature else 0.0)
        state.max_new_1.fill_(sampling.max_new_tokens)
        stop_ids = () if sampling.ignore_eos else self.stop_ids
        state.eos_ids_8.fill_(-1)
        state.eos_ids_8[: len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int32, device=device)

    def _prefill(
        self,
        state: DecodeState,
        prompts: list[Sequence[int]],
        G: int,
        head_VD: torch.Tensor,
        meter: "_Meter",
    ) -> None:
        """Every prompt once, whole prompts in packed chunks, through the training forward; then the first token."""
        start = time.perf_counter()
        device = state.token_B.device
        state.cache.begin([len(p) for p in prompts], G)
        chunks = _chunks_of_prompts(prompts, PREFILL_CHUNK_TOKENS)
        keys: list[list[torch.Tensor]] = [[] for _ in self.model.layers]
        values: list[list[torch.Tensor]] = [[] for _ in self.model.layers]
        last_rows = []
        longest = max(map(len, prompts))
        for chunk in chunks:
            layout = tree_layout([len(prompts[n]) for n in chunk], (), (), device=device)

            def attend(
                layer_idx: int, qk: torch.Tensor, v: torch.Tensor, rope: Rope, layout: TreeLayout = layout
            ) -> torch.Tensor:
                q, k = rotated(qk, rope, self.model.config.num_heads)
                filler = (0, 0, 0, 0, 0, longest - layout.longest_prompt)
                for kept, x in ((keys, k), (values, v)):
                    kept[layer_idx].append(F.pad(prompt_rectangle(x, layout), filler))
                return prefix_attention(q, k, v, layout)

            token_T = torch.tensor([token for n in chunk for token in prompts[n]], device=device)
            position_T = torch.cat([torch.arange(len(prompts[n])) for n in chunk]).to(device)
            hidden_TD = decoder_hidden(self.model, token_T, position_T, attend)
            last_N = torch.tensor([len(prompts[n]) for n in chunk]).cumsum(0) - 1
            last_rows.append(hidden_TD[last_N.to(device)])
        for layer_keys, layer_values in zip(keys, values, strict=True):
            state.cache.write_prompt(torch.cat(layer_keys), torch.cat(layer_values))
        last_ND = torch.cat(last_rows)
        finish_step(last_ND.repeat_interleave(G, 0), state.view(len(prompts) * G), head_VD)
        meter.prefilled(time.perf_counter() - start)

    def _decode(self, state: DecodeState, num_slots: int, head_VD: torch.Tensor, meter: "_Meter") -> None:
        """Step until no row is alive, dropping finished rows on the way."""
        start = time.perf_counter()
        while num_alive := int(state.num_alive_1):  # the one host read of a step
            if num_alive <= FRAC_ALIVE_TO_COMPACT * num_slots:
                num_slots = state.compact(num_slots)
                meter.num_compactions += 1
            decode_step(state, self.model, head_VD, num_slots)
            meter.stepped(num_alive, num_slots)
        meter.num_waves += 1
        meter.t_decode_s += time.perf_counter() - start


def _packed_results(state: DecodeState, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Tokens and log-probs of a finished wave, row after row, and each row's length and finish reason; copies."""
    length_S = state.num_new_S[:num_rows].clone()
    is_used_SC = torch.arange(state.out_token_SC.shape[1], device=length_S.device) < length_S[:, None]
    token_T, logprob_T = state.out_token_SC[:num_rows][is_used_SC], state.out_logprob_SC[:num_rows][is_used_SC]
    return token_T, logprob_T, length_S, state.finish_S[:num_rows].clone()


def _chunks_of_prompts(prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """Consecutive prompts whose rectangle, count * longest tokens, stays within the limit; a longer one is alone."""
    chunks: list[list[int]] = []
    longest = 0
    for n, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if not chunks or (len(chunks[-1]) + 1) * longest > limit:
            chunks.append([])
            longest = len(prompt)
        chunks[-1].append(n)
    return chunks


@dataclass(slots=True)
class _Meter:
    """Running sums of one `generate`."""

    t_prefill_s: float = 0.0
    t_decode_s: float = 0.0
    num_steps: int = 0
    num_compactions: int = 0
    num_waves: int = 0
    num_alive_slots: int = 0
    num_slots: int = 0

    def prefilled(self, seconds: float) -> None:
        self.t_prefill_s += seconds

    def stepped(self, num_alive: int, num_slots: int) -> None:
        self.num_steps += 1
        self.num_alive_slots += num_alive
        self.num_slots += num_slots

    def stats(self, num_prompt_tokens: int, num_new_tokens: int) -> RolloutStats:
        return RolloutStats(
            t_prefill_s=self.t_prefill_s,
            t_decode_s=self.t_decode_s,
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            num_steps=self.num_steps,
            num_compactions=self.num_compactions,
            num_waves=self.num_waves,
            frac_slots_alive=self.num_alive_slots / self.num_slots if self.num_slots else 1.0,
        )
