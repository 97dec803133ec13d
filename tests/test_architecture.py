"""The rules of layout and style that a machine can hold: one-way imports, harmless names, sizes, no surprises."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "kernels": {"kernels"},
    "profiling": {"profiling"},
    "trainer": {"trainer", "kernels", "profiling"},
}
FOLDERS = (*ALLOWED, "tests", "benchmarks")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_TRITON_LINES = 120

FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "common", "misc", "tmp", "data", "info"}

# Whose variables they are: the loader's and torchrun's, Triton's, Hugging Face's, CUDA's, the terminal's, the system's.
FOREIGN_VARIABLES = re.compile(
    r"(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(OMP|MKL)_NUM_THREADS|PYTORCH_\w+|TORCH_\w+|NCCL_\w+"
    r"|TRITON_\w+|HF_\w+|TOKENIZERS_PARALLELISM|CUDA_\w+|NVIDIA_\w+|CUBLAS_WORKSPACE_CONFIG"
    r"|CI|TERM|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|PATH|HOME|LANG|LC_ALL|PYTHON\w+|XDG_\w+|SSH_\w+"
)
MACHINE_PATH = re.compile(r"(?<![\w}])/(?:work|root|farm)/|(?<![\w}])/tmp/[a-z]")

IMPORT_NAMES = {"liger-kernel": "liger_kernel", "pyyaml": "yaml"}
RESULT_KEYS = {"device", "commit", "versions"}


@cache
def own_files() -> tuple[Path, ...]:
    """Every Python file of the project."""
    folders = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return (*folders, *sorted(ROOT.glob("*.py")))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def imports(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement among ``nodes`` with the module that it names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, node.module or ""


def component_imports(component: str) -> Iterator[tuple[Path, ast.stmt, str]]:
    for path in (ROOT / component).rglob("*.py"):
        for node, name in imports(ast.walk(parse(path))):
            yield path, node, name


def tracked_files() -> list[Path]:
    """What git has, or would have after ``git add``."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("component", sorted(ALLOWED))
def test_dependencies_point_one_way(component: str) -> None:
    for path, node, name in component_imports(component):
        top, _, rest = name.partition(".")
        assert top not in ALLOWED, f"{place(path, node)}: write sparkgrpo.{name}; bare {top!r} is another's package"
        if top == "sparkgrpo":
            assert rest.split(".")[0] in ALLOWED[component], f"{place(path, node)}: {component} must not import {name}"


def test_kernels_need_only_torch_and_triton() -> None:
    allowed = {"torch", "triton", "sparkgrpo", *sys.stdlib_module_names}
    for path, node, name in component_imports("kernels"):
        assert name.partition(".")[0] in allowed, f"{place(path, node)}: kernels must not import {name}"


