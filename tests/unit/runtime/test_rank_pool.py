"""Pool of ranks: numbers, order of calls, memory, and starts that fail; the actors are fakes."""

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import ray

from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.runtime import rank_pool
from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.rank_pool import MemoryRotation, RankPool
from tests.support.sleepers import Sleeper


class FakeRef:
    """Reference to a result, as Ray's actors return them."""

    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def future(self) -> Future[Any]:
        return self._result

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._result).__await__()


class FakeMethod:
    """Method of an actor, called as `method.remote(...)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: Any) -> FakeRef:
        result = self._call(*args)
        if not isinstance(result, Future):
            value = result
            result = Future()
            result.set_result(value)
        return FakeRef(result)


class FakeRank:
    """Actor that returns its node at once, and does its other calls one after the other.

    Attributes:
        joined_as: rank and address of the store that it has joined with.
    """

    def __init__(self, node: str, log: list[str]) -> None:
        self.joined_as: tuple[int, tuple[str, int]] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._log = log
        self.node_address = FakeMethod(lambda: node)
        self.open_store = FakeMethod(lambda address: (address, 29500))
        self.join = FakeMethod(self._join)
        self.update = FakeMethod(lambda policy: self._work("update", None))
        self.sleep = FakeMethod(lambda: self._work("sleep", 5))
        self.wake = FakeMethod(lambda: self._work("wake", None))

    def _join(self, rank: int, store_address: tuple[str, int], specs: object) -> str:
        self.joined_as = rank, store_address
        return "NVIDIA H200"

    def _work(self, name: str, result: Any) -> Future[Any]:
        def work() -> Any:
            time.sleep(0.02)
            self._log.append(name)
            return result

        return self._thread.submit(work)


class FakeActorClass:
    """`TrainerRankActor`, whose actors are given."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = iter(actors)

    def options(self, **options: Any) -> "FakeActorClass":
        return self

    def remote(self, *args: Any) -> Any:
        return next(self._actors)


def make_pool(monkeypatch: pytest.MonkeyPatch, actors: Sequence[Any]) -> RankPool:
    monkeypatch.setattr(rank_pool, "TrainerRankActor", FakeActorClass(actors))
    return RankPool(
        "solver",
        TrainerSpec(model=""),
        threads=1,
        actor_options=[{"num_gpus": 1}] * len(actors),
        monitor=None,
        rotation=None,
    )


def test_ranks_are_numbered_by_node_and_then_in_order_of_their_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA_VISIBLE_DEVICES may name GPUs in any order, or by UUID, so that names decide nothing."""
    nodes = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.1"]
    actors = [FakeRank(node, []) for node in nodes]
    pool = make_pool(monkeypatch, actors)
    asyncio.run(pool.start())
    store_address = ("10.0.0.1", 29500)
    assert [actor.joined_as for actor in actors] == [
        (2, store_address),
        (0, store_address),
        (3, store_address),
        (1, store_address),
    ]
    assert pool.peak_flops == 989e12


def test_processes_that_do_not_start_end_the_run_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = [FakeRank("", []), FakeRank("", [])]
    for actor in actors:
        actor.node_address = FakeMethod(Future)  # never done
    monkeypatch.setattr(rank_pool, "_START_S", 0.05)
    pool = make_pool(monkeypatch, actors)
    with pytest.raises(ClusterError, match=r"^policy solver: Ray has not started its 2 processes"):
        asyncio.run(pool.start())


def test_while_ranks_are_offloaded_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    pool = make_pool(monkeypatch, [FakeRank("10.0.0.1", log)])

    async def run() -> None:
        await pool.start()
        first = asyncio.ensure_future(pool.call("solver", "update"))
        await asyncio.sleep(0)
        async with pool.offloaded():
            second = asyncio.ensure_future(pool.call("solver", "update"))
            waking = asyncio.ensure_future(pool.wake())
            await asyncio.sleep(0.1)
            log.append("a server starts")
        await asyncio.gather(first, second, waking)
        await pool.sleep()
        async with pool.offloaded():
            log.append("another server starts")

    asyncio.run(run())
    assert log == [
        "update",
        "sleep",
        "a server starts",
        "wake",
        "update",
        "sleep",
        "another server starts",
    ]


def test_only_one_of_the_trainers_that_take_turns_has_memory() -> None:
    log: list[str] = []
    rotation = MemoryRotation()
    trainers = [Sleeper("policy", log), Sleeper("critic", log)]
    rotation.members.extend(trainers)

    async def work(trainer: Sleeper) -> None:
        async with rotation.take(trainer):
            await asyncio.sleep(0)
            log.append("work")

    async def run() -> None:
        await asyncio.gather(*map(work, trainers))

    asyncio.run(run())
    assert log == [
        "critic sleeps",
        "policy wakes",
        "work",
        "policy sleeps",
        "critic wakes",
        "work",
    ]


def test_errors_of_all_ranks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray logs a traceback of each error that nobody reads."""
    read: list[int] = []

    class Unread(Future[Any]):
        """Failed result that records that it is read."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self._rank = rank
            self.set_exception(ray.exceptions.RayError(f"disk {rank} is full"))

        def exception(self, timeout: float | None = None) -> BaseException | None:
            read.append(self._rank)
            return super().exception(timeout)

    actors = [FakeRank("10.0.0.1", []) for _ in range(2)]
    for rank, actor in enumerate(actors):
        result = Unread(rank)
        method = FakeMethod(lambda policy, result=result: result)
        monkeypatch.setattr(actor, "wait_written", method, raising=False)
    pool = make_pool(monkeypatch, actors)
    with pytest.raises(OSError, match="rank 0 of solver: disk 0 is full"):
        asyncio.run(pool.wait_written("solver"))
    assert set(read) == {0, 1}


def test_an_error_without_a_message_is_named_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(ray.exceptions.RayTaskError("wait_written", "", MemoryError(), "", 1, ""))
    actor = FakeRank("10.0.0.1", [])
    method = FakeMethod(lambda policy: failed)
    monkeypatch.setattr(actor, "wait_written", method, raising=False)
    pool = make_pool(monkeypatch, [actor])
    with pytest.raises(OSError, match="rank 0 of solver: MemoryError"):
        asyncio.run(pool.wait_written("solver"))
