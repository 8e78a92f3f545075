"""Debian packages for tests, unpacked into a folder; nothing is installed, and root is not needed.

`python -m tests.support.debian FOLDER PACKAGE PATH` unpacks a package, and makes FOLDER/bin/<program>
start the program at PATH in the package.
"""

from __future__ import annotations

import getpass
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


class NoPackages(RuntimeError):
    """Packages cannot be downloaded on this machine; the message is one line."""


def unpacked(folder: Path, packages: Sequence[str]) -> Path:
    """Unpack these packages, without their dependencies; return the folder of their files.

    Raises:
        NoPackages: this machine has no apt-get, or apt-get cannot download them.
    """
    return _fetch(folder, "download", *packages)


def program(folder: Path, package: str, *paths: str) -> Path:
    """Unpack a package with its missing dependencies; return a script that starts its program.

    Args:
        paths: possible paths of the program in the package.

    Raises:
        NoPackages: this machine has no apt-get, or apt-get cannot download them.
    """
    root = _fetch(
        folder,
        "install",
        "--download-only",
        "--reinstall",
        "--no-install-recommends",
        "--yes",
        package,
    )
    library_folders = {file.parent.relative_to(root) for file in root.rglob("*.so*")}
    library_path = ":".join(sorted(f"$root/{library}" for library in library_folders))
    path = next(path for path in paths if (root / path).is_file())
    script = folder / "bin" / Path(path).name
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        'root=$(cd "$(dirname "$0")/../root" && pwd)\n'  # the folder may be renamed later
        f'LD_LIBRARY_PATH={library_path} exec "$root/{path}" "$@"\n'
    )
    script.chmod(0o755)
    return script


def _fetch(folder: Path, *words: str) -> Path:
    """Download packages by apt-get with these arguments; return the folder of their files."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NoPackages("packages come from Debian or Ubuntu, and there is no apt-get here")
    cache = folder / "cache"
    (cache / "archives/partial").mkdir(parents=True)
    result = _apt(cache, *words)
    if result.returncode:  # a fresh container has no package lists
        (cache / "lists/partial").mkdir(parents=True)
        lists_option = ["-o", f"Dir::State::lists={cache}/lists"]
        _apt(cache, *lists_option, "update")
        result = _apt(cache, *lists_option, *words)
    if result.returncode:
        raise NoPackages(
            f"apt-get cannot fetch {words[-1]}: {(result.stderr.splitlines() or ['?'])[-1]}"
        )
    for deb in cache.rglob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", deb, folder / "root"], check=True)
    shutil.rmtree(cache)
    return folder / "root"


def _apt(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["timeout", "180", "apt-get"]
    for option in (
        f"APT::Sandbox::User={getpass.getuser()}",
        f"Dir::Cache={cache}",
        "Debug::NoLocking=1",
        "Acquire::http::Timeout=20",
    ):
        command += ["-o", option]
    command += words
    return subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)


def main(folder: Path, package: str, *paths: str) -> None:
    """Make a program in `folder`, which appears only when it is complete; print why if that is impossible."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        program(temporary, package, *paths)
        temporary.rename(folder)
    except NoPackages as error:
        shutil.rmtree(temporary)
        print(f"no {package} for tests: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
