"""Python, PyTorch, Triton, graphs and the optional kernels of others: each is made to compute something."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from sparkgrpo.trainer.doctor.finding import Finding, Machine

SPARK = (12, 1)
MIN_TRITON = (3, 6)
COMPILE_DEADLINE_S = 300


def check_python(machine: Machine) -> Finding:
    """Version and word size, and that a file of this package is importable from here."""
    version, bits = platform.python_version(), 64 if sys.maxsize > 2**32 else 32
    found = f"Python {version}, {bits} bits, {platform.machine()}, {platform.system()}"
    if sys.version_info < (3, 11) or bits == 32:
        return Finding(name="python", verdict="problem", found=found, cure="install Python 3.11 or newer, 64 bits")
    return Finding(name="python", verdict="ok", found=found)


def check_torch(machine: Machine) -> Finding:
    """A product on the device against the same in float64, and the build against the platform."""
    build = "CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    error = _product_error(machine.device)
    found = f"torch {torch.__version__}, {build}; a product on the {machine.device.type} is right to {error:.0e}"
    cure = ""
    if error > 1e-2:
        cure = "the device computes wrong results: run a memory test, and reinstall torch and the driver"
    elif machine.has_nvidia_driver and not machine.has_cuda:
        cure = (
            _install_line() if torch.version.cuda is None else "the driver is older than this build: update the driver"
        )
        found += "; an NVIDIA driver is there, and PyTorch sees no device"
    elif machine.capability == SPARK and (torch.version.cuda or "").startswith("12"):
        cure = f"a DGX Spark needs a build for CUDA 13: {_install_line()}"
    elif not machine.has_cuda:
        found += "; no NVIDIA driver, so runs use the CPU"
    return Finding(name="torch", verdict="problem" if cure else "ok", found=found, cure=cure)


def _install_line() -> str:
    return "pip install torch --index-url https://download.pytorch.org/whl/cu130"


def _product_error(device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    return float(((a.to(device) @ b.to(device)).double().cpu() - exact).abs().max() / exact.abs().max())


def check_triton(machine: Machine) -> Finding:
    """One of our kernels is compiled (for sm_121 where no device is there), on a device it is run as well."""
    name = "triton"
    if importlib.util.find_spec("triton") is None:
        verdict = "problem" if machine.has_cuda else "cannot say"
        return Finding(name=name, verdict=verdict, found="not installed", cure='pip install "triton>=3.6"')
    version = importlib.metadata.version("triton")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_TRITON:
        return Finding(name=name, verdict="problem", found=f"triton {version}", cure='pip install "triton>=3.6"')
    major, minor = machine.capability or SPARK
    code, output = _compile_report(f"{major}{minor}", "rms_norm bfloat16 D 64 forward")
    ignored = " TRITON_PTXAS_PATH is set and has no effect for this GPU: the override is TRITON_PTXAS_BLACKWELL_PATH."
    warning = ignored if "TRITON_PTXAS_PATH" in os.environ and (major, minor) >= (10, 0) else ""
    if code != 0:
        cure = f"reinstall triton; the compiler's words: {output[-300:]}"
        return Finding(
            name=name, verdict="problem", found=f"triton {version} does not compile for sm_{major}{minor}", cure=cure
        )
    found = f"triton {version} and its ptxas compile rms_norm for sm_{major}{minor}."
    if machine.has_cuda:
        from sparkgrpo.kernels.rms_norm import rms_norm, rms_norm_reference

        x = torch.randn(64, 512, device=machine.device, dtype=torch.bfloat16)
        weight = torch.ones(512, device=machine.device, dtype=torch.bfloat16)
        error = (rms_norm(x, weight, eps=1e-6).y_TD - rms_norm_reference(x, weight, eps=1e-6).y_TD).abs().max().item()
        if error > 0.05:
            return Finding(
                name=name, verdict="problem", found=f"{found} It runs and is wrong by {error:.2g}.", cure="report it"
            )
        found += " It runs on the device and is right."
    return Finding(name=name, verdict="ok", found=found + warning)


def _compile_report(target: str, only: str) -> tuple[int, str]:
    """Exit code and output of our compile report, in a process of its own without the interpreter's switch."""
    command = [sys.executable, "-m", "sparkgrpo.kernels.compile_report", "--target", target]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [*command, *(["--only", only] if only else [])], capture_output=True, text=True, check=False, env=environment,
        timeout=COMPILE_DEADLINE_S,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).strip()


