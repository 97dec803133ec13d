"""What the assembler makes of one compile case: registers, spills, shared memory, resident blocks, instruction kinds.

Triton compiles for any GPU, and its wheel brings ptxas and cuobjdump along, so none of this needs a GPU.
"""

import importlib
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparkgrpo.kernels.triton_launch import CompileCase, is_interpreted


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one multiprocessor has; CUDA C++ Programming Guide, "Compute Capabilities"."""

    shared_bytes: int
    """Shared memory that one block may opt in to."""
    sm_shared_bytes: int
    """Shared memory of all its blocks together, 1 KiB a block taken by the driver included."""
    sm_warps: int
    sm_blocks: int
    product: str
    """The tensor-core instruction that a product of bf16 operands must use."""


LIMITS = {
    90: Limits(shared_bytes=232_448, sm_shared_bytes=233_472, sm_warps=64, sm_blocks=32, product="HGMMA"),
    120: Limits(shared_bytes=101_376, sm_shared_bytes=102_400, sm_warps=48, sm_blocks=24, product="HMMA"),
    121: Limits(shared_bytes=101_376, sm_shared_bytes=102_400, sm_warps=48, sm_blocks=24, product="HMMA"),
}
"""By compute capability: H100 and H200, RTX 50 and RTX PRO 6000, GB10."""

SM_REGISTERS = 65_536

UNREAD_STACK_BYTES = 8
"""Triton 3.6 stores 8 bytes of local memory in kernels with descriptors and never loads them: no spill."""

HGMMA_ROWS = 64
"""Smallest M of sm_90's warp-group product; tiles of fewer rows use HMMA there."""

MEMORY_KINDS = ("LDG", "STG", "LDGSTS")
"""Global loads, stores and asynchronous copies: counted by bits per thread, "LDG.128"."""

KINDS = ("HMMA", "HGMMA", "UTMALDG", "UTMASTG", "LDSM", "LDL", "STL", "MUFU", "DFMA", "ATOM", "ATOMG", "RED", "REDG")
"""Tensor cores, TMA, matrix loads, spills, special functions, fp64 and atomics."""

_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseReport:
    """One compiled variant."""

    num_warps: int
    num_stages: int
    registers: int
    """A thread's."""
    stack_bytes: int
    """Local memory of a thread."""
    shared_bytes: int
    """A block's, as Triton asks for it at launch."""
    blocks_per_sm: int
    """Resident at once, by registers, shared memory, warps and blocks."""
    instructions: dict[str, int]
    """Static count by kind; kinds that do not occur are left out."""
    disassembled: int
    """Capability that the instructions were read for: 120 where this cuobjdump cannot disassemble sm_121."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What came of one case: the report, None where it does not compile, and what breaks a rule, with the remedy."""

    name: str
    capability: int
    report: CaseReport | None
    problems: tuple[str, ...]


def load_cases(module_name: str, capability: int) -> list[CompileCase]:
    """The compile cases of a kernel file for GPUs of one capability.

    Raises:
        ValueError: no function `compile_cases`, or a name that occurs twice.
    """
    module = importlib.import_module(module_name)
    if not hasattr(module, "compile_cases"):
        raise ValueError(f"{module_name} has no compile_cases(capability) -> list[CompileCase]: add it at its end")
    cases = module.compile_cases(capability)
    twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    if twice:
        raise ValueError(f"{module_name} lists cases of one name twice: {', '.join(twice)}; rename one of each")
    return cases


def examine(module_name: str, case_name: str, capability: int) -> CaseResult:
    """Compile and judge one case, found by name because a kernel does not travel between processes."""
    case = {case.name: case for case in load_cases(module_name, capability)}[case_name]
    try:
        report = compile_case(case, capability)
    except Exception as error:  # the compiler's errors have no common class, and other cases must still be reported
        text = str(error).strip()
        problem = f"does not compile: {type(error).__name__}: {text[-2000:]}"
        return CaseResult(name=case_name, capability=capability, report=None, problems=(problem,))
    problems = tuple(find_problems(case, report, capability))
    return CaseResult(name=case_name, capability=capability, report=report, problems=problems)


def use_cache(folder: str) -> None:
    """Let Triton keep what it compiles in `folder`: a cache of earlier runs must not answer for today's compiler."""
    knobs.cache.dir = folder


