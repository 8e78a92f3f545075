"""Ray over the machines of a Slurm job, with scripts in place of Slurm's commands."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mcore_mas.runtime import slurm_ray
from tests.support.fake_commands import FakeCommands

TWO_MACHINES = """
import sys
from pathlib import Path
from mcore_mas.runtime.slurm_ray import ray_over_machines
with ray_over_machines(2, 1, Path(sys.argv[1])) as address:
    import ray
    ray.init(address=address, log_to_driver=False)
    print(ray.cluster_resources()["CPU"], sum(node["Alive"] for node in ray.nodes()))
    ray.shutdown()
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    return FakeCommands(tmp_path / "bin", monkeypatch)


def run_on_two_machines(home: Path) -> subprocess.CompletedProcess[str]:
    """Run Ray over two machines, for a user who has never used Ray; print CPUs and nodes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    # The path is short because Ray makes sockets below it.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        env["HOME"] = str(home)
        env["RAY_TMPDIR"] = folder
        command = [sys.executable, "-c", TWO_MACHINES, str(home / "ray.log")]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_machines_join_with_a_new_private_token(
    commands: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # srun starts the command that follows its options on this machine once more; the real one obeys
    # the CPU binding in the environment unless it is told not to
    skip_options = 'while [ "$1" != -m ]; do last=$1; shift; done; exec "$last" "$@"'
    check_binding = 'case "${SLURM_CPU_BIND+$*}" in *--cpu-bind=none*) ;; *) exit 1; esac'
    commands.add("srun", f"{check_binding}; {skip_options}")
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x2")

    finished = run_on_two_machines(tmp_path)
    log = (tmp_path / "ray.log").read_text()
    assert finished.stdout.split() == ["2.0", "2"], finished.stderr + log
    token = tmp_path / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    assert token.read_text() not in log


@pytest.mark.slow
def test_machines_that_cannot_join_are_reported_at_once(
    commands: FakeCommands, tmp_path: Path
) -> None:
    commands.add("srun", "exit 1")
    started = time.monotonic()
    last_line = run_on_two_machines(tmp_path).stderr.splitlines()[-1]
    assert re.fullmatch(
        r"mcore_mas\.runtime\.errors\.TrainingError: [01] of 2 machines joined Ray at [\d.:]+, and "
        rf"the process that starts them has ended; see {tmp_path}/ray\.log",
        last_line,
    )
    assert time.monotonic() - started < 120


@pytest.mark.parametrize(
    ("addresses", "route", "chosen"),
    [
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1", "10.0.0.1"),
        # only loopback leads to the last machine
        (["localhost", "10.0.0.2"], "127.0.0.1", None),
        # Slurm knows no node
        ([], "10.0.0.1", None),
    ],
)
def test_ray_uses_the_network_of_the_addresses_in_slurm(
    addresses: list[str],
    route: str,
    chosen: str | None,
    commands: FakeCommands,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        f"NodeName=n{number} NodeAddr={address} Port=1" for number, address in enumerate(addresses)
    ]
    nodes = "\\n".join(lines or ["Node n0 not found"])
    commands.add("scontrol", f'[ "$*" = "--oneliner show node n[0-1]" ] && printf "{nodes}\\n"')
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    connected: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: connected.append(address))
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: (route, 4))
    assert slurm_ray.address_in_slurm_network() == chosen
    assert connected == ([("10.0.0.2", 9)] if addresses else [])
