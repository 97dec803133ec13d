"""Shared fixtures, and what must be set before the first import of triton and of huggingface_hub."""

import importlib.util
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may wait for a network
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when a kernel is decorated


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: the first CUDA device, else the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, by mark."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("trl") and importlib.util.find_spec("trl") is None:
        pytest.skip("needs the extra trl: pip install -e .[trl]")
