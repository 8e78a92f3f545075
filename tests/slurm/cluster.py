"""A real Slurm from Debian's packages in a folder of its own: no root, nothing installed, gone with the folder.

`python -m tests.slurm.cluster FOLDER [--nodes 2] [--accounting]` starts one, prints what a shell must export to use it,
and ends it with Ctrl-C.
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

from rollout.base.processes import free_port, start_group, stop_group
from tests.support.debian import unpacked

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
ACCOUNTING = [
    "slurmdbd",
    "slurm-wlm-mysql-plugin",
    "mariadb-server-core",
    "mariadb-client-core",
    "libaio1",
    "liburing2",
]
ACCOUNTING += ["libmariadb3"]
GPUS, CPUS, MEMORY = 4, 12, 64_000  # of a node, pretended; memory in MB


@dataclass(kw_only=True)
class Slurm(AbstractContextManager["Slurm"]):
    """A cluster of `nodes` machines that are all this one, with pretended CPUs and GPUs, for the block."""

    folder: Path
    nodes: int = 2
    accounting: bool = False
    kill_wait: int = 30  # seconds between SIGTERM and SIGKILL, Slurm's default
    settings: Sequence[str] = ()  # further lines of slurm.conf
    env: dict[str, str] = field(default_factory=dict, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Slurm:
        """Fetch, configure and start everything.

        Raises:
            NoPackages: the packages cannot be had.
        """
        root = unpacked(self.folder, [*PACKAGES, *(ACCOUNTING if self.accounting else ())])
        for daemon in (root / "usr/sbin").glob("*-wlm"):  # they ask their own name what they are
            daemon.with_name(daemon.name.removesuffix("-wlm")).symlink_to(daemon.name)
        lib = root / "usr/lib/x86_64-linux-gnu"
        if not lib.is_dir():
            lib = next((root / "usr/lib").glob("*-linux-gnu"))
        own = {
            "LD_LIBRARY_PATH": f"{lib}:{lib}/slurm-wlm",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._wrap(root, own)
        self.env = os.environ | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        with ExitStack() as stack:
            self._configure(lib)
            self._munge(stack)
            if self.accounting:
                self._accounts(stack, root)
            self._daemon(stack, "slurmctld", ["slurmctld", "-D", "-i"])
            for node in range(self.nodes):
                command = ["slurmd", "-D", "-N", f"n{node}"]
                self._daemon(stack, f"n{node}", [*command, "-d", f"{root}/usr/sbin/slurmstepd"])
            wait_until(
                lambda: (
                    self.run("sinfo", "-h", "-N", "-o", "%T").split().count("idle") >= self.nodes
                ),
                30,
            )
            stack.callback(self._end_jobs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the jobs and all of Slurm, what they left running, and remove the folder."""
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
        """What a command of Slurm prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert not check or not done.returncode, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout + done.stderr

    def ends(self, process: subprocess.Popen[Any]) -> None:
        """Have a process that uses this cluster end before it does."""
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says about a job, by key."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def train(self, run: Path, *options: str, nodes: int = 1) -> str:
        """Submit a training in one step of a job, as the rule `train` does; gives the job's number."""
        command = [sys.executable, "-m", "tests.slurm.training_job", str(run / "config.yaml")]
        command += [str(run / "logs" / "train.log"), str(nodes), "4"]
        step = ["srun", "-n1", "--cpus-per-task=4", f"--nodes={nodes}", *command]
        size = [
            "--requeue",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--cpus-per-task=4",
            "--mem=4000",
        ]
        size += [f"--output={run}/slurm.out", f"--chdir={Path(__file__).parents[2]}"]
        return self.run(
            "sbatch", "--parsable", *size, *options, f"--wrap={shlex.join(step)}"
        ).strip()

    def ended(self, number: str, seconds: float = 600) -> str:
        """How a job has ended."""
        ends = (
            "COMPLETED",
            "FAILED",
            "TIMEOUT",
            "CANCELLED",
            "OUT_OF_MEMORY",
            "NODE_FAIL",
            "PREEMPTED",
        )
        wait_until(lambda: self.job(number)["JobState"] in ends, seconds)
        return self.job(number)["JobState"]

    def logs(self, lines: int = 15) -> str:
        """The ends of the daemons' logs, for messages of failed tests."""
        tails = {
            log.name: log.read_text(errors="replace").splitlines()[-lines:]
            for log in self.folder.glob("*.log")
        }
        return "\n".join(f"\n--- {name}\n" + "\n".join(tail) for name, tail in tails.items())

    def _wrap(self, root: Path, env: Mapping[str, str]) -> None:
        """Commands that find their libraries and this cluster by themselves, as installed ones would."""
        (self.folder / "bin").mkdir()
        settings = " ".join(f"{name}={value}" for name, value in env.items())
        for command in (*(root / "usr/bin").iterdir(), *(root / "usr/sbin").iterdir()):
            wrapper = self.folder / "bin" / command.name
            wrapper.write_text(f'#!/bin/sh\n{settings} exec {command} "$@"\n')
            wrapper.chmod(0o755)

    def _daemon(
        self, stack: ExitStack, name: str, command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        child = start_group(command, log=self.folder / f"{name}.log", env=self.env, cwd=self.folder)
        stack.callback(stop_group, child)
        return child

    def _munge(self, stack: ExitStack) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        own = {
            "socket": "munge.sock",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
        }
        options = [f"--{name}={self.folder / file}" for name, file in own.items()]
        self._daemon(
            stack, "munged", ["munged", "--foreground", "--force", *options, "--num-threads=2"]
        )
        wait_until((self.folder / "munge.sock").exists, 10)

    def _accounts(self, stack: ExitStack, root: Path) -> None:
        """MariaDB and slurmdbd, with this cluster and an account `lab` of this user."""
        data, user = self.folder / "mariadb", getpass.getuser()
        sql = self.folder / "mariadb.sock"
        base = [f"--basedir={root}/usr", f"--datadir={data}", f"--user={user}"]
        subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                *base,
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
            ],
            env=self.env,
            check=True,
            capture_output=True,
        )
        server = ["mariadbd", "--no-defaults", *base, f"--socket={sql}", "--skip-networking"]
        self._daemon(
            stack, "mariadb", [*server, "--innodb-buffer-pool-size=64M", "--skip-grant-tables"]
        )
        wait_until(sql.exists, 60)
        self.env["MYSQL_UNIX_PORT"] = str(sql)
        self._daemon(stack, "slurmdbd", ["slurmdbd", "-D"])
        wait_until(
            lambda: "error" not in self.run("sacctmgr", "-n", "show", "cluster", check=False), 60
        )
        for words in (
            "add cluster c",
            "add account lab",
            "add qos urgent preempt=normal",
            "modify qos normal set gracetime=60",
            f"add user {user} account=lab qos=normal,urgent defaultqos=normal",
        ):
            self.run("sacctmgr", "-i", *words.split())

    def _end_jobs(self) -> None:
        self.run("scancel", "--full", "-s", "KILL", "-u", getpass.getuser(), check=False)
        self.run("scancel", "-u", getpass.getuser(), check=False)
        wait_until(lambda: not self.run("squeue", "-h", check=False).strip(), 30, must=False)

    def _configure(self, lib: Path) -> None:
        here, folder = socket.gethostname(), self.folder
        lines: Mapping[str, object] = {
            "ClusterName": "c",
            "SlurmctldHost": f"{here}(127.0.0.1)",
            "SlurmUser": getpass.getuser(),
            "SlurmdUser": getpass.getuser(),
            "SlurmctldPort": free_port(),
            "PluginDir": lib / "slurm-wlm",
            "AuthInfo": f"socket={folder / 'munge.sock'}",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool-%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd-%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "EnforcePartLimits": "ALL",  # what fits no machine is refused, and not queued for ever
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
            "GresTypes": "gpu",
            "ReturnToService": 2,
            "SlurmdParameters": "config_overrides",
            "KillWait": self.kill_wait,
            "PreemptType": "preempt/qos" if self.accounting else "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "AccountingStorageType": "accounting_storage/slurmdbd"
            if self.accounting
            else "accounting_storage/none",
        }
        conf = [f"{key}={value}" for key, value in lines.items()]
        gpus = folder / "gpus"
        gpus.mkdir()
        gres = []
        for node in range(self.nodes):
            for gpu in range(GPUS):
                (gpus / f"n{node}").mkdir(exist_ok=True)
                (gpus / f"n{node}/gpu{gpu}").touch()
            gres.append(
                f"NodeName=n{node} Name=gpu Type=fake File={gpus}/n{node}/gpu[0-{GPUS - 1}]"
            )
            conf.append(
                f"NodeName=n{node} NodeHostname={here} NodeAddr=127.0.0.1 Port={free_port()} CPUs={CPUS} "
                f"RealMemory={MEMORY} Gres=gpu:fake:{GPUS} State=UNKNOWN"
            )
        conf += [
            "PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP"
        ]
        conf += [
            "PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP"
        ]
        if self.accounting:
            port = free_port()
            conf += ["AccountingStorageHost=127.0.0.1", f"AccountingStoragePort={port}"]
            conf += ["AccountingStoreFlags=job_comment", "AccountingStorageTRES=gres/gpu"]
            conf += [f"AccountingStoragePass={folder / 'munge.sock'}"]
            database = folder / "slurmdbd.conf"
            database.write_text(
                f"AuthType=auth/munge\nAuthInfo=socket={folder / 'munge.sock'}\nDbdHost=localhost\nDbdPort={port}\n"
                f"SlurmUser={getpass.getuser()}\nPluginDir={lib / 'slurm-wlm'}\nPidFile={folder / 'slurmdbd.pid'}\n"
                f"StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser={getpass.getuser()}\n"
            )
            database.chmod(0o600)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text("\n".join([*conf, *self.settings, ""]))
        (folder / "gres.conf").write_text("\n".join([*gres, ""]))


def wait_until(true: Callable[[], object], seconds: float, *, must: bool = True) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it has not come about, and it must.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            if must:
                raise TimeoutError(f"not so after {seconds:.0f} s")
            return
        time.sleep(0.1)


def main() -> None:
    """Start a cluster for a shell, until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--accounting", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Slurm(
        folder=given.folder.resolve(), nodes=given.nodes, accounting=given.accounting
    ) as slurm:
        print(f"export PATH={slurm.env['PATH']}", flush=True)
        with suppress(KeyboardInterrupt):
            time.sleep(1e9)


if __name__ == "__main__":
    main()
