"""The sandbox of an ordinary user: every other test of it, played as one where the tests run as root."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOBODY = 65534
# the interpreter may lie in root's own folder, which an ordinary user cannot pass: here, and nowhere else, he can
OPENED = """
set -e
inside=$(realpath --relative-base /root "$0" | cut -d / -f 1)
if [ -n "$inside" ]; then
    mount --bind "/root/$inside" /mnt
    mount -t tmpfs -o mode=755 home /root
    mkdir "/root/$inside"
    mount --bind /mnt "/root/$inside"
fi
"""
AS_USER = f"exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --inh-caps=-all --bounding-set=-all"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are an ordinary user's already")
def test_an_ordinary_users_sandbox_holds_in_both_tiers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        path = Path(__file__)
        others = [str(other) for other in sorted(path.parent.glob("test_*.py")) if other != path]
        pytest_words = [
            "-m",
            "pytest",
            "-q",
            "-rA",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            f"{folder}/t",
            *others,
        ]
        script = f'{OPENED}{AS_USER} "$0" "$@"'
        own = {"HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(
            ["unshare", "--mount", "bash", "-c", script, sys.executable, *pytest_words],
            cwd=ROOT,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    for tier in ("namespaces", "landlock"):
        passed = re.findall(
            rf"^PASSED \S+test_sandbox_attacks\.py::\S+\[.*{tier}", ended.stdout, re.MULTILINE
        )
        assert len(passed) >= 20, (tier, ended.stdout[-4000:])
