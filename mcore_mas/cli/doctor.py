"""What this machine has and lacks for training."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

_PACKAGES = (
    "torch",
    "megatron-core",
    "ray",
    "transformers",
    "snakemake",
    "mlflow",
    "faiss-cpu",
    "pyarrow",
    "hydra-core",
)
_OPTIONAL = ("transformer-engine", "sglang", "flash-attn", "gymnasium", "mcp", "alfworld")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Ray keeps its objects)
_NEEDED_GIB = {"memory": 8, "shared memory": 0.5, "disk": 5}


def examine() -> int:
    """Print one line per finding; 1 if something needed is missing, else 0."""
    failed = 0
    for name, check in _CHECKS.items():
        ok, finding = check()
        failed += not ok
        print(f"{'ok ' if ok else 'NO '} {name:<16} {finding}")
    return 1 if failed else 0


def _python() -> tuple[bool, str]:
    return sys.version_info >= (3, 11), f"{sys.version.split()[0]} (3.11 or newer is needed)"


def _packages() -> tuple[bool, str]:
    missing = [name for name in _PACKAGES if not _version(name)]
    if missing:
        return False, f"missing: {', '.join(missing)}; run `make setup`"
    return True, ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)


def _optional() -> tuple[bool, str]:
    return True, ", ".join(f"{name} {_version(name) or 'absent'}" for name in _OPTIONAL)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        return True, "none: training runs on the CPU over gloo, for models of a few million parameters"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return True, f"{len(names)}: {', '.join(sorted(set(names)))}"


def _cores() -> tuple[bool, str]:
    return True, f"{len(os.sched_getaffinity(0))} usable"


def _sandbox() -> tuple[bool, str]:
    """The tier in which model-written programs run here; without one, teams that run none still train."""
    from rollout.sandbox import Sandbox, SandboxUnavailable

    sandbox = Sandbox(slots=1)
    try:
        asyncio.run(sandbox.start())
    except SandboxUnavailable as error:
        return True, f"none: {error}"
    finally:
        sandbox.close()
    return True, f"{sandbox.tier} (model-written programs; docs/sandbox.md)"


def _room(name: str, free_bytes: Callable[[], int]) -> Callable[[], tuple[bool, str]]:
    def check() -> tuple[bool, str]:
        free = free_bytes() / 2**30
        return free >= _NEEDED_GIB[name], f"{free:.1f} GiB free ({_NEEDED_GIB[name]} needed by the demo)"

    return check


_CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "python": _python,
    "packages": _packages,
    "optional": _optional,
    "gpus": _gpus,
    "cores": _cores,
    "sandbox": _sandbox,
    "memory": _room("memory", lambda: psutil.virtual_memory().available),
    "shared memory": _room("shared memory", lambda: shutil.disk_usage(_SHARED_MEMORY).free),
    "disk": _room("disk", lambda: shutil.disk_usage(Path.cwd()).free),
}
