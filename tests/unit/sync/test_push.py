"""Weights that are pushed into SGLang: buckets, sessions, and failures that all ranks hear of."""

from __future__ import annotations

import base64
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.tensors import buckets
from rollout.sync import SyncRoute, WeightUpdate, alone, digests, push
from rollout.sync.push import GroupSender, TensorSender, flatten
from rollout.sync.sglang_layout import SGLangLayout
from tests.support.meeting import meeting
from tests.support.three_tensors import NAMES, tensors


def test_a_bucket_is_laid_out_as_sglang_reads_it() -> None:
    given = [
        ("half", torch.tensor([1.0, 2.0, 3.0]).bfloat16()),
        ("one", torch.tensor([[0.5]])),
        ("byte", torch.ones(1).byte()),
    ]
    flat, metadata = flatten(given)
    assert flat.tolist() == [
        0,
        0,
        0,
        63,
        128,
        63,
        0,
        64,
        64,
        64,
        1,
    ]  # 0.5 | 1, 2, 3 as bfloat16 | 1; little end first
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
        return httpx.Response(
            400 if refuses else 200, json={"success": not refuses, "message": "not now"}
        )

    to = SyncRoute(
        transport="tensor", place="http://127.0.0.1:9", model=str(model), options={"held": {}}
    )
    sender = TensorSender(to, rank=0, exchange=alone)
    sender._http = httpx.Client(transport=httpx.MockTransport(answer))
    if refused:
        with pytest.raises(EngineError, match=f"{refused}: status 400: not now"):
            sender.send(tensors().items(), 1, {})
    else:
        sender.send(tensors().items(), 1, {})
    whole = [
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/flush_cache",
    ]
    begun, _, ended, _ = whole
    # a refused beginning may be a session that a dead trainer has left open
    assert asked == {"": whole, begun: [begun, ended] * 2, whole[1]: whole[:3]}[refused]


