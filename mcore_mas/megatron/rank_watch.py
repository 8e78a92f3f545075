"""Watchdog of ranks: each rank reports its phase in a file, and its stack if the phase takes too long.

`RankWatchdog` is the side of a rank, `RankMonitor` the side of the controller, which raises an error if no rank shows
progress. Code that runs for long within a phase calls `heartbeat` now and then.
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

from rollout.base.processes import ProcessLost

_POLLS = 8  # of the status files, within the time after which ranks count as hung
_FRAMES = 4  # of a stack that an error message shows, the innermost last
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_ACTOR_FILE = "trainer_rank.py"  # in the stack of the thread that runs the calls of a rank
_TRACEBACK_HEADER = "Timeout ("  # what faulthandler writes before the stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMonitor:
    """The controller's view of the ranks of one policy, by their status files."""

    folder: Path  # of the status files; all nodes see it
    policy: str
    hang_s: float  # seconds without progress of any rank after which the ranks count as hung

    def status_file(self, rank: int) -> Path:
        """Return the file with a rank's phase, and with the stacks of its threads if the phase takes too long."""
        return self.folder / f"{self.policy}-{rank}.txt"

    async def wait_for_hang(self, results: Sequence[asyncio.Future[object]]) -> NoReturn:
        """Watch all ranks until this is cancelled.

        Args:
            results: the pending result of each rank, by rank.

        Raises:
            ProcessLost: no rank has shown progress for `hang_s`. The message says where each unfinished rank is.
        """
        progress: list[int] = []
        since = time.monotonic()
        # longer than hang_s, so that the watchdogs of the ranks write their stacks first
        patience_s = self.hang_s * (1 + 2 / _POLLS)
        while time.monotonic() - since < patience_s:
            await asyncio.sleep(self.hang_s / _POLLS)
            latest = [self._last_progress(rank) for rank in range(len(results))]
            if latest != progress:
                progress = latest
                since = time.monotonic()

        unfinished = [rank for rank, result in enumerate(results) if not result.done()]
        raise ProcessLost(
            f"policy {self.policy}: nothing for {time.monotonic() - since:.0f} s; "
            f"{self._describe(unfinished)}"
        )

    def _last_progress(self, rank: int) -> int:
        """Return the time of a rank's last sign of progress, in ns; 0 if its watchdog has dumped its stacks."""
        path = self.status_file(rank)
        with suppress(OSError):
            if _TRACEBACK_HEADER not in path.read_text():
                return path.stat().st_mtime_ns
        return 0

    def _describe(self, ranks: Sequence[int]) -> str:
        """Describe where ranks are, those at the same place together and those that do not respond first."""
        ranks_by_place: dict[str, list[int]] = {}
        for rank in ranks:
            path = self.status_file(rank)
            status = path.read_text() if path.is_file() else ""
            phase, _, stacks = status.partition("\n")
            if _TRACEBACK_HEADER in stacks:
                place = f"stands in {phase} at {_call_stack(stacks)}"
            elif phase:
                place = f"does not answer in {phase} (is it stopped?)"
            else:
                place = "has not begun (is it stopped?)"
            ranks_by_place.setdefault(place, []).append(rank)

        descriptions = []
        for place, members in sorted(ranks_by_place.items()):
            noun = "rank" if len(members) == 1 else "ranks"
            descriptions.append(f"{noun} {', '.join(map(str, members))} {place}")
        return "; ".join(descriptions)


def _call_stack(stacks: str) -> str:
    """Format the innermost frames of the thread that runs the calls of a rank."""
    threads = [_FRAME.findall(thread) for thread in stacks.split("\nThread ")]
    calls = [frames for frames in threads if any(_ACTOR_FILE in file for file, _, _ in frames)]
    frames = calls[0] if calls else threads[0]
    return " > ".join(
        f"{Path(file).name}:{line} {function}"
        for file, line, function in reversed(frames[:_FRAMES])
    )


class RankWatchdog:
    """A rank's own watchdog. The thread that dumps stacks is faulthandler's, which needs no lock of the interpreter."""

    def __init__(self, path: Path, hang_s: float) -> None:
        """Report in the file `path` from now on.

        Args:
            hang_s: seconds without a heartbeat after which the stacks are dumped.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._hang_s = hang_s
        self._phase = b""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report that the block, a phase of this name, runs, and watch it."""
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
        file = self._file.fileno()
        with suppress(OSError):  # a full disk does not stop a rank
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, self._phase)
            os.utime(file)


_active: RankWatchdog | None = None  # of this process, while it is in a phase


def heartbeat() -> None:
    """Report progress of the rank that this process is; does nothing outside a watched phase."""
    if _active is not None:
        _active.heartbeat()
