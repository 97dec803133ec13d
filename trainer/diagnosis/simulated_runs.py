"""Made-up runs, healthy and sick, to measure how often diagnosis is wrong.

A policy's ability is a logit that rises towards a ceiling; prompts differ in difficulty; rewards are drawn answer by
answer, so that dead groups, lengths and reasons have the noise of a real batch. What the optimiser logs (entropy, KL,
gradient norm, gaps) follows curves whose size and noise are drawn wide, from the healthy runs that we have seen.
A sick run is a healthy one with one disease put in from some step on.

Letters: T steps, N prompts of a step, G completions of a prompt.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

Row = dict[str, object]
Array = np.ndarray


@dataclass(kw_only=True, slots=True)
class SimulatedRun:
    """The rows of a run folder, and what is wrong with it."""

    config: Row
    steps: list[Row]
    evals: list[Row]
    disease: str | None
    """Id of the rule that should name it; None: healthy."""
    is_truncated_often: bool = False
    """A healthy run of which 15 % of the answers of its later steps are cut off: a warning of that is no mistake."""


@dataclass(kw_only=True, slots=True)
class _Course:
    """Curves of one run, each [T]; diseases change them before the rows are drawn."""

    num_prompts: int
    group_size: int
    cap: int
    spread: float
    """Standard deviation of the difficulty over prompts, in logits."""
    ability_T: Array
    length_T: Array
    wrong_factor_T: Array
    """How many times as long a wrong answer is."""
    length_noise: float
    entropy_T: Array
    same_T: Array
    """Share of siblings that copy the first one."""
    kl_T: Array
    grad_T: Array
    gap_T: Array
    changed_T: Array
    paid_wrongly_T: Array
    """Share of wrong answers that the reward pays."""
    has_strict: bool = True
    """Whether the task has a strict check beside its reward."""
    settings: Row = field(default_factory=dict)


def simulated_run(seed: int, disease: str | None = None) -> SimulatedRun:
    """The run of a seed. ``disease`` is None or a key of `DISEASES`; ValueError for another."""
    rng = np.random.default_rng([seed, sum(map(ord, disease or ""))])
    course = _healthy_course(rng)
    if disease is not None:
        if disease not in DISEASES:
            raise ValueError(f"expected one of {', '.join(DISEASES)}, got {disease!r}")
        begin = int(rng.integers(0, len(course.ability_T) // 4))
        # What else a healthy run may have (a large KL, long answers) would only hide which disease it is.
        course.kl_T = np.minimum(course.kl_T, 0.3)
        course.length_T = np.minimum(course.length_T, 0.25 * course.cap)
        DISEASES[disease][1](rng, course, begin)
    steps = [_row(rng, course, t) for t in range(len(course.ability_T))]
    cut = np.array([row["frac_truncated"] for row in steps[40:]], dtype=float)
    return SimulatedRun(
        config={
            "group_size": course.group_size,
            "max_new_tokens": course.cap,
            "temperature": 1.0,
            "beta": 0.04,
            "inner_epochs": 1,
            "mini_batches": 1,
            "precision": "bf16",
            "advantage": "group",
            "ratio": "token",
            **course.settings,
        },
        steps=steps,
        evals=_evals(rng, course),
        disease=None if disease is None else DISEASES[disease][0],
        is_truncated_often=bool((np.convolve(cut > 0.12, np.ones(5), "valid") >= 4).any()) if len(cut) >= 5 else False,
    )


def _healthy_course(rng: np.random.Generator) -> _Course:
    T = int(rng.integers(60, 400))
    t = np.arange(T)
    cap = int(rng.choice([128, 256, 1024]))
    rise = 1 - np.exp(-t / rng.uniform(0.1, 1.0) / T)
    first, gain = rng.uniform(-3.5, 0.5), rng.uniform(0.8, 5.0)
    return _Course(
        num_prompts=int(rng.choice([8, 16, 32])),
        group_size=int(rng.choice([4, 8, 16])),
        cap=cap,
        spread=rng.uniform(0.5, 2.5),
        ability_T=first + gain * rise + _wander(rng, T, 0.15),
        length_T=cap * rng.uniform(0.1, 0.4) * (1 + rng.uniform(-0.4, 0.9) * rise) * np.exp(_wander(rng, T, 0.05)),
        wrong_factor_T=np.full(T, rng.uniform(0.9, 1.6)),
        length_noise=rng.uniform(0.2, 0.4),
        entropy_T=rng.uniform(0.15, 2.0) * (1 - rng.uniform(-0.1, 0.75) * rise) * np.exp(_wander(rng, T, 0.05)),
        same_T=np.clip(rng.uniform(0.0, 0.3) + rng.uniform(0.0, 0.4) * rise, 0, 1),
        kl_T=10 ** rng.uniform(-3, 0.4) * rise**1.5 * np.exp(rng.normal(0, 0.3, T)),
        grad_T=rng.uniform(0.05, 2.0) * np.exp(rng.normal(0, 0.3, T)) * np.where(rng.random(T) < 0.005, 8, 1),
        gap_T=rng.uniform(0.002, 0.02) * np.exp(rng.normal(0, 0.2, T)),
        changed_T=np.clip(rng.uniform(0.3, 1.0) + rng.normal(0, 0.02, T), 0, 1),
        paid_wrongly_T=np.zeros(T),
        has_strict=bool(rng.random() < 0.5),
    )


def _wander(rng: np.random.Generator, T: int, size: float) -> Array:
    """A slow random walk that is drawn back to 0."""
    noise, found = rng.normal(0, size, T), np.zeros(T)
    for t in range(1, T):
        found[t] = 0.9 * found[t - 1] + 0.44 * noise[t]
    return found


def _row(rng: np.random.Generator, course: _Course, t: int) -> Row:
    N, G = course.num_prompts, course.group_size
    p_N = 1 / (1 + np.exp(-(course.ability_T[t] + course.spread * rng.normal(size=N))))
    strict = rng.random((N, G)) < p_N[:, None]
    copies = rng.random((N, G)) < course.same_T[t]
    strict = np.where(copies, strict[:, :1], strict)
    right = strict | (rng.random((N, G)) < course.paid_wrongly_T[t])
    k = right.sum(1)
    factor = np.where(right, 1.0, course.wrong_factor_T[t])
    raw = course.length_T[t] * factor * np.exp(rng.normal(0, course.length_noise, (N, G)))
    cut, length = raw >= course.cap, np.clip(np.round(raw), 1, course.cap)
    dead, p = (k == 0) | (k == G), right.mean()
    kl = 0.0 if t == 0 else float(course.kl_T[t])
    return {
        "v": 1,
        "step": t + 1,
        "num_prompts": N,
        "group_size": G,
        "num_tokens": int(length.sum()),
        "reward_mean": float(p),
        "frac_right": float(p),
        "frac_right_strict": float(strict.mean()) if course.has_strict else None,
        "hack_gap": float(p - strict.mean()) if course.has_strict else None,
        "num_right": k.tolist(),
        "frac_zero_std": float(dead.mean()),
        "frac_all_right": float((k == G).mean()),
        "frac_all_wrong": float((k == 0).mean()),
        "frac_unique": float((1 + (G - 1) * (1 - copies[:, 1:].mean())) / G),
        "len_mean": float(length.mean()),
        "len_right_mean": float(length[right].mean()) if right.any() else None,
        "len_wrong_mean": float(length[~right].mean()) if (~right).any() else None,
        "frac_truncated": float(cut.mean()),
        "entropy_mean": float(course.entropy_T[t]),
        "kl_mean": kl,
        "clip_frac": 0.0,
        "ratio_max": 1.0,
        "grad_norm": float(course.grad_T[t] * math.sqrt(max(1 - dead.mean(), 0.0))),
        "frac_params_changed": float(course.changed_T[t]),
        "logprob_gap_mean": float(course.gap_T[t]),
        "logprob_gap_p99": float(6 * course.gap_T[t]),
        "frac_reward_error": 0.0,
        "num_nonfinite": 0,
        "t_gen": float(length.sum() * 1e-4 * np.exp(rng.normal(0, 0.05))),
        "reason/ok": float(p),
        "reason/wrong_value": float(1 - p),
    }


def _evals(rng: np.random.Generator, course: _Course) -> list[Row]:
    T, num_problems = len(course.ability_T), int(rng.choice([100, 200]))
    greedy = rng.uniform(0.0, 0.8)
    # The same problems every time, answered greedily: what they share does not change from one evaluation to the next.
    difficulty_Q, luck_Q = course.spread * rng.normal(size=num_problems), rng.random(num_problems)
    rows: list[Row] = []
    for step in [*range(0, T, 20), T]:
        ability = course.ability_T[max(step - 1, 0)] + greedy
        p_Q = 1 / (1 + np.exp(-(ability + difficulty_Q)))
        is_new_Q = rng.random(num_problems) < 0.3
        accuracy = float((np.where(is_new_Q, rng.random(num_problems), luck_Q) < p_Q).mean())
        se = math.sqrt(accuracy * (1 - accuracy) / num_problems)
        rows.append({"v": 1, "step": step, "num_problems": num_problems, "accuracy": accuracy, "accuracy_se": se})
    return rows


def _ramp(T: int, begin: int, steps: float) -> Array:
    """0 until ``begin``, then up to 1 within so many steps."""
    return np.clip((np.arange(T) - begin) / steps, 0, 1)


def _starved(rng: np.random.Generator, course: _Course, begin: int) -> None:
    course.ability_T = np.full(len(course.ability_T), rng.uniform(-9, -7.5))
    course.spread = rng.uniform(0.3, 0.8)
    course.kl_T = course.kl_T * 0.02  # hardly any gradient


def _too_easy(rng: np.random.Generator, course: _Course, begin: int) -> None:
    course.ability_T = np.full(len(course.ability_T), rng.uniform(7.0, 9.0))
    course.spread = rng.uniform(0.3, 0.8)


def _cut_off(rng: np.random.Generator, course: _Course, begin: int) -> None:
    course.length_T = course.cap * rng.uniform(1.3, 2.0) * np.exp(_wander(rng, len(course.length_T), 0.02))


def _collapse(rng: np.random.Generator, course: _Course, begin: int) -> None:
    down = _ramp(len(course.ability_T), begin + 15, rng.uniform(8, 20))
    certain_T = 0.5 / course.length_T  # half a nat an answer: else siblings could not all be the same
    course.entropy_T = course.entropy_T * (1 - down) + certain_T * down
    course.same_T = np.maximum(course.same_T, 0.995 * down)
    course.ability_T = np.where(down > 0, course.ability_T[begin], course.ability_T)


def _blowup(rng: np.random.Generator, course: _Course, begin: int) -> None:
    up = _ramp(len(course.ability_T), begin + 20, rng.uniform(10, 30))
    course.entropy_T = course.entropy_T + up * rng.uniform(1.5, 4.0)
    course.ability_T = course.ability_T - up * rng.uniform(3.0, 6.0)


def _broken(rng: np.random.Generator, course: _Course, begin: int) -> None:
    course.ability_T = np.maximum(course.ability_T, -0.5) - 7 * _ramp(len(course.ability_T), 1, rng.uniform(1, 10))
    course.kl_T = course.kl_T * 0.3


def _racing(rng: np.random.Generator, course: _Course, begin: int) -> None:
    up = _ramp(len(course.ability_T), begin + 15, rng.uniform(20, 40))
    course.ability_T = np.full(len(up), rng.uniform(-1.5, 0.3)) + _wander(rng, len(up), 0.1)
    course.length_T = course.cap * 0.2 * (1 + up * rng.uniform(1.6, 3.0))
    course.wrong_factor_T = course.wrong_factor_T * (1 + 0.5 * up)


def _runaway(rng: np.random.Generator, course: _Course, begin: int) -> None:
    T = len(course.kl_T)
    late = np.maximum(np.arange(T) - begin - 15, 0)
    course.kl_T = np.minimum(0.02 * np.exp(late / rng.uniform(6, 12)), 50.0) * np.exp(rng.normal(0, 0.2, T))
    course.ability_T = course.ability_T - 5 * _ramp(T, begin + 25, 25)


def _hacking(rng: np.random.Generator, course: _Course, begin: int) -> None:
    up = _ramp(len(course.ability_T), begin + 10, rng.uniform(15, 40))
    course.paid_wrongly_T = up * rng.uniform(0.5, 0.9)
    course.ability_T = np.full(len(up), rng.uniform(-2.0, -0.5)) + _wander(rng, len(up), 0.1)


def _stale_weights(rng: np.random.Generator, course: _Course, begin: int) -> None:
    up = _ramp(len(course.gap_T), begin + 15, rng.uniform(10, 30))
    course.gap_T = course.gap_T + up * rng.uniform(0.12, 0.5)


def _not_moving(rng: np.random.Generator, course: _Course, begin: int) -> None:
    course.changed_T = np.clip(rng.normal(0.01, 0.005, len(course.changed_T)), 0, 1)
    course.ability_T = np.full(len(course.ability_T), rng.uniform(-1.0, 0.5)) + _wander(rng, len(course.ability_T), 0.1)
    course.kl_T = course.kl_T * 1e-4


DISEASES: Mapping[str, tuple[str, Callable[[np.random.Generator, _Course, int], None]]] = {
    "starved": ("dead_groups", _starved),
    "too easy": ("dead_groups", _too_easy),
    "cut off": ("truncation", _cut_off),
    "collapse": ("entropy_collapse", _collapse),
    "noise": ("entropy_blowup", _blowup),
    "broken early": ("accuracy_collapse", _broken),
    "length": ("length_racing", _racing),
    "runaway": ("kl_runaway", _runaway),
    "hacking": ("reward_hacking", _hacking),
    "stale weights": ("engine_gap", _stale_weights),
    "frozen": ("not_moving", _not_moving),
}
"""By name of the family: the rule that should name it, and what puts the disease in."""
