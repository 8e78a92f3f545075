"""Tiers of isolation, and the paths of this machine that isolated programs may read."""

import os
import platform
import site
import sys
import sysconfig
from pathlib import Path

from rollout.sandbox.records import SandboxUnavailable

# Separate root file system, processes, network and users; seccomp; limits per job.
NAMESPACES = "namespaces"
# No other files, no network and no other processes by Landlock and seccomp, for machines without
# user namespaces.
LANDLOCK = "landlock"
# Limits only, for programs that the user trusts.
UNISOLATED = "unisolated"
ISOLATED = (NAMESPACES, LANDLOCK)
TIERS = (*ISOLATED, UNISOLATED)

_SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)


def candidate_tiers(tier: str) -> tuple[str, ...]:
    """Return the tiers to try, best first.

    Args:
        tier: a name in `TIERS`, or "auto" for all tiers that isolate.

    Raises:
        ValueError: there is no such tier.
        SandboxUnavailable: no tier isolates on this kind of machine.
    """
    if tier not in ("auto", *TIERS):
        raise ValueError(f"unknown sandbox tier '{tier}'; known: auto, {', '.join(TIERS)}")
    machine = (sys.platform, platform.machine())
    if tier != UNISOLATED and machine != ("linux", "x86_64"):
        raise SandboxUnavailable(
            f"the sandbox isolates on Linux x86_64 only, and this machine is {' '.join(machine)}; "
            "use a sandbox server (env.options.server)"
        )
    return ISOLATED if tier == "auto" else (tier,)


def interpreter() -> str:
    """Return the path of the Python that runs programs: this process's, outside of its venv."""
    return os.path.realpath(sys.executable)


def site_package_folders() -> list[str]:
    """Return the folders of this Python's installed packages."""
    folders = [
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
    ]
    return sorted({os.path.realpath(folder) for folder in folders if Path(folder).is_dir()})


def readable_paths() -> list[str]:
    """Return the paths that programs may read: the system's, the interpreter's and packages.

    Paths below another path of the list are left out.
    """
    python_paths = (
        sys.base_prefix,
        os.path.realpath(sys.base_prefix),
        str(Path(interpreter()).parents[1]),
    )
    paths = {*_SYSTEM_PATHS, *python_paths, *site_package_folders()}
    return sorted(path for path in paths if not _is_below_another(path, paths))


def _is_below_another(path: str, paths: set[str]) -> bool:
    return any(path != other and path.startswith(f"{other.rstrip('/')}/") for other in paths)
