"""The pool of scoring processes: every way a job can go wrong ends in an outcome, in bounded time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkgrpo.trainer.tasks.scoring import ScoringPool, WorkerStartError, default_num_workers

HANDLER = """
import os, signal, subprocess, sys, time
def make(settings):
    if settings.get("fails"):
        raise ImportError("no such thing")
    calls = []
    def handle(job):
        calls.append(job)
        name, *rest = job if isinstance(job, list) else [job]
        if name == "sleep":
            time.sleep(rest[0])
        if name == "raise":
            raise KeyError("boom")
        if name == "exit":
            os._exit(3)
        if name == "sys.exit":
            sys.exit(0)
        if name == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: pass
        if name == "child":
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
        if name == "child and hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open(rest[0], "w").write(str(child.pid))
            time.sleep(60)
        if name == "object":
            return object()
        if name == "print":
            print("to stdout")
        if name == "nan":
            return float("nan")
        if name == "pid":
            return os.getpid()
        return {"calls": len(calls), "echo": rest, "factor": settings.get("factor")}
    return handle
"""


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("handler")
    (folder / "scoring_pool_handler.py").write_text(HANDLER)
    sys.path.append(str(folder))
    yield "scoring_pool_handler:make"
    sys.path.remove(str(folder))


@pytest.fixture
def pool(handler: str) -> Iterator[ScoringPool]:
    with ScoringPool(handler, {"factor": 2}, num_workers=2) as pool:
        yield pool


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int) -> None:
    end = time.monotonic() + 5
    while is_alive(pid):
        assert time.monotonic() < end, f"process {pid} lives on"
        time.sleep(0.01)


def test_outcomes_come_in_the_order_of_the_jobs(pool: ScoringPool) -> None:
    jobs = [["sleep", 0.1 if n % 3 == 0 else 0.0, n] for n in range(9)]
    outcomes = pool.run(jobs, 10.0)
    assert [outcome.status for outcome in outcomes] == ["done"] * 9
    assert [outcome.value["echo"][1] for outcome in outcomes] == list(range(9))
    assert outcomes[0].value["factor"] == 2 and outcomes[0].wall_s >= 0.1


def test_text_of_any_kind_goes_through(pool: ScoringPool) -> None:
    texts = ["", "\0\x1b[2J", "\ud800 \U0001f600", "x" * 3_000_000]
    assert [outcome.value["echo"] for outcome in pool.run([["echo", text] for text in texts], 20)] == [
        [t] for t in texts
    ]


def test_not_a_number_arrives_as_such(pool: ScoringPool) -> None:
    (outcome,) = pool.run(["nan"], 10)
    assert outcome.value != outcome.value


@pytest.mark.parametrize("job", ["raise", "sys.exit", "object"])
def test_a_raised_error_brings_its_traceback_and_leaves_the_process(pool: ScoringPool, job: str) -> None:
    pids = pool.pids()
    (outcome,) = pool.run([job], 10)
    assert outcome.status == "raised" and "Traceback" in outcome.error
    assert {"raise": "boom", "sys.exit": "SystemExit", "object": "JSON"}[job] in outcome.error
    assert pool.pids() == pids and pool.num_restarts == 0


@pytest.mark.parametrize(("job", "word"), [("exit", "exit code 3"), ("segfault", "SIGSEGV")])
def test_a_dead_process_is_replaced(pool: ScoringPool, job: str, word: str) -> None:
    outcomes = pool.run([job, "pid", "pid", job, "pid"], 20)
    assert [outcome.status for outcome in outcomes] == ["died", "done", "done", "died", "done"]
    assert word in outcomes[0].error
    assert pool.num_restarts == 2


@pytest.mark.parametrize("job", [["sleep", 60], "deaf"])
def test_the_deadline_holds_whatever_the_job_does(pool: ScoringPool, job: object) -> None:
    start = time.monotonic()
    outcomes = pool.run([job, "pid"], 0.4)
    assert [outcome.status for outcome in outcomes] == ["timeout", "done"]
    assert 0.4 <= outcomes[0].wall_s < 1.5 and time.monotonic() - start < 5


def test_other_jobs_go_on_beside_one_that_hangs(pool: ScoringPool) -> None:
    hanging = pool.submit(["sleep", 60], 3.0)
    start = time.monotonic()
    assert all(outcome.status == "done" for outcome in pool.run(["pid"] * 20, 10))
    assert time.monotonic() - start < 2.5 and not hanging.done()
    assert hanging.result().status == "timeout"


def test_submitting_does_not_wait(pool: ScoringPool) -> None:
    start = time.monotonic()
    futures = [pool.submit(["sleep", 0.2], 10) for _ in range(4)]
    assert time.monotonic() - start < 0.1
    assert all(future.result().status == "done" for future in futures)
    assert time.monotonic() - start < 2  # two at a time


def test_what_a_killed_job_started_dies_with_it(pool: ScoringPool, tmp_path: Path) -> None:
    (outcome,) = pool.run([["child and hang", str(tmp_path / "pid")]], 1.0)
    assert outcome.status == "timeout"
    wait_until_dead(int((tmp_path / "pid").read_text()))


def test_closing_ends_everything(handler: str) -> None:
    pool = ScoringPool(handler, {}, num_workers=2)
    pids = pool.pids()
    (outcome,) = pool.run(["child"], 10)
    running = [pool.submit(["sleep", 60], 100) for _ in range(2)]
    waiting = [pool.submit("pid", 10) for _ in range(5)]
    time.sleep(0.1)
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 2
    assert {future.result().status for future in running} == {"died"} and all(future.cancelled() for future in waiting)
    for pid in (*pids, outcome.value):
        wait_until_dead(pid)
    with pytest.raises(ValueError, match="closed"):
        pool.submit("pid", 1)


def test_a_handler_that_cannot_be_made_says_why(handler: str) -> None:
    with pytest.raises(WorkerStartError, match="no such thing"):
        ScoringPool(handler, {"fails": True}, num_workers=2)
    with pytest.raises(WorkerStartError, match="no_such_module"):
        ScoringPool("no_such_module:make", {}, num_workers=1)


def test_a_worker_that_cannot_be_replaced_raises_and_does_not_hang(handler: str, tmp_path: Path) -> None:
    (tmp_path / "once_only.py").write_text(
        "import os\ndef make(settings):\n    open(settings['flag'], 'x')\n    return lambda job: os._exit(1)\n"
    )
    sys.path.append(str(tmp_path))
    try:
        with ScoringPool("once_only:make", {"flag": str(tmp_path / "flag")}, num_workers=1) as pool:
            assert pool.submit(0, 10).result().status == "died"
            with pytest.raises(WorkerStartError, match="FileExistsError"):
                pool.submit(0, 10).result()
    finally:
        sys.path.remove(str(tmp_path))


def test_workers_die_with_the_trainer(handler: str) -> None:
    folder = sys.modules["sparkgrpo.trainer.tasks.scoring"].__file__
    program = (
        f"import sys, time; sys.path = {sys.path!r}\n"
        "from sparkgrpo.trainer.tasks.scoring import ScoringPool\n"
        f"pool = ScoringPool({handler!r}, {{}}, num_workers=2)\n"
        "pool.submit(['sleep', 60], 100)\n"
        "print(*pool.pids(), flush=True); time.sleep(60)"
    )
    assert folder is not None
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    for pid in pids:
        wait_until_dead(pid)


def test_printing_stays_off_stdout(pool: ScoringPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert pool.run(["print"], 10)[0].status == "done"
    assert capfd.readouterr().out == ""


def test_pools_leave_no_descriptor_and_no_thread(handler: str) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    for _ in range(3):
        with ScoringPool(handler, {}, num_workers=2) as pool:
            pool.run(["pid", "exit", "pid"], 10)
    assert count() == before


def test_descriptors_above_1023_are_no_problem(handler: str) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip("the system allows fewer descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with ScoringPool(handler, {}, num_workers=1) as pool:
            assert pool.run(["pid"], 10)[0].status == "done"
    finally:
        for descriptor in fillers:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_number_of_workers_follows_the_processors() -> None:
    assert 1 <= default_num_workers() <= 12
