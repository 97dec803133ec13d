"""The tokenizer of the embedded model: bytes, the numbers 0 to 400, and the words of the Countdown prompt.

The class is transformers' Qwen2Tokenizer, on which that library insists for a Qwen2 checkpoint, whatever the folder
says. Its byte-level BPE has no merges here, so any text falls back to bytes; numbers and words are added tokens: they
are found first, the longest match wins, and they decode like any text (they are not special). One token a number is
what lets a model of a million weights do sums: a sum is then a look-up of (number, operator, number), not a procedure
over digits. (Measured with character tokens and 0.8M parameters: the sums went wrong under RL.)
"""

from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Tokenizer

MAX_NUMBER = 400
"""Largest number that is one token: 20 * 20, the largest value that a worked answer shows."""

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", END)

PIECES = ("<answer>", "</answer>", " yes\n", " no\n", "system", "user", "assistant", "Using")

WORDS = (
    "the numbers write an arithmetic expression that equals Use each number exactly once You may use and parentheses "
    "Think briefly then put only inside + - * / ["
)
"""Words and signs of the prompt that follow a blank; the blank belongs to the token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, without a default system message: the prompt stays short."""


def byte_letters() -> list[str]:
    """The letters that stand for the bytes 0 to 255, in that order (GPT-2's table: a printable byte is itself)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template. Ids: special tokens, bytes, numbers of two and three digits, words."""
    base = {token: token_id for token_id, token in enumerate([*SPECIAL_TOKENS, *byte_letters()])}
    tokenizer = Qwen2Tokenizer(
        vocab=base,
        merges=[],
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    numbers = [str(number) for number in range(10, MAX_NUMBER + 1)]
    words = [" " + word for word in WORDS.split(" ")]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in [*numbers, *PIECES, *words]])
    return tokenizer
