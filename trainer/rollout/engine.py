"""The rollout: N prompts become N G completions and the log-prob of every sampled token.

Every prompt is computed once and its keys are shared by its G siblings; all rows that fit run together; finished rows
are dropped. The weights are the trainer's own storage, so nothing is copied or rebuilt between an update and the next
rollout.

Letters: N prompts, G siblings, S = N G rows (row s = n G + g), T packed completion tokens, C most new tokens, B live
slots.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from sparkgrpo.kernels.sampling import INVALID, Filters, result_uniforms
from sparkgrpo.profiling.phases import Instant, now, seconds_between
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.rollout.cache import Cache
from sparkgrpo.trainer.rollout.decode_loop import Meter, decode_exactly, decode_in_buckets
from sparkgrpo.trainer.rollout.graphs import Capture, EagerRunner, GraphRunner, Runner, cuda_capture
from sparkgrpo.trainer.rollout.grouped_cache import GroupedCache
from sparkgrpo.trainer.rollout.paged_cache import PagedCache, page_bytes
from sparkgrpo.trainer.rollout.pages import PAGE_TOKENS, split_into_waves
from sparkgrpo.trainer.rollout.prefill import prefill
from sparkgrpo.trainer.rollout.result import Rollout, RolloutStats, Sampling
from sparkgrpo.trainer.rollout.row_cache import RowCache
from sparkgrpo.trainer.rollout.shrinking_cache import ShrinkingCache
from sparkgrpo.trainer.rollout.state import MAX_STOP_IDS, DecodeState, allocate_state
from sparkgrpo.trainer.rollout.step import decode_step, finish_step

SELF_TEST_GAP = 1e-4
"""Nats by which a replay's log-probs may differ from those of the plain step; they are expected to be equal."""
SMALL_KV_WIDTH = 128
"""Numbers of a token's key in one layer up to which a CPU keeps the contexts of a few rows in one piece each."""
ROW_TOKENS_STEP = 256
"""Room for tokens in a row of a paged cache grows by so many, so that a longer prompt seldom means new buffers."""
UNLIMITED_PAGES = 1 << 62
MAX_SIBLINGS = 1 << 16
MAX_STREAM = 1 << 47


def print_to_stderr(line: str) -> None:
    """A line for a person; stdout belongs to the result."""
    print(line, file=sys.stderr)


