"""Real Slurm cluster from Debian's packages in a temporary folder; needs no root and installs nothing.

`python -m tests.slurm.cluster FOLDER [--nodes 2] [--accounting]` starts a cluster, prints what a shell must export to
use it, and ends it with Ctrl-C.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rollout.base.network import free_port
from rollout.base.processes import start_group, stop_group
from tests.support.debian import unpacked

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "libmunge2",
    "libhwloc15",
    "liblua5.1-0",
]
ACCOUNTING_PACKAGES = [
    "slurmdbd",
    "slurm-wlm-mysql-plugin",
    "mariadb-server-core",
    "mariadb-client-core",
    "libaio1",
    "liburing2",
    "libmariadb3",
]

# Resources that each node claims to have
GPUS = 4
CPUS = 12
MEMORY_MB = 64_000

END_STATES = (
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "CANCELLED",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "PREEMPTED",
)


@dataclass(kw_only=True)
class Slurm(AbstractContextManager["Slurm"]):
    """Slurm cluster whose nodes are all this machine, with claimed CPUs and GPUs; runs for a `with` block.

    Attributes:
        folder: folder of all its files.
        nodes: number of nodes.
        accounting: start Slurm's database too.
        kill_wait: seconds between SIGTERM and SIGKILL, by default Slurm's.
        settings: further lines of slurm.conf.
        env: environment in which Slurm's commands are found.
    """

    folder: Path
    nodes: int = 2
    accounting: bool = False
    kill_wait: int = 30
    settings: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Slurm:
        """Download, configure and start Slurm.

        Raises:
            NoPackages: the packages cannot be downloaded.
        """
        packages = [*PACKAGES, *ACCOUNTING_PACKAGES] if self.accounting else PACKAGES
        root = unpacked(self.folder, packages)
        # A daemon's name decides which daemon it is.
        for daemon in (root / "usr/sbin").glob("*-wlm"):
            daemon.with_name(daemon.name.removesuffix("-wlm")).symlink_to(daemon.name)
        libraries = root / "usr/lib/x86_64-linux-gnu"
        if not libraries.is_dir():
            libraries = next((root / "usr/lib").glob("*-linux-gnu"))
        self._wrap_commands(root, libraries)
        self.env = os.environ | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

        with ExitStack() as stack:
            self._configure(libraries)
            self._start_munge(stack)
            if self.accounting:
                self._start_accounting(stack, root)
            self._start_daemon(stack, "slurmctld", ["slurmctld", "-D", "-i"])
            for node in range(self.nodes):
                step_daemon = f"{root}/usr/sbin/slurmstepd"
                command = ["slurmd", "-D", "-N", f"n{node}", "-d", step_daemon]
                self._start_daemon(stack, f"n{node}", command)
            wait_until(lambda: self._idle_nodes() >= self.nodes, 30)
            stack.callback(self._end_jobs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the jobs, their processes and Slurm's daemons; remove the folder."""
        try:
            self._stack.close()
        finally:
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    env = process.environ()
                    if "SLURM_JOB_ID" in env and f"{self.folder}/bin" in env.get("PATH", ""):
                        process.kill()
            shutil.rmtree(self.folder)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm; return its output.

        Args:
            check: assert that the command succeeds.
        """
        completed = subprocess.run(
            command, env=self.env, capture_output=True, text=True, check=False
        )
        if check:
            assert completed.returncode == 0, f"{command}: {completed.stderr}{self.logs()}"
        return completed.stdout + completed.stderr

    def kill_at_exit(self, process: subprocess.Popen[Any]) -> None:
        """Kill a process that uses this cluster before the cluster ends."""
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that `scontrol show job` prints."""
        fields = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(field.partition("=")[::2] for field in fields)

    def train(self, run: Path, *options: str, nodes: int = 1) -> str:
        """Submit a training as one step of a job, like the rule `train`; return the job's number.

        Args:
            run: run folder.
            options: further options of sbatch.
        """
        training = [
            sys.executable,
            "-m",
            "tests.slurm.training_job",
            str(run / "config.yaml"),
            str(run / "logs" / "train.log"),
            str(nodes),
            "4",
        ]
        step = ["srun", "-n1", "--cpus-per-task=4", f"--nodes={nodes}", *training]
        return self.run(
            "sbatch",
            "--parsable",
            "--requeue",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--cpus-per-task=4",
            "--mem=4000",
            f"--output={run}/slurm.out",
            f"--chdir={ROOT}",
            *options,
            f"--wrap={shlex.join(step)}",
        ).strip()

    def wait_for_end(self, number: str, seconds: float = 600) -> str:
        """Wait until a job has ended; return its state."""
        wait_until(lambda: self.job(number)["JobState"] in END_STATES, seconds)
        return self.job(number)["JobState"]

    def wait_for_requeue(self, number: str, seconds: float) -> None:
        """Wait until a job has been stopped once and waits to be started again."""

        def is_requeued() -> bool:
            job = self.job(number)
            return job["Restarts"] == "1" and job["JobState"] == "PENDING"

        wait_until(is_requeued, seconds)

    def start_soon(self, number: str, *settings: str) -> None:
        """Let a requeued job start in 5 s, and change other settings of it.

        By default a requeued job starts after two minutes. Slurm refuses a start in the same second.
        """
        self.run("scontrol", "update", f"JobId={number}", *settings, "StartTime=now+5")

    def find_job(self, comment: str) -> str:
        """Return the number of the only queued or running job whose comment contains this text.

        Snakemake writes the rule of a job into its comment.
        """
        numbers = []
        for line in self.run("squeue", "-h", "-o", "%i %k").splitlines():
            number, job_comment = line.split()
            if comment in job_comment:
                numbers.append(number)
        (number,) = numbers
        return number

    def is_idle(self) -> bool:
        """Return True if no job is queued or running."""
        return not self.run("squeue", "-h").strip()

    def logs(self, lines: int = 15) -> str:
        """Return the last lines of the daemons' logs, for messages of failed tests."""
        logs = []
        for path in self.folder.glob("*.log"):
            last_lines = path.read_text(errors="replace").splitlines()[-lines:]
            logs.append("\n".join([f"\n--- {path.name}", *last_lines]))
        return "\n".join(logs)

    def _idle_nodes(self) -> int:
        return self.run("sinfo", "-h", "-N", "-o", "%T").split().count("idle")

    def _wrap_commands(self, root: Path, libraries: Path) -> None:
        """Write scripts that start the commands with their libraries and this cluster's config."""
        environment = (
            f"LD_LIBRARY_PATH={libraries}:{libraries}/slurm-wlm "
            f"SLURM_CONF={self.folder / 'slurm.conf'}"
        )
        (self.folder / "bin").mkdir()
        for command in (*(root / "usr/bin").iterdir(), *(root / "usr/sbin").iterdir()):
            script = self.folder / "bin" / command.name
            script.write_text(f'#!/bin/sh\n{environment} exec {command} "$@"\n')
            script.chmod(0o755)

    def _start_daemon(self, stack: ExitStack, name: str, command: Sequence[str]) -> None:
        log = self.folder / f"{name}.log"
        process = start_group(command, log=log, env=self.env, cwd=self.folder)
        stack.callback(stop_group, process)

    def _start_munge(self, stack: ExitStack) -> None:
        """Start the authentication service."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        command = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder / 'munge.sock'}",
            f"--key-file={key}",
            f"--pid-file={self.folder / 'munge.pid'}",
            f"--seed-file={self.folder / 'munge.seed'}",
            "--num-threads=2",
        ]
        self._start_daemon(stack, "munged", command)
        wait_until((self.folder / "munge.sock").exists, 10)

    def _start_accounting(self, stack: ExitStack, root: Path) -> None:
        """Start MariaDB and slurmdbd, with this cluster and an account `lab` of this user."""
        user = getpass.getuser()
        socket_file = self.folder / "mariadb.sock"
        options = [
            "--no-defaults",
            f"--basedir={root}/usr",
            f"--datadir={self.folder / 'mariadb'}",
            f"--user={user}",
        ]
        install = [
            "mariadb-install-db",
            *options,
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        ]
        subprocess.run(install, env=self.env, check=True, capture_output=True)
        serve = [
            "mariadbd",
            *options,
            f"--socket={socket_file}",
            "--skip-networking",
            "--innodb-buffer-pool-size=64M",
            "--skip-grant-tables",
        ]
        self._start_daemon(stack, "mariadb", serve)
        wait_until(socket_file.exists, 60)

        self.env["MYSQL_UNIX_PORT"] = str(socket_file)
        self._start_daemon(stack, "slurmdbd", ["slurmdbd", "-D"])
        wait_until(self._has_database, 60)
        for command in (
            "add cluster c",
            "add account lab",
            "add qos urgent preempt=normal",
            "modify qos normal set gracetime=60",
            f"add user {user} account=lab qos=normal,urgent defaultqos=normal",
        ):
            self.run("sacctmgr", "-i", *command.split())

    def _has_database(self) -> bool:
        return "error" not in self.run("sacctmgr", "-n", "show", "cluster", check=False)

    def _end_jobs(self) -> None:
        user = getpass.getuser()
        self.run("scancel", "--full", "-s", "KILL", "-u", user, check=False)
        self.run("scancel", "-u", user, check=False)
        with suppress(TimeoutError):  # __exit__ kills the processes of jobs that do not end
            wait_until(lambda: not self.run("squeue", "-h", check=False).strip(), 30)

    def _configure(self, libraries: Path) -> None:
        """Write slurm.conf, gres.conf and slurmdbd.conf."""
        user = getpass.getuser()
        values: dict[str, object] = {
            "ClusterName": "c",
            "SlurmctldHost": f"{socket.gethostname()}(127.0.0.1)",
            "SlurmUser": user,
            "SlurmdUser": user,
            "SlurmctldPort": free_port(),
            "PluginDir": libraries / "slurm-wlm",
            "AuthInfo": f"socket={self.folder / 'munge.sock'}",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool-%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd-%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            # Jobs that fit on no node are refused instead of queued for ever.
            "EnforcePartLimits": "ALL",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "SchedulerParameters": (
                "sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0"
            ),
            "GresTypes": "gpu",
            "ReturnToService": 2,
            "SlurmdParameters": "config_overrides",
            "KillWait": self.kill_wait,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "AccountingStorageType": "accounting_storage/none",
        }
        if self.accounting:
            port = free_port()
            values |= {
                "PreemptType": "preempt/qos",
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageHost": "127.0.0.1",
                "AccountingStoragePort": port,
                "AccountingStoreFlags": "job_comment",
                "AccountingStorageTRES": "gres/gpu",
                "AccountingStoragePass": self.folder / "munge.sock",
            }
            self._configure_accounting(libraries, port)
        slurm_conf = [
            *_config_lines(values),
            *(self._node_line(node) for node in range(self.nodes)),
            "PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 "
            "MaxTime=INFINITE State=UP",
            "PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF "
            "MaxTime=INFINITE State=UP",
            *self.settings,
        ]
        gres_conf = [self._make_gpus(node) for node in range(self.nodes)]
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text("\n".join([*slurm_conf, ""]))
        (self.folder / "gres.conf").write_text("\n".join([*gres_conf, ""]))

    def _configure_accounting(self, libraries: Path, port: int) -> None:
        user = getpass.getuser()
        values: dict[str, object] = {
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.folder / 'munge.sock'}",
            "DbdHost": "localhost",
            "DbdPort": port,
            "SlurmUser": user,
            "PluginDir": libraries / "slurm-wlm",
            "PidFile": self.folder / "slurmdbd.pid",
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost",
            "StorageUser": user,
        }
        path = self.folder / "slurmdbd.conf"
        path.write_text("\n".join([*_config_lines(values), ""]))
        path.chmod(0o600)

    def _node_line(self, node: int) -> str:
        """Return the line of slurm.conf that describes a node."""
        return (
            f"NodeName=n{node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
            f"Port={free_port()} CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:fake:{GPUS} "
            "State=UNKNOWN"
        )

    def _make_gpus(self, node: int) -> str:
        """Make files that stand for a node's GPUs; return the line of gres.conf that names them."""
        folder = self.folder / "gpus" / f"n{node}"
        folder.mkdir(parents=True)
        for gpu in range(GPUS):
            (folder / f"gpu{gpu}").touch()
        return f"NodeName=n{node} Name=gpu Type=fake File={folder}/gpu[0-{GPUS - 1}]"


def _config_lines(values: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it is not true after this time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {seconds:.0f} s")
        time.sleep(0.1)


def main() -> None:
    """Start a cluster for a shell, until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--accounting", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = arguments.folder.resolve()
    with Slurm(folder=folder, nodes=arguments.nodes, accounting=arguments.accounting) as slurm:
        print(f"export PATH={slurm.env['PATH']}", flush=True)
        with suppress(KeyboardInterrupt):
            time.sleep(1e9)


if __name__ == "__main__":
    main()