@pytest.mark.parametrize("component", sorted(ALLOWED))
def test_optional_packages_are_imported_where_they_are_used(component: str) -> None:
    """At module level only what every install has: the test environment holds extras that a user's may lack."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[><=!~; \[]", requirement)[0] for requirement in requirements]
    # tokenizers and huggingface_hub come with transformers.
    installed = {IMPORT_NAMES.get(name, name) for name in names} | {"tokenizers", "huggingface_hub"}
    allowed = installed | {"sparkgrpo", *sys.stdlib_module_names}
    for path in (ROOT / component).rglob("*.py"):
        for node, name in imports(parse(path).body):
            assert name.partition(".")[0] in allowed, f"{place(path, node)}: import {name} inside the function using it"


def test_own_imports_name_files() -> None:
    """A misspelt module is found even where its import would run only on another machine."""
    for path in own_files():
        for node, name in imports(ast.walk(parse(path))):
            top, _, rest = name.partition(".")
            target = ROOT / rest.replace(".", "/")
            if top == "sparkgrpo":
                assert target.with_suffix(".py").is_file() or target.is_dir(), f"{place(path, node)}: no module {name}"


def test_no_init_files() -> None:
    """A regular package named ``kernels`` or ``profiling`` at the root would shadow Hugging Face's or the stdlib's."""
    assert not [path for path in own_files() if path.name == "__init__.py"]


def test_no_relative_imports() -> None:
    for path in own_files():
        for node in ast.walk(parse(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{place(path, node)}: relative import"


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT): path.read_text(encoding="utf-8").count("\n") for path in own_files()}
    assert not {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_functions_are_short() -> None:
    too_long = {}
    for path in own_files():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                is_triton = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if lines > (MAX_TRITON_LINES if is_triton else MAX_FUNCTION_LINES):
                    too_long[f"{place(path, node)} {node.name}"] = lines
    assert not too_long


def test_names_tell_the_subject() -> None:
    for path in own_files():
        parts = {
            part.removeprefix("test_").removeprefix("bench_") for part in path.relative_to(ROOT).with_suffix("").parts
        }
        assert not parts & FORBIDDEN_STEMS, f"{path.relative_to(ROOT)}: name it after its subject"
        assert not re.search(r"_v?\d+$", path.stem), (
            f"{path.relative_to(ROOT)}: a numbered variant; replace the old one"
        )


def variables_read(tree: ast.Module) -> Iterator[tuple[ast.Attribute, str | None]]:
    """Each use of the process environment with the variable's name, None where the name is not a literal.

    A whole environment handed to a child, ``{**os.environ, ...}`` or ``env=os.environ``, reads no variable.
    """
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in ("environ", "environb", "getenv"):
            continue
        parent = parents[node]
        if isinstance(parent, ast.Dict | ast.keyword):
            continue
        if isinstance(parent, ast.Attribute):  # os.environ.get(...)
            parent = parents[parent]
        key = None
        if isinstance(parent, ast.Subscript):
            key = parent.slice
        elif isinstance(parent, ast.Compare):
            key = parent.left
        elif isinstance(parent, ast.Call) and parent.args:
            key = parent.args[0]
        yield node, key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def test_no_environment_variables_of_our_own() -> None:
    for path in own_files():
        if (ROOT / "tests") in path.parents:
            continue
        for node, name in imports(ast.walk(parse(path))):
            if name == "os":
                assert isinstance(node, ast.Import), f"{place(path, node)}: import os, so that os.environ is seen"
        for node, variable in variables_read(parse(path)):
            is_foreign = variable is not None and FOREIGN_VARIABLES.fullmatch(variable)
            assert is_foreign, f"{place(path, node)}: reads {variable or 'the environment'}; options belong in Config"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("os.environ['SPARKGRPO_DEBUG']", ["SPARKGRPO_DEBUG"]),
        ("os.environ.get('RANK', '0')", ["RANK"]),
        ("os.getenv('X')", ["X"]),
        ("'X' in os.environ", ["X"]),
        ("os.environ[name]", [None]),
        ("dict(os.environ)", [None]),
        ("run({**os.environ, 'A': '1'})", []),
        ("run(env=os.environ)", []),
    ],
)
def test_reading_the_environment_is_seen(program: str, found: list[str | None]) -> None:
    assert [name for _, name in variables_read(ast.parse(program))] == found


def test_no_paths_of_a_machine() -> None:
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content:
            match = MACHINE_PATH.search(content.decode("utf-8", errors="replace"))
            assert match is None, f"{path.relative_to(ROOT)}: path of a machine, {match}"


def test_typing_links_point_at_the_folders() -> None:
    """They show type checkers and editors the folders under the names that an install gives them."""
    for component in ALLOWED:
        assert (ROOT / ".typings" / "sparkgrpo" / component).resolve() == ROOT / component


def test_benchmark_results_say_where_they_come_from() -> None:
    results = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    for path in results:
        if path.name == ".gitkeep":
            continue
        assert path.suffix == ".json", f"{path.relative_to(ROOT)}: results are JSON"
        result = json.loads(path.read_text(encoding="utf-8"))
        missing = RESULT_KEYS - set(result)
        assert isinstance(result, dict) and not missing, f"{path.relative_to(ROOT)} lacks {sorted(missing)}"
