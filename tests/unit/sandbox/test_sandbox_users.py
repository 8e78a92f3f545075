"""The tests of the sandbox's processes, run as an ordinary user when the tests run as root."""

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
# The interpreter may be below /root, which an ordinary user cannot enter. In the mount namespace of this test
# they can.
OPEN_ROOT_FOLDER = """
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
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as an ordinary user already")
def test_the_sandbox_of_an_ordinary_user_isolates_in_both_tiers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        # The other files test runs and judges, which ask for no rights.
        attacks = Path(__file__).with_name("test_sandbox_attacks.py")
        exhaustion = Path(__file__).with_name("test_sandbox_exhaustion.py")
        pytest_arguments = [
            "-m",
            "pytest",
            "-q",
            "-rA",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            f"{folder}/t",
            str(attacks),
            str(exhaustion),
        ]
        script = f'{OPEN_ROOT_FOLDER}{AS_USER} "$0" "$@"'
        environment = {"HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        completed = subprocess.run(
            ["unshare", "--mount", "bash", "-c", script, sys.executable, *pytest_arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert completed.returncode == 0, completed.stdout[-8000:] + completed.stderr[-2000:]
    for tier in ("namespaces", "landlock"):
        passed = re.findall(
            rf"^PASSED \S+test_sandbox_attacks\.py::\S+\[.*{tier}", completed.stdout, re.MULTILINE
        )
        assert len(passed) >= 20, (tier, completed.stdout[-4000:])
