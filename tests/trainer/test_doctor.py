"""`sparkgrpo doctor` on this machine and on machines that are stand-ins."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkgrpo.profiling import memory
from sparkgrpo.trainer import cli
from sparkgrpo.trainer.commands import doctor
from sparkgrpo.trainer.doctor import compute_checks, machine_checks, sandbox_checks
from sparkgrpo.trainer.doctor.finding import Finding, Machine, run_check, this_machine
from sparkgrpo.trainer.tasks.sandbox import self_test

CPU = Machine(
    device=torch.device("cpu"), capability=None, is_integrated=False, has_nvidia_driver=False, run_folder=Path("runs")
)
NEEDS_A_DEVICE = ("tiles", "cuda graphs", "nsys", "ncu")
QUICK = (
    "python,torch,c compiler,tiles,cuda graphs,flash-attn,liger-kernel,nsys,ncu,memory,heat,landlock,seccomp,run folder"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Every row but those that take long, as --json gives them."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **other: lines.append(text))
        folder = tmp_path_factory.mktemp("doctor")
        cli.main(["doctor", "--json", "--only", QUICK, "--run-dir", str(folder)])
    content = json.loads(lines[0])
    assert content["num_problems"] == sum(row["verdict"] == "problem" for row in content["checks"])
    return {row["name"]: row for row in content["checks"]}


def test_every_row_says_what_was_found(rows: dict[str, dict[str, str]]) -> None:
    assert list(rows) == QUICK.split(",")
    for row in rows.values():
        assert row["verdict"] in ("ok", "problem", "cannot say") and len(row["found"]) > 10
        assert bool(row["cure"]) >= (row["verdict"] == "problem")


@pytest.mark.skipif(torch.cuda.is_available(), reason="rows of a machine without a GPU")
def test_rows_of_a_machine_without_a_gpu(rows: dict[str, dict[str, str]]) -> None:
    """Nothing that needs a device is called a problem, or fine."""
    assert all(rows[name]["verdict"] == "cannot say" for name in NEEDS_A_DEVICE)
    assert all(
        "without a CUDA device" in rows[name]["found"] or "no CUDA device" in rows[name]["found"]
        for name in NEEDS_A_DEVICE
    )
    assert rows["torch"]["verdict"] == "ok" and rows["flash-attn"]["verdict"] in ("ok", "cannot say")
    assert rows["memory"]["verdict"] == "ok" and "GiB available" in rows["memory"]["found"]


def test_a_driver_without_a_device_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver = dataclasses.replace(CPU, has_nvidia_driver=True)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = compute_checks.check_torch(with_driver)
    assert found.verdict == "problem" and "whl/cu130" in found.cure
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "update the driver" in compute_checks.check_torch(with_driver).cure


def test_a_spark_with_a_build_for_cuda_12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    spark = dataclasses.replace(CPU, capability=(12, 1), has_nvidia_driver=False)
    found = compute_checks.check_torch(spark)
    assert found.verdict == "problem" and "needs a build for CUDA 13" in found.cure


def test_a_wrong_product_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_checks, "_product_error", lambda device: 0.5)
    assert compute_checks.check_torch(CPU).verdict == "problem"


def test_triton_is_judged_by_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def report(target: str, only: str) -> tuple[int, str]:
        asked.append((target, only))
        return len(asked) - 1, "ptxas fatal: sm_121a is not defined"

    monkeypatch.setattr(compute_checks, "_compile_report", report)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere")
    first, second = (compute_checks.check_triton(CPU) for _ in range(2))
    assert first.verdict == "ok" and "TRITON_PTXAS_BLACKWELL_PATH" in first.found
    assert second.verdict == "problem" and "sm_121a is not defined" in second.cure
    assert {target for target, _ in asked} == {"121"}


@pytest.mark.slow
def test_triton_compiles_for_the_spark() -> None:
    found = compute_checks.check_triton(CPU)
    assert found.verdict == "ok", found


def test_memory_of_a_spark_with_swap_and_a_full_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page cache is no problem, swap is; both meters are shown."""
    kib = {
        "MemTotal": 127_000_000,
        "MemFree": 3_000_000,
        "MemAvailable": 100_000_000,
        "Cached": 90_000_000,
        "SwapTotal": 8_000_000,
    }
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("".join(f"{key}: {value} kB\n" for key, value in kib.items()))
    real = memory.meminfo_bytes
    for module in (memory, machine_checks):
        monkeypatch.setattr(module, "meminfo_bytes", lambda field, path=meminfo: real(field, path))
    monkeypatch.setattr(memory, "host_available_bytes", lambda: real("MemAvailable", meminfo))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (3_000_000 << 10, 127_000_000 << 10))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(is_integrated=True))
    spark = dataclasses.replace(CPU, device=torch.device("cuda"), capability=(12, 1), is_integrated=True)
    found = machine_checks.check_memory(spark)
    assert found.verdict == "problem" and "swapoff" in found.cure
    assert "95.4 of 121.1 GiB available (free 2.9" in found.found and "CUDA says 2.9 of 121.1 GiB free" in found.found
    assert "a run may plan with 75.4 GiB" in found.found


