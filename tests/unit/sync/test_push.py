"""Pushing weights into SGLang: layout of buckets, update sessions, and errors that reach every rank."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.tensors import buckets
from rollout.sync.cuda_ipc import TensorSender
from rollout.sync.process_group import DistributedSender
from rollout.sync.push import flatten
from rollout.sync.transport import ServerOptions, SyncRoute
from tests.support.meeting import meeting
from tests.support.three_tensors import NAMES, tensors


def route(model: Path) -> SyncRoute:
    return SyncRoute(transport="tensor", target="http://127.0.0.1:9", model=str(model))


def test_sglang_can_reconstruct_the_tensors_of_a_bucket() -> None:
    named_tensors = [
        ("half", torch.tensor([1.0, 2.0, 3.0]).bfloat16()),
        ("one", torch.tensor([[0.5]])),
        ("byte", torch.ones(1).byte()),
    ]
    flat, metadata = flatten(named_tensors)
    # Bytes in little-endian order.
    half_in_float32 = [0, 0, 0, 63]
    one_two_three_in_bfloat16 = [128, 63, 0, 64, 64, 64]
    assert flat.tolist() == [*half_in_float32, *one_two_three_in_bfloat16, 1]
    assert [(entry.name, entry.start_idx, entry.end_idx, entry.numel) for entry in metadata] == [
        ("one", 0, 4, 4),
        ("half", 4, 10, 6),
        ("byte", 10, 11, 1),
    ]
    for entry in metadata:
        # Reconstruct the tensor as SGLang's FlattenedTensorBucket.reconstruct_tensors does.
        tensor = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert torch.equal(tensor, dict(named_tensors)[entry.name])
    names = [[name for name, _ in bucket] for bucket in buckets(named_tensors, limit=7)]
    assert names == [["half"], ["one", "byte"]]
    assert [len(bucket) for bucket in buckets(named_tensors, limit=1)] == [1, 1, 1]


@pytest.mark.parametrize("refused", ["/update_weights_from_tensor", "/begin_weight_update", ""])
def test_a_session_is_ended_however_a_push_ends(model: Path, refused: str) -> None:
    requested_paths: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requested_paths.append(request.url.path)
        refuses = request.url.path == refused
        return httpx.Response(
            400 if refuses else 200, json={"success": not refuses, "message": "not now"}
        )

    sender = TensorSender(route(model))
    sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    if refused:
        with pytest.raises(EngineError, match=f"{refused}: status 400: not now"):
            sender.send(tensors().items(), 1)
    else:
        sender.send(tensors().items(), 1)

    begin = "/begin_weight_update"
    update = "/update_weights_from_tensor"
    end = "/end_weight_update"
    expected_paths = {
        "": [begin, update, end, "/flush_cache"],
        update: [begin, update, end],
        # A trainer that died may have left a session open. It is ended, and begun once more; the
        # second refusal is final.
        begin: [begin, end, begin, end],
    }
    assert requested_paths == expected_paths[refused]


class FinishedBroadcast:
    """Handle of a broadcast that has finished."""

    def wait(self) -> None:
        pass


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the process group with the servers by one whose broadcasts finish at once."""
    monkeypatch.setattr(DistributedSender, "_form_group", lambda self: None)
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: FinishedBroadcast())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("kind", [TensorSender, DistributedSender])
def test_the_next_bucket_is_gathered_while_servers_load_one(
    model: Path, kind: type[TensorSender | DistributedSender], broadcasts: None
) -> None:
    gathered = {name: threading.Event() for name in NAMES}
    loading: list[int] = []  # numbers of the buckets that are being loaded
    loading_at_arrival: list[int] = []  # how many were being loaded when each bucket arrived

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/update_weights"):
            number = len(loading_at_arrival)
            loading.append(number)
            loading_at_arrival.append(len(loading))
            # The sender closes the next bucket when it has gathered the tensor after it. The server
            # answers only then, so a sender that waited for the answer first would time out here.
            assert gathered[NAMES[min(number + 2, len(NAMES) - 1)]].wait(60)
            loading.remove(number)
        return httpx.Response(200, json={"success": True})

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            gathered[name].set()
            yield name, tensor

    sender = kind(route(model))
    sender.bucket_bytes = 1  # a bucket for every tensor
    sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    sender.send(stream(), 1)
    assert loading_at_arrival == [1] * len(NAMES)  # one bucket is loaded at a time
    assert not loading


