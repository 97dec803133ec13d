"""Samples by group: a prompt once, its completions sorted by reward."""

from collections.abc import Sequence

import numpy as np

from sparkgrpo.trainer.dashboard import number, short
from sparkgrpo.trainer.page.markup import escaped, escaped_block, sample_anchor
from sparkgrpo.trainer.run_reader import Row

BUDGET_BYTES = 400_000
HEAD_CHARS, TAIL_CHARS = 600, 300
MAX_MEMBERS = 64


def sample_section(samples: Sequence[Row], *, budget_bytes: int = BUDGET_BYTES) -> str:
    """All groups that the budget holds, thinned evenly over the run where it does not hold all."""
    groups = _groups(samples)
    if not groups:
        return "<p class=note>The run kept no samples.</p>"
    shown = [_group_html(label, rows) for label, rows in groups]
    total = sum(len(text.encode()) for text in shown)
    note = ""
    if total > budget_bytes:
        keep = max(1, int(len(shown) * budget_bytes / total))
        chosen = np.unique(np.linspace(0, len(shown) - 1, keep).round().astype(int)).tolist()
        counts = f"{len(chosen)} of {len(shown)} groups are shown, evenly over the run"
        note = f"<p class=note>{counts}; samples.jsonl has all.</p>"
        shown = [shown[i] for i in chosen]
        while len(shown) > 1 and sum(len(text.encode()) for text in shown) > budget_bytes:
            shown.pop(len(shown) // 2)
    return note + "\n".join(shown)


def _groups(samples: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Training groups by step, then held-out problems, each through the steps at which it was answered."""
    training: dict[tuple[object, ...], list[Row]] = {}
    heldout: dict[tuple[object, ...], list[Row]] = {}
    for row in samples:
        problem = str(row.get("problem", ""))
        if row.get("split") == "train":
            training.setdefault((number(row.get("step")) or 0.0, problem), []).append(row)
        else:
            heldout.setdefault((problem,), []).append(row)
    found = [(f"training, step {step:.0f}", sorted(rows, key=_by_reward)) for (step, _), rows in training.items()]
    return found + [
        ("held-out", sorted(rows, key=lambda row: number(row.get("step")) or 0.0)) for rows in heldout.values()
    ]


def _by_reward(row: Row) -> float:
    reward = number(row.get("reward"))
    return float("inf") if reward is None else -reward


def _group_html(label: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    right = sum(row.get("reason") == "ok" for row in rows)
    answers = "".join(_answer(row, with_step=label == "held-out") for row in rows[:MAX_MEMBERS])
    more = f"<p class=note>{len(rows) - MAX_MEMBERS} more in samples.jsonl</p>" if len(rows) > MAX_MEMBERS else ""
    return (
        f'<details class="group"><summary>{label}: {escaped(first.get("problem", ""), 160)} '
        f'<span class="unit">{right} of {len(rows)} right</span></summary>'
        f'<pre class="prompt">{escaped_block(first.get("prompt", ""), head=HEAD_CHARS, tail=TAIL_CHARS)}</pre>'
        f"{answers}{more}</details>"
    )


def _answer(row: Row, *, with_step: bool) -> str:
    facts = [
        f"step {short(row.get('step')) if not isinstance(row.get('step'), int) else row.get('step')}"
        if with_step
        else "",
        escaped(row.get("reason", "-"), 40),
        f"{escaped(row.get('num_tokens', '-'), 12)} tokens",
        f"finish {escaped(row.get('finish', '-'), 12)}",
        "" if number(row.get("advantage")) is None else f"advantage {short(row.get('advantage'))}",
        escaped(row.get("sample_id", ""), 60),
    ]
    kind = "right" if row.get("reason") == "ok" else "wrong"
    text = escaped_block(row.get("completion", ""), head=HEAD_CHARS, tail=TAIL_CHARS)
    return (
        f'<div class="answer {kind}" id="{sample_anchor(row.get("sample_id"))}"><div class="facts">'
        f'<span class="reward">reward {short(row.get("reward"))}</span> · '
        f"{' · '.join(fact for fact in facts if fact)}</div><pre>{text}</pre></div>"
    )
