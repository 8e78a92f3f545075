"""A trainer spread over Ray actors does what it does in one process."""

import asyncio
import os
import re
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
import torch

from mcore_mas.megatron.batch import Microbatch
from mcore_mas.packing.pack import pack, unpack
from mcore_mas.runtime import trainer_group
from mcore_mas.runtime.errors import ClusterError
from mcore_mas.runtime.trainer_group import TrainerGroup
from rollout.models.tensors import read_tensors
from rollout.sync.transport import SyncRoute
from tests.support import precision, ranks, reference


@pytest.mark.multirank
@pytest.mark.slow
def test_two_data_parallel_actors_score_train_and_export(running_ray: None, tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path / "model")
    samples = reference.make_samples()
    batches = pack(samples, 12)

    async def play() -> tuple[
        list[torch.Tensor], dict[str, float], list[torch.Tensor], dict[str, torch.Tensor]
    ]:
        group = TrainerGroup("p", ranks.spec_of(str(tmp_path / "model"), dp=2), threads=1)
        await group.ready()
        start = await group.score(batches)
        metrics = await group.update(batches)
        frozen = await group.score(batches, reference=True)
        route = SyncRoute(
            transport="disk", target=str(tmp_path / "sent"), model=str(tmp_path / "model")
        )
        handover = await group.export(route, 1)
        weights = dict(read_tensors(Path(handover.location)))
        return start, metrics, frozen, weights

    start, metrics, frozen, weights = asyncio.run(play())
    precision.assert_scores(
        [torch.tensor(row) for row in unpack(batches, start, samples)], model, samples
    )
    assert all(map(torch.equal, frozen, start))
    assert metrics["device_s"] > 0 and "peak_flops" not in metrics  # of CPUs nobody knows it
    expected = precision.expect(model, samples, 1, ranks.LR)
    (step,) = expected.steps
    assert metrics["grad_norm"] == pytest.approx(
        step["norm"], rel=precision.bound(expected.own.norm)
    )
    assert precision.gap(weights, step["parameters"]) <= precision.bound(expected.own.parameters)


def test_ranks_get_micro_batches_whole_map_experts_on_record_and_may_write_to_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(trainer_group.ray, "put", stored.append)
    (batch,) = (
        replace(b, routing=torch.full((len(b.token_ids), 3), 7, dtype=torch.uint8))
        for b in packed_once()
    )
    trainer_group._shared([batch])
    for value in stored[0][0].values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False  # as Ray's store gives it
    (mapped,) = trainer_group._mapped(stored[0])
    for name in type(batch).__slots__:
        before, after = getattr(batch, name), getattr(mapped, name)
        if isinstance(before, torch.Tensor):
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        else:
            assert after == before, name
    assert (
        mapped.routing is not None
        and mapped.routing.data_ptr() == stored[0][0]["routing"].ctypes.data
    )
    kept = batch.advantages.clone()
    mapped.advantages.mul_(2.0).add_(1.0)  # a read-only page would end the rank
    assert torch.equal(batch.advantages, kept) and torch.equal(mapped.advantages, 2.0 * kept + 1.0)


def packed_once() -> list[Microbatch]:
    return pack(reference.make_samples()[:1], 100)


NODES = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.1"]  # of four places


class Answer:
    """What a call of a rank gives, at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def future(self) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(self._value)
        return done

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.future()).__await__()


class Seated:
    """A rank that says where it is, and is told its number."""

    def __init__(self, node: str) -> None:
        self.rank: int | None = None
        self.met: Any = None
        self.node, self.host, self.join = MagicMock(), MagicMock(), MagicMock()
        self.node.remote.side_effect = lambda: Answer(node)
        self.host.remote.side_effect = lambda address: Answer((address, 29500))
        self.join.remote.side_effect = self._joined

    def _joined(self, rank: int, place: tuple[str, int], _: object) -> Answer:
        self.rank, self.met = rank, place
        return Answer("NVIDIA H200")


class Worker:
    """A rank that notes what it does: each call takes a moment, and the next one waits for it."""

    def __init__(self, said: list[str]) -> None:
        self._line, self._said = ThreadPoolExecutor(1), said
        self.update = MagicMock()
        self.sleep, self.wake = MagicMock(), MagicMock()
        self.update.remote.side_effect = lambda *_: self._does("updates", ({}, 0.0))
        self.sleep.remote.side_effect = lambda: self._does("sleeps", 5)
        self.wake.remote.side_effect = lambda: self._does("wakes", None)

    def _does(self, what: str, value: Any) -> Any:
        def work() -> Any:
            time.sleep(0.02)
            self._said.append(what)
            return value

        called = self._line.submit(work)
        return SimpleNamespace(future=lambda: called)


@pytest.mark.slow
def test_experts_on_record_are_mapped_by_a_rank_and_not_copied(running_ray: None) -> None:
    """How much memory of a process' own 64 MiB of them take."""
    (batch,) = pack(reference.make_samples()[:1], 1 << 20)
    routing = torch.arange(64 << 20, dtype=torch.int64).to(torch.uint8).view(16, -1)

    @ray.remote
    class Rank:
        def take(self, shared: Any) -> tuple[int, int]:
            (mapped,) = trainer_group._mapped(shared)
            experts = 0 if mapped.routing is None else int(mapped.routing.sum(dtype=torch.int64))
            return experts, int(
                re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]
            )

    rank = Rank.remote()
    nothing, before = ray.get(rank.take.remote(trainer_group._shared([batch])))
    experts, after = ray.get(
        rank.take.remote(trainer_group._shared([replace(batch, routing=routing)]))
    )
    assert (nothing, experts) == (0, int(routing.sum(dtype=torch.int64)))
    assert after - before < 16 << 10  # KiB


