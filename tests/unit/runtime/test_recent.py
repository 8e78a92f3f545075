"""The newest state of a run in memory: kept while there is room, and otherwise one line."""

import asyncio
from pathlib import Path

import pytest

from mcore_mas.runtime import recent
from mcore_mas.runtime.checkpoint import Written
from mcore_mas.runtime.recent import RecentState, free_memory, recent_state
from mcore_mas.runtime.recipe import Identity
from rollout.base.files import Digest, write_chunks
from rollout.base.ownership import remove_path
from rollout.sync import MEMORY, memory_path

IDENTITY = Identity(run="r", models={"p": {"vocab": 5}})


async def write(folder: Path) -> Written:
    async def written() -> dict[str, Digest]:
        (folder / "p").mkdir()
        return {"p/weights": write_chunks(folder / "p" / "weights", [b"w" * 10])}

    return written


async def spoilt(folder: Path) -> Written:
    async def written() -> dict[str, Digest]:
        raise OSError("rank 0 of p: No space left on device")

    return written


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of every step is kept, however short they are."""
    monkeypatch.setattr(recent, "_EVERY_S", 0.0)


def test_of_short_steps_a_state_is_kept_every_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "_EVERY_S", 2.0)
    clock = [100.0]
    monkeypatch.setattr(recent.time, "monotonic", lambda: clock[0])

    async def keep() -> list[str]:
        states, kept = RecentState(tmp_path, IDENTITY, 10, pytest.fail), []
        for step, now in enumerate([100.0, 101.9, 102.0, 103.9, 110.0], 1):
            clock[0] = now
            await states.keep(step, {}, write)
            await states.finish()
            kept += [path.name for path in tmp_path.iterdir()]
        return kept

    # seconds 0, 2 and 10: the states between are worth less than two seconds
    assert [int(name[-1]) for name in asyncio.run(keep())] == [1, 1, 3, 3, 5]


def test_the_newest_is_kept_in_memory_and_nothing_stays_of_it(tmp_path: Path) -> None:
    async def keep(folder: Path, *steps: int) -> None:
        states = RecentState(folder, IDENTITY, 10, pytest.fail)
        for step in steps:
            await states.keep(step, {"kl": step}, write)
        await states.finish()

    folder = memory_path()
    folder.mkdir()
    asyncio.run(keep(folder, 1, 2, 3))
    assert folder.is_relative_to(MEMORY)
    assert [path.name for path in folder.iterdir()] == ["step_000003"]
    found = recent_state(folder, IDENTITY, pytest.fail)
    assert found is not None and found.step == 3 and found.state == {"kl": 3}
    (folder / "step_000003" / "p" / "weights").write_bytes(b"v" * 10)
    said: list[str] = []
    assert recent_state(folder, IDENTITY, said.append) is None  # the disk's newest is taken then
    assert said == [f"{folder}/step_000003: p/weights is not what was written"]
    assert not folder.exists()
    asyncio.run(keep(folder, 2))  # after a start from the disk's
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    remove_path(folder)


def test_without_room_a_line_says_so_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def keep() -> None:
        states = RecentState(tmp_path, IDENTITY, 10 << 20, said.append)
        await states.keep(1, {}, write)
        with monkeypatch.context() as full:
            full.setattr(recent, "free_memory", lambda: (20 << 20) - 1)
            await states.keep(2, {}, write)
        assert list(tmp_path.iterdir()) == []  # nor does the older one take up what there is
        await states.keep(3, {}, spoilt)
        await states.keep(4, {}, write)  # as it is when there is room again
        await states.finish()

    asyncio.run(asyncio.wait_for(keep(), 10))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]
    assert said == [
        "no state in memory, which takes twice 10 MiB (20 MiB of memory are free): a lost rank costs all "
        "steps since the newest checkpoint on disk"
    ]


def test_free_memory_is_what_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < free_memory() <= 1 << 50
    own = next(
        (
            line[3:]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line[:3] == "0::"
        ),
        "/",
    )
    group = tmp_path / own.strip("/")
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("900\n")
    (group / "memory.stat").write_text("anon 500\nactive_file 30\ninactive_file 20\nshmem 100\n")
    monkeypatch.setattr(recent, "_CGROUPS", tmp_path)
    assert free_memory() == 150