def check_tiles(machine: Machine) -> Finding:
    """Every shipped tile compiled for the device: registers, spills and shared memory within its limits."""
    name = "tiles"
    if machine.capability is None:
        return Finding(
            name=name, verdict="cannot say",
            found="no CUDA device; python -m sparkgrpo.kernels.compile_report checks them for sm_90, sm_120 and sm_121",
        )  # fmt: skip
    target = "".join(map(str, machine.capability))
    code, output = _compile_report(target, "")
    if code == 0:
        return Finding(name=name, verdict="ok", found=f"every kernel compiles for sm_{target} within its limits")
    return Finding(
        name=name, verdict="problem", found=f"kernels do not fit sm_{target}: {output[-300:]}",
        cure="report it: kernels/tile_table.py needs a row for this GPU; --device cpu runs meanwhile",
    )  # fmt: skip


def check_compiler(machine: Machine) -> Finding:
    """Triton compiles a small C file against Python's headers at its first launch: so does this check."""
    name = "c compiler"
    compiler = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    cure = "apt install gcc python3-dev"
    needed = "problem" if machine.has_cuda else "cannot say"
    note = "" if machine.has_cuda else "; only kernels on a GPU need it"
    if compiler is None:
        return Finding(name=name, verdict=needed, found=f"no C compiler on PATH{note}", cure=cure)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.c"
        source.write_text("#include <Python.h>\nint main(void) { return 0; }\n")
        command = [compiler, "-fsyntax-only", f"-I{sysconfig.get_paths()['include']}", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        return Finding(name=name, verdict=needed, found=f"Python's C headers are not there{note}", cure=cure)
    return Finding(name=name, verdict="ok", found=f"{Path(compiler).name} compiles against Python's headers")


def check_graphs(machine: Machine) -> Finding:
    """A captured graph must repeat what the plain call gives."""
    name = "cuda graphs"
    if not machine.has_cuda:
        return Finding(name=name, verdict="cannot say", found="no CUDA device; a CPU decodes without graphs")
    x = torch.arange(4096, device=machine.device, dtype=torch.float32)
    expected = (x * 3 + 1).sum()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (x * 3 + 1).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = (x * 3 + 1).sum()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    if torch.equal(captured, expected):
        return Finding(
            name=name, verdict="ok", found="a captured graph was replayed three times and equals the plain call"
        )
    return Finding(
        name=name, verdict="problem", found=f"a replay gave {captured.item()} in place of {expected.item()}",
        cure="update the driver; decoding notices and goes on without graphs",
    )  # fmt: skip


def check_flash_attention(machine: Machine) -> Finding:
    """Optional: one call where it is installed."""
    name = "flash-attn"
    if importlib.util.find_spec("flash_attn") is None:
        return Finding(name=name, verdict="ok", found="not installed, not needed: only --attention flash uses it")
    version = importlib.metadata.version("flash-attn")
    if not machine.has_cuda:
        return Finding(
            name=name, verdict="cannot say", found=f"flash-attn {version} cannot be called without a CUDA device"
        )
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

    q = torch.randn(1, 32, 2, 64, device=machine.device, dtype=torch.bfloat16)
    error = (flash_attn_func(q, q, q) - _attention(q)).abs().max().item()
    verdict = "ok" if error < 0.05 else "problem"
    return Finding(
        name=name, verdict=verdict, found=f"flash-attn {version}: one call differs from torch by {error:.2g}",
        cure="" if verdict == "ok" else "pip uninstall flash-attn",
    )  # fmt: skip


def _attention(q: torch.Tensor) -> torch.Tensor:
    heads_first = q.transpose(1, 2).float()
    return torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first).transpose(1, 2)


def check_liger(machine: Machine) -> Finding:
    """Optional, a peer in the benchmarks: one call where it can run."""
    name = "liger-kernel"
    if importlib.util.find_spec("liger_kernel") is None:
        return Finding(name=name, verdict="ok", found="not installed; only the benchmarks compare with it")
    version = importlib.metadata.version("liger-kernel")
    if not machine.has_cuda:
        return Finding(
            name=name, verdict="cannot say", found=f"liger-kernel {version} cannot be called without a CUDA device"
        )
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

    x = torch.randn(8, 128, device=machine.device)
    y = LigerRMSNormFunction.apply(x, torch.ones(128, device=machine.device), 1e-6, 0.0, "llama", False)
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    error = (y - exact).abs().max().item()  # pyright: ignore[reportOperatorIssue]
    verdict = "ok" if error < 1e-3 else "problem"
    return Finding(
        name=name, verdict=verdict, found=f"liger-kernel {version}: one call is right to {error:.0e}",
        cure="" if verdict == "ok" else "benchmarks against it mean nothing here: pip install -U liger-kernel",
    )  # fmt: skip
