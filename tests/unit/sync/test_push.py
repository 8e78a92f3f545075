"""Weights that are pushed into SGLang: buckets, sessions, and failures that all ranks hear of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.models.tensors import buckets
from mcore_mas.rollout.sync import SyncRoute, alone, digests, push
from mcore_mas.rollout.sync.push import GroupSender, TensorSender, flatten
from tests.support.three_tensors import NAMES, tensors


def test_a_bucket_is_laid_out_as_sglang_reads_it() -> None:
    given = [
        ("half", torch.tensor([1.0, 2.0, 3.0]).bfloat16()),
        ("one", torch.tensor([[0.5]])),
        ("byte", torch.ones(1).byte()),
    ]
    flat, metadata = flatten(given)
    assert flat.tolist() == [0, 0, 0, 63, 128, 63, 0, 64, 64, 64, 1]  # 0.5 | 1, 2, 3 as bfloat16 | 1; little end first
    assert [(m.name, m.start_idx, m.end_idx, m.numel) for m in metadata] == [
        ("one", 0, 4, 4),
        ("half", 4, 10, 6),
        ("byte", 10, 11, 1),
    ]
    for entry in metadata:  # what FlattenedTensorBucket.reconstruct_tensors does
        tensor = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert torch.equal(tensor, dict(given)[entry.name])
    sizes = [[name for name, _ in bucket] for bucket in buckets(given, limit=7)]
    assert sizes == [["half"], ["one", "byte"]]
    assert [len(bucket) for bucket in buckets(given, limit=1)] == [1, 1, 1]


@pytest.mark.parametrize("refused", ["/update_weights_from_tensor", "/begin_weight_update", ""])
def test_a_session_is_ended_however_a_push_ends(model: Path, refused: str) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        refuses = request.url.path == refused
        return httpx.Response(400 if refuses else 200, json={"success": not refuses, "message": "not now"})

    to = SyncRoute(transport="tensor", place="http://127.0.0.1:9", model=str(model), options={"digest": "nothing"})
    sender = TensorSender(to, rank=0, exchange=alone)
    sender._http = httpx.Client(transport=httpx.MockTransport(answer))
    if refused:
        with pytest.raises(EngineError, match=f"{refused}: status 400: not now"):
            sender.send(tensors().items(), 1, {})
    else:
        sender.send(tensors().items(), 1, {})
    whole = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/flush_cache"]
    begun, _, ended, _ = whole
    # a refused beginning may be a session that a dead trainer has left open
    assert asked == {"": whole, begun: [begun, ended] * 2, whole[1]: whole[:3]}[refused]


def test_the_next_bucket_is_gathered_while_servers_load_one(model: Path) -> None:
    drawn = {name: threading.Event() for name in NAMES}
    loading: list[int] = []
    most: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_tensor":
            number = len(most)
            loading.append(number)
            most.append(len(loading))
            # its answer comes when the tensor after the next, which closes the next one's bucket, was drawn
            assert drawn[NAMES[min(number + 2, len(NAMES) - 1)]].wait(10)
            loading.remove(number)
        return httpx.Response(200, json={"success": True})

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            drawn[name].set()
            yield name, tensor

    options = {"digest": "nothing", "bucket_bytes": 1}  # a bucket for every tensor
    to = SyncRoute(transport="tensor", place="http://127.0.0.1:9", model=str(model), options=options)
    sender = TensorSender(to, rank=0, exchange=alone)
    sender._http = httpx.Client(transport=httpx.MockTransport(answer))
    sender.send(stream(), 1, {})
    assert most == [1] * len(NAMES) and not loading  # one at a time, and all of them


def meeting(ranks: int) -> list[Callable[[Any], list[Any]]]:
    """The exchange of each of that many ranks, which are threads; one that waits for nobody fails."""
    place: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=10)

    def exchange_of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            place[rank] = value
            barrier.wait()
            found = list(place)
            barrier.wait()
            return found

        return exchange

    return [exchange_of(rank) for rank in range(ranks)]


@pytest.mark.parametrize("kind", [TensorSender, GroupSender])
def test_what_one_rank_is_refused_stops_all_at_the_same_tensor(
    model: Path, kind: type[TensorSender | GroupSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        update = request.url.path.startswith("/update_weights")
        updates.extend([request.url.path] if update else [])
        refuses = update and len(updates) == 2
        return httpx.Response(400 if refuses else 200, json={"success": not refuses, "message": "no memory"})

    class Sent:
        def wait(self) -> None:
            pass

    monkeypatch.setattr(GroupSender, "_join", lambda self: None)
    monkeypatch.setattr(push.dist, "broadcast", lambda *_, **__: Sent())
    monkeypatch.setattr(push.torch.cuda, "is_available", lambda: False)
    options = {"digest": "nothing", "bucket_bytes": 1}  # a bucket for every tensor
    to = SyncRoute(transport="t", place="http://127.0.0.1:9", model=str(model), options=options)
    drawn: dict[int, list[str]] = {0: [], 1: []}

    def stream(rank: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            drawn[rank].append(name)
            yield name, tensor

    def play(rank: int, sender: TensorSender | GroupSender) -> str:
        with pytest.raises(EngineError) as caught:
            sender.send(stream(rank), 1, {})
        sender.send(stream(rank), 2, {})  # in step with each other still
        return str(caught.value)

    senders = [kind(to, rank=rank, exchange=exchange) for rank, exchange in enumerate(meeting(2))]
    for sender in senders:
        sender._http = httpx.Client(transport=httpx.MockTransport(answer))
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(play, range(2), senders))
    assert said[0] == said[1]
    assert said[0].endswith("status 400: no memory")
    assert drawn[0] == drawn[1] == [*NAMES, *NAMES]  # the third has closed the second's bucket
    assert len(updates) == 2 + 3


def test_every_rank_sums_its_share_of_the_engines_tensors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: dict[int, list[int]] = {}  # by thread, which is a rank

    def hashed(tensor: Tensor) -> int:
        summed.setdefault(threading.get_ident(), []).append(tensor.numel())
        return tensor.numel()

    monkeypatch.setattr(digests, "_sha", hashed)
    held = {"dtype": "float32", "tp": 2, "kv_heads": 2, "gpu": False}
    to = SyncRoute(
        transport="tensor", place="http://127.0.0.1:9", model=str(model), options={"digest": "sglang", "held": held}
    )

    def play(rank: int, exchange: Callable[[Any], list[Any]]) -> dict[str, str]:
        sender = TensorSender(to, rank=rank, exchange=exchange)
        answer = httpx.MockTransport(lambda _: httpx.Response(200, json={"success": True}))
        sender._http = httpx.Client(transport=answer)
        return dict(sender.send(tensors().items(), 1, {}).checksums)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(play, range(2), meeting(2)))
    digest = digests.SGLangDigest(**held)
    for name, tensor in tensors().items():
        digest.add(name, tensor)
    assert sorted(map(len, summed.values())) == [1, 2, 3]  # of three tensors; the last are those of all at once
    assert said == [digest.finish()] * 2


def test_a_gpu_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu:
        is_cuda, device = True, torch.device("cuda", 0)

    whole = tuple(range(15))
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (tuple, whole))
    monkeypatch.setattr(push, "_name_of", lambda device: f"GPU-{device.index}")
    rebuild, arguments = push._Shared(OnAGpu()).__reduce__()  # type: ignore[arg-type]
    assert rebuild is tuple
    assert arguments == (*whole[:6], "GPU-0", *whole[7:])  # where rebuild_cuda_tensor has the device
