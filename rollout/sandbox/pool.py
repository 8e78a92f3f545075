"""Pool of jails: the zygote process that jails are cloned from, and jails that are cloned ahead."""

import json
import os
import socket
import subprocess
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
from rollout.sandbox.tiers import NAMESPACES, interpreter, readable_paths, site_package_folders

# where each pool makes its folder of boxes (`JailPool.boxes`), in tiers without a separate root file system
BOXES = Path(tempfile.gettempdir())

_GUEST_PARENT = Path(__file__).resolve().parent
_START_ZYGOTE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from guest.warden import main; "
    "del sys.path[0]; main()"
)
# The whole environment of programs, into which nothing of this process's environment goes.
_ENVIRONMENT: Mapping[str, str] = {
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
_READY_S = 60.0  # within which the zygote must start, also on a busy machine


class JailPool:
    """A zygote, from which every jail of a sandbox is cloned, and jails that wait for their job.

    Attributes:
        zygote: process that is cloned.
        groups: control groups of the jails; None if this user may not create any, and in tiers other than
            "namespaces".
        boxes: folder with the jobs' working folders; None if jobs have a root file system of their
            own.
    """

    def __init__(self, tier: str, *, warm: int) -> None:
        """Start the zygote. The kernel ends it together with the calling thread.

        Args:
            tier: isolation, one of `tiers.TIERS`.
            warm: number of jails that are cloned ahead.
        """
        self.groups: cgroup.Cgroups | None = None
        self.boxes: Path | None = None
        self._warm: deque[Jail] = deque()
        self._warm_size = warm
        self._boxes_made = 0
        self._cores = Cores()

        _remove_abandoned_boxes()
        if tier != NAMESPACES:
            # The prefix names this process, so that a later one can remove the folder if it is abandoned.
            self.boxes = Path(tempfile.mkdtemp(prefix=cgroup.process_prefix(), dir=BOXES))
        else:
            parents = cgroup.writable_parents()
            if parents is not None:
                self.groups = cgroup.Cgroups(parents)

        settings = {
            "tier": tier,
            "parent": os.getpid(),
            "readable": readable_paths(),
            "packages": site_package_folders(),
        }
        self._channel, zygote_end = wire.pair()
        # -s -P: neither the user's packages nor the working folder on the import path. -S: no `site`, which would run
        # .pth files; the zygote adds the folders of `packages` itself.
        python = [interpreter(), "-s", "-P", "-S", "-c", _START_ZYGOTE]
        arguments = [str(_GUEST_PARENT), str(zygote_end.fileno()), json.dumps(settings)]
        with zygote_end:
            self.zygote = subprocess.Popen(
                [*python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(zygote_end.fileno(),),
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the zygote can be cloned; raise SandboxUnavailable with the reason if not."""
        self._channel.settimeout(_READY_S)
        try:
            answer, _ = wire.receive(self._channel)
        except (EOFError, OSError):
            self.zygote.kill()
            stderr = self.zygote.communicate()[1].decode("utf-8", "replace")
            last_line = stderr.strip().rpartition("\n")[2]
            answer = {"fault": last_line or "it did not start"}
        if "fault" in answer:
            self.close()
            raise SandboxUnavailable(answer["fault"])
        self._channel.setblocking(False)

    @property
    def is_alive(self) -> bool:
        """True if the zygote can still be cloned."""
        try:
            return self.zygote.poll() is None and self._channel.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # the zygote has nothing to say
            return True
        except OSError:
            return False

    @contextmanager
    def lend(self) -> Iterator[Jail]:
        """Return a context with a new jail, for one program or one session; the jail ends with the context.

        Raises:
            SandboxError: the zygote is gone, or cannot be cloned.
        """
        # a jail that was cloned ahead may outlive the zygote for a moment
        if not self.is_alive:
            raise SandboxError("the sandbox cannot make another jail (it has ended)")

        jail = self._warm.popleft() if self._warm else self._make_jail()
        try:
            while len(self._warm) < self._warm_size:
                self._warm.append(self._make_jail())
            yield jail
        finally:
            jail.close()
            if jail.group is not None and self.groups is not None:
                self.groups.take_back(jail.group)

    def close(self) -> None:
        """End the zygote with every job, and remove their folders and control groups."""
        while self._warm:
            self._warm.pop().close()
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.zygote.wait(1.0)
        self.zygote.kill()
        with suppress(subprocess.TimeoutExpired):
            self.zygote.communicate(timeout=1.0)
        if self.groups is not None:
            self.groups.close()
        if self.boxes is not None:
            remove_tree(str(self.boxes))  # one that stays is removed by a later process's sandbox

    def _make_jail(self) -> Jail:
        group = None
        process_files: list[int] = []
        try:
            if self.groups is not None:
                group = self.groups.lend()
                process_files = group.open_process_files()
            return Jail(self._clone(process_files), group, self._cores)
        except OSError as error:
            if group is not None and self.groups is not None:
                self.groups.take_back(group)
            raise SandboxError(
                f"the sandbox cannot make another jail ({error.strerror})"
            ) from error
        finally:
            for file in process_files:
                os.close(file)

    def _clone(self, process_files: list[int]) -> socket.socket:
        """Clone a warden; return the host's end of its channel.

        Args:
            process_files: through which the warden joins its control group.
        """
        request = {}
        if self.boxes is not None:
            self._boxes_made += 1
            box = self.boxes / str(self._boxes_made)
            box.mkdir(mode=0o700)
            request["box"] = str(box)

        host_end, warden_end = wire.pair()
        try:
            with warden_end:
                wire.send(self._channel, request, [warden_end.fileno(), *process_files])
        except OSError:
            host_end.close()
            raise
        return host_end


def _remove_abandoned_boxes() -> None:
    """Remove the folders that killed processes of this user have left, as far as possible."""
    for folder in cgroup.abandoned_folders(BOXES):
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                remove_tree(str(folder))
