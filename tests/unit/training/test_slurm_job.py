"""A stage in a job of Slurm, whose commands are stand-ins here: a Ray over its machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Stand = Callable[[str, str], None]


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Puts a shell script in the place of a command."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return put


OVER_TWO = """
import sys
from pathlib import Path
from mcore_mas.training.cluster import ray_over
with ray_over(2, 1, Path(sys.argv[1])) as address:
    import ray
    ray.init(address=address, log_to_driver=False)
    print(ray.cluster_resources()["CPU"], sum(node["Alive"] for node in ray.nodes()))
    ray.shutdown()
"""


def over_two(home: Path) -> subprocess.CompletedProcess[str]:
    """A Ray over two machines, for somebody who has never used one."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:  # a short path: Ray has sockets in it
        env = {**unset, "HOME": str(home), "RAY_TMPDIR": folder}
        command = [sys.executable, "-c", OVER_TWO, str(home / "ray.log")]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_ray_over_machines_makes_the_token_that_lets_them_join(stand: Stand, tmp_path: Path) -> None:
    stand("srun", 'while [ "$1" != -m ]; do last=$1; shift; done; exec "$last" "$@"')  # this machine once more
    done = over_two(tmp_path)
    assert done.stdout.split() == ["2.0", "2"], done.stderr + (tmp_path / "ray.log").read_text()
    token = tmp_path / ".ray" / "auth_token"
    assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    assert token.read_text() not in (tmp_path / "ray.log").read_text()


@pytest.mark.slow
def test_machines_that_cannot_join_are_told_at_once(stand: Stand, tmp_path: Path) -> None:
    stand("srun", "exit 1")
    began = time.monotonic()
    said = over_two(tmp_path).stderr.splitlines()[-1]
    assert re.fullmatch(
        r"mcore_mas\.training\.joblog\.TrainingError: [01] of 2 machines joined Ray at [\d.:]+, and what starts them "
        rf"has ended; see {tmp_path}/ray\.log",
        said,
    )
    assert time.monotonic() - began < 120