class RolloutEngine:
    """Generates with a model's own weights; buffers are allocated at first use and kept.

    Args:
        model: The decoder that is being trained; its weights are read where they lie.
        stop_ids: Token ids that end a completion.
        num_valid: len(tokenizer): head rows from there on are never sampled.
        max_rows: Most completions that decode together; more go in waves of whole groups.
        max_new_tokens: Most new tokens of any rollout.
        max_context: Longest prompt plus completion, tokens; what the checkpoint was made for where None.
        cache: "grouped" or "shrinking" (a CPU's, for large and for small models), "rows" (what the latter ends in),
            "paged" (a GPU's), or "auto".
        kv_budget_bytes: Most bytes of a paged cache; None: what max_rows rows of the longest context so far take.
        capture: Makes a graph of a decode step; None: CUDA's on a GPU, no graphs elsewhere.
        report: Gets a line when decoding has to go on without graphs.

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
        cache: Literal["auto", "grouped", "shrinking", "rows", "paged"] = "auto",
        kv_budget_bytes: int | None = None,
        capture: Capture | None = None,
        report: Callable[[str], None] = print_to_stderr,
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
        self.cache_kind = _cache_kind(model) if cache == "auto" else cache
        self.is_paged = self.cache_kind == "paged"
        self.shares_prompts = self.cache_kind in ("grouped", "shrinking")
        self.kv_budget_bytes, self.report = kv_budget_bytes, report
        self.capture = cuda_capture(model.device) if capture is None and model.device.type == "cuda" else capture
        self.row_tokens = 0
        """Tokens that a row of the buffers has room for, prompt included; they grow with the longest asked for."""
        self.head_VD = self._head()
        """Head rows below num_valid, as `finish_step` takes them; those of the rollout that runs."""
        self.filters: Filters | None = None
        """Of the rollout that runs."""
        self.between_steps: Callable[[], None] | None = None
        """Called after every decode step; what it raises ends the rollout."""
        self._state: DecodeState | None = None
        self._runner: Runner | None = None

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
        device, lengths = self.model.device, [len(p) for p in prompts]
        row_tokens = self._row_tokens_for(max(lengths) + sampling.max_new_tokens)
        num_pages = self._num_pages(row_tokens) if self.is_paged else UNLIMITED_PAGES
        waves = split_into_waves(lengths, G, sampling.max_new_tokens, num_pages, self.max_rows)
        self.head_VD = self._head()
        state, runner = self._ready(row_tokens)
        self.filters = _filters(sampling, device)
        if self.filters is not None:  # an evaluation's: no graph has them
            runner = self._eager_runner(state)
        runner.begin()
        meter = Meter(between_steps=self.between_steps)
        pieces = []
        for wave in waves:
            wave_prompts, wave_streams = [prompts[n] for n in wave], [streams[n] for n in wave]
            self._begin(state, wave_prompts, wave_streams, G, sampling, key)
            begin, filled, done = self._run_wave(state, runner, wave_prompts, G, sampling, meter)
            pieces.append(_packed_results(state, len(wave) * G))
            length_NG = pieces[-1][2].view(-1, G).cpu()  # waits for the device, which has passed the three instants
            meter.t_prefill_s += seconds_between(begin, filled)
            meter.t_decode_s += seconds_between(filled, done)
            meter.read([len(p) for p in wave_prompts], length_NG, is_shared=self.shares_prompts)
            state.cache.end_wave()
            meter.num_waves += 1
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
            stats=self._stats(meter, runner, sum(lengths), len(token_T)),
        )

    def _stats(self, meter: Meter, runner: Runner, num_prompt_tokens: int, num_new_tokens: int) -> RolloutStats:
        model, head_bytes = self.model, self.head_VD.numel() * self.head_VD.element_size()
        body = [p for name, p in model.named_parameters() if name not in ("embed_VD", "lm_head_VD")]
        return meter.stats(
            num_prompt_tokens,
            num_new_tokens,
            weight_bytes=head_bytes + sum(p.numel() * p.element_size() for p in body),
            logit_bytes=2 * 4 * self.num_valid,
            token_bytes=page_bytes(model) // PAGE_TOKENS,
            runner=runner,
            has_graphs=isinstance(runner, GraphRunner),
        )

    @torch.no_grad()
    def self_test(self) -> str | None:
        """Compare graphs with the plain step on a small rollout; where they differ, go on without graphs.

        Returns:
            None: they agree, or there are none. Else why not, in one line, which `report` has got too.
        """
        if self.capture is None or not self.is_paged:
            return None
        sampling = Sampling(max_new_tokens=min(8, self.max_new_tokens))
        G = min(2, self.max_rows)
        num_prompts = min(4, self.max_rows // G)
        prompts = [[(7 * n + i) % self.num_valid for i in range(1 + 5 * n)] for n in range(num_prompts)]
        by_graph = self.generate(prompts, G, sampling, 1)
        capture, self.capture, self._runner = self.capture, None, None
        plain = self.generate(prompts, G, sampling, 1)
        self.capture, self._runner = capture, None
        gap = math.inf
        if by_graph.rows() == plain.rows():
            gap = float((by_graph.logprob_T - plain.logprob_T).abs().max())
        if by_graph.stats.graph_coverage == 1.0 and gap <= SELF_TEST_GAP:
            return None
        self.capture = None
        why = f"tokens differ or log-probs by {gap:.1e}" if by_graph.stats.graph_coverage else "a capture failed"
        line = f"decoding without CUDA graphs, up to several times slower: they failed their self-test ({why})"
        self.report(line)
        return line

    def _row_tokens_for(self, num_tokens: int) -> int:
        """Tokens that a row of the buffers must have room for: those it has, unless more are asked for."""
        if num_tokens <= self.row_tokens:
            return self.row_tokens
        return min(-(-num_tokens // ROW_TOKENS_STEP) * ROW_TOKENS_STEP, self.max_context)

    def _num_pages(self, row_tokens: int) -> int:
        """Pages of a layer, page 0 included: what all rows take that share nothing, within the budget."""
        num_pages = 1 + self.max_rows * -(-row_tokens // PAGE_TOKENS)
        if self.kv_budget_bytes is not None:
            num_pages = min(num_pages, self.kv_budget_bytes // page_bytes(self.model))
        return max(num_pages, 1)

    def _ready(self, row_tokens: int) -> tuple[DecodeState, Runner]:
        """Buffers and runner for rows of so many tokens, prompt included; made at first use, and for longer rows."""
        if self._state is None or (self.is_paged and row_tokens > self.row_tokens):
            self._state = self._runner = None  # freed before the larger ones are made
            self.row_tokens = row_tokens
            self._state = allocate_state(
                self.model,
                self._make_cache,
                max_rows=self.max_rows,
                max_new_tokens=self.max_new_tokens,
                num_valid=self.num_valid,
            )
        if self._runner is None:
            self._runner = self._make_runner(self._state)
        return self._state, self._runner

    def _make_cache(self, context_len_B: torch.Tensor) -> Cache:
        model = self.model
        if self.cache_kind == "rows":
            return RowCache(model.config, dtype=model.dtype, device=model.device)
        if not self.is_paged:
            kind = ShrinkingCache if self.cache_kind == "shrinking" else GroupedCache
            return kind(
                model.config, max_rows=self.max_rows, max_new_tokens=self.max_new_tokens, dtype=model.dtype,
                device=model.device,
            )  # fmt: skip
        return PagedCache(
            model.config,
            max_rows=self.max_rows,
            max_tokens=self.row_tokens,
            num_pages=self._num_pages(self.row_tokens),
            context_len_B=context_len_B,
            dtype=model.dtype,
        )

    def _eager_runner(self, state: DecodeState) -> EagerRunner:
        return EagerRunner(lambda n: decode_step(state, self.model, self.head_VD, n, self.filters))

    def _make_runner(self, state: DecodeState) -> Runner:
        def step(num_slots: int) -> None:
            decode_step(state, self.model, self.head_VD, num_slots)

        def tensors() -> dict[str, torch.Tensor]:
            return dict(self.model.named_parameters()) | state.tensors() | {"rope": self.model.rope_frequency_E}

        if self.capture is None or not self.is_paged:
            return self._eager_runner(state)
        return GraphRunner(step, tensors, state.context_len_B, self.capture, self.report)

    def _decode(self, state: DecodeState, runner: Runner, num_rows: int, sampling: Sampling, meter: Meter) -> None:
        if self.is_paged:
            limits = {"max_rows": self.max_rows, "max_new_tokens": sampling.max_new_tokens}
            decode_in_buckets(state, runner, num_rows, meter, **limits)
        else:
            decode_exactly(state, runner, num_rows, meter)

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
        state.token_B.zero_()  # a parked slot of a bucket is computed too, from a token that exists
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
        if state.uniform_2SC is not None:
            rows, num_new = slice(0, num_rows), sampling.max_new_tokens
            state.uniform_2SC[:, rows, :num_new] = result_uniforms(
                state.seed_1, state.prompt_len_B[rows], state.stream_B[rows], num_new
            )
        state.eos_ids_8.fill_(-1)
        state.eos_ids_8[: len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int32, device=device)

    def _run_wave(
        self,
        state: DecodeState,
        runner: Runner,
        prompts: list[Sequence[int]],
        G: int,
        sampling: Sampling,
        meter: Meter,
    ) -> tuple[Instant, Instant, Instant]:
        """Prefill and decode; the instants before, between and behind them, on the device's clock."""
        begin = now(self.model.device)
        self._prefill(state, prompts, G, sampling)
        filled = now(self.model.device)
        self._decode(state, runner, len(prompts) * G, sampling, meter)
        return begin, filled, now(self.model.device)

    def _prefill(self, state: DecodeState, prompts: list[Sequence[int]], G: int, sampling: Sampling) -> None:
        """Every prompt once, then the first token of every row."""
        state.cache.begin([len(p) for p in prompts], G, sampling.max_new_tokens)
        last_ND = prefill(self.model, state.cache, prompts)
        finish_step(last_ND.repeat_interleave(G, 0), state.view(len(prompts) * G), self.head_VD, self.filters)


