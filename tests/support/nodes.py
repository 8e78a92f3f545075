"""Nodes of a Ray on one machine: namespaces with an address, a host name, processes and /dev/shm of their own."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from tests.support.debian import NoPackages, program

_SECONDS = 1800  # after which a node that was left behind ends by itself
_INSIDE = "hostname {name}; mount -t tmpfs -o size=4g tmpfs /dev/shm; mount -t tmpfs tmpfs {ray}; exec sleep {seconds}"
_RAY = Path("/tmp/ray")


def _have_ip() -> None:
    """Put `ip` onto this process's PATH where there is none, from Debian's packages, until this process ends.

    Raises:
        NoPackages: they cannot be had.
    """
    if shutil.which("ip"):
        return
    folder = Path(tempfile.mkdtemp(prefix="iproute2-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["PATH"] += (
        f":{program(folder, 'iproute2', 'bin/ip', 'usr/bin/ip', 'sbin/ip').parent}"
    )


@cache
def missing() -> str:
    """Why there can be no nodes here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    try:
        _have_ip()
    except NoPackages as error:
        return f"needs ip; {error}"
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"needs {tool} (util-linux)"
    probe = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return (
        "" if done.returncode == 0 else f"namespaces are not allowed here ({done.stderr.strip()})"
    )


class Nodes:
    """Nodes in one network 10.77.0.0/24, the first of which can be the head of a Ray."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where the token and logs of the nodes lie."""
        self._folder, self._name = folder, f"mm{os.getpid()}"
        self._shells: list[subprocess.Popen[bytes]] = []  # each ends its node with it
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(32))
        self._token.chmod(0o600)

    def add(self) -> int:
        """Make one more node, connected to all others; its number."""
        number = len(self._shells) + 1
        space = self._space(number)
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        if number == 1:  # the network's switch is in the first namespace
            _run("ip", "-n", space, "link", "add", "net", "type", "bridge")
            _run("ip", "-n", space, "link", "set", "net", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(1)}/24", "dev", "net")
        else:
            port = ["name", f"port{number}", "netns", self._space(1)]
            _run("ip", "link", "add", "net", "netns", space, "type", "veth", "peer", *port)
            _run("ip", "-n", self._space(1), "link", "set", f"port{number}", "master", "net", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "net")
            _run("ip", "-n", space, "link", "set", "net", "up")
        _RAY.mkdir(exist_ok=True)
        script = _INSIDE.format(name=f"node{number}", ray=_RAY, seconds=_SECONDS)
        own = [
            "unshare",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            script,
        ]
        self._shells.append(subprocess.Popen(["ip", "netns", "exec", space, *own]))
        while not self._inside(number):
            time.sleep(0.02)
        return number

    def start_ray(self, number: int, cpus: int, pool: str | None = None) -> None:
        """Have a node start the Ray, or join that of the first, with a label `pool` where it has one."""
        head = (
            ["--head", "--port", "6379", "--include-dashboard=false"]
            if number == 1
            else ["--address", self.ray]
        )
        size = [
            "--num-cpus",
            str(cpus),
            "--object-store-memory",
            str(100 << 20),
            "--disable-usage-stats",
        ]
        label = ["--labels", f"pool={pool}"] if pool else []
        words = ["start", *head, "--node-ip-address", self.address(number), *size, *label]
        with (self._folder / f"node{number}.log").open("wb") as log:
            command = [sys.executable, "-m", "ray.scripts.scripts", *words]
            subprocess.run(
                self.on(number, command, Path("/")),
                stdout=log,
                stderr=log,
                check=True,
                env=self._environment(),
            )

    @property
    def ray(self) -> str:
        """The Ray's address."""
        return f"{self.address(1)}:6379"

    def address(self, number: int) -> str:
        """A node's address."""
        return f"10.77.0.{number}"

    def start(
        self, number: int, command: Sequence[str], folder: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node, in `folder`; it writes to `log`."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self.on(number, command, folder),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
            )

    def on(self, number: int, command: Sequence[str], folder: Path) -> list[str]:
        """`command` as it is run on a node, in `folder`."""
        enter = ["nsenter", "-t", str(self._inside(number)), "-n", "-m", "-u", "-p"]
        return [*enter, "env", "-C", str(folder), *command]

    def running(self, number: int, name: str) -> list[int]:
        """The processes of Ray's actors of class `name` on a node, as this machine numbers them."""
        found = []
        for process in psutil.Process(self._inside(number)).parent().children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{name}"):
                    found.append(process.pid)
        return sorted(found)

    def cut(self, number: int) -> None:
        """Take a node off the network; its processes go on and hear nothing."""
        _run("ip", "-n", self._space(number), "link", "set", "net", "down")

    def kill(self, number: int) -> None:
        """End a node with all its processes."""
        shell = self._shells[number - 1]
        with suppress(ProcessLookupError):
            os.kill(self._inside(number) or shell.pid, 9)
        shell.kill()
        shell.wait()

    def close(self) -> None:
        """Remove all nodes."""
        for number in range(len(self._shells), 0, -1):
            self.kill(number)
            subprocess.run(
                ["ip", "netns", "del", self._space(number)], check=False, capture_output=True
            )

    def _space(self, number: int) -> str:
        return f"{self._name}n{number}"

    def _inside(self, number: int) -> int:
        """The first process of a node, 0 before there is one."""
        children = Path(
            f"/proc/{self._shells[number - 1].pid}/task/{self._shells[number - 1].pid}/children"
        )
        with suppress(OSError):
            for child in children.read_text().split():
                if Path(f"/proc/{child}/comm").read_text().strip() == "sleep":
                    return int(child)
        return 0

    def _environment(self) -> dict[str, str]:
        own = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        # a node that is cut off is given up after 20 s, and one whose machine is busy is not
        health = {"RAY_health_check_timeout_ms": "6000", "RAY_health_check_failure_threshold": "3"}
        # by default Ray's workers give up a machine that is busy
        patient = {
            "RAY_worker_register_timeout_seconds": "300",
            "RAY_raylet_client_num_connect_attempts": "60",
        }
        return {**os.environ, **own, **health, **patient}


@contextmanager
def nodes_of(folder: Path, cpus: Sequence[int]) -> Iterator[Nodes]:
    """Nodes with that many CPUs each, in one Ray."""
    with ExitStack() as stack:
        nodes = Nodes(folder)
        stack.callback(nodes.close)
        for count in cpus:
            nodes.start_ray(nodes.add(), count)
        yield nodes


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
