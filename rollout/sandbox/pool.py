"""Process pool of warm jails: the tiers of isolation, the process that jobs are cloned from, and who lends them."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout.sandbox import cgroup
from rollout.sandbox.guest import wire
from rollout.sandbox.guest.box import remove_tree
from rollout.sandbox.jail import Cores, Jail
from rollout.sandbox.records import SandboxError, SandboxUnavailable

BOXES = Path(tempfile.gettempdir())  # where boxes are, in tiers without a file system of their own

_HERE = Path(__file__).resolve().parent
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from guest.warden import main; del sys.path[0]; main()"
_ENVIRONMENT: Mapping[str, str] = {  # all of it: nothing of the parent's environment goes in
    "PATH": "/usr/bin:/bin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "TMPDIR": "/box",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MPLBACKEND": "agg",
}
_READY_S = 60.0  # numerical packages take seconds to import on a busy machine


class JailPool:
    """A zygote, the process from which every job of a sandbox is cloned; jails made ahead, their groups and folders."""

    def __init__(self, tier: str, *, warm: int) -> None:
        """Start the zygote, in this thread: the kernel ends it with the thread. `warm` jails wait at a time."""
        self._warm: deque[Jail] = deque()
        self._size, self._count, self._cores = warm, 0, Cores()
        self.groups: cgroup.Cgroups | None = None
        self.boxes: Path | None = (
            None  # where jobs' folders are, in tiers without a file system of their own
        )
        for folder in cgroup.abandoned(BOXES):  # one that cannot be removed stays
            with suppress(OSError):
                if folder.lstat().st_uid == os.geteuid():
                    remove_tree(str(folder))
        if tier != NAMESPACES:
            prefix = f"{cgroup.PREFIX}{os.getpid()}-{cgroup.started(os.getpid())}-"
            self.boxes = Path(tempfile.mkdtemp(prefix=prefix, dir=BOXES))
        elif parents := cgroup.writable_parents():
            self.groups = cgroup.Cgroups(parents)
        settings = {
            "tier": tier,
            "parent": os.getpid(),
            "readable": readable_paths(),
            "packages": packages(),
        }
        self._channel, theirs = wire.pair()
        # -s -P -S: no user's packages, no working folder, no .pth files on the import path
        command = [interpreter(), "-s", "-P", "-S", "-c", _START, str(_HERE), str(theirs.fileno())]
        with theirs:
            self._zygote = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it can lend; SandboxUnavailable, with the reason, if it cannot."""
        self._channel.settimeout(_READY_S)
        try:
            answer, _ = wire.receive(self._channel)
        except (EOFError, OSError):
            self._zygote.kill()
            said = (
                self._zygote.communicate()[1].decode("utf-8", "replace").strip().rpartition("\n")[2]
            )
            answer = {"fault": said or "it did not start"}
        if "fault" in answer:
            self.close()
            raise SandboxUnavailable(answer["fault"])
        self._channel.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether the zygote can still clone."""
        try:
            return self._zygote.poll() is None and self._channel.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # it has nothing to say
            return True
        except OSError:
            return False

    @contextmanager
    def lent(self) -> Iterator[Jail]:
        """A jail for one job, whose warden waits for it; it ends with the block.

        Raises:
            SandboxError: the zygote is gone.
        """
        if (
            not self.alive
        ):  # what it lent before may live on for a moment, and be what a request is sent to
            raise SandboxError("the sandbox cannot make another jail (it has ended)")
        jail = self._warm.popleft() if self._warm else self._jail()
        while len(self._warm) < self._size:
            self._warm.append(self._jail())
        try:
            yield jail
        finally:
            jail.close()
            if jail.group is not None and self.groups is not None:
                self.groups.take_back(jail.group)

    def _jail(self) -> Jail:
        try:
            group = self.groups.lend() if self.groups else None
            return Jail(self._clone(group.open() if group else []), group, self._cores)
        except OSError as error:
            raise SandboxError(
                f"the sandbox cannot make another jail ({error.strerror})"
            ) from error

    def _clone(self, handles: list[int]) -> socket.socket:
        """Our end of a new warden, which joins the groups of `handles`."""
        request = {}
        if self.boxes is not None:
            self._count += 1
            box = self.boxes / str(self._count)
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
        """End the zygote and with it every job, and remove what jobs were given."""
        while self._warm:
            self._warm.pop().close()
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._zygote.wait(1.0)
        self._zygote.kill()
        with suppress(subprocess.TimeoutExpired):
            self._zygote.communicate(timeout=1.0)
        if self.groups is not None:
            self.groups.close()
        if self.boxes is not None:
            remove_tree(str(self.boxes))  # what stays, the next start sweeps


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
    folders = [
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
    ]
    return sorted({os.path.realpath(folder) for folder in folders if Path(folder).is_dir()})


def readable_paths() -> list[str]:
    """What programs may read: the system's programs, the interpreter, and installed packages."""
    own = (sys.base_prefix, os.path.realpath(sys.base_prefix), str(Path(interpreter()).parents[1]))
    paths = {*_SYSTEM, *own, *packages()}
    covered = {
        path
        for path in paths
        for other in paths
        if path != other and path.startswith(f"{other.rstrip('/')}/")
    }
    return sorted(paths - covered)
