"""Between problems and token ids: what the model sees, and what is graded."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparkgrpo.kernels.sampling import LENGTH, STOP
from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.dialogue import PURPOSE_EVAL, PURPOSE_ROLLOUT, Dialogue, derived_key
from sparkgrpo.trainer.model.decoder import DecoderConfig
from sparkgrpo.trainer.rollout.result import Rollout, RolloutStats, Sampling
from sparkgrpo.trainer.tasks.base import Problem

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes 0 to 255, <s> 256, </s> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: idx for idx, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def rollout_of(rows: list[list[int]], finish: list[int]) -> Rollout:
    return Rollout(
        token_T=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        logprob_T=torch.zeros(sum(map(len, rows))),
        length_S=torch.tensor([len(row) for row in rows], dtype=torch.int32),
        finish_S=torch.tensor(finish, dtype=torch.int8),
        prompt_of_row_S=torch.arange(len(rows), dtype=torch.int32),
        sampling=Sampling(),
        stats=RolloutStats(
            t_prefill_s=0.0,
            t_decode_s=0.0,
            num_prompt_tokens=0,
            num_new_tokens=0,
            num_steps=0,
            num_compactions=0,
            num_waves=1,
            frac_slots_alive=1.0,
            num_decode_bytes=0,
            graph_coverage=None,
            t_capture_s=0.0,
        ),
    )


def test_a_chat_prompt_ends_where_the_answer_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = Problem(prompt=({"role": "user", "content": "2+3"},), columns={}, identity="x")
    ids = Dialogue(tokenizer).prompt_ids(problem)
    assert tokenizer.decode(ids) == "<s>user:2+3</s><s>assistant:"
    assert ids.count(256) == 2 and ids[0] == 256


def test_ready_ids_go_through_without_a_tokenizer() -> None:
    ids = Dialogue(None).prompt_ids(Problem(prompt=(5, 0, 7), columns={}, identity="x"))
    assert ids == [5, 0, 7] and isinstance(ids, list)


def test_ready_ids_mean_nothing_to_a_model_with_a_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        UserError, match=r"echo:5 is made of token ids for a toy without a tokenizer, .* --task countdown"
    ):
        Dialogue(tokenizer).prompt_ids(Problem(prompt=(5,), columns={}, identity="echo:5"))


def test_prompts_are_checked_against_the_length_of_the_model() -> None:
    problems = [Problem(prompt=(1,) * length, columns={}, identity=f"x:{length}") for length in (3, 9, 4)]
    shape = dict.fromkeys(("width", "num_layers", "num_heads", "num_kv_heads", "head_width", "ffn_width"), 2)
    model = DecoderConfig(**shape, family="llama", vocab_size=9, rms_eps=1e-6, rope_theta=1e4, max_position=14)
    assert Dialogue(None).prompts(problems, model, 5) == [[1] * 3, [1] * 9, [1] * 4]
    with pytest.raises(UserError, match="x:9: expected prompt and completion within the model's 14 positions, got 15"):
        Dialogue(None).prompts(problems, model, 6)


def test_a_chat_prompt_without_a_tokenizer_is_our_bug() -> None:
    problem = Problem(prompt=({"role": "user", "content": "2+3"},), columns={}, identity="x")
    with pytest.raises(AssertionError, match="needs a model with a tokenizer"):
        Dialogue(None).prompt_ids(problem)


def test_completions_are_decoded_from_their_own_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["<answer>(3 + 7) * 4</answer>", " n't , . é", ""]
    rows = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 257] for text in texts]
    rows[1] = rows[1][:-2]  # cut within the two bytes of é, by the limit
    completions = Dialogue(tokenizer).completions(rollout_of(rows, [STOP, LENGTH, STOP]))
    assert [completion.token_ids for completion in completions] == [tuple(row) for row in rows]
    assert [completion.is_truncated for completion in completions] == [False, True, False]
    # neither the stop token nor a special one in between is text, and spaces before punctuation stay
    assert [completion.text for completion in completions] == [texts[0], " n't , . �", ""]
    inner = Dialogue(tokenizer).completions(rollout_of([[*rows[0][:9], 256, *rows[0][9:]]], [STOP]))
    assert inner[0].text == texts[0]


def test_without_a_tokenizer_completions_have_ids_and_no_text() -> None:
    completions = Dialogue(None).completions(rollout_of([[4], [5, 6]], [STOP, LENGTH]))
    assert [(c.text, c.token_ids, c.is_truncated) for c in completions] == [("", (4,), False), ("", (5, 6), True)]


def test_keys_are_64_bits_and_differ_by_seed_purpose_and_index() -> None:
    names = [(seed, purpose, i) for seed in (0, 1, 1 << 40) for purpose in (1, 2) for i in range(200)]
    keys = {derived_key(*name) for name in names}
    assert len(keys) == len(names)
    assert all(0 <= key < 1 << 64 for key in keys)
    assert max(keys) > 1 << 63 and sum(key & 0xFFFFFFFF > 1 << 31 for key in keys) > 400
    assert PURPOSE_ROLLOUT != PURPOSE_EVAL
    assert derived_key(3, PURPOSE_ROLLOUT, 5) == derived_key(3, PURPOSE_ROLLOUT, 5)