@pytest.mark.parametrize("kind", [TensorSender, DistributedSender])
def test_a_refused_bucket_stops_every_rank_at_the_same_tensor(
    model: Path, kind: type[TensorSender | DistributedSender], broadcasts: None
) -> None:
    updates: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        is_update = request.url.path.startswith("/update_weights")
        if is_update:
            updates.append(request.url.path)
        refuses = is_update and len(updates) == 2
        return httpx.Response(
            400 if refuses else 200, json={"success": not refuses, "message": "no memory"}
        )

    gathered: dict[int, list[str]] = {0: [], 1: []}

    def stream(rank: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            gathered[rank].append(name)
            yield name, tensor

    def send_twice(rank: int, sender: TensorSender | DistributedSender) -> str:
        """Return the error of the first update; the second one must succeed on both ranks."""
        with pytest.raises(EngineError) as caught:
            sender.send(stream(rank), 1)
        sender.send(stream(rank), 2)
        return str(caught.value)

    senders = [
        kind(route(model), rank=rank, all_gather=all_gather)
        for rank, all_gather in enumerate(meeting(2))
    ]
    for sender in senders:
        sender.bucket_bytes = 1  # a bucket for every tensor
        sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(send_twice, range(2), senders))
    assert errors[0] == errors[1]
    assert errors[0].endswith("status 400: no memory")
    assert gathered[0] == gathered[1] == [*NAMES, *NAMES]
    # The first update ends with its second bucket, which was closed by the third tensor.
    assert len(updates) == 2 + len(NAMES)


@pytest.mark.parametrize(
    ("status", "message", "is_reused"),
    [
        (200, "Succeeded to destroy custom process group.", True),
        (400, "The group to be destroyed does not exist.", True),
        (400, "Failed to destroy custom process group: NCCL.", False),
    ],
)
def test_the_process_group_of_an_earlier_trainer_is_destroyed_before_a_new_one_is_formed(
    model: Path, status: int, message: str, is_reused: bool
) -> None:
    bodies: dict[str, dict[str, object]] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        bodies[request.url.path] = json.loads(request.content)
        if request.url.path == "/destroy_weights_update_group":
            return httpx.Response(status, json={"success": status == 200, "message": message})
        return httpx.Response(400, json={"success": False, "message": "no group today"})

    sender = DistributedSender(route(model))
    sender.http = httpx.Client(transport=httpx.MockTransport(answer))
    for _ in range(2):
        with pytest.raises(EngineError, match="no group today"):
            sender.begin()
        destroyed = str(bodies["/destroy_weights_update_group"]["group_name"])
        new_name = str(bodies["/init_weights_update_group"]["group_name"])
        assert new_name.startswith(destroyed)
        assert (new_name == destroyed) is is_reused


class GroupServers:
    """Stand-in for SGLang servers that remember their process groups, and never join them.

    Attributes:
        groups: names of the groups of each server, by its port.
        refusing: port of a server that refuses the next bucket.
    """

    def __init__(self, *ports: int) -> None:
        self.groups: dict[int, set[str]] = {port: set() for port in ports}
        self.refusing: int | None = None

    def sender(self, model: Path) -> DistributedSender:
        """Return a sender to the servers, whose groups have one rank: the sender's."""
        urls = " ".join(f"http://127.0.0.1:{port}" for port in self.groups)
        target = replace(route(model), target=urls, servers=ServerOptions(tp=0))
        sender = DistributedSender(target)
        sender.http = httpx.Client(transport=httpx.MockTransport(self._answer))
        return sender

    def _answer(self, request: httpx.Request) -> httpx.Response:
        port = int(request.url.port or 0)
        body = json.loads(request.content or "null")
        message = ""
        if request.url.path == "/init_weights_update_group":
            self.groups[port].add(body["group_name"])
        elif request.url.path == "/destroy_weights_update_group":
            if body["group_name"] not in self.groups[port]:
                message = "The group to be destroyed does not exist."
            self.groups[port].discard(body["group_name"])
        elif request.url.path.startswith("/update_weights"):
            assert {body["group_name"]} == self.groups[port]
            if port == self.refusing:
                self.refusing = None
                message = "no memory"
        status = 400 if message else 200
        return httpx.Response(status, json={"success": not message, "message": message})


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the groups use gloo."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_servers_leave_a_group_that_an_update_has_abandoned(model: Path, without_gpu: None) -> None:
    servers = GroupServers(81, 82)
    sender = servers.sender(model)
    sender.send(tensors().items(), 1)
    (first,) = servers.groups[81]
    assert servers.groups[82] == {first}

    servers.refusing = 82
    with pytest.raises(EngineError, match="status 400: no memory"):
        sender.send(tensors().items(), 2)
    assert servers.groups[81] == {first}  # a server may still wait for the broadcast

    servers.groups[82].clear()  # this server was started again
    sender.send(tensors().items(), 2)
    (second,) = servers.groups[81]
    assert second != first
    assert servers.groups[82] == {second}

    sender.close()
    assert servers.groups == {81: set(), 82: set()}


def test_senders_of_one_process_form_groups_of_different_names(
    model: Path, without_gpu: None
) -> None:
    """As for two policies of one trainer process, or after a server was started again."""
    policies = GroupServers(81), GroupServers(82)
    senders = [servers.sender(model) for servers in policies]
    for sender in senders:
        sender.send(tensors().items(), 1)
    first, second = (servers.groups for servers in policies)
    assert len(first[81] | second[82]) == 2
    for sender in senders:
        sender.close()
