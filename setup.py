"""Install kernels/, trainer/ and profiling/ as sparkgrpo.kernels, sparkgrpo.trainer and sparkgrpo.profiling.

Everything else about the package stands in pyproject.toml; what needs code stands here.
"""

from setuptools import find_namespace_packages, setup

COMPONENTS = ("kernels", "trainer", "profiling")
DATA_SUFFIXES = ("safetensors", "json", "jinja", "yaml", "txt", "jsonl", "css", "js")


def subpackages(component: str) -> list[str]:
    """Name ``component`` and every folder below it, dotted, as they stand at the repository root."""
    return find_namespace_packages(include=[component, f"{component}.*"], exclude=["*__pycache__*"])


setup(
    packages=[f"sparkgrpo.{package}" for component in COMPONENTS for package in subpackages(component)],
    package_dir={f"sparkgrpo.{component}": component for component in COMPONENTS},
    # "" stands for every package: data lies next to the code that reads it (embedded weights, presets).
    package_data={"": ["py.typed", *(f"*.{suffix}" for suffix in DATA_SUFFIXES)]},
)
