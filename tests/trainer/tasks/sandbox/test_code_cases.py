"""The shared rows for the code checker, one test a row; skipped where the data is not beside the repository."""

import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks.code_text import MAX_CODE_CHARS, last_code_block
from sparkgrpo.trainer.tasks.sandbox.checker import Checker, Verdict, same_stdout
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits

TAKEOVER = Path(__file__).with_name("takeover.txt").read_text(encoding="utf-8")
CASES = Path(__file__).parents[5] / "shared" / "data" / "cases" / "code.jsonl"
ROWS = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()] if CASES.exists() else []
DEFAULT_MAX_S = 10.0

pytestmark = [
    pytest.mark.walls,
    pytest.mark.skipif(not ROWS, reason="the shared case rows are not beside the repository"),
]


def text_of(row: dict, field: str) -> str:
    parts = row.get(field + "_parts")
    return row[field] if parts is None else "".join(piece * times for piece, times in parts)


def judge(row: dict, checker: Checker) -> Verdict:
    tests = [tuple(ast.literal_eval(text) for text in test) for test in row["visible"] + row["hidden"]]
    is_completion = row.keys() & {"completion", "completion_parts"}
    code = last_code_block(text_of(row, "completion")) if is_completion else text_of(row, "code")
    if code is None or len(code) > MAX_CODE_CHARS:
        return Verdict(passed=(False,) * len(tests), reason="no_code" if code is None else "too_long")
    code = (TAKEOVER if row.get("preamble") == "takeover" else "") + code
    checker.limits = replace(Limits(), call_s=row.get("call_s", 2.0), total_s=row.get("total_s", 8.0))
    return checker.judge_calls(code, row["entry"], tests)


@pytest.mark.parametrize("row", [row for row in ROWS if row["kind"] != "stdout"], ids=lambda row: row["id"])
def test_row(row: dict, checker: Checker) -> None:
    start = time.monotonic()
    verdict = judge(row, checker)
    wall_s = time.monotonic() - start
    num_visible = len(row["visible"])
    assert verdict.reason == row["reason"], row["note"]
    assert sum(verdict.passed[:num_visible]) == row["passed_visible"]
    assert sum(verdict.passed[num_visible:]) == row["passed_hidden"]
    assert float(all(verdict.passed)) == row["reward"]
    assert wall_s < row.get("max_s", DEFAULT_MAX_S)


@pytest.mark.parametrize("row", [row for row in ROWS if row["kind"] == "stdout"], ids=lambda row: row["id"])
def test_stdout_row(row: dict) -> None:
    is_same = same_stdout(row["printed"], row["expected"])
    assert (float(is_same), "ok" if is_same else "wrong_value") == (row["reward"], row["reason"])
