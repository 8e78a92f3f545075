"""Process pool of warm jails: the tiers of isolation, the process that jobs are cloned from, and who lends them."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from mcore_mas.rollout.sandbox import cgroup
from mcore_mas.rollout.sandbox.cgroup import Cgroups
from mcore_mas.rollout.sandbox.guest import wire
from mcore_mas.rollout.sandbox.guest.box import remove_tree
from mcore_mas.rollout.sandbox.jail import Jail
from mcore_mas.rollout.sandbox.records import SandboxError, SandboxUnavailable

BOXES = Path(tempfile.gettempdir())  # where boxes are, in tiers without a file system of their own


class JailPool:
    """A zygote, what it cloned ahead, and the groups and folders of its jobs."""

    def __init__(self, tier: str, *, warm: int) -> None:
        """Start the zygote, in this thread: the kernel ends it with the thread. `warm` jails wait at a time."""
        self._warm: deque[Jail] = deque()
        self._size = warm
        self.groups: cgroup.Cgroups | None = None
        self.boxes: Path | None = None
        _sweep()
        parents = cgroup.writable_parents() if tier == NAMESPACES else None
        if parents:
            cgroup.sweep_groups(parents)
            self.groups = cgroup.Cgroups(parents)
        if tier != NAMESPACES:
            prefix = f"{cgroup.PREFIX}{os.getpid()}-{cgroup.started(os.getpid())}-"
            self.boxes = Path(tempfile.mkdtemp(prefix=prefix, dir=BOXES))
        self.zygote = Zygote(tier, boxes=self.boxes or BOXES, groups=self.groups)

    async def ready(self) -> None:
        """Wait until it can lend.

        Raises:
            SandboxUnavailable: it cannot, with the reason.
        """
        await asyncio.to_thread(self.zygote.wait)

    def lend(self) -> Jail:
        """A jail for one job.

        Raises:
            SandboxError: the zygote is gone.
        """
        jail = self._warm.popleft() if self._warm else self.zygote.jail()
        while len(self._warm) < self._size:
            self._warm.append(self.zygote.jail())
        return jail

    def take_back(self, jail: Jail) -> None:
        """End a lent jail."""
        jail.close()
        if jail.group is not None and self.groups is not None:
            self.groups.take_back(jail.group)

    def close(self) -> None:
        """End every job, and remove what jobs were given."""
        while self._warm:
            self._warm.pop().close()
        self.zygote.close()
        if self.groups is not None:
            self.groups.close()
        if self.boxes is not None:
            remove_tree(str(self.boxes))  # what stays, the next start sweeps


def _sweep() -> None:
    """Remove folders that a killed process left; one that cannot be removed stays."""
    for folder in BOXES.glob(f"{cgroup.PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and cgroup.abandoned(folder.name):
                remove_tree(str(folder))


_HERE = Path(__file__).resolve().parent
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from guest.warden import main; del sys.path[0]; main()"
_ENVIRONMENT = MappingProxyType(  # all of it: nothing of the parent's environment goes in
    {
        "PATH": "/usr/bin:/bin",
        "HOME": "/box",
        "LANG": "C.UTF-8",
        "TMPDIR": "/box",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
    }
)
_READY_S = 60.0  # numerical packages take seconds to import on a busy machine


class Zygote:
    """The process from which every job of a sandbox is cloned."""

    def __init__(self, tier: str, *, boxes: Path, groups: Cgroups | None) -> None:
        """Start it; `boxes` is where jobs' folders go in tiers without a file system of their own."""
        self._boxes = boxes
        self._groups = groups
        self._namespaces = tier == NAMESPACES
        self._count = 0
        settings = {"tier": tier, "parent": os.getpid(), "readable": readable_paths(), "packages": packages()}
        ours, theirs = wire.pair()
        # -s -P -S: no user's packages, no working folder, no .pth files on the import path
        command = [interpreter(), "-s", "-P", "-S", "-c", _START, str(_HERE), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=dict(_ENVIRONMENT),
                cwd="/",
                start_new_session=True,
            )
        self._channel = ours

    def wait(self) -> None:
        """Wait until it can clone.

        Raises:
            SandboxUnavailable: it cannot, with the reason.
        """
        self._channel.settimeout(_READY_S)
        try:
            answer, _ = wire.receive(self._channel)
        except (EOFError, OSError):
            self._process.kill()
            said = self._process.communicate()[1].decode("utf-8", "replace").strip().rpartition("\n")[2]
            answer = {"fault": said or "it did not start"}
        if "fault" in answer:
            self.close()
            raise SandboxUnavailable(answer["fault"])
        self._channel.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether it can still clone."""
        try:
            return self._process.poll() is None and self._channel.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # it has nothing to say
            return True
        except OSError:
            return False

    def jail(self) -> Jail:
        """A new jail, whose warden waits for a job.

        Raises:
            SandboxError: the zygote is gone.
        """
        try:
            group = self._groups.lend() if self._groups else None
            return Jail(self._clone(group.open() if group else []), group)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot make another jail ({error.strerror})") from error

    def _clone(self, handles: list[int]) -> socket.socket:
        """Our end of a new warden, which joins the groups of `handles`."""
        request = {}
        if not self._namespaces:
            self._count += 1
            box = self._boxes / str(self._count)
            box.mkdir(mode=0o700)
            request["box"] = str(box)
        ours, theirs = wire.pair()
        try:
            with theirs:
                wire.send(self._channel, request, [theirs.fileno(), *handles])
        except OSError:
            ours.close()
            raise
        finally:
            for handle in handles:
                os.close(handle)
        return ours

    def close(self) -> None:
        """End it and with it every job."""
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=1.0)


NAMESPACES = "namespaces"  # own root, processes, network and user; seccomp; limits per job
LANDLOCK = "landlock"  # no other files, no network, no other process; seccomp; for machines without user namespaces
UNISOLATED = "unisolated"  # limits only: for programs of your own
ISOLATED = (NAMESPACES, LANDLOCK)
TIERS = (*ISOLATED, UNISOLATED)

_SYSTEM = (
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)


def candidates(tier: str) -> tuple[str, ...]:
    """The tiers to try for a choice by name, `auto` among them; never the unisolated one unless it is named.

    Raises:
        ValueError: no such tier.
        SandboxUnavailable: nothing isolates on this kind of machine.
    """
    if tier not in ("auto", *TIERS):
        raise ValueError(f"unknown sandbox tier '{tier}'; known: auto, {', '.join(TIERS)}")
    if tier != UNISOLATED and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SandboxUnavailable(
            f"the sandbox isolates on Linux x86_64, and this is {sys.platform} {platform.machine()}; use a sandbox "
            "server (env.options.server)"
        )
    return ISOLATED if tier == "auto" else (tier,)


def interpreter() -> str:
    """The Python that programs run on: this one's, outside its virtual environment."""
    return os.path.realpath(sys.executable)


def packages() -> list[str]:
    """Where this Python's installed packages are."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return sorted({os.path.realpath(folder) for folder in folders if Path(folder).is_dir()})


def readable_paths() -> list[str]:
    """What programs may read: the system's programs, the interpreter, and installed packages."""
    own = (sys.base_prefix, os.path.realpath(sys.base_prefix), str(Path(interpreter()).parents[1]))
    paths = {*_SYSTEM, *own, *packages()}
    covered = {path for path in paths for other in paths if path != other and path.startswith(f"{other.rstrip('/')}/")}
    return sorted(paths - covered)
