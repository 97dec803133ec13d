"""The compile report: it misses no kernel, and it fails where it should.

The kernel and the cases in this file are compiled in a child process, which imports the file under its own name.
"""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton comes with Linux only")
tl = pytest.importorskip("triton.language")

from sparkgrpo.kernels import compile_report, sass_report, triton_launch  # noqa: E402  after the skip
from sparkgrpo.kernels.sass_report import CaseReport, count_kinds, find_problems  # noqa: E402
from sparkgrpo.kernels.triton_launch import CompileCase  # noqa: E402

KERNELS = Path(triton_launch.__file__).parent
TARGETS = (90, 120, 121)
CLEAN_ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def kernels_in_source(path: Path) -> set[str]:
    """Names of the file's `@triton.jit` functions that are launched; device functions have other names."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


@pytest.mark.parametrize("capability", TARGETS)
def test_every_kernel_has_a_case(capability: int) -> None:
    for path in sorted(KERNELS.glob("*.py")):
        written = kernels_in_source(path)
        if not written:
            continue
        assert path.stem.endswith("_kernels"), f"{path.name} holds kernels; the report scans *_kernels.py alone"
        cases = sass_report.load_cases(f"sparkgrpo.kernels.{path.stem}", capability)
        lacking = written - {case.kernel.__name__ for case in cases}
        assert not lacking, f"{path.name}: add {sorted(lacking)} to compile_cases"


@pytest.mark.parametrize("capability", TARGETS)
def test_every_case_fits_its_kernel_and_has_a_name_of_its_own(capability: int) -> None:
    assert compile_report.list_jobs(compile_report.kernel_modules(), [capability])  # raises on a name used twice
    for module in compile_report.kernel_modules():
        for case in sass_report.load_cases(module, capability):
            given = {*case.signature, *case.constexprs}
            assert set(case.kernel.arg_names) <= given, case.name
            assert {*case.constexprs, *case.aligned} <= set(case.kernel.arg_names), case.name


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                 /* 0x0000df00ff017b82 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 LDG.E.U16 R9, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0060*/             @!UP0 UTMALDG.2D [UR8], [UR6] ;
        /*0070*/                   STL [R1], R4 ;
        /*0080*/                   LDL.LU R4, [R1] ;
        /*0090*/                   MUFU.EX2 R4, R4 ;
        /*11a0*/                   EXIT ;
"""


def test_instructions_are_counted_by_kind_and_width() -> None:
    counts = count_kinds(SASS)
    expected = {"HMMA": 1, "UTMALDG": 1, "LDL": 1, "STL": 1, "MUFU": 1}
    assert counts == expected | {"LDG.128": 1, "LDG.16": 1, "LDG.32": 1, "LDGSTS.128": 1}


CASE = CompileCase(name="case", kernel=None, signature={}, constexprs={})
REPORT = CaseReport(
    num_warps=8, num_stages=3, registers=200, stack_bytes=0, shared_bytes=0, blocks_per_sm=1, instructions={},
    disassembled=121,
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "report", "capability", "words"),
    [
        ({}, {}, 121, None),
        ({}, {"instructions": {"LDL": 1, "STL": 1}, "stack_bytes": 8}, 121, "spills"),
        ({}, {"instructions": {"STL": 6}, "stack_bytes": 8}, 121, None),  # Triton 3.6 with descriptors
        ({}, {"instructions": {"STL": 6}, "stack_bytes": 16}, 121, "spills"),
        ({}, {"shared_bytes": 101_376}, 121, None),
        ({}, {"shared_bytes": 101_377}, 121, "the limit is 101,376"),
        ({}, {"shared_bytes": 101_377}, 120, "the limit is 101,376"),
        ({}, {"shared_bytes": 232_448}, 90, None),
        ({}, {"shared_bytes": 232_449}, 90, "the limit is 232,448"),
        ({"is_product": True}, {"instructions": {"HMMA": 4}}, 121, None),
        ({"is_product": True}, {}, 121, "no HMMA"),
        ({"is_product": True}, {"instructions": {"HGMMA": 4}}, 90, None),
        ({"is_product": True}, {"instructions": {"HMMA": 4}}, 90, "no HGMMA"),
        ({"is_product": True, "constexprs": {"BLOCK_M": 16}}, {"instructions": {"HMMA": 4}}, 90, None),
        ({"is_product": True, "constexprs": {"BLOCK_M": 16}}, {}, 90, "no HMMA"),
        ({"uses_tma": True}, {"instructions": {"UTMALDG": 2}}, 121, None),
        ({"uses_tma": True}, {"instructions": {"LDG.128": 2}}, 121, "no UTMALDG"),
    ],
)
def test_each_limit_is_held(case: dict, report: dict, capability: int, words: str | None) -> None:
    problems = find_problems(replace(CASE, **case), replace(REPORT, **report), capability)
    assert len(problems) == (words is not None)
    assert words is None or (words in problems[0] and ":" in problems[0]), problems


