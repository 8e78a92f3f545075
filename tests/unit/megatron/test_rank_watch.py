"""Ranks that hang: they say where they stand themselves, whatever locks they hold."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mcore_mas.megatron.device import RankWatch, WatchFiles, beat
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups
from mcore_mas.runtime import trainer_group
from rollout.base.processes import ProcessLost

RANK = """
import ctypes, sys, time
from pathlib import Path
from mcore_mas.megatron import device
watch = device.RankWatch(Path(sys.argv[1]), 0.5)
def hold_the_lock():
    ctypes.PyDLL(None).sleep(600)
def wait():
    time.sleep(600)
with watch.phase("update"):
    print("ready", flush=True)
    {"holds": hold_the_lock, "waits": wait}[sys.argv[2]]()
"""


@contextmanager
def rank(file: Path, how: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    script = folder / "trainer_group.py"  # whose frames are those of a rank's calls
    script.write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, str(script), str(file), how], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


async def stalled(files: WatchFiles, *answered: bool) -> None:
    """Watch ranks of which some have answered."""
    answers = [asyncio.get_running_loop().create_future() for _ in answered]
    for answer, done in zip(answers, answered, strict=True):
        if done:
            answer.set_result(None)
    await files.stalled(answers)


def test_a_rank_that_holds_the_lock_of_the_interpreter_says_where_it_stands(tmp_path: Path) -> None:
    files = WatchFiles(folder=tmp_path / "ranks", policy="solver", hang_s=0.5)
    with (
        rank(files.of(0), "waits", tmp_path),
        rank(files.of(1), "holds", tmp_path),
        rank(files.of(2), "waits", tmp_path) as stopped,
    ):
        os.kill(stopped.pid, signal.SIGSTOP)
        with pytest.raises(ProcessLost) as lost:
            asyncio.run(stalled(files, False, False, False))
    said = str(lost.value)
    assert said.startswith("policy solver: nothing for ")
    assert "rank 2 does not answer in update (is it stopped?); " in said
    assert (
        "rank 0 stands in update at trainer_group.py:12 <module> > trainer_group.py:9 wait" in said
    )
    assert (
        "rank 1 stands in update at trainer_group.py:12 <module> > trainer_group.py:7 hold_the_lock"
        in said
    )


def test_of_ranks_that_have_answered_nothing_is_said(tmp_path: Path) -> None:
    files = WatchFiles(folder=tmp_path, policy="solver", hang_s=0.1)
    for number in range(2):  # their files are equally empty between two calls
        RankWatch(files.of(number), 0.1)
    with pytest.raises(
        ProcessLost,
        match=r"^policy solver: nothing for 0 s; rank 1 has not begun \(is it stopped\?\)$",
    ):
        asyncio.run(stalled(files, True, False))


def test_signs_of_life_keep_a_rank_from_hanging_and_the_end_of_a_call_its_watchdog(
    tmp_path: Path,
) -> None:
    files = WatchFiles(folder=tmp_path, policy="p", hang_s=2.0)
    watch = RankWatch(files.of(0), 2.0)

    async def goes_on() -> None:
        watching = asyncio.ensure_future(stalled(files, False))
        with watch.phase("score"):
            ends = time.monotonic() + 5.0  # longer than what is a hang
            while time.monotonic() < ends:
                beat()
                assert files.of(0).read_text() == "score\n"
                await asyncio.sleep(0.1)
        assert not watching.done()
        watching.cancel()

    asyncio.run(goes_on())
    assert files.of(0).read_text() == ""
    beat()  # outside a call there is nothing to be watched
    assert files.of(0).read_text() == ""


def test_ranks_wait_for_each_other_for_longer_than_they_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = trainer_group._Rank(1, WatchFiles(folder=tmp_path, policy="p", hang_s=7200.0))
    rank._store = store = HashStore()
    monkeypatch.setattr(trainer_group.ray, "nodes", list)
    monkeypatch.setattr(rank, "_load", lambda *_: None)
    rank.join(0, ("", 0), {"p": TrainerSpec(model="")})
    try:
        groups = dist.group.WORLD, parallel_state.get_tensor_model_parallel_group()
        waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    finally:
        destroy_process_groups()
    assert {store.timeout, *waits} == {timedelta(hours=4)}
