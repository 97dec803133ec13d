"""Runs the tests of the head ops on every producer: the CPU's two schedules, and the GPU's three designs in Triton's
interpreter."""

import importlib.util

import pytest


@pytest.fixture(params=["torch", "torch recompute", "anchored", "chunked", "recompute"])
def producer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes the head in this test: it stands in for design "auto"."""
    if not request.param.startswith("torch"):
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton comes with Linux only")
        from sparkgrpo.kernels.triton_launch import is_interpreted

        if not is_interpreted():
            pytest.skip("Triton's interpreter is off where a GPU is: the tests marked gpu run there")
        monkeypatch.setattr("sparkgrpo.kernels.dispatch.runs_triton", lambda device: True)
    if request.param != "torch":
        design = request.param.removeprefix("torch ")
        monkeypatch.setattr("sparkgrpo.kernels.head_plan.cheapest_design", lambda times_s: design)
    return request.param


@pytest.fixture
def is_triton(producer: str) -> bool:
    """Whether this test runs Triton kernels."""
    return not producer.startswith("torch")
