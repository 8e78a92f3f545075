"""Watchdog of ranks: it names the ranks that hang and the functions that they are in."""

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

from mcore_mas.megatron.rank_watch import RankMonitor, RankWatchdog, heartbeat
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups
from mcore_mas.runtime import trainer_rank
from rollout.base.restarts import ProcessLost

RANK = """
import ctypes, sys, time
from pathlib import Path
from mcore_mas.megatron.rank_watch import RankWatchdog
watchdog = RankWatchdog(Path(sys.argv[1]), 0.5)
def hold_the_lock():
    ctypes.PyDLL(None).sleep(600)
def wait():
    time.sleep(600)
with watchdog.phase("update"):
    print("ready", flush=True)
    {"holds": hold_the_lock, "waits": wait}[sys.argv[2]]()
"""


@contextmanager
def rank_process(status: Path, behaviour: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that enters a phase and then holds the interpreter's lock, or waits."""
    script = folder / "trainer_rank.py"  # the monitor looks for the stack of this file
    script.write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, str(script), str(status), behaviour], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


async def wait_for_hang(monitor: RankMonitor, *finished: bool) -> None:
    """Watch as many ranks as there are arguments, of which those that are True have a result."""
    results = [asyncio.get_running_loop().create_future() for _ in finished]
    for result, is_finished in zip(results, finished, strict=True):
        if is_finished:
            result.set_result(None)
    await monitor.wait_for_hang(results)


def test_a_rank_that_holds_the_interpreter_lock_is_named_with_its_stack(tmp_path: Path) -> None:
    monitor = RankMonitor(folder=tmp_path / "ranks", policy="solver", hang_s=0.5)
    with (
        rank_process(monitor.status_file(0), "waits", tmp_path),
        rank_process(monitor.status_file(1), "holds", tmp_path),
        rank_process(monitor.status_file(2), "waits", tmp_path) as stopped,
    ):
        os.kill(stopped.pid, signal.SIGSTOP)
        with pytest.raises(ProcessLost) as lost:
            asyncio.run(wait_for_hang(monitor, False, False, False))
    message = str(lost.value)
    assert message.startswith("policy solver: no progress for ")
    assert "rank 2: does not respond in phase update (is it stopped?); " in message
    innermost_frames = {0: "trainer_rank.py:9 wait", 1: "trainer_rank.py:7 hold_the_lock"}
    for rank, frame in innermost_frames.items():
        assert f"rank {rank}: in phase update at trainer_rank.py:12 <module> > {frame}" in message


def test_a_dump_of_stacks_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dump comes after `hang_s`, and the wait for it must not begin again."""
    monitor = RankMonitor(folder=tmp_path, policy="solver", hang_s=8.0)
    file = monitor.status_file(0)
    clock = [0.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] == 1.0:
            file.write_text("update\n")
        if clock[0] == 9.0:
            file.write_text('update\nTimeout (0:00:08)!\n  File "trainer_rank.py", line 1 in f')

    monkeypatch.setattr("mcore_mas.megatron.rank_watch.asyncio.sleep", sleep)
    monkeypatch.setattr("mcore_mas.megatron.rank_watch.time.monotonic", lambda: clock[0])
    with pytest.raises(
        ProcessLost, match=r"^policy solver: no progress for 10 s; rank 0: in phase up"
    ):
        asyncio.run(wait_for_hang(monitor, False))


def test_ranks_that_have_a_result_are_not_named(tmp_path: Path) -> None:
    monitor = RankMonitor(folder=tmp_path, policy="solver", hang_s=0.1)
    for rank in range(2):  # both files are empty, as between two calls
        RankWatchdog(monitor.status_file(rank), 0.1)
    message = (
        r"^policy solver: no progress for 0 s; "
        r"rank 1: does not respond between phases \(is it stopped\?\)$"
    )
    with pytest.raises(ProcessLost, match=message):
        asyncio.run(wait_for_hang(monitor, True, False))


@pytest.mark.slow
def test_heartbeats_keep_a_rank_from_hanging_and_the_end_of_a_phase_stops_its_watchdog(
    tmp_path: Path,
) -> None:
    monitor = RankMonitor(folder=tmp_path, policy="p", hang_s=2.0)
    status = monitor.status_file(0)
    watchdog = RankWatchdog(status, 2.0)

    async def work() -> None:
        watching = asyncio.ensure_future(wait_for_hang(monitor, False))
        with watchdog.phase("score"):
            end = time.monotonic() + 5.0  # longer than the time after which a rank hangs
            while time.monotonic() < end:
                heartbeat()
                assert status.read_text() == "score\n"
                await asyncio.sleep(0.1)
        assert not watching.done()
        watching.cancel()

    asyncio.run(work())
    assert status.read_text() == ""
    heartbeat()  # outside a phase nothing is watched
    assert status.read_text() == ""


def test_ranks_wait_for_each_other_for_longer_than_they_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = RankMonitor(folder=tmp_path, policy="p", hang_s=7200.0)
    rank = trainer_rank.TrainerRank(1, monitor)
    store = HashStore()
    rank._store = store
    monkeypatch.setattr(trainer_rank.ray, "nodes", list)
    monkeypatch.setattr(rank, "_trainer_class", lambda *_: None)
    rank.join(0, ("", 0), {"p": TrainerSpec(model="")})
    try:
        timeouts = [store.timeout]
        for group in (dist.group.WORLD, parallel_state.get_tensor_model_parallel_group()):
            timeouts.append(group._get_backend(torch.device("cpu")).options._timeout)
    finally:
        destroy_process_groups()
    assert set(timeouts) == {timedelta(hours=4)}
