"""GPUs of this machine: how many a run may take, without torch, which takes seconds to say so, and how to hide them."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_mas.config.run import RunConfig

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_here() -> int:
    """How many GPUs this process may take; none where torch is built without CUDA."""
    torch = importlib.util.find_spec("torch")
    if (
        torch is None
        or not Path(torch.origin or "").with_name("lib").joinpath("libtorch_cuda.so").exists()
    ):
        return 0
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = os.environ.get(_VISIBLE)
    return (
        there
        if named is None
        else min(there, sum(name not in ("", "-1") for name in named.split(",")))
    )


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as it would name them to a child."""
    import torch

    named = os.environ.get(_VISIBLE, "").split(",")
    return [
        named[i] if i < len(named) and named[i] else str(i)
        for i in range(torch.cuda.device_count())
    ]


@contextmanager
def on_its_devices(config: RunConfig) -> Iterator[None]:
    """For the block, this process and those that it starts see no GPU if the run computes on CPUs.

    CUDA reads it once: nothing may have asked for it before.
    """
    before = os.environ.get(_VISIBLE)
    if config.cluster.device == "cpu":
        os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE, None)
        if before is not None:
            os.environ[_VISIBLE] = before
