"""The model that ships: its tokenizer, the worked answers it learnt from, its weights and their recipe."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sparkgrpo.trainer.embedded import recipe
from sparkgrpo.trainer.embedded.tokenizer_build import MAX_NUMBER, SPECIAL_TOKENS, build_tokenizer
from sparkgrpo.trainer.embedded.traces import HASTY, PATIENT, Teacher, chains, worked_answer
from sparkgrpo.trainer.tasks.base import KeyedDraws
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions, judge, make_problem

MODEL_FOLDER = Path(recipe.__file__).parent / "model"
STEP = re.compile(r"([-+*])(\d+)=(\d+)")
PROMPT_3_7_4 = (
    "<|im_start|>user\nUsing the numbers [3, 7, 4], write an arithmetic expression that equals 40. Use each number "
    "exactly once. You may use + - * / and parentheses. Think briefly, then put only the expression inside "
    "<answer></answer>.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


def recorded_sha256() -> str:
    """The digest that the README states for the weights."""
    text = (MODEL_FOLDER.parent / "README.md").read_text()
    return re.findall(r"\b[0-9a-f]{64}\b", text)[0]


@pytest.mark.parametrize(
    "text",
    [
        "(3+7)*4",
        "<answer>(3 + 7) * 4</answer>",
        " no\n yes\n yes\r\n\t",
        "h\u00e9llo \u2603 \U0001d518 \x00 \x7f",
        "401 1000 007 2026 \u0663 1_2 theory",
        "a  b\n\n  c<answer<//answer>",
        "".join(chr(code) for code in range(0x250)),
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_byte_has_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = tokenizer.get_vocab()
    first = vocabulary[SPECIAL_TOKENS[-1]] + 1
    assert sorted(vocabulary.values()) == list(range(len(tokenizer)))
    # Tokens `first` .. `first` + 255 are the bytes 0 .. 255: a character of two bytes is two of them.
    assert tokenizer.encode("\u00ff", add_special_tokens=False) == [first + 0xC3, first + 0xBF]
    assert [tokenizer.decode([first + byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]


def test_numbers_tags_and_verdicts_are_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for piece in [*map(str, range(MAX_NUMBER + 1)), "<answer>", "</answer>", " yes\n", " no\n"]:
        assert len(tokenizer.encode(piece, add_special_tokens=False)) == 1, piece
    ids = tokenizer.encode("20*20=400-16=384?183 no\n<answer>20*20-16</answer>", add_special_tokens=False)
    assert len(ids) == 12 + 7


def test_chat_template_gives_the_prompt_once(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = list(make_problem([3, 7, 4], 40).prompt)
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == PROMPT_3_7_4
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == PROMPT_3_7_4
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert len(ids) == 59


def test_shipped_tokenizer_is_the_one_the_code_builds(tokenizer: PreTrainedTokenizerFast) -> None:
    built = build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template
    assert built.encode(PROMPT_3_7_4) == tokenizer.encode(PROMPT_3_7_4)


def check_attempt(attempt: str, nums: list[int], target: int) -> None:
    """Every `=` holds, every number is used once, the target is copied and the verdict is right."""
    chain, verdict = attempt.split(" ")
    chain, shown_target = chain.split("?")
    first, *steps = re.split(r"(?=[-+*])", chain)
    value, used = int(first), [int(first)]
    for step in steps:
        op, operand, shown = STEP.fullmatch(step).groups()
        value = {"+": value + int(operand), "-": value - int(operand), "*": value * int(operand)}[op]
        used.append(int(operand))
        assert value == int(shown), attempt
    assert sorted(used) == sorted(nums), attempt
    assert int(shown_target) == target
    assert verdict == ("yes" if value == target else "no"), attempt


@pytest.mark.parametrize("teacher", [HASTY, PATIENT])
@pytest.mark.parametrize("numbers", [(2,), (3,), (4,)])
def test_worked_answers_are_true(numbers: tuple[int, ...], teacher: Teacher) -> None:
    task = Countdown(CountdownOptions(numbers=numbers))
    num_yes = num_no = 0
    for index, problem in enumerate(task.problems(7, 0, 200)):
        nums, target = problem.columns["nums"], problem.columns["target"]
        text = worked_answer(chains(nums), target, teacher, KeyedDraws(1, index))
        *attempts, answer = text.split("\n")
        assert len(set(attempts)) == len(attempts), "an attempt is made twice"
        for attempt in attempts:
            check_attempt(attempt, nums, target)
        assert re.fullmatch(r"<answer>[-+*()\d]+</answer>", answer)
        num_yes, num_no = num_yes + text.count(" yes\n"), num_no + text.count(" no\n")
    assert min(num_yes, num_no) > 20


def test_every_puzzle_of_three_numbers_has_a_chain() -> None:
    problems = Countdown(CountdownOptions(numbers=(2, 3))).problems(11, 0, 2000)
    assert all(
        any(chain.value == problem.columns["target"] for chain in chains(problem.columns["nums"]))
        for problem in problems
    )


@pytest.mark.parametrize("numbers", [(3, 7, 4), (1, 20, 20), (5, 5, 5, 5), (2, 9, 13, 20)])
def test_chains_are_distinct_and_their_answers_have_their_values(numbers: tuple[int, ...]) -> None:
    found = chains(numbers)
    assert len({chain.text for chain in found}) == len(found)
    for chain in found:
        assert judge(chain.answer, numbers, chain.value) == "ok", chain


def test_teacher_gives_up_and_answers_anyway() -> None:
    options = [chain for chain in chains((3, 7, 4)) if chain.value != 40]
    texts = [worked_answer(options, 40, HASTY, KeyedDraws(2, index)) for index in range(400)]
    num_attempts = [text.count(" no\n") for text in texts]
    assert max(num_attempts) == HASTY.max_attempts
    frac_one = num_attempts.count(1) / len(texts)
    # Binomial(400, p): four standard deviations.
    expected = HASTY.give_up[0]
    assert abs(frac_one - expected) < 4 * (expected * (1 - expected) / len(texts)) ** 0.5


def test_weights_are_the_recorded_ones() -> None:
    digest = hashlib.sha256((MODEL_FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert digest == recorded_sha256()


def test_folder_loads_in_transformers_and_writes_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER)
    assert model.config.model_type == "qwen2"
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 3e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = torch.tensor([tokenizer.encode(PROMPT_3_7_4, add_special_tokens=False)])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=144)[0, prompt.shape[1] :]
    assert ids[-1] == tokenizer.eos_token_id
    assert re.fullmatch(
        r"(\d+([-+*]\d+=\d+){2}\?\d+ (yes|no)\n)+<answer>[-+*()\d]+</answer>", tokenizer.decode(ids[:-1])
    )


def test_recipe_is_reproducible_bit_for_bit() -> None:
    phases = tuple(
        recipe.Phase(teacher=teacher, num_steps=2, num_answers=2, matrix_lr=0.02, other_lr=3e-3)
        for teacher in (PATIENT, HASTY)
    )
    tiny = recipe.Recipe(seed=3, phases=phases, num_puzzles=2, num_threads=1)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        first, second = (recipe.warm_up(tiny, build_tokenizer()).state_dict() for _ in range(2))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    start = recipe.new_model(build_tokenizer(), seed=3).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
    assert any(not torch.equal(weight, start[name]) for name, weight in first.items())


def test_warmup_rows_see_their_prompt_and_themselves() -> None:
    batch = recipe.pack([[1, 2], [1]], [[[3, 4], [5, 6, 7]], [[8]]], pad_id=0)
    assert batch.token_BL.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 8, 0, 0, 0, 0, 0]]
    assert batch.position_BL.tolist() == [[0, 1, 2, 3, 2, 3, 4], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.is_seen_B1LL[0, 0, 5].tolist() == [True, True, False, False, True, True, False]
    assert batch.source_M.tolist() == [1, 2, 1, 4, 5, 7]
    assert batch.label_M.tolist() == [3, 4, 5, 6, 7, 8]


def test_heldout_puzzles_never_occur_in_the_warm_up() -> None:
    heldout = {problem.identity for problem in Countdown(CountdownOptions(numbers=(3,))).heldout(200)}
    warmup = {problem.identity for problem in Countdown(CountdownOptions(numbers=recipe.NUMBERS)).problems(0, 0, 2000)}
    assert not heldout & warmup


def test_the_command_makes_the_model_that_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without options the recipe is the one that made the weights; the seed is the only choice."""
    made = []
    monkeypatch.setattr(recipe, "warm_up", lambda settings, tokenizer: made.append(settings))
    monkeypatch.setattr(recipe, "save", lambda folder, model, tokenizer: made.append(folder))
    recipe.main(["--out", str(tmp_path)])
    recipe.main(["--out", str(tmp_path), "--seed", "7"])
    assert made == [recipe.Recipe(), tmp_path, recipe.Recipe(seed=7), tmp_path]
