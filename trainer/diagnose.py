"""What a run suffers from: a pure function of what is in its folder.

`sparkgrpo diagnose`, `train`, `watch` and `report` call the same function. A rule looks at curves, a verdict needs its
condition to last (`diagnosis/episode.py`), and a verdict that follows from another is printed beneath it and does not
count. The rules stand in ``diagnosis/rules_*.py``.

Sources of the limits (read 2026-11): rldoctor 0.2 (dead groups 0.5 and 0.75, truncation 0.05 and 0.15, entropy to a
tenth, KL 0.5, clip 0.1 and 0.2, length 1.5, train against held-out 0.15 and 0.30, 3 medians and 8 MADs); rlprobe 0.1
(truncation 0.5). Meaning: DAPO (arXiv:2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071), 2505.22617 (entropy is
spent for reward). The windows, the conditions under "not when", the shares of distinct answers and the fp32 gap are
ours, and estimates until healthy real runs have replaced them.
"""

import math
from collections.abc import Mapping, Sequence

from sparkgrpo.trainer.dashboard import number
from sparkgrpo.trainer.diagnosis.curves import Curves
from sparkgrpo.trainer.diagnosis.dead_groups import dead_groups_note
from sparkgrpo.trainer.diagnosis.episode import SEVERITIES, Episode, episode_of
from sparkgrpo.trainer.diagnosis.rule import WARM_UP_STEPS, Diagnosis, Finding, Rule, Verdict
from sparkgrpo.trainer.diagnosis.rules_plumbing import PLUMBING
from sparkgrpo.trainer.diagnosis.rules_policy import POLICY
from sparkgrpo.trainer.diagnosis.rules_signal import SIGNAL
from sparkgrpo.trainer.diagnosis.rules_truth import TRUTH_AND_MACHINE
from sparkgrpo.trainer.run_reader import RunRecord

RULES: tuple[Rule, ...] = (*PLUMBING, *SIGNAL, *POLICY, *TRUTH_AND_MACHINE)
"""All rules; a verdict's place in this order breaks ties of severity."""

_LEVELS = ("info", "warn", "error")
_NEAR_STEPS = 30
"""A cause must have been seen up to this many steps before what follows from it."""


def diagnose(record: RunRecord) -> Diagnosis:
    """Judge a run by every rule. Never raises on what a run folder can hold (`run_reader.py` refuses the rest)."""
    found = diagnose_rows(record.steps, record.evals, record.config, run=record.run, samples=record.samples)
    found.notes += record.problems
    return found


def diagnose_rows(
    steps: Sequence[Mapping[str, object]],
    evals: Sequence[Mapping[str, object]],
    config: Mapping[str, object],
    *,
    run: Mapping[str, object] | None = None,
    samples: Sequence[Mapping[str, object]] = (),
) -> Diagnosis:
    """Judge rows of metrics.jsonl and evals.jsonl, ascending by step, under a resolved configuration.

    Args:
        run: The content of run.json, for limits that depend on the machine.
        samples: Rows of samples.jsonl, of which verdicts name two.
    """
    curves = Curves(steps, evals, config, run)
    diagnosis = Diagnosis(num_steps=curves.T)
    for rule in RULES:
        finding = rule.judge(curves)
        if isinstance(finding, str):
            diagnosis.off[rule.id] = finding
            continue
        diagnosis.checked.append(rule.id)
        episode = episode_of(finding.severity_T.tolist(), finding.at_once_T.tolist())
        if episode is not None:
            diagnosis.verdicts.append(_verdict(rule, finding, episode, curves, samples))
    _blame(diagnosis.verdicts)
    diagnosis.verdicts = _ordered(diagnosis.verdicts)
    note = dead_groups_note(steps)
    if note:
        diagnosis.notes.append(note)
    return diagnosis


def exit_code(diagnosis: Diagnosis, fail_on: str) -> int:
    """0: nothing active at this severity ("warn" or "error"); 1: something; 3: too short to judge."""
    if diagnosis.counting(fail_on):
        return 1
    return 3 if diagnosis.num_steps < WARM_UP_STEPS else 0


def _verdict(
    rule: Rule, finding: Finding, episode: Episode, curves: Curves, samples: Sequence[Mapping[str, object]]
) -> Verdict:
    """The numbers are those of the last step at which the condition was seen."""
    at = episode.last_idx
    return Verdict(
        id=rule.id,
        title=rule.title,
        severity=SEVERITIES[episode.severity],
        first_step=int(curves.step_T[episode.first_idx]),
        last_step=int(curves.step_T[at]),
        raised_step=int(curves.step_T[episode.raised_idx]),
        is_active=episode.is_active,
        text=finding.say(at),
        evidence={name: value for name, value in finding.evidence(at).items() if math.isfinite(value)},
        cures=finding.cures(at) if finding.cures else rule.cures,
        sample_ids=_sample_ids(rule.sample_kind, samples, curves.step_T[at]),
        num_episodes=episode.num_episodes,
    )


def _sample_ids(kind: str, samples: Sequence[Mapping[str, object]], step: float) -> tuple[str, ...]:
    """Two samples of the kind that a disease shows itself in, the nearest in time; fewer where there are none."""
    fits = {
        "wrong": lambda row: row.get("reason") != "ok",
        "right": lambda row: row.get("reason") == "ok",
        "truncated": lambda row: row.get("finish") == "length",
        "best": lambda row: row.get("split") == "train",
        "none": lambda row: False,
    }.get(kind, lambda row: True)
    named = [row for row in samples if isinstance(row.get("sample_id"), str) and fits(row)]

    def rank(row: Mapping[str, object]) -> tuple[float, float]:
        reward = number(row.get("reward")) or 0.0
        return abs((number(row.get("step")) or 0.0) - step), -reward if kind == "best" else reward

    return tuple(str(row["sample_id"]) for row in sorted(named, key=rank)[:2])


def _blame(verdicts: Sequence[Verdict]) -> None:
    """Put what follows from another verdict beneath it; the cause is as severe as its worst consequence."""
    by_id = {verdict.id: verdict for verdict in verdicts}
    for rule in RULES:
        verdict = by_id.get(rule.id)
        if verdict is None:
            continue
        for cause_id in rule.because_of:
            cause = by_id.get(cause_id)
            if cause is None or cause.severity == "info" or cause.because_of == verdict.id:
                continue
            if cause.last_step >= verdict.first_step - _NEAR_STEPS:
                verdict.because_of = cause_id
                break
    for verdict in verdicts:
        root, seen = verdict, {verdict.id}
        while root.because_of is not None and root.because_of not in seen:
            root = by_id[root.because_of]
            seen.add(root.id)
        if root is not verdict and verdict.is_active and verdict.severity != "info":
            root.is_active, root.last_step = True, max(root.last_step, verdict.last_step)
            root.severity = max(root.severity, verdict.severity, key=_LEVELS.index)


def _ordered(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Active before cleared, worst first, and behind each what follows from it."""
    roots = [verdict for verdict in verdicts if verdict.because_of is None]
    roots.sort(key=lambda verdict: (not verdict.is_active, -_LEVELS.index(verdict.severity)))
    ordered: list[Verdict] = []

    def add(verdict: Verdict) -> None:
        ordered.append(verdict)
        for follower in verdicts:
            if follower.because_of == verdict.id and follower not in ordered:
                add(follower)

    for root in roots:
        add(root)
    return ordered
