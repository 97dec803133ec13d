"""How many answers a second the text checkers judge, how long a hostile text can hold one, and what a call of a user's
reward function costs beside its own time.

    python -m benchmarks.answer_checkers [--seconds 2]

One core, one thread; the checkers are timed by the processor's clock, which other programs do not slow. Answers are a
mix of right, wrong, malformed and missing ones, as models write them. Hostile texts are 256 kB of tags, digits,
brackets and blanks; the slowest is reported. The reward function returns a constant for 128 completions of 200 words
and 256 tokens, and is timed by the wall clock.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median

import torch

from benchmarks.record import write_result
from sparkgrpo.trainer.tasks.base import Completion, Problem, Score
from sparkgrpo.trainer.tasks.countdown import Countdown, CountdownOptions, make_problem
from sparkgrpo.trainer.tasks.gsm8k import NumberGrader
from sparkgrpo.trainer.tasks.number_text import judge_number, read_answer
from sparkgrpo.trainer.tasks.user import RewardFunctions, TrainerState

GOALS = {"countdown": 40_000, "number reader": 20_000, "five parts": 15_000}
"""Answers a second on a core."""
HOSTILE_GOAL_S, CALL_GOAL_S = 0.005, 0.002
HOSTILE_CHARS, ROUND_S, NUM_ROWS = 256_000, 0.1, 128
THINKING = "First I try 3 + 7 = 10, then 10 * 4 = 40, which is what was asked for. "


def completion(text: str, token_ids: tuple[int, ...] = ()) -> Completion:
    return Completion(text=text, token_ids=token_ids, is_truncated=False)


def answers(right: str, wrong: str, malformed: str) -> list[Completion]:
    """Half of them right; a long text, two blocks, and one that was cut off."""
    texts = [f"{THINKING}<answer>{right}</answer>"] * 5 + [f"{THINKING * 8}<answer>{wrong}</answer>"] * 2
    texts += [f"<answer>{wrong}</answer> no, <answer>{right}</answer>", f"<answer>{malformed}</answer>", THINKING * 3]
    return [completion(text) for text in texts]


def numeric_answers() -> list[Completion]:
    """In the lesson's form, with and without decorations."""
    bare = answers("$1,234.00", "17", "eighteen or so")
    framed = f"<reasoning>\n{THINKING}\n</reasoning>\n<answer>\n1234\n</answer>\n"
    return [*bare[::2], *[completion(framed)] * 4, completion("#### 1,234 dollars"), completion("\\boxed{1234}")]


def checkers() -> dict[str, tuple[Callable[[Completion], object], Sequence[Completion]]]:
    task, problem = Countdown(CountdownOptions()), make_problem([3, 7, 4], 40)
    grader, gold = NumberGrader(), Fraction(1234)
    return {
        "countdown": (lambda c: task.verify(problem, c), answers("(3 + 7) * 4", "3 * 7 + 4", "(3 + ) 4")),
        "number reader": (lambda c: judge_number(read_answer(c.text), gold), numeric_answers()),
        "five parts": (lambda c: grader.reward(c, gold), numeric_answers()),
    }


def per_second(check: Callable[[Completion], object], asked: Sequence[Completion], seconds: float) -> list[float]:
    """Answers a second of processor time, a round of a tenth of a second each."""
    rates = []
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        count, start_s = 0, time.process_time()
        while (took_s := time.process_time() - start_s) < ROUND_S:
            for one in asked:
                check(one)
            count += len(asked)
        rates.append(count / took_s)
    return rates


def hostile_texts() -> dict[str, Completion]:
    pieces = ["<answer>", "</answer>", "<reasoning>", "</reasoning>", "</reasoning><answer>", "\\boxed{", "####", "9"]
    pieces += ["(", " ", "\n", ",999", "\u202f999", "*", "\u2212", "<", "\n</answer>\n", "1 "]
    texts = {}
    for piece in pieces:
        many = piece * (HOSTILE_CHARS // len(piece))
        texts |= {
            f"{piece!r}": many,
            f"{piece!r} in a block": f"<reasoning>{many}<answer>{many}</answer>"[-HOSTILE_CHARS:],
        }
    return {name: completion(text) for name, text in texts.items()}


def slowest(check: Callable[[Completion], object]) -> tuple[str, float]:
    """The hostile text that takes longest, by the quickest of five tries each."""
    worst = ("", 0.0)
    for name, one in hostile_texts().items():
        times_s = []
        for _ in range(5):
            start_s = time.process_time()
            check(one)
            times_s.append(time.process_time() - start_s)
        worst = max(worst, (name, min(times_s)), key=lambda found: found[1])
    return worst


def call_times_s(seconds: float) -> list[float]:
    """Time of scoring 128 completions by a function that returns a constant, in its process."""
    problems: list[Problem] = [make_problem([row // 8 + 1, 2, 3], 6) for row in range(0, NUM_ROWS, 8) for _ in range(8)]
    problems = [problems[row // 8 * 8] for row in range(NUM_ROWS)]
    asked = [completion("word " * 200, tuple(range(256))) for _ in range(NUM_ROWS)]
    verdicts = [Score(reward=0.0, parts={}, reason="wrong_value")] * NUM_ROWS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "constant.py"
        path.write_text("def constant(completions, **kwargs):\n    return [1.0] * len(completions)\n")
        functions = RewardFunctions(
            [f"{path}:constant"], columns=frozenset({"nums", "target"}), is_plain=False, timeout_s=60, warn=print
        )
        times_s = []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            start_s = time.perf_counter()
            functions.score(problems, asked, verdicts, TrainerState(global_step=1, max_steps=2))
            times_s.append(time.perf_counter() - start_s)
        functions.close()
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers a second of the text checkers.")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each checker")
    seconds = parser.parse_args().seconds
    rows = {}
    for name, (check, asked) in checkers().items():
        rates, (shape, took_s) = per_second(check, asked, seconds), slowest(check)
        rows[name] = {
            "answers_per_s_best": max(rates),
            "answers_per_s_median": median(rates),
            "goal": GOALS[name],
            "rounds": rates,
            "slowest_hostile_ms": took_s * 1e3,
            "slowest_hostile": shape,
            "hostile_goal_ms": HOSTILE_GOAL_S * 1e3,
        }
        print(f"{name:14} {median(rates):9,.0f} answers/s (best {max(rates):,.0f}, goal {GOALS[name]:,})")
        print(f"{'':14} {took_s * 1e3:9.2f} ms for the slowest hostile text ({shape})")
    times_s = call_times_s(seconds)
    print(f"a reward function's process: {median(times_s) * 1e3:.2f} ms a batch (best {min(times_s) * 1e3:.2f})")
    call = {"ms_median": median(times_s) * 1e3, "ms_best": min(times_s) * 1e3, "goal_ms": CALL_GOAL_S * 1e3}
    call |= {"num_calls": len(times_s)}
    path = write_result("answer_checkers", torch.device("cpu"), {"checkers": rows, "reward_function_call": call})
    print(path)


if __name__ == "__main__":
    main()
