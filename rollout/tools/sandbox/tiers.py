"""How a program is kept in: the tiers, best first, and what of this machine each shows to a program."""

from __future__ import annotations

import os
import platform
import site
import sys
import sysconfig
from pathlib import Path

from rollout.tools.sandbox.records import SandboxUnavailable

NAMESPACES = "namespaces"  # own root, processes, network and user; seccomp; limits per job
LANDLOCK = "landlock"  # no other files, no network, no other process; seccomp; for machines without user namespaces
UNISOLATED = "unisolated"  # limits only: for programs of your own
ISOLATED = (NAMESPACES, LANDLOCK)
TIERS = (*ISOLATED, UNISOLATED)

_SYSTEM = (
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


def candidates(tier: str) -> tuple[str, ...]:
    """The tiers to try for a choice by name, `auto` among them; never the unisolated one unless it is named.

    Raises:
        ValueError: no such tier.
        SandboxUnavailable: nothing isolates on this kind of machine.
    """
    if tier not in ("auto", *TIERS):
        raise ValueError(f"unknown sandbox tier '{tier}'; known: auto, {', '.join(TIERS)}")
    if tier != UNISOLATED and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SandboxUnavailable(
            f"the sandbox isolates on Linux x86_64, and this is {sys.platform} {platform.machine()}; use a sandbox "
            "server (env.options.server)"
        )
    return ISOLATED if tier == "auto" else (tier,)


def interpreter() -> str:
    """The Python that programs run on: this one's, outside its virtual environment."""
    return os.path.realpath(sys.executable)


def packages() -> list[str]:
    """Where this Python's installed packages are."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return sorted({os.path.realpath(folder) for folder in folders if Path(folder).is_dir()})


def readable(libraries: bool) -> list[str]:
    """What programs may read: the system's programs, the interpreter, and with `libraries` installed packages."""
    paths = {
        *_SYSTEM,
        sys.base_prefix,
        os.path.realpath(sys.base_prefix),
        str(Path(interpreter()).parents[1]),
    }
    paths |= set(packages()) if libraries else set()
    covered = {path for path in paths for other in paths if path != other and path.startswith(f"{other.rstrip('/')}/")}
    return sorted(paths - covered)
