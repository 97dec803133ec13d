"""Between problems and token ids: the prompt is tokenised once, text is only ever derived from ids.

Tasks whose prompts are ready token ids (`echo`) need no tokenizer; their completions have ids and no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerFast

from sparkgrpo.kernels.philox import philox_words
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.chat import encode_chat
from sparkgrpo.trainer.model.decoder import DecoderConfig
from sparkgrpo.trainer.model.families import check_length
from sparkgrpo.trainer.rollout.result import Rollout
from sparkgrpo.trainer.tasks.base import Completion, Message, Problem

PURPOSE_ROLLOUT, PURPOSE_EVAL = 1, 2
"""Fourth counter word of the keys derived from the run's seed (0 is token sampling itself)."""


def derived_key(seed: int, purpose: int, index: int) -> int:
    """A 64-bit key for the index-th use (rollout or evaluation) of a run, from its seed."""
    low, high, _, _ = philox_words(seed, index, 0, 0, purpose)
    return high << 32 | low


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Encodes problems and decodes completions with a model's tokenizer, or with none."""

    tokenizer: PreTrainedTokenizerFast | None

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of the prompt, up to where the answer begins.

        Raises:
            UserError: A problem of ready ids for a model with a tokenizer, whose ids mean something else.
        """
        if isinstance(problem.prompt[0], int):
            if self.tokenizer is not None:
                raise UserError(
                    f"task: {problem.identity} is made of token ids for a toy without a tokenizer, and this model has "
                    "one; expected a task with text, such as --task countdown"
                )
            return list(cast(tuple[int, ...], problem.prompt))
        assert self.tokenizer is not None, "a task with chat prompts needs a model with a tokenizer"
        return encode_chat(self.tokenizer, cast(tuple[Message, ...], problem.prompt))

    def prompts(self, problems: Sequence[Problem], model: DecoderConfig, max_new_tokens: int) -> list[list[int]]:
        """Token ids of every prompt, checked against the length that the model was made for.

        Raises:
            UserError: The first prompt that is too long with its completion, by the problem's name.
        """
        prompts = [self.prompt_ids(problem) for problem in problems]
        for problem, prompt in zip(problems, prompts, strict=True):
            try:
                check_length(model, len(prompt) + max_new_tokens)
            except UserError as error:
                raise UserError(f"{problem.identity}: {error}") from None
        return prompts

    def completions(self, rollout: Rollout) -> list[Completion]:
        """What was written, in row order; special tokens are left out of the text."""
        rows = rollout.rows()
        return [
            Completion(text=text, token_ids=ids, is_truncated=is_truncated)
            for text, ids, is_truncated in zip(self._texts(rows), rows, rollout.is_truncated(), strict=True)
        ]

    def _texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        if self.tokenizer is None:
            return [""] * len(rows)
        return self.tokenizer.batch_decode(
            [list(row) for row in rows], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
