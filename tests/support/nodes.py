"""Ray nodes on one machine: namespaces, each with its own address, host name, processes and /dev/shm."""

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

_LIFETIME_S = 1800  # a node that was left behind ends after this time
# Shell script of a node's first process
_NODE_SCRIPT = (
    "hostname {name}; mount -t tmpfs -o size=4g tmpfs /dev/shm; mount -t tmpfs tmpfs {ray}; "
    "exec sleep {seconds}"
)
_RAY = Path("/tmp/ray")


def _install_ip() -> None:
    """Put the program `ip` onto PATH if it is missing, from Debian's packages.

    It is removed when this process ends.

    Raises:
        NoPackages: the packages cannot be downloaded.
    """
    if shutil.which("ip"):
        return
    folder = Path(tempfile.mkdtemp(prefix="iproute2-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ip = program(folder, "iproute2", "bin/ip", "usr/bin/ip", "sbin/ip")
    os.environ["PATH"] += f":{ip.parent}"


@cache
def missing() -> str:
    """Return why this machine cannot have nodes; "" if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    try:
        _install_ip()
    except NoPackages as error:
        return f"needs ip; {error}"
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"needs {tool} (util-linux)"
    probe = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return f"namespaces are not allowed here ({result.stderr.strip()})"
    return ""


class Nodes:
    """Nodes in one network 10.77.0.0/24; the first can be the head of a Ray cluster."""

    def __init__(self, folder: Path) -> None:
        """Initialize without nodes; the token and the nodes' logs are written to `folder`."""
        self._folder = folder
        self._name = f"mm{os.getpid()}"
        # A node ends when its shell ends.
        self._shells: list[subprocess.Popen[bytes]] = []
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(32))
        self._token.chmod(0o600)

    def add(self) -> int:
        """Add a node that is connected to all others; return its number, from 1."""
        number = len(self._shells) + 1
        namespace = self._namespace(number)
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        if number == 1:  # the first namespace has the network's bridge
            _run("ip", "-n", namespace, "link", "add", "net", "type", "bridge")
            _run("ip", "-n", namespace, "link", "set", "net", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{self.address(1)}/24", "dev", "net")
        else:
            peer = ["name", f"port{number}", "netns", self._namespace(1)]
            _run("ip", "link", "add", "net", "netns", namespace, "type", "veth", "peer", *peer)
            _run(
                "ip",
                "-n",
                self._namespace(1),
                "link",
                "set",
                f"port{number}",
                "master",
                "net",
                "up",
            )
            _run("ip", "-n", namespace, "addr", "add", f"{self.address(number)}/24", "dev", "net")
            _run("ip", "-n", namespace, "link", "set", "net", "up")
        _RAY.mkdir(exist_ok=True)
        script = _NODE_SCRIPT.format(name=f"node{number}", ray=_RAY, seconds=_LIFETIME_S)
        node_command = [
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
        self._shells.append(subprocess.Popen(["ip", "netns", "exec", namespace, *node_command]))
        while self._first_process(number) == 0:
            time.sleep(0.02)
        return number

    def start_ray(self, number: int, cpus: int, pool: str | None = None) -> None:
        """Start Ray on a node: the first is the head, the others join it.

        Args:
            pool: value of the node's label `pool`; None for no label.
        """
        head = ["--head", "--port", "6379", "--include-dashboard=false"]
        role = head if number == 1 else ["--address", self.ray]
        resources = [
            "--num-cpus",
            str(cpus),
            "--object-store-memory",
            str(100 << 20),
            "--disable-usage-stats",
        ]
        label = ["--labels", f"pool={pool}"] if pool else []
        node_address = ["--node-ip-address", self.address(number)]
        ray_arguments = ["start", *role, *node_address, *resources, *label]
        with (self._folder / f"node{number}.log").open("wb") as log:
            command = [sys.executable, "-m", "ray.scripts.scripts", *ray_arguments]
            subprocess.run(
                self.on(number, command, Path("/")),
                stdout=log,
                stderr=log,
                check=True,
                env=self._environment(),
            )

    @property
    def ray(self) -> str:
        """Address of the Ray cluster."""
        return f"{self.address(1)}:6379"

    def address(self, number: int) -> str:
        """Return the IP address of a node."""
        return f"10.77.0.{number}"

    def start(
        self, number: int, command: Sequence[str], folder: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node, in `folder`; its output goes to `log`."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self.on(number, command, folder),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
            )

    def on(self, number: int, command: Sequence[str], folder: Path) -> list[str]:
        """Return the command that runs `command` on a node, in `folder`."""
        enter = ["nsenter", "-t", str(self._first_process(number)), "-n", "-m", "-u", "-p"]
        return [*enter, "env", "-C", str(folder), *command]

    def running(self, number: int, name: str) -> list[int]:
        """Return the process ids, outside the node, of Ray's actors of class `name` on a node."""
        pids = []
        node = psutil.Process(self._first_process(number)).parent()
        for process in node.children(recursive=True):
            with suppress(psutil.Error):
                arguments = process.cmdline()
                if arguments and arguments[0].startswith(f"ray::{name}"):
                    pids.append(process.pid)
        return sorted(pids)

    def cut(self, number: int) -> None:
        """Disconnect a node from the network; its processes keep running."""
        _run("ip", "-n", self._namespace(number), "link", "set", "net", "down")

    def kill(self, number: int) -> None:
        """Kill a node with all its processes."""
        shell = self._shells[number - 1]
        with suppress(ProcessLookupError):
            os.kill(self._first_process(number) or shell.pid, 9)
        shell.kill()
        shell.wait()

    def close(self) -> None:
        """Remove all nodes."""
        for number in range(len(self._shells), 0, -1):
            self.kill(number)
            subprocess.run(
                ["ip", "netns", "del", self._namespace(number)], check=False, capture_output=True
            )

    def _namespace(self, number: int) -> str:
        return f"{self._name}n{number}"

    def _first_process(self, number: int) -> int:
        """Return the process id of a node's `sleep`, or 0 if it does not run yet."""
        pid = self._shells[number - 1].pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        with suppress(OSError):
            for child in children.read_text().split():
                if Path(f"/proc/{child}/comm").read_text().strip() == "sleep":
                    return int(child)
        return 0

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray drops a disconnected node after 20 s, but not a node whose machine is busy.
            "RAY_health_check_timeout_ms": "6000",
            "RAY_health_check_failure_threshold": "3",
            # With Ray's defaults, workers fail to start on a busy machine.
            "RAY_worker_register_timeout_seconds": "300",
            "RAY_raylet_client_num_connect_attempts": "60",
        }


@contextmanager
def nodes_of(folder: Path, cpus: Sequence[int]) -> Iterator[Nodes]:
    """Yield nodes of one Ray cluster, with these numbers of CPUs; remove them afterwards."""
    with ExitStack() as stack:
        nodes = Nodes(folder)
        stack.callback(nodes.close)
        for count in cpus:
            nodes.start_ray(nodes.add(), count)
        yield nodes


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
