"""GPUs and cores of this machine: count, name and hide them.

`count_visible_gpus` does not import torch, which takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this module, and the models of a config take 0.4 s
    from mcore_mas.config.run import RunConfig

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAX_CORES = 8
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # quota of a container, in version 2 of cgroups


def count_visible_gpus() -> int:
    """Return the number of GPUs that this process may use.

    It is 0 if torch is missing or built without CUDA.
    """
    if not _torch_has_cuda():
        return 0
    installed = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return installed
    named = [name for name in visible.split(",") if name not in ("", "-1")]
    return min(installed, len(named))


def _torch_has_cuda() -> bool:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return Path(torch.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()


def smallest_gpu_gb() -> float | None:
    """Return the memory of the smallest GPU that this process may use, in GB (1e9 bytes).

    None if `nvidia-smi` does not say it.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get(_VISIBLE)
    if visible:
        command += ["-i", visible]
    try:
        output = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
        mebibytes = [float(line) for line in output.split()]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return min(mebibytes) * 2**20 / 1e9 if mebibytes else None


def visible_gpu_ids() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them to a child."""
    import torch

    named = os.environ.get(_VISIBLE, "").split(",")
    return [
        named[i] if i < len(named) and named[i] else str(i)
        for i in range(torch.cuda.device_count())
    ]


@contextmanager
def hide_gpus_from_cpu_run(config: RunConfig) -> Iterator[None]:
    """Hide all GPUs from this process and its children for the block, if `cluster.device` is "cpu".

    CUDA reads CUDA_VISIBLE_DEVICES once, so nothing may have initialized CUDA before.
    """
    before = os.environ.get(_VISIBLE)
    if config.cluster.device == "cpu":
        os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VISIBLE, None)
        else:
            os.environ[_VISIBLE] = before


def available_cores() -> int:
    """Return the number of cores that this process may use.

    This is OMP_NUM_THREADS, which Snakemake sets, or else the number of cores that the container and the affinity
    mask grant, but at most 8: matrix products of models that CPUs can train are too small for more threads.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads):
        return int(threads)

    granted = _MAX_CORES
    if _CPU_QUOTA.is_file():
        quota, period = _CPU_QUOTA.read_text().split()  # microseconds of each period, or "max"
        if quota != "max":
            granted = int(quota) // int(period)
    return max(1, min(_MAX_CORES, granted, len(os.sched_getaffinity(0))))
