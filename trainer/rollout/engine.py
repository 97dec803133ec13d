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

import torch

from sparkgrpo.kernels.sampling import INVALID
from sparkgrpo.trainer.model.decoder import Decoder
from sparkgrpo.trainer.rollout.decode_loop import Meter, decode_exactly
from sparkgrpo.trainer.rollout.graphs import EagerRunner, Runner
from sparkgrpo.trainer.rollout.grouped_cache import GroupedCache
from sparkgrpo.trainer.rollout.prefill import prefill
from sparkgrpo.trainer.rollout.result import Rollout, Sampling
from sparkgrpo.trainer.rollout.state import MAX_STOP_IDS, DecodeState, allocate_state
from sparkgrpo.trainer.rollout.step import decode_step, finish_step

MAX_SIBLINGS = 1 << 16
MAX_STREAM = 1 << 47


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
        self.head_VD = self._head()
        """Head rows below num_valid, as `finish_step` takes them; those of the rollout that runs."""
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
        waves = split_into_waves(len(prompts), G, self.max_rows)
        self.head_VD = self._head()
        state, runner = self._ready(max(map(len, prompts)) + sampling.max_new_tokens)
        runner.begin()
        meter = Meter()
        pieces = []
        for wave in waves:
            wave_prompts, wave_streams = [prompts[n] for n in wave], [streams[n] for n in wave]
            self._begin(state, wave_prompts, wave_streams, G, sampling, key)
            self._prefill(state, wave_prompts, G, sampling, meter)
            decode_exactly(state, runner, len(wave) * G, meter)
            pieces.append(_packed_results(state, len(wave) * G))
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
            stats=meter.stats(sum(map(len, prompts)), len(token_T)),
        )

    def _ready(self, num_tokens: int) -> tuple[DecodeState, Runner]:
        """Buffers and runner for rows of so many tokens, prompt included; made at first use."""
        if self._state is None or self._runner is None:
            state = self._state = allocate_state(
                self.model,
                lambda _: GroupedCache(
                    self.model.config,
                    max_rows=self.max_rows,
                    max_new_tokens=self.max_new_tokens,
                    dtype=self.model.dtype,
                    device=self.model.device,
                ),
                max_rows=self.max_rows,
                max_new_tokens=self.max_new_tokens,
                num_valid=self.num_valid,
            )
            self._runner = EagerRunner(lambda num_slots: decode_step(state, self.model, self.head_VD, num_slots))
        return self._state, self._runner

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
        self, state: DecodeState, prompts: list[Sequence[int]], G: int, sampling: Sampling, meter: Meter
    ) -> None:
        """Every prompt once, then the first token of every row."""
        start = time.perf_counter()
        state.cache.begin([len(p) for p in prompts], G, sampling.max_new_tokens)
        last_ND = prefill(self.model, state.cache, prompts)
        finish_step(last_ND.repeat_interleave(G, 0), state.view(len(prompts) * G), self.head_VD)
        meter.t_prefill_s += time.perf_counter() - start


def _packed_results(state: DecodeState, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Tokens and log-probs of a finished wave, row after row, and each row's length and finish reason; copies."""
    length_S = state.num_new_S[:num_rows].clone()
    is_used_SC = torch.arange(state.out_token_SC.shape[1], device=length_S.device) < length_S[:, None]
    token_T, logprob_T = state.out_token_SC[:num_rows][is_used_SC], state.out_logprob_SC[:num_rows][is_used_SC]
    return token_T, logprob_T, length_S, state.finish_S[:num_rows].clone()