def test_a_rank_that_no_server_is_beside_shares_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks, two servers of one GPU: torch keeps memory that was shared until somebody has opened it."""
    sent: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/update_weights"):
            sent.append(json.loads(request.content)["serialized_named_tensors"])
        return httpx.Response(200, json={"success": True})

    to = SyncRoute(transport="t", place="http://a http://b", model=str(model), options={"held": {}})
    shared = itertools.count(1)

    def play(rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        sender = TensorSender(to, rank=rank, exchange=exchange)
        sender._http = httpx.Client(transport=httpx.MockTransport(answer))
        sender.send(tensors().items(), 1, {})

    monkeypatch.setattr(push, "serialize", lambda _: str(next(shared)))
    with ThreadPoolExecutor() as pool:
        list(pool.map(play, range(3), meeting(3)))
    assert sorted(map(tuple, sent)) == [("1",), ("2",)]
    assert next(shared) == 3


class Sent:
    """A broadcast that has ended."""

    def wait(self) -> None:
        pass


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of servers that are not there, which gets all that is sent to it."""
    monkeypatch.setattr(GroupSender, "_join", lambda self: None)
    monkeypatch.setattr(push.dist, "broadcast", lambda *_, **__: Sent())
    monkeypatch.setattr(push.torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("kind", [TensorSender, GroupSender])
def test_the_next_bucket_is_gathered_while_servers_load_one(
    model: Path, kind: type[TensorSender | GroupSender], broadcasts: None
) -> None:
    drawn = {name: threading.Event() for name in NAMES}
    loading: list[int] = []
    most: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/update_weights"):
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

    options = {"held": {}, "bucket_bytes": 1}  # a bucket for every tensor
    to = SyncRoute(transport="t", place="http://127.0.0.1:9", model=str(model), options=options)
    sender = kind(to, rank=0, exchange=alone)
    sender._http = httpx.Client(transport=httpx.MockTransport(answer))
    sender.send(stream(), 1, {})
    assert most == [1] * len(NAMES) and not loading  # one at a time, and all of them


@pytest.mark.parametrize("kind", [TensorSender, GroupSender])
def test_what_one_rank_is_refused_stops_all_at_the_same_tensor(
    model: Path, kind: type[TensorSender | GroupSender], broadcasts: None
) -> None:
    updates: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        update = request.url.path.startswith("/update_weights")
        updates.extend([request.url.path] if update else [])
        refuses = update and len(updates) == 2
        return httpx.Response(
            400 if refuses else 200, json={"success": not refuses, "message": "no memory"}
        )

    options = {"held": {}, "bucket_bytes": 1}  # a bucket for every tensor
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


def test_every_rank_sums_its_share_of_the_engines_tensors(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: dict[int, list[int]] = {}  # by thread, which is a rank

    def hashed(tensor: Tensor, *, gpu: bool) -> str:
        summed.setdefault(threading.get_ident(), []).append(tensor.numel())
        return f"{tensor.numel()}"

    monkeypatch.setattr(digests, "sum_of", hashed)
    held = {"dtype": "float32", "tp": 2, "kv_heads": 2, "gpu": False, "vocab": 64}
    to = SyncRoute(
        transport="tensor", place="http://127.0.0.1:9", model=str(model), options={"held": held}
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
    assert sorted(map(len, summed.values())) == [
        1,
        2,
        3,
    ]  # of three tensors; the last are those of all at once
    assert said == [digest.finish()] * 2


DECODER = {  # two heads of keys and values for four of queries, of one row each
    "model.embed_tokens.weight": torch.arange(128.0)[:, None] + 1000,
    "model.layers.0.input_layernorm.weight": torch.tensor([7.0, 8.0]),
    "model.layers.0.self_attn.q_proj.weight": torch.arange(8.0).view(4, 2),
    "model.layers.0.self_attn.k_proj.weight": torch.arange(4.0).view(2, 2) + 20,
    "model.layers.0.self_attn.v_proj.weight": torch.arange(4.0).view(2, 2) + 30,
    "model.layers.0.self_attn.o_proj.weight": torch.arange(8.0).view(2, 4) + 40,
    "model.layers.0.mlp.gate_proj.weight": torch.arange(8.0).view(4, 2) + 50,
    "model.layers.0.mlp.up_proj.weight": torch.arange(8.0).view(4, 2) + 60,
    "model.layers.0.mlp.down_proj.weight": torch.arange(8.0).view(2, 4) + 70,
}
HELD = {"dtype": "float32", "tp": 2, "kv_heads": 2, "gpu": False, "vocab": 128}
DIRECT = (
    "model.embed_tokens.weight",
    "model.layers.*.input_layernorm.weight",
    "model.layers.*.self_attn.qkv_proj.weight",
    "model.layers.*.self_attn.o_proj.weight",
    "model.layers.*.mlp.gate_up_proj.weight",
)  # down_proj is in a form of the server's own


class Server:
    """Takes buckets for its two ranks as SGLang does, the pickles of this very process."""

    def __init__(self) -> None:
        self.direct: list[dict[str, Tensor]] = [{}, {}]
        self.full: list[dict[str, Tensor]] = [{}, {}]
        self.requests: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_tensor":
            body = json.loads(request.content)
            self.requests.append(body["load_format"])
            for rank, payload in enumerate(body["serialized_named_tensors"]):
                taken = ForkingPickler.loads(base64.b64decode(payload))
                if body["load_format"] == "direct":
                    self.direct[rank] |= {name: tensor.clone() for name, tensor in taken}
                else:
                    flat = taken["flattened_tensor"]
                    self.full[rank] |= {
                        x.name: flat[x.start_idx : x.end_idx].view(x.dtype).reshape(x.shape).clone()
                        for x in taken["metadata"]
                    }
        return httpx.Response(200, json={"success": True})


def pushed(
    model: Path, streams: Sequence[Iterable[tuple[str, Tensor]]], **options: Any
) -> tuple[Server, list[WeightUpdate]]:
    """What a server at tp 2 is given, one stream a rank."""
    options = {"held": HELD, "tp": 2, "direct": DIRECT, **options}
    to = SyncRoute(
        transport="tensor", place="http://127.0.0.1:9", model=str(model), options=options
    )
    server = Server()

    def play(rank: int, exchange: Callable[[Any], list[Any]]) -> WeightUpdate:
        sender = TensorSender(to, rank=rank, exchange=exchange)
        sender._http = httpx.Client(transport=httpx.MockTransport(server))
        return sender.send(streams[rank], 1, {})

    with ThreadPoolExecutor(2) as pool:
        return server, list(pool.map(play, range(2), meeting(2)))


@pytest.fixture
def decoder(tmp_path: Path, shared_by_name: None) -> Path:
    save_file(DECODER, str(tmp_path / "model.safetensors"))
    return tmp_path


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("cut", [False, True])
def test_each_rank_of_a_server_is_given_its_shard_where_it_holds_it_so(
    decoder: Path, cut: bool, bucket_bytes: int
) -> None:
    def stream(rank: int) -> Iterator[tuple[str, Tensor]]:
        layout = SGLangLayout(**HELD, ranks=[rank])
        for name, tensor in DECODER.items():
            yield (
                name,
                layout.shares(name, tensor)[0] if cut and "down_proj" not in name else tensor,
            )

    server, updates = pushed(decoder, [stream(0), stream(1)], bucket_bytes=bucket_bytes)
    q, k, v = (DECODER[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    gate, up = (DECODER[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    for rank in (0, 1):
        heads, one, rows = (slice(size * rank, size * rank + size) for size in (2, 1, 64))
        want = {
            "model.embed_tokens.weight": DECODER["model.embed_tokens.weight"][rows],
            "model.layers.0.input_layernorm.weight": torch.tensor([7.0, 8.0]),
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q[heads], k[one], v[one]]),
            "model.layers.0.self_attn.o_proj.weight": DECODER[
                "model.layers.0.self_attn.o_proj.weight"
            ][:, heads],
            "model.layers.0.mlp.gate_up_proj.weight": torch.cat([gate[heads], up[heads]]),
        }
        assert server.direct[rank].keys() == want.keys()
        assert all(torch.equal(server.direct[rank][name], tensor) for name, tensor in want.items())
        (down,) = server.full[rank].items()
        assert down[0] == "model.layers.0.mlp.down_proj.weight" and torch.equal(
            down[1], DECODER[down[0]]
        )
    forms = {1: ["direct"] * 5 + ["flattened_bucket"], 1 << 20: ["direct", "flattened_bucket"]}
    assert sorted(server.requests) == forms[bucket_bytes]
    digest = digests.SGLangDigest(**HELD)
    for name, tensor in DECODER.items():
        digest.add(name, tensor)
    right = {name: said for name, said in digest.finish().items() if "down_proj" not in name}
    assert [update.checksums for update in updates] == [right, right]
    # 64 rows, 2 numbers, 4 rows of 2, 2 of 2, 4 of 2 on each rank; a full matrix of 2 rows of 4
    assert [update.bytes for update in updates] == [4 * (2 * (64 + 2 + 8 + 4 + 8) + 8)] * 2


def test_a_share_of_another_shape_is_refused(decoder: Path) -> None:
    wrong = [(name, tensor[:3] if "q_proj" in name else tensor) for name, tensor in DECODER.items()]
    with pytest.raises(EngineError, match=r"q_proj.weight' has shape \[3, 2\]; expected \[4, 2\]"):
        pushed(decoder, [wrong, wrong])


def test_shares_come_alone_where_both_sides_are_cut_alike(decoder: Path) -> None:
    def shares(ranks: int, **changes: Any) -> frozenset[str]:
        options = {"held": {**HELD, **changes}, "tp": 2, "direct": changes.pop("direct", DIRECT)}
        to = SyncRoute(
            transport="tensor", place="http://127.0.0.1:9", model=str(decoder), options=options
        )
        return TensorSender(to).shares(ranks)

    every = frozenset(DECODER) - {"model.layers.0.mlp.down_proj.weight"}
    assert shares(2) == every
    assert shares(2, vocab=127) == every  # 64 and 63 rows on both sides
    assert shares(2, vocab=126) == every - {
        "model.embed_tokens.weight"
    }  # 63 each, and SGLang has 64 and 62
    assert (
        shares(1) == shares(4) == shares(2, kv_heads=1) == frozenset()
    )  # ranks of SGLang would have the same head


def test_a_gpu_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu:
        is_cuda, device = True, torch.device("cuda", 0)

    whole = tuple(range(15))
    monkeypatch.setattr(
        "torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (tuple, whole)
    )
    monkeypatch.setattr(push, "_name_of", lambda device: f"GPU-{device.index}")
    rebuild, arguments = push._Shared(OnAGpu()).__reduce__()  # type: ignore[arg-type]
    assert rebuild is tuple
    assert arguments == (
        *whole[:6],
        "GPU-0",
        *whole[7:],
    )  # where rebuild_cuda_tensor has the device
