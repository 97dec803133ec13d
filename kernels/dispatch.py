"""Which implementation serves a tensor: one question, asked in one place, so that a test can answer it for every op."""

import torch


def runs_triton(device: torch.device) -> bool:
    """Whether the Triton kernels serve this device; the torch path of each op serves the others."""
    return device.type == "cuda"