def compile_case(case: CompileCase, capability: int) -> CaseReport:
    """Compile for sm_<capability> and read the result.

    Raises:
        ValueError: the case does not fit the kernel's arguments.
        RuntimeError: in the interpreter, or where no cuobjdump can read the cubin.
        Exception: whatever Triton and ptxas raise.
    """
    compiled = _compile(case, capability)
    usage = _cuobjdump(compiled.asm["cubin"], "--dump-resource-usage")
    sass, disassembled = _cuobjdump(compiled.asm["cubin"], "-sass"), capability
    if sass is None and capability == 121:  # Triton 3.6; sm_120 has the same instructions
        sass, disassembled = _cuobjdump(_compile(case, 120).asm["cubin"], "-sass"), 120
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage or "")
    if found is None or sass is None:
        raise RuntimeError(f"cuobjdump of Triton {triton.__version__} cannot read code for sm_{capability}")
    registers, stack_bytes = (int(number) for number in found.groups())
    shared_bytes, limits = compiled.metadata.shared, LIMITS[capability]
    # A warp gets registers in units of 256: 8 a thread.
    by_registers = SM_REGISTERS // (-(-registers // 8) * 8 * 32 * case.num_warps)
    by_shared = limits.sm_shared_bytes // (shared_bytes + 1024)
    return CaseReport(
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=shared_bytes,
        blocks_per_sm=min(by_registers, by_shared, limits.sm_warps // case.num_warps, limits.sm_blocks),
        instructions=count_kinds(sass),
        disassembled=disassembled,
    )


def find_problems(case: CompileCase, report: CaseReport, capability: int) -> list[str]:
    """Every rule that the compiled case breaks, as a sentence with what to do."""
    problems, seen, limits = [], report.instructions, LIMITS[capability]
    num_loads, num_stores = seen.get("LDL", 0), seen.get("STL", 0)
    if num_loads or (num_stores and report.stack_bytes > UNREAD_STACK_BYTES):
        problems.append(
            f"spills registers to local memory ({num_loads} LDL, {num_stores} STL, {report.stack_bytes} bytes a"
            f" thread; {report.registers} registers): take a smaller tile or block, more warps, or descriptors"
        )
    if report.shared_bytes > limits.shared_bytes:
        problems.append(
            f"{report.shared_bytes:,} bytes of shared memory, the limit is {limits.shared_bytes:,}:"
            f" fewer stages than {report.num_stages}, or a smaller tile"
        )
    rows = case.constexprs.get("BLOCK_M", HGMMA_ROWS)
    product = "HMMA" if rows < HGMMA_ROWS else limits.product
    if case.is_product and product not in seen:
        problems.append(
            f"no {product}, so the product is not on the tensor cores as it should be: check the operands' dtypes,"
            " tile and input_precision (a product in fp32 is a case without is_product)"
        )
    if case.uses_tma and "UTMALDG" not in seen:
        problems.append("no UTMALDG: its descriptors are not loaded through TMA; pass them as tensordesc<...>")
    return problems


def count_kinds(sass: str) -> dict[str, int]:
    """Static count of the instruction kinds that tell something about speed, in the order of KINDS, memory last."""
    counts: Counter[str] = Counter()
    for opcode in _OPCODE.findall(sass):
        kind, *modifiers = opcode.split(".")
        if kind in MEMORY_KINDS:
            width = {"256", "128", "64", "U16", "S16", "U8", "S8"}.intersection(modifiers)
            kind = f"{kind}.{width.pop().lstrip('US') if width else '32'}"
        elif kind not in KINDS:
            continue
        counts[kind] += 1
    order = {kind: index for index, kind in enumerate(KINDS)}
    return dict(sorted(counts.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def _compile(case: CompileCase, capability: int) -> Any:  # noqa: ANN401  Triton's CompiledKernel has no public type
    if is_interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: kernels are decorated for the interpreter and cannot be compiled")
    _check_arguments(case)
    names = list(case.kernel.arg_names)
    types = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    # A launch finds out by itself that these are multiples of 16.
    pointers = {name for name in names if types[name].startswith("*")}
    unseen = _unseen(case)
    is_aligned = (pointers - unseen) | {name for name in case.aligned if types[name] != "constexpr"}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in is_aligned}
    source = ASTSource(fn=case.kernel, signature=types, constexprs=dict(case.constexprs), attrs=attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _check_arguments(case: CompileCase) -> None:
    """Raises ValueError where the case and the kernel's arguments differ."""
    names, given = set(case.kernel.arg_names), {*case.signature, *case.constexprs}
    lacking, unknown = sorted(names - given), sorted({*case.constexprs, *case.aligned} - names)
    if lacking or unknown:
        raise ValueError(
            f"case {case.name!r} does not fit {case.kernel.__name__}: it lacks {lacking or 'nothing'} and has unknown"
            f" {unknown or 'nothing'}; name each argument in signature or in constexprs"
        )
    wrong = sorted(set(case.aligned) & _unseen(case))
    if wrong:
        raise ValueError(
            f"case {case.name!r} counts {wrong} as aligned, which a launch never finds out (do_not_specialize):"
            " take them out of aligned"
        )


def _unseen(case: CompileCase) -> set[str]:
    """Arguments whose alignment a launch never looks at."""
    return {p.name for p in case.kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}


def _cuobjdump(cubin: bytes, flag: str) -> str | None:
    """Text of one dump; None where this cuobjdump does not know the architecture."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, flag, file.name], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
