"""Comparison of the NCCL versions of two Python environments."""

import subprocess
import sys
from pathlib import Path

# Program that prints the version of the NCCL wheel that torch brings.
_PRINT_VERSION = (
    "from importlib.metadata import distributions; "
    "names = ('nvidia-nccl-cu13', 'nvidia-nccl-cu12'); "
    "print(*(d.version for name in names for d in distributions(name=name)))"
)


def nccl_mismatch(python: Path) -> str | None:
    """Return the reason why this environment and that of `python` cannot form an NCCL group.

    NCCL refuses a group of two versions, but only after minutes and on every rank.

    Returns:
        None if the versions are the same, or one of them is not known.
    """
    trainer_version = nccl_version(sys.executable)
    server_version = nccl_version(str(python))
    if trainer_version == server_version or not trainer_version or not server_version:
        return None
    return (
        f"NCCL cannot connect two versions: this environment has {trainer_version}, {python} has {server_version}; "
        f"install nvidia-nccl {server_version} here (environment.post-deploy.sh)"
    )


def nccl_version(python: str) -> str:
    """Return the NCCL version in an interpreter's environment, or "" if it has no wheel of NCCL."""
    result = subprocess.run(
        [python, "-I", "-c", _PRINT_VERSION],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    versions = result.stdout.split()
    return versions[0] if versions else ""