def test_a_system_without_meminfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "meminfo_bytes", lambda *a: None)
    assert machine_checks.check_memory(CPU).verdict == "cannot say"


def test_run_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system")

    here = dataclasses.replace(CPU, run_folder=tmp_path / "not" / "yet")
    assert machine_checks.check_run_folder(here).verdict == "ok" and not list(tmp_path.iterdir())
    monkeypatch.setattr(machine_checks.tempfile, "TemporaryFile", refuse)
    found = machine_checks.check_run_folder(here)
    assert found.verdict == "problem" and "Read-only file system" in found.found and "--run-dir" in found.cure


@pytest.mark.parametrize(
    ("layer", "verdicts"),
    [("landlock", ("problem", "ok")), ("seccomp", ("ok", "problem")), ("rlimits", ("ok", "problem"))],
)
def test_a_wall_that_does_not_stand(monkeypatch: pytest.MonkeyPatch, layer: str, verdicts: tuple[str, str]) -> None:
    findings = tuple(
        self_test.Finding(name=f"try {wall}", layer=wall, is_good=wall != layer, detail="it was possible")
        for wall in ("landlock", "seccomp", "rlimits")
    )
    report = self_test.SandboxReport(
        level="strict", abi=3, kernel="6.1", machine="x86_64", layers=(), findings=findings
    )
    monkeypatch.setattr(sandbox_checks, "self_test", lambda level: report)
    found = [check(CPU) for check in (sandbox_checks.check_landlock, sandbox_checks.check_seccomp)]
    assert tuple(row.verdict for row in found) == verdicts
    (bad,) = [row for row in found if row.verdict == "problem"]
    assert f"layer {layer} does not hold" in bad.found and bad.cure


def test_walls_that_could_not_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = self_test.Finding(name="put the walls up", layer="landlock", is_good=False, detail="no such call")
    report = self_test.SandboxReport(level="strict", abi=None, kernel="4.4", machine="x", layers=(), findings=(failed,))
    monkeypatch.setattr(sandbox_checks, "self_test", lambda level: report)
    assert sandbox_checks.check_landlock(CPU).verdict == "problem"
    assert sandbox_checks.check_seccomp(CPU).verdict == "cannot say"


def test_a_check_that_raises_ends_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(machine: Machine) -> Finding:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    found = run_check("torch", broken, CPU)
    assert found.verdict == "problem" and found.found == "it raised RuntimeError: CUDA error: an illegal memory access"
    monkeypatch.setitem(doctor.CHECKS, "torch", broken)
    assert cli.main(["doctor", "--only", "torch,python"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("problem     torch") and lines[-2].startswith("ok          python")
    assert lines[-1] == "1 to mend"


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--only", "pyhton"]) == 2
    assert "got 'pyhton'" in capsys.readouterr().err
    assert cli.main(["doctor", "--jsn"]) == 2


def test_this_machine() -> None:
    found = this_machine(Path("x"))
    assert found.has_cuda == torch.cuda.is_available() and (found.capability is None) == (not found.has_cuda)