def test_while_it_is_away_a_group_has_no_memory_and_calls_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    reference.make_model("qwen2", tmp_path / "model")
    monkeypatch.setattr(ray, "put", lambda value: value)
    group = TrainerGroup("p", ranks.spec_of(str(tmp_path / "model")), threads=1, places=[])
    group._ranks, group._joined = [Worker(said)], True

    async def play() -> None:
        first = asyncio.ensure_future(group.update([]))
        await asyncio.sleep(0)
        async with group.away():
            second = asyncio.ensure_future(group.update([]))
            waking = asyncio.ensure_future(group.wake())
            await asyncio.sleep(0.1)
            said.append("a server starts")
        await asyncio.gather(first, second, waking)
        await group.sleep()
        async with group.away():
            said.append("another one")

    asyncio.run(play())
    assert said == [
        "updates",
        "sleeps",
        "a server starts",
        "wakes",
        "updates",
        "sleeps",
        "another one",
    ]


def test_ranks_are_numbered_by_node_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_there = [Seated(node) for node in NODES]
    unborn = iter(ranks_there)
    actor = MagicMock()
    actor.options.return_value.remote.side_effect = lambda *_: next(unborn)
    monkeypatch.setattr(trainer_group, "_RANKS", actor)
    reference.make_model("qwen2", tmp_path / "model")
    spec = ranks.spec_of(str(tmp_path / "model"), dp=4)
    group = TrainerGroup("p", spec, threads=1, places=[{"num_gpus": 1}] * 4)
    asyncio.run(group.ready())
    # whatever their GPUs are called: CUDA_VISIBLE_DEVICES may have them in any order, or by UUID
    assert [rank.rank for rank in ranks_there] == [2, 0, 3, 1]
    assert {rank.met for rank in ranks_there} == {("10.0.0.1", 29500)}
    assert group._peak == 989e12
    assert group._ranks == sorted(ranks_there, key=lambda rank: rank.rank)


def test_ranks_that_do_not_start_end_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = MagicMock()
    actor.options.return_value.remote.return_value.node.remote.return_value.future = Future
    monkeypatch.setattr(trainer_group, "_RANKS", actor)
    monkeypatch.setattr(trainer_group, "_START_S", 0.05)
    reference.make_model("qwen2", tmp_path / "model")
    spec = ranks.spec_of(str(tmp_path / "model"), dp=2)
    group = TrainerGroup("solver", spec, threads=1, places=[{"num_gpus": 1}] * 2)
    with pytest.raises(ClusterError, match=r"^policy solver: Ray has not started its 2 processes"):
        asyncio.run(group.ready())


def test_nccl_is_told_before_ranks_meet_unless_somebody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference.make_model("qwen2", tmp_path / "model")
    spec, name = replace(ranks.spec_of(str(tmp_path / "model")), cumem="0"), "NCCL_CUMEM_ENABLE"
    met: list[str | None] = []
    monkeypatch.setattr(
        trainer_group, "init_process_groups", lambda *_, **__: met.append(os.environ.get(name))
    )
    monkeypatch.setattr(trainer_group.ray, "nodes", lambda: [{}])
    for its, said in ((spec, {}), (replace(spec, cumem=None), {}), (spec, {name: "1"})):
        monkeypatch.setattr(os, "environ", dict(said))
        rank = trainer_group._Rank(1, None)
        rank._load, rank._store = MagicMock(), MagicMock()
        rank.join(0, ("127.0.0.1", 1), {"p": its})
    assert met == ["0", None, "1"]
