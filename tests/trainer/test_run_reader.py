"""Reading run folders: growing, shrunken, damaged, hostile."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkgrpo.trainer.config import UserError
from sparkgrpo.trainer.run_reader import JsonlTail, RunFollower, finite_row, read_record

MakeRunFolder = Callable[..., Path]


def row(step: int, **more: object) -> dict[str, object]:
    return {"v": 1, "step": step, **more}


def append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def test_only_what_was_appended_is_read_and_a_half_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []  # there is no file yet
    append(path, '{"v":1,"step":1}\n{"v":1,"st')
    assert tail.read() == [row(1)]
    assert tail.read() == []
    append(path, 'ep":2}\n')
    assert tail.read() == [row(2)]
    before = tail.num_bytes_read
    append(path, '{"v":1,"step":3}\n')
    assert tail.read() == [row(3)]
    assert tail.num_bytes_read - before == len('{"v":1,"step":3}\n')
    before = tail.num_bytes_read
    assert tail.read() == [] and tail.num_bytes_read == before


def test_a_half_line_that_a_resume_cuts_away_is_no_shrinking(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"v":1,"step":1}\n{"v":1,"step":2')
    tail = JsonlTail(path)
    tail.read()
    path.write_text('{"v":1,"step":1}\n')
    assert tail.read() == []
    append(path, '{"v":1,"step":2}\n')
    assert tail.read() == [row(2)] and tail.num_restarts == 0


def test_a_shrunken_file_is_read_again(make_run_folder: MakeRunFolder) -> None:
    folder = make_run_folder(metrics=[row(1), row(2), row(3)])
    follower = RunFollower(folder)
    follower.poll()
    assert [r["step"] for r in follower.record.steps] == [1, 2, 3]
    (folder / "metrics.jsonl").write_text(json.dumps(row(1, lr=5)) + "\n")
    assert follower.poll()
    assert follower.record.steps == [row(1, lr=5)]
    assert not follower.poll()


def test_later_line_of_a_step_wins_and_order_is_by_step(make_run_folder: MakeRunFolder) -> None:
    record = read_record(make_run_folder(metrics=[row(1), row(2, lr=1), row(3), row(2, lr=2)]))
    assert record.steps == [row(1), row(2, lr=2), row(3)]


def test_damaged_lines_are_skipped_and_said(make_run_folder: MakeRunFolder) -> None:
    folder = make_run_folder(
        metrics=[
            row(1),
            "not json\n",
            "[1]\n",
            '{"step":2}\n',
            "\n",
            row(3),
            {"v": 1},
            '{"v":1,"step":true}\n',
            '{"v":1,"st',
        ]
    )
    record = read_record(folder)
    assert [r["step"] for r in record.steps] == [1, 3]
    text = "\n".join(record.problems)
    assert "metrics.jsonl, line 2 was skipped: not JSON" in text and "line 3" in text and "line 4" in text
    assert text.count("a line without a step number") == 2


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_that_are_not_finite_become_null(make_run_folder: MakeRunFolder, value: str) -> None:
    (step,) = read_record(make_run_folder(metrics=[f'{{"v":1,"step":1,"kl_mean":{value},"lr":1}}\n'])).steps
    assert (
        step["kl_mean"] is None and step["num_nonfinite"] == 1 and step["nonfinite"] == ["kl_mean"] and step["lr"] == 1
    )


def test_nonfinite_adds_to_what_the_writer_counted() -> None:
    found = finite_row(row(1, num_nonfinite=2, nonfinite=["a", "b"], loss=float("nan")))
    assert found["num_nonfinite"] == 3 and found["nonfinite"] == ["a", "b", "loss"]


def test_deep_nesting_and_long_lines_do_not_raise(make_run_folder: MakeRunFolder) -> None:
    deep = '{"v":1,"step":2,"x":' + "[" * 100_000 + "]" * 100_000 + "}\n"
    record = read_record(make_run_folder(metrics=[row(1, text="x" * 1_000_000), deep, row(3)]))
    assert [r["step"] for r in record.steps] == [1, 3]


def test_newer_schema_is_refused_by_name(make_run_folder: MakeRunFolder) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: written by a newer sparkgrpo \(v 2, this one reads 1\)"):
        read_record(make_run_folder(metrics=[{"v": 2, "step": 1}]))
    with pytest.raises(UserError, match="newer sparkgrpo"):
        read_record(make_run_folder("other", run={"v": 9}))


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_record(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"not a run folder, cannot read run\.json"):
        read_record(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(UserError, match="expected JSON objects"):
        read_record(tmp_path)


def test_config_of_another_kind_is_empty(make_run_folder: MakeRunFolder) -> None:
    record = read_record(make_run_folder(run={"config": ["no"], "status": 7, "run_id": "a\x1b[2Jb"}))
    assert record.config == {} and record.status == "7" and record.name == "a\\x1b[2Jb"