def _cache_kind(model: Decoder) -> str:
    """A GPU's pages; on a CPU by what a step costs: the calls around the keys, or the keys."""
    if model.device.type == "cuda":
        return "paged"
    is_small = model.config.num_kv_heads * model.config.head_width <= SMALL_KV_WIDTH
    return "shrinking" if is_small and model.dtype != torch.bfloat16 else "grouped"


def _filters(sampling: Sampling, device: torch.device) -> Filters | None:
    """The sampling's filters as tensors, None where it has none."""
    if not sampling.is_filtered:
        return None
    top_k_1 = torch.tensor([sampling.top_k], dtype=torch.int32, device=device)
    return Filters(top_k_1, *(torch.tensor([p], device=device) for p in (sampling.top_p, sampling.min_p)))


def _packed_results(state: DecodeState, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Tokens and log-probs of a finished wave, row after row, and each row's length and finish reason; copies."""
    length_S = state.num_new_S[:num_rows].clone()
    is_used_SC = torch.arange(state.out_token_SC.shape[1], device=length_S.device) < length_S[:, None]
    token_T, logprob_T = state.out_token_SC[:num_rows][is_used_SC], state.out_logprob_SC[:num_rows][is_used_SC]
    return token_T, logprob_T, length_S, state.finish_S[:num_rows].clone()
