"""Shared fixtures, and what must be set before the first import of triton and of huggingface_hub."""

import functools
import importlib.util
import os
import sys
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparkgrpo.trainer.tasks.sandbox.landlock import KernelCalls, abi_version
from sparkgrpo.trainer.tasks.sandbox.seccomp import filter_template

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may wait for a network
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when a kernel is decorated


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: the first CUDA device, else the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class OpWatch(TorchDispatchMode):
    """Every operation in order, and the largest tensor that any of them returned; inside our own ops too, which hide
    theirs from an ordinary mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """Name of the operation, shapes of its tensor arguments."""
        self.largest, self.largest_from = 0, ""
        self.peak_bytes = 0
        """Most bytes at one time of tensors that were made inside."""
        self._given: dict[int, StorageWeakRef] = {}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._forget_the_dead()
        for x in tree_leaves((args, kwargs)):  # what was there before, unless it was made inside
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._alive:
                self._given[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
        if func.namespace == "sparkgrpo":
            with self:
                out = OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
            self.calls.append((str(func), tuple(x.shape for x in tree_leaves(args) if isinstance(x, torch.Tensor))))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        for x in made:
            if x.dtype == torch.uint8:  # the interpreter copies whole storages as bytes
                continue
            if x.numel() > self.largest:
                self.largest, self.largest_from = x.numel(), str(func)
            storage = x.untyped_storage()
            if storage._cdata not in self._given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._forget_the_dead()
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return out

    def _forget_the_dead(self) -> None:
        """Storages by address: one that is gone leaves its address to another."""
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self._given = {key: kept for key, kept in self._given.items() if not kept.expired()}

    def product_rows(self) -> list[int]:
        """Rows of the left operand of every matrix product."""
        place = {"aten.mm.": 0, "mkldnn._linear_pointwise.": 0, "aten.addmm_.": 1}
        return [shapes[place[op]][0] for name, shapes in self.calls for op in place if name.startswith(op)]


@pytest.fixture
def op_watch() -> OpWatch:
    """A fresh watch: `with op_watch: ...`."""
    return OpWatch()


@functools.cache
def missing_wall() -> str | None:
    """Why no confined process can be made on this machine, or None."""
    if sys.platform != "linux":
        return "it is made of Linux's walls"
    try:
        abi_version(KernelCalls())
        filter_template()
    except OSError as error:
        return str(error.strerror)
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, by mark."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("walls") and missing_wall() is not None:
        pytest.skip(f"the sandbox cannot stand here: {missing_wall()}")
    if item.get_closest_marker("trl") and importlib.util.find_spec("trl") is None:
        pytest.skip("needs the extra trl: pip install -e .[trl]")
