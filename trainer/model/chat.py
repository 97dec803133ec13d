"""Messages to prompt ids, once: ids go on from here, never text (architecture, data that flows, 1)."""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from sparkgrpo.trainer.config import UserError


def has_chat_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether `encode_chat` follows the model's own template; if not, say so to the user."""
    return bool(tokenizer.chat_template)


def encode_chat(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Prompt ids of a conversation, ending where the model's answer begins.

    With a chat template the template alone writes special tokens: the generation prompt once, a BOS exactly where it
    has one; the tokenizer adds none of its own. Without one (base models) each message's content ends with a newline,
    roles are dropped, and a BOS comes first where the tokenizer puts one before plain text. A plain prompt is what a
    base model was trained on; an invented chat format would be noise to it, and refusing would bar base models.

    Args:
        messages: "role" and "content" each, in order; at least one.

    Raises:
        UserError: no messages, or the template refuses them (a role it does not know, say).
    """
    if not messages:
        raise UserError("expected at least one message in a prompt, got none: check the task's prompts")
    if has_chat_template(tokenizer):
        text = _render(tokenizer, messages)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    text = "".join(message["content"] + "\n" for message in messages)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # The BOS is asked for on its own: with add_special_tokens=True some tokenizers would close the prompt with an EOS.
    bos_id = tokenizer.bos_token_id
    if isinstance(bos_id, int) and tokenizer("a")["input_ids"][0] == bos_id:
        return [bos_id, *ids]
    return ids


def _render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> str:
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"expected messages that the model's chat template takes, got roles {roles} and its answer: {error}"
        ) from error
    return str(text)
