"""Private Ray cluster of a run, on this machine."""

import logging
import os
import secrets
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import auto_init_hook
from ray._private import worker as ray_worker

from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.ray_cleanup import kill_processes_of, reaped, remove_session
from mcore_mas.runtime.stop_signal import Stopped, preserved_sigterm_handler

# Tunables of glibc (malloc(3), mallopt(3)), which a process reads when it starts. By default glibc maps every large
# tensor and unmaps it when it is freed, so a third of the time of an update on a CPU is spent on page faults.
# With these a process keeps the memory that it frees. All threads share one arena, because the heaps of further
# arenas end at 64 MiB. The price is resident memory; benchmarks/page_reuse.py prints both.
KEEP_PAGES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),  # bytes; larger tensors are still mapped
    "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    # Threads of libgomp wait for each other by spinning, by default for some milliseconds: on a busy machine an update
    # with two threads took seven times the CPU time of one. With this count they sleep after some 20 us.
    "GOMP_SPINCOUNT": "10000",
}
_ATTEMPTS = 3  # starts of Ray, which gives up after 30 s on a busy machine


@contextmanager
def running_ray(
    cpus: int,
    object_store_mb: int,
    *,
    gpus: int = 0,
    keep_pages: bool = False,
    logs: Path | None = None,
) -> Iterator[None]:
    """Start Ray for this block; it shuts down with this process, even if that is killed.

    Args:
        cpus: CPUs that Ray hands out.
        object_store_mb: size of the object store in MiB.
        gpus: GPUs that Ray hands out.
        keep_pages: Ray's processes retain freed memory instead of returning it to the OS. Variables
            that are already set in the environment take precedence.
        logs: folder that its logs are moved to if the block fails.

    Raises:
        ClusterError: Ray does not start.
    """
    _set_environment(keep_pages=keep_pages)
    remove_ray_excepthook()
    make_private_token()
    session = _start(cpus, gpus, object_store_mb)
    with reaped(session, logs), no_implicit_ray():
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def no_implicit_ray() -> Iterator[None]:
    """Keep Ray's functions from starting another Ray in this block; they fail if this one has ended.

    The end of the interpreter shuts Ray down. A training in a thread that Ctrl-C has left behind may
    call it after that.
    """
    starts_implicitly = auto_init_hook.enable_auto_connect
    auto_init_hook.enable_auto_connect = False
    try:
        yield
    finally:
        auto_init_hook.enable_auto_connect = starts_implicitly


def remove_ray_excepthook() -> None:
    """Let Python print uncaught errors of this process without Ray's hook, which importing Ray has set.

    The hook first sends the error to Ray's head. If the head has ended before the driver, as after
    Ctrl-C on a busy machine, the hook waits for it for a minute and then ends the process without
    the error. A hook of the user's own stays.
    """
    if sys.excepthook is ray_worker.custom_excepthook:
        sys.excepthook = ray_worker.normal_excepthook


def _set_environment(*, keep_pages: bool) -> None:
    """Set the environment variables that Ray and its processes read when they start."""
    if keep_pages:
        for name, value in KEEP_PAGES.items():
            os.environ.setdefault(name, value)

    # If it is set, `ray.init` joins the Ray at this address.
    os.environ.pop("RAY_ADDRESS", None)
    # If it is not set, Ray requires the token of `make_private_token`; "disabled" would accept anyone.
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # By default workers have a low priority on a busy machine.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    # `ray.init` would wait forever if a worker that it starts in advance ended.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    # The default is 60 s, and a worker may take longer to start on a busy machine.
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")


def make_private_token() -> None:
    """Make the token of this user's Rays, if there is none, readable by this user alone.

    Whoever has the token can run code as this user. Ray itself would make it readable by all, and two jobs that start
    at once would make two.
    """
    token = Path.home() / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o700, exist_ok=True)
    if not token.is_file():
        # a random name, because machines that share a home folder may have equal process ids
        draft = token.with_name(f".auth_token.{secrets.token_hex(8)}")
        draft.touch(0o600)
        draft.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was first
            os.link(draft, token)
        draft.unlink()
    if token.stat().st_uid == os.getuid():
        token.chmod(0o600)


def _start(cpus: int, gpus: int, object_store_mb: int) -> Path:
    """Start Ray and return the folder of its session."""
    folder = _private_folder() / "ray"
    pattern = f"session_*_{os.getpid()}"  # Ray ends the names of its sessions with the driver's process id
    earlier_sessions = set(folder.glob(pattern))
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with preserved_sigterm_handler():
                context: Any = ray.init(
                    address="local",  # else a Ray that somebody started here would be joined
                    num_cpus=cpus,
                    num_gpus=gpus,
                    include_dashboard=False,
                    object_store_memory=object_store_mb << 20,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    _temp_dir=str(folder),
                )
            return Path(context.address_info["session_dir"])
        except Stopped:
            _end_sessions(set(folder.glob(pattern)) - earlier_sessions)
            raise
        except Exception as error:  # Ray has no error type for a start that took too long
            _end_sessions(set(folder.glob(pattern)) - earlier_sessions)
            timed_out = "timed out during startup" in str(error)
            if timed_out and attempt < _ATTEMPTS:
                continue
            reason = f"({' '.join(str(error).split())[:300]})"
            if timed_out:
                reason = f"in {_ATTEMPTS} attempts of 30 s; end other work on it, and run it again"
            raise ClusterError(
                f"cluster.address: local: no Ray starts on this machine {reason}"
            ) from error
    raise AssertionError


def _end_sessions(sessions: Collection[Path]) -> None:
    """End the processes of a Ray that did not start, and remove the folders of its sessions."""
    ray.shutdown()
    for session in sessions:
        kill_processes_of(session)
        remove_session(session)


def _private_folder() -> Path:
    """Make a folder that only this user can read, because Ray's processes make theirs readable by all."""
    parent = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").resolve()  # noqa: S108
    folder = parent / f"ray-{os.getuid()}"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise ClusterError(
            f"cluster.address: local: {folder} is not this user's; set RAY_TMPDIR to a folder that is"
        )
    folder.chmod(0o700)
    return folder
