"""Prompts as ids: special tokens exactly once, the generation prompt once, plain text where there is no template."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.model.chat import encode_chat, has_chat_template

BOS, EOS = 256, 257
MESSAGES = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 1"}]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.mark.parametrize("adds", ["", "<s> $A", "<s> $A </s>"])
def test_a_template_alone_writes_the_special_tokens(adds: str, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(adds=adds)
    ids = encode_chat(tokenizer, MESSAGES)
    assert tokenizer.decode(ids) == "<s>[system]add</s>[user]1 + 1</s>[assistant]"
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert ids.count(EOS) == len(MESSAGES)
    assert ids == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)


def test_a_template_without_bos_gets_none(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}:", adds="<s> $A")
    assert tokenizer.decode(encode_chat(tokenizer, MESSAGES)) == "add1 + 1:"


@pytest.mark.parametrize(("adds", "begin"), [("", ""), ("<s> $A", "<s>"), ("<s> $A </s>", "<s>"), ("$A </s>", "")])
def test_without_a_template_contents_are_lines_after_the_bos_of_the_tokenizer(
    adds: str, begin: str, make_tokenizer: MakeTokenizer
) -> None:
    tokenizer = make_tokenizer(chat_template=None, adds=adds)
    assert not has_chat_template(tokenizer) and has_chat_template(make_tokenizer())
    assert tokenizer.decode(encode_chat(tokenizer, MESSAGES)) == f"{begin}add\n1 + 1\n"


def test_no_bos_token_at_all(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.bos_token = None
    assert tokenizer.decode(encode_chat(tokenizer, MESSAGES)) == "add\n1 + 1\n"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_no_messages_are_refused(template: str | None, make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(UserError, match="at least one message in a prompt, got none"):
        encode_chat(make_tokenizer(chat_template=template), [])


def test_a_template_that_refuses_is_quoted(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('System role not supported') }}")
    with pytest.raises(UserError, match="got roles system, user and its answer: System role not supported"):
        encode_chat(tokenizer, MESSAGES)
