"""Watchdog of ranks: each reports its phase in a file, and its stacks if the phase takes too long.

A rank has a `RankWatchdog`. The controller has a `RankMonitor`, which raises an error if no rank
shows progress. Long computations within a phase call `heartbeat` now and then.
"""

import asyncio
import faulthandler
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rollout.base.restarts import ProcessLost

# Number of times that the status files are read within `RankMonitor.hang_s`.
_POLLS = 8

# Number of a stack's frames in an error message; the innermost frame is last.
_FRAMES = 4

_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')

# File in the stack of the thread that runs the calls of a rank.
_ACTOR_FILE = "trainer_rank.py"

# Text that faulthandler writes before the stacks.
_TRACEBACK_HEADER = "Timeout ("


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMonitor:
    """The controller's view of the ranks of one policy, by their status files.

    Attributes:
        folder: folder of the status files, on a file system that all nodes share.
        policy: name of the policy.
        hang_s: seconds without progress after which a rank's watchdog writes its stacks; the monitor
            waits a quarter longer.
    """

    folder: Path
    policy: str
    hang_s: float

    def status_file(self, rank: int) -> Path:
        """Return the file with a rank's phase, and with its stacks if the phase takes too long."""
        return self.folder / f"{self.policy}-{rank}.txt"

    async def wait_for_hang(self, results: Sequence[asyncio.Future[object]]) -> NoReturn:
        """Watch all ranks until the call is cancelled.

        Args:
            results: pending result of each rank, by rank.

        Raises:
            ProcessLost: no rank has shown progress for 1.25 times `hang_s`. The message describes the
                state of each rank without a result.
        """
        progress_times = [-1] * len(results)
        last_progress_s = time.monotonic()
        # This is longer than hang_s, so that the watchdogs of the ranks write their stacks first.
        patience_s = self.hang_s * (1 + 2 / _POLLS)
        while time.monotonic() - last_progress_s < patience_s:
            await asyncio.sleep(self.hang_s / _POLLS)
            new_times = [self._progress_time(rank) for rank in range(len(results))]
            # A time that falls to 0, because the rank's watchdog has written stacks, is no progress.
            if any(new > old for new, old in zip(new_times, progress_times, strict=True)):
                last_progress_s = time.monotonic()
            progress_times = new_times

        unfinished = [rank for rank, result in enumerate(results) if not result.done()]
        raise ProcessLost(
            f"policy {self.policy}: no progress for {time.monotonic() - last_progress_s:.0f} s; "
            f"{self._describe(unfinished)}"
        )

    def _progress_time(self, rank: int) -> int:
        """Return the time of a rank's last progress by its status file, in ns.

        It is 0 if the rank's watchdog has written stacks, or if there is no status file yet.
        """
        path = self.status_file(rank)
        with suppress(OSError):
            if _TRACEBACK_HEADER not in path.read_text():
                return path.stat().st_mtime_ns
        return 0

    def _describe(self, ranks: Sequence[int]) -> str:
        """Describe the states of ranks; ranks in the same state are listed together.

        The descriptions are sorted by their text, so that "does not respond" precedes "in phase".
        """
        ranks_by_state: dict[str, list[int]] = {}
        for rank in ranks:
            ranks_by_state.setdefault(self._state(rank), []).append(rank)

        descriptions = []
        for state, members in sorted(ranks_by_state.items()):
            noun = "rank" if len(members) == 1 else "ranks"
            descriptions.append(f"{noun} {', '.join(map(str, members))}: {state}")
        return "; ".join(descriptions)

    def _state(self, rank: int) -> str:
        """Describe the state of a rank by its status file."""
        path = self.status_file(rank)
        status = path.read_text() if path.is_file() else ""
        phase, _, stacks = status.partition("\n")
        if _TRACEBACK_HEADER in stacks:
            return f"in phase {phase} at {_call_stack(stacks)}"
        if phase:
            # A process that can run would have written its stacks.
            return f"does not respond in phase {phase} (is it stopped?)"
        # The rank is between two calls, or has not made its file yet.
        return "does not respond between phases (is it stopped?)"


def _call_stack(stacks: str) -> str:
    """Format the innermost frames of the thread that runs the calls of a rank."""
    stacks_by_thread = [_FRAME.findall(thread) for thread in stacks.split("\nThread ")]
    frames = stacks_by_thread[0]
    for thread_frames in stacks_by_thread:
        if any(_ACTOR_FILE in file for file, _, _ in thread_frames):
            frames = thread_frames
            break
    return " > ".join(
        f"{Path(file).name}:{line} {function}"
        for file, line, function in reversed(frames[:_FRAMES])
    )


class RankWatchdog:
    """Watchdog in the process of a rank.

    A thread of faulthandler writes the stacks. It does not need the interpreter's lock, which the
    code that hangs may hold.
    """

    def __init__(self, path: Path, hang_s: float) -> None:
        """Create an empty status file.

        Args:
            path: path of the status file.
            hang_s: seconds without a heartbeat after which the stacks are written to the file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._hang_s = hang_s
        self._phase = b""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report that a phase runs during this block, and watch it."""
        global _active
        self._phase = name.encode() + b"\n"
        _active = self
        try:
            self.heartbeat()
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._phase = b""
            _active = None
            self._write()

    def heartbeat(self) -> None:
        """Report progress and restart the timer of the watchdog."""
        self._write()
        faulthandler.dump_traceback_later(self._hang_s, file=self._file)

    def _write(self) -> None:
        """Write the phase; the modification time of the file is the time of the last progress."""
        file = self._file.fileno()
        with suppress(OSError):  # a full disk does not stop a rank
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, self._phase)
            os.utime(file)


# The watchdog of this process while it is in a phase.
_active: RankWatchdog | None = None


def heartbeat() -> None:
    """Report progress of this process's rank; do nothing outside a watched phase."""
    if _active is not None:
        _active.heartbeat()
