"""Debian's packages for tests, unpacked into a folder: nothing is installed, and no root is needed.

`python -m tests.support.debian FOLDER PACKAGE PATH` makes FOLDER/bin/<program> of PATH, a program in a package.
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
    """The packages cannot be had here: one line that says why."""


def unpacked(folder: Path, packages: Sequence[str]) -> Path:
    """These packages alone, fetched by apt-get and unpacked into `folder`.

    Raises:
        NoPackages: there is no apt-get, or it cannot fetch them.
    """
    return _fetched(folder, "download", *packages)


def program(folder: Path, package: str, *paths: str) -> Path:
    """A program at one of `paths` in a package, which is unpacked with what it depends on and this machine lacks.

    Raises:
        NoPackages: there is no apt-get, or it cannot fetch them.
    """
    root = _fetched(
        folder,
        "install",
        "--download-only",
        "--reinstall",
        "--no-install-recommends",
        "--yes",
        package,
    )
    libraries = ":".join(
        sorted({f"$root/{file.parent.relative_to(root)}" for file in root.rglob("*.so*")})
    )
    path = next(path for path in paths if (root / path).is_file())
    made = folder / "bin" / Path(path).name
    made.parent.mkdir()
    lines = [
        "#!/bin/sh",
        'root=$(cd "$(dirname "$0")/../root" && pwd)',
    ]  # wherever the folder is by then
    made.write_text(
        "\n".join([*lines, f'LD_LIBRARY_PATH={libraries} exec "$root/{path}" "$@"', ""])
    )
    made.chmod(0o755)
    return made


def _fetched(folder: Path, *words: str) -> Path:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NoPackages("packages come from Debian or Ubuntu, and there is no apt-get here")
    cache = folder / "cache"
    (cache / "archives/partial").mkdir(parents=True)
    done = _apt(cache, *words)
    if done.returncode:  # nothing is known of packages here, as in a fresh container
        (cache / "lists/partial").mkdir(parents=True)
        own = ["-o", f"Dir::State::lists={cache}/lists"]
        _apt(cache, *own, "update")
        done = _apt(cache, *own, *words)
    if done.returncode:
        raise NoPackages(
            f"apt-get cannot fetch {words[-1]}: {(done.stderr.splitlines() or ['?'])[-1]}"
        )
    for deb in cache.rglob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", deb, folder / "root"], check=True)
    shutil.rmtree(cache)
    return folder / "root"


def _apt(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = [f"APT::Sandbox::User={getpass.getuser()}", f"Dir::Cache={cache}", "Debug::NoLocking=1"]
    options = [part for one in (*own, "Acquire::http::Timeout=20") for part in ("-o", one)]
    command = ["timeout", "180", "apt-get", *options, *words]
    return subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)


def main(folder: Path, package: str, *paths: str) -> None:
    """Make a program in `folder`, whole or not at all; where packages cannot be had, say why in one line."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        program(made, package, *paths)
        made.rename(folder)
    except NoPackages as error:
        shutil.rmtree(made)
        print(f"no {package} for tests: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
