"""Watchdog of trainer ranks: each says in a file what it is at, and where it stands when that takes too long."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mcore_mas.rollout.base.supervision import ProcessLost

_LOOKS = 8  # in the time after which a rank hangs
_FRAMES = 4  # of a rank's stack that are told, the innermost last
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_CALLS = "trainer_group.py"  # what is in the stack of the thread that a rank's calls run in
_LATE = "Timeout ("  # what faulthandler writes first


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFiles:
    """Where the ranks of a policy say what they are at, in a folder that all nodes see."""

    folder: Path
    policy: str
    hang_s: float  # without a sign of life of any rank, after which they hang

    def of(self, rank: int) -> Path:
        """A rank's file: its phase, and if that takes too long the stacks of its threads."""
        return self.folder / f"{self.policy}-{rank}.txt"

    async def stalled(self, ranks: int) -> NoReturn:
        """Watch ranks that were asked something, until this is cancelled.

        Raises:
            ProcessLost: none has shown a sign of life for `hang_s`; which does not answer, and where others stand.
        """
        seen, since = None, time.monotonic()
        while time.monotonic() - since < self.hang_s * (1 + 2 / _LOOKS):  # their own watchdogs come first
            await asyncio.sleep(self.hang_s / _LOOKS)
            if (now := [self._beat(rank) for rank in range(ranks)]) != seen:
                seen, since = now, time.monotonic()
        told = "; ".join(f"{_numbered(own)} {what}" for what, own in self._standing(ranks).items())
        raise ProcessLost(f"policy {self.policy}: nothing for {time.monotonic() - since:.0f} s; {told}")

    def _beat(self, rank: int) -> int:
        """The time of a rank's last sign of life, of which a dump of its stacks is none."""
        with suppress(OSError):
            if _LATE not in (path := self.of(rank)).read_text():
                return path.stat().st_mtime_ns
        return 0

    def _standing(self, ranks: int) -> dict[str, list[int]]:
        """What the ranks are at, those that do not answer first; with the ranks that are at it."""
        found: dict[str, list[int]] = {}
        for rank in range(ranks):
            text = self.of(rank).read_text() if self.of(rank).is_file() else ""
            phase, _, dump = text.partition("\n")
            if _LATE in dump:
                what = f"stands in {phase} at {_place(dump)}"
            else:
                what = (
                    f"does not answer in {phase} (is it stopped?)"
                    if phase
                    else "has not begun, or has ended (is it stopped?)"
                )
            found.setdefault(what, []).append(rank)
        return dict(sorted(found.items()))


def _numbered(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _place(dump: str) -> str:
    """The innermost frames of the thread that a rank's calls run in."""
    threads = [_FRAME.findall(thread) for thread in dump.split("\nThread ")]
    own = next((frames for frames in threads if any(_CALLS in file for file, _, _ in frames)), threads[0])
    return " > ".join(f"{Path(file).name}:{line} {name}" for file, line, name in reversed(own[:_FRAMES]))


class RankWatch:
    """A rank's own watchdog; the thread that writes stacks is faulthandler's, which no lock of Python's holds up."""

    def __init__(self, path: Path, hang_s: float) -> None:
        """Write into `path` from now on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._hang_s, self._phase = path.open("wb", buffering=0), hang_s, b""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch the block, which is called `name`."""
        global _running
        self._phase, _running = name.encode() + b"\n", self
        try:
            self.beat()
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._phase, _running = b"", None
            self._write()

    def beat(self) -> None:
        """This rank goes on."""
        self._write()
        faulthandler.dump_traceback_later(self._hang_s, file=self._file)

    def _write(self) -> None:
        file = self._file.fileno()
        with suppress(OSError):  # of a disk that is full
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, self._phase)
            os.utime(file)


_running: RankWatch | None = None  # of this process, in a phase


def beat() -> None:
    """The rank of this process, if it is one and is watched, goes on."""
    if _running is not None:
        _running.beat()
