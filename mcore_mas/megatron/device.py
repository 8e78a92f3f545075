"""The device of a rank, and whether Triton's kernels run on it."""

import importlib.util

import torch


def rank_device() -> torch.device:
    """Return the device that holds the tensors of this rank: its GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def use_triton(device: torch.device) -> bool:
    """Return True if operations on `device` use the kernels that are written in Triton."""
    return device.type != "cpu" and importlib.util.find_spec("triton") is not None