def test_the_comparison_names_what_changed() -> None:
    stored = {"a": {"registers": 64, "shared_bytes": 0}, "gone": {"registers": 1}}
    now = {"a": {"registers": 72, "shared_bytes": 0}, "fresh": {"registers": 1}}
    assert compile_report.compare(stored, stored) == []
    lines = compile_report.compare(stored, now)
    assert sorted(lines) == ["a: registers 64 -> 72", "fresh: new", "gone: gone, or not compiled"]


@pytest.mark.parametrize("arguments", [["--target", "122"], ["--tagret", "121"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_report, "is_interpreted", lambda: False)
    with pytest.raises(SystemExit) as caught:
        compile_report.main(arguments)
    assert caught.value.code == 2


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_report, "is_interpreted", lambda: True)
    with pytest.raises(SystemExit) as caught:
        compile_report.main([])
    assert caught.value.code == 2
    assert "env -u TRITON_INTERPRET" in capsys.readouterr().err


def test_a_misspelt_case_is_told_the_nearest() -> None:
    names = [job.case for job in compile_report.list_jobs(compile_report.kernel_modules(), [121])]
    wrong = names[0].replace(names[0][1], "", 1)
    with pytest.raises(ValueError, match=re.escape(names[0])):
        compile_report.list_jobs(compile_report.kernel_modules(), [121], wrong)


@triton.jit(do_not_specialize=["num_steps"])
def _product_kernel(  # noqa: ANN202
    a_ptr,  # noqa: ANN001
    b_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    num_steps,  # noqa: ANN001
    BLOCK_M: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    BLOCK_N: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    BLOCK_K: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
):
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(num_steps):
        a = tl.load(a_ptr + (step * BLOCK_M + offs_m[:, None]) * BLOCK_K + offs_k[None, :])
        b = tl.load(b_ptr + (step * BLOCK_K + offs_k[:, None]) * BLOCK_N + offs_n[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out_ptr + offs_m[:, None] * BLOCK_N + offs_n[None, :], total)


def compile_cases(capability: int) -> list[CompileCase]:
    """One good variant and one for each way to break a limit."""

    def case(
        name: str, word: str, m: int, n: int, k: int, num_warps: int, num_stages: int, **more: bool
    ) -> CompileCase:
        signature = {"a_ptr": word, "b_ptr": word, "out_ptr": "*fp32", "num_steps": "i32"}
        tile = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
        more = {"is_product": True} | more
        return CompileCase(
            name=name, kernel=_product_kernel, signature=signature, constexprs=tile, num_warps=num_warps,
            num_stages=num_stages, **more,
        )  # fmt: skip

    return [
        case("good", "*bf16", 64, 64, 32, 4, 2),
        case("spills", "*bf16", 128, 128, 32, 1, 2),
        case("shared", "*bf16", 128, 128, 128, 8, 6),
        case("fp32", "*fp32", 32, 32, 32, 4, 2),
        case("pointers", "*bf16", 64, 64, 32, 4, 2, uses_tma=True),
        case("broken", "*bf16", 64, 64, 7, 4, 2),
    ]


def run_report(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkgrpo.kernels.compile_report", "--module", Path(__file__).stem, *arguments]
    environment = CLEAN_ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_every_broken_limit_fails_the_report() -> None:
    done = run_report("--target", "121")
    failures = dict(re.findall(r"^FAILED sm_121 (\w+): (.*)", done.stdout, re.MULTILINE))
    starts = {"spills": "spills", "fp32": "no HMMA", "pointers": "no UTMALDG", "broken": "does not compile"}
    for name, words in starts.items():
        assert failures[name].startswith(words), done.stdout + done.stderr
    assert "the limit is 101,376" in failures["shared"]
    assert set(failures) == {*starts, "shared"}
    assert done.returncode == 1


@pytest.mark.slow
def test_a_good_kernel_passes_and_is_compared_with_what_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_report("--only", "good", "--json", str(path), "--check", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("to compare with") == len(TARGETS)
    targets = json.loads(path.read_text())["targets"]
    assert set(targets) == {f"sm_{capability}" for capability in TARGETS}
    products = {name: {"HMMA", "HGMMA"} & set(cases["good"]["instructions"]) for name, cases in targets.items()}
    assert products == {"sm_90": {"HGMMA"}, "sm_120": {"HMMA"}, "sm_121": {"HMMA"}}

    stored = targets["sm_121"]
    stored["good"]["registers"] += 1
    compile_report.stored_path(tmp_path, 121).write_text(json.dumps({"cases": stored}))
    done = run_report("--only", "good", "--target", "121", "--check", str(tmp_path))
    assert "good: registers" in done.stdout
    assert done.returncode == 0, "a change is told, not refused"
