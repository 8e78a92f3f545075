"""The command `doctor`: a check of what this machine has for training."""

import asyncio
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import typer

from mcore_mas.cli.mlflow_pages import MACHINE_PANEL
from mcore_mas.planning.machine import count_visible_gpus
from mcore_mas.runtime.project_path import path_problem

doctor_commands = typer.Typer()

_REQUIRED_PACKAGES = (
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
_OPTIONAL_PACKAGES = ("transformer-engine", "sglang", "gymnasium", "mcp", "alfworld")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (Ray's object store)


@doctor_commands.command("doctor", rich_help_panel=MACHINE_PANEL)
def examine() -> None:
    """Check what this machine has; exit status 1 if something required is missing."""
    healthy = True
    for name, check in _CHECKS.items():
        passed, finding = check()
        healthy = healthy and passed
        print(f"{'ok ' if passed else 'NO '} {name:<16} {finding}")
    raise typer.Exit(0 if healthy else 1)


# Each check returns True unless something that training needs is missing, and its finding.


def _check_python() -> tuple[bool, str]:
    version = sys.version.split()[0]
    return sys.version_info >= (3, 11), f"{version} (3.11 or newer is required)"


def _check_paths() -> tuple[bool, str]:
    problem = path_problem()
    return not problem, problem or f"{Path.cwd()} (jobs can be started here)"


def _check_packages() -> tuple[bool, str]:
    missing = [name for name in _REQUIRED_PACKAGES if not _package_version(name)]
    if missing:
        return False, f"missing: {', '.join(missing)}; run `make setup`"
    return True, ", ".join(f"{name} {_package_version(name)}" for name in _REQUIRED_PACKAGES)


def _check_optional_packages() -> tuple[bool, str]:
    versions = [f"{name} {_package_version(name) or 'absent'}" for name in _OPTIONAL_PACKAGES]
    return True, ", ".join(versions)


def _package_version(name: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_gpus() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        return True, "none: training runs on the CPU over gloo, for models of a few M parameters"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return True, f"{len(names)}: {', '.join(sorted(set(names)))}"


def _check_sglang() -> tuple[bool, str]:
    """Check what SGLang's servers need on GPUs. It is no error if SGLang is missing: teams have the embedded engine."""
    from rollout.engines.sglang.nccl import nccl_mismatch
    from rollout.engines.sglang.toolkit import toolchain_problem

    python = Path(os.environ.get("SGLANG_PYTHON", ".venv-sglang/bin/python"))
    if not python.is_file():
        return True, f"none: {python} is missing; `make setup-sglang` makes it (docs/engines.md)"
    if not count_visible_gpus():
        return True, f"{python}, on CPUs"
    problem = toolchain_problem(python.absolute(), {}) or nccl_mismatch(python)
    return not problem, problem or f"{python}, with nvcc and a C++ compiler"


def _check_cores() -> tuple[bool, str]:
    return True, f"{len(os.sched_getaffinity(0))} usable"


def _check_sandbox() -> tuple[bool, str]:
    """Report the isolation of model-written programs, which only some teams need."""
    from rollout.sandbox import Sandbox, SandboxUnavailable

    sandbox = Sandbox(slots=1)
    try:
        asyncio.run(sandbox.start())
    except SandboxUnavailable as error:
        return True, f"none: {error}"
    finally:
        sandbox.close()
    return True, f"{sandbox.tier} (model-written programs; docs/sandbox.md)"


def _check_memory() -> tuple[bool, str]:
    return _check_space(8, psutil.virtual_memory().available)


def _check_shared_memory() -> tuple[bool, str]:
    return _check_space(0.5, shutil.disk_usage(_SHARED_MEMORY).free)


def _check_disk() -> tuple[bool, str]:
    return _check_space(5, shutil.disk_usage(Path.cwd()).free)


def _check_space(required_gib: float, free_bytes: int) -> tuple[bool, str]:
    free_gib = free_bytes / 2**30
    return free_gib >= required_gib, f"{free_gib:.1f} GiB free ({required_gib:g} for the demo)"


_CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "python": _check_python,
    "paths": _check_paths,
    "packages": _check_packages,
    "optional": _check_optional_packages,
    "gpus": _check_gpus,
    "sglang": _check_sglang,
    "cores": _check_cores,
    "sandbox": _check_sandbox,
    "memory": _check_memory,
    "shared memory": _check_shared_memory,
    "disk": _check_disk,
}
