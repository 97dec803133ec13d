"""The watchdog on a meter of our own, and the limits it watches."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparkgrpo.profiling import memory
from sparkgrpo.profiling.memory import MemoryLimits, cgroup_left_bytes, memory_limits
from sparkgrpo.profiling.watchdog import PERIOD_S, MemoryFloorReached, MemoryWatchdog

GIB = 1 << 30
LIMITS = MemoryLimits(available_bytes=60 * GIB, reserve_bytes=20 * GIB, floor_bytes=16 * GIB, warning_bytes=20 * GIB)


class Meter:
    """MemAvailable as the test says."""

    def __init__(self, gib: float) -> None:
        self.gib: float | None = gib

    def __call__(self) -> int | None:
        return None if self.gib is None else int(self.gib * GIB)


def test_warning_once_until_memory_has_risen() -> None:
    meter = Meter(50)
    dog = MemoryWatchdog(LIMITS, meter)
    told = []
    for gib in (50, 19, 18, 25, 19.5, 17):
        meter.gib = gib
        told.append(dog.poll().is_low)
    assert told == [False, True, False, False, True, False]
    dog.check()


def test_the_floor_is_final() -> None:
    meter = Meter(15.9)
    dog = MemoryWatchdog(LIMITS, meter)
    dog.look()
    meter.gib = 100
    dog.look()
    with pytest.raises(MemoryFloorReached, match=r"below the floor of 16\.0 GiB"):
        dog.check()


def test_the_lowest_value_between_two_questions() -> None:
    meter = Meter(50)
    dog = MemoryWatchdog(LIMITS, meter)
    for gib in (40, 30, 45):
        meter.gib = gib
        dog.look()
    assert dog.poll().lowest_bytes == 30 * GIB
    assert dog.poll().lowest_bytes == 45 * GIB


def test_a_system_that_does_not_say_is_never_stopped() -> None:
    meter = Meter(1)
    meter.gib = None
    dog = MemoryWatchdog(LIMITS, meter)
    assert dog.poll().lowest_bytes is None and not dog.is_at_floor


def test_the_thread_sees_a_short_fall() -> None:
    """A dip that is over before the run asks."""
    meter = Meter(50)
    with MemoryWatchdog(LIMITS, meter) as dog:
        meter.gib = 10
        deadline = time.monotonic() + 50 * PERIOD_S
        while not dog.is_at_floor and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 10)
        meter.gib = 50
        assert dog.is_at_floor


def test_limits_of_a_spark_of_a_card_and_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (20 * GIB, 80 * GIB))
    found = {}
    for is_integrated in (True, False):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda d, kind=is_integrated: SimpleNamespace(is_integrated=kind)
        )
        found[is_integrated] = memory_limits(torch.device("cuda"))
    assert found[True].usable_bytes == 80 * GIB and found[True].floor_bytes == 16 * GIB
    assert found[True].warning_bytes == 20 * GIB
    assert found[False].usable_bytes == 12 * GIB and found[False].floor_bytes == GIB // 2
    assert memory_limits(torch.device("cpu")).usable_bytes == 90 * GIB


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(text)


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    """Version 2: the process's own group has no limit, the one above has; reclaimable cache is free."""
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("0::/outer/inner\n")
    group(root / "outer" / "inner", memory_max="max\n", memory_current="99\n")
    group(
        root / "outer",
        memory_max=f"{8 * GIB}\n",
        memory_current=f"{5 * GIB}\n",
        memory_stat=f"inactive_file {GIB}\nanon 3\n",
    )
    assert cgroup_left_bytes(root, own) == 4 * GIB
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {50 * GIB // 1024} kB\n")
    assert memory.host_available_bytes(meminfo, root, own) == 4 * GIB
    meminfo.write_text(f"MemAvailable: {2 * GIB // 1024} kB\n")
    assert memory.host_available_bytes(meminfo, root, own) == 2 * GIB


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("12:cpu,cpuacct:/box\n4:memory:/box\n")
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}\n"
    group(
        root / "memory" / "box",
        memory_limit_in_bytes=str(6 * GIB),
        memory_usage_in_bytes=str(2 * GIB),
        memory_stat=stat,
    )
    group(root / "memory", memory_limit_in_bytes="9223372036854771712", memory_usage_in_bytes="5")
    assert cgroup_left_bytes(root, own) == 5 * GIB


def test_no_control_group(tmp_path: Path) -> None:
    assert cgroup_left_bytes(tmp_path, tmp_path / "none") is None
    (tmp_path / "self").write_text("0::/\ngarbage\n")
    assert cgroup_left_bytes(tmp_path, tmp_path / "self") is None
