"""The checker on honest programs, on deadlines, and on failures that are not the program's."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sparkgrpo.trainer.tasks.sandbox.checker import Checker, same_stdout
from sparkgrpo.trainer.tasks.sandbox.zygote_link import Equipment, Limits, SandboxError

pytestmark = pytest.mark.walls

HONEST = yaml.safe_load(Path(__file__).with_name("honest.yaml").read_text(encoding="utf-8"))
MODULES = """
abc argparse array ast asyncio base64 bisect calendar collections copy csv dataclasses datetime decimal
difflib enum fractions functools graphlib hashlib heapq html io itertools json keyword logging math numbers
operator pathlib pprint queue random re secrets shlex statistics string struct tempfile textwrap threading
time timeit tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref zlib
zoneinfo
"""
SQUARE = "def f(x): return x * x"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


@pytest.fixture
def quick(checker: Checker) -> Iterator[Checker]:
    checker.limits = Limits(call_s=0.3, total_s=0.7)
    yield checker
    checker.limits = Limits()


@pytest.mark.parametrize("module", MODULES.split())
def test_the_standard_library_can_be_imported(checker: Checker, module: str) -> None:
    verdict = checker.judge_calls(f"import {module}\ndef f(): return 1", "f", [((), 1)])
    assert verdict.reason == "ok", verdict


@pytest.mark.parametrize("program", HONEST, ids=lambda program: program["name"])
def test_honest_programs_work(checker: Checker, program: dict) -> None:
    verdict = checker.judge_calls(program["code"], "f", [((), 4)])
    assert verdict.reason == "ok", verdict


def test_calls_share_their_process_and_not_their_arguments(checker: Checker) -> None:
    code = "seen = []\ndef f(xs):\n    seen.append(1)\n    xs.append(len(seen))\n    return xs"
    verdict = checker.judge_calls(code, "f", [(([0],), [0, 1]), (([0],), [0, 2])])
    assert verdict.reason == "ok"


def test_candidates_share_nothing(checker: Checker) -> None:
    poison = "import builtins, math, json\nbuiltins.len = math.sqrt = json.dumps = None\ndef f(): return 0"
    checker.judge_calls(poison, "f", [((), 0)])
    assert checker.judge_calls("import math\ndef f(): return len('ab') + math.sqrt(4)", "f", [((), 4.0)]).reason == "ok"


def test_the_order_of_a_set_does_not_vary(checker: Checker) -> None:
    code = "def f(): return list({'a', 'b', 'c', 'd', 'e', 'f'})"
    seen = {checker.judge_calls(code, "f", [((), list(order))]).passed for order in ("abcdef",) for _ in range(5)}
    assert len(seen) == 1


def test_the_first_reason_counts_and_later_tests_go_on(checker: Checker) -> None:
    code = "def f(x):\n    if x == 1: raise KeyError\n    return object() if x == 2 else x"
    verdict = checker.judge_calls(code, "f", [((x,), x) for x in range(4)])
    assert verdict.passed == (True, False, False, True)
    assert (verdict.reason, verdict.detail) == ("exception", "KeyError")


def test_the_deadline_of_a_call(quick: Checker) -> None:
    start = time.monotonic()
    verdict = quick.judge_calls("def f(x):\n    while x: pass\n    return x", "f", [((x,), x) for x in (0, 1, 0)])
    assert (verdict.passed, verdict.reason) == ((True, False, False), "timeout")
    assert 0.3 <= time.monotonic() - start < 2


def test_the_deadline_of_a_candidate(quick: Checker) -> None:
    """Each call stays within its own limit, all together do not."""
    start = time.monotonic()
    verdict = quick.judge_calls("import time\ndef f(x): return time.sleep(0.2)", "f", [((x,), None) for x in range(50)])
    assert verdict.reason == "timeout" and 1 <= sum(verdict.passed) <= 3
    assert 0.7 <= time.monotonic() - start < 3


def test_large_arguments_and_results_pass_full_pipes(checker: Checker) -> None:
    text = "é" * 60_000  # 360 kB of JSON, more than a pipe holds
    assert checker.judge_calls("def f(x): return x", "f", [((text,), text)] * 3).reason == "ok"


def test_programs(checker: Checker) -> None:
    tests = [("3\n", "9\n"), ("12", "144")]
    assert checker.judge_program("print(int(input()) ** 2)", tests).reason == "ok"
    main = "import sys\ndef main():\n    print(int(sys.stdin.readline()) ** 2)\nif __name__ == '__main__':\n    main()"
    assert checker.judge_program(main, tests).reason == "ok"
    assert checker.judge_program(main.replace("    main()", "    sys.exit(main())"), tests).reason == "ok"
    threaded = "import threading\nthreading.Thread(target=lambda: print(int(input()) ** 2)).start()"
    assert checker.judge_program(threaded, tests).reason == "ok"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print(4)", "wrong_value"),
        ("print(9); raise SystemExit(3)", "exception"),
        ("print(9); raise SystemExit('no')", "exception"),
        ("print(9); 1 / 0", "exception"),
        ("print(9", "syntax_error"),
        ("import os; os.abort()", "crashed"),
        ("print(9); input(); input()", "exception"),
        ("while True: pass", "timeout"),
        ("import os, time; print(9, flush=True); os.close(1); time.sleep(9)", "timeout"),
        ("while True: print('x' * 10_000)", "too_much_output"),
        ("import os; os.write(1, b'\\xff\\xfe')", "wrong_value"),
    ],
)
def test_programs_that_fail(quick: Checker, code: str, reason: str) -> None:
    verdict = quick.judge_program(code, [("3\n", "9\n")])
    assert (verdict.passed, verdict.reason) == ((False,), reason)


def test_a_program_need_not_read_its_input(checker: Checker) -> None:
    given = "x" * 500_000
    assert checker.judge_program("print(1)", [(given, "1")]).reason == "ok"
    assert checker.judge_program("import os; os.close(0); print(1)", [(given, "1")]).reason == "ok"
    assert checker.judge_program("print(len(input()))", [(given, "500000")]).reason == "ok"


@pytest.mark.parametrize(
    ("printed", "is_same"),
    [
        ("1\n2", True),
        ("1\n2\n\n", True),
        ("1 \t\r\n2\r\n", True),
        (b"1\n2\n", True),
        ("1\n\n2", False),
        (" 1\n2", False),
        ("1", False),
        ("1\n2\n3", False),
        ("1 2", False),
        ("", False),
        (b"1\n2\xff", False),
    ],
)
def test_same_stdout(printed: str | bytes, is_same: bool) -> None:
    assert same_stdout(printed, "1\n2\n") is is_same


def test_a_dead_zygote_costs_no_verdict(squares: list) -> None:
    with Checker() as checker:
        assert checker.link.pid is not None
        first = checker.link.pid
        os.kill(first, signal.SIGKILL)
        assert checker.judge_calls(SQUARE, "f", squares).reason == "ok"
        assert checker.link.pid != first


def test_a_zygote_that_dies_under_a_candidate_ends_it(squares: list) -> None:
    with Checker(limits=Limits(call_s=1.5)) as checker:
        assert checker.link.pid is not None
        threading.Timer(0.3, os.kill, (checker.link.pid, signal.SIGKILL)).start()
        verdict = checker.judge_calls("while True: pass", "f", squares)
        assert verdict.reason == "crashed"  # its parent's death killed it
        assert checker.judge_calls(SQUARE, "f", squares).reason == "ok"


def test_a_stopped_zygote_raises_and_pays_nothing(monkeypatch: pytest.MonkeyPatch, squares: list) -> None:
    monkeypatch.setattr("sparkgrpo.trainer.tasks.sandbox.zygote_link.ZYGOTE_PROGRAM", Path("/nonexistent"))
    with pytest.raises(SandboxError, match="did not start"):
        Checker()


def test_functions_run_in_fresh_children(tmp_path: Path) -> None:
    (tmp_path / "a_checker.py").write_text(
        "calls = []\ndef judge(x):\n    calls.append(x)\n    if x == 'die': import os; os._exit(1)\n"
        "    if x == 'hang':\n        while True: pass\n    if x == 'peek': return open(__file__).read(6)\n"
        "    if x == 'escape': return open('/etc/passwd').read(4)\n    return len(calls)\n"
    )
    name = "a_checker:judge"
    folder = [str(tmp_path)]
    equipment = Equipment(functions=[name], search_path=folder, readable=folder)
    with Checker(equipment=equipment, limits=Limits(call_s=0.5)) as c:
        assert [c.call_function(name, (1,)) for _ in range(2)] == [("ok", 1)] * 2
        assert c.call_function(name, ("die",)) == ("crashed", None)
        assert c.call_function(name, ("hang",)) == ("timeout", None)
        assert c.call_function(name, ("peek",)) == ("ok", "calls ")
        assert c.call_function(name, ("escape",)) == ("exception", "PermissionError")
        assert c.call_function("no:such", ()) == ("no_function", None)
    with pytest.raises(SandboxError, match="No module named 'no_such'"):
        Checker(equipment=Equipment(functions=["no_such:f"]))


def test_500_candidates_leave_nothing(squares: list) -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(children(os.getpid()))

    with Checker() as checker:
        assert checker.link.pid is not None
        checker.judge_calls(SQUARE, "f", squares)
        before, zygote_fds = resources(), len(os.listdir(f"/proc/{checker.link.pid}/fd"))
        codes = [
            SQUARE,
            "import os\nos._exit(1)",
            "def f(x): return 'x' * (2 << 20)",
            "def f(",
            "import os\nos.close(4)",
        ]
        for n in range(500):
            checker.judge_calls(codes[n % len(codes)], "f", squares[:1])
        assert resources() == before
        assert len(os.listdir(f"/proc/{checker.link.pid}/fd")) == zygote_fds
        assert children(checker.link.pid) == []


def test_a_killed_checker_takes_its_children_along() -> None:
    program = (
        f"import sys; sys.path = {sys.path!r}\n"
        "from sparkgrpo.trainer.tasks.sandbox.checker import Checker\n"
        "from sparkgrpo.trainer.tasks.sandbox.zygote_link import Limits\n"
        "checker = Checker(limits=Limits(call_s=60, total_s=60))\n"
        "print(checker.link.pid, flush=True)\n"
        "checker.judge_calls('import time\\nprint(1)\\nwhile True: time.sleep(1)', 'f', [((), 0)])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    zygote = int(process.stdout.readline())
    end = time.monotonic() + 10
    while not children(zygote) and time.monotonic() < end:
        time.sleep(0.02)
    family = [zygote, *children(zygote)]
    assert len(family) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    while any(map(is_alive, family)):
        assert time.monotonic() < end, "a process lives on"
        time.sleep(0.02)


def test_limits_can_be_changed_between_candidates(checker: Checker, squares: list) -> None:
    checker.limits = replace(checker.limits, call_s=5.0)
    assert checker.judge_calls(SQUARE, "f", squares).reason == "ok"
