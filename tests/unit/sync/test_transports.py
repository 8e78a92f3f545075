"""Weights arrive bit for bit over every transport, and what does not is named."""

from __future__ import annotations

import hashlib
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_mas.rollout.base import files
from mcore_mas.rollout.base.errors import EngineError
from mcore_mas.rollout.base.files import memory_path
from mcore_mas.rollout.engines.embedded.decoder import CachedDecoder
from mcore_mas.rollout.models.architecture import read_architecture
from mcore_mas.rollout.models.tensors import (
    Checksum,
    RowBlocks,
    checksum,
    compare,
    complete,
    copy,
    gpu_hash,
    read_tensors,
    shape_of,
    tensor_shapes,
    whole,
)
from mcore_mas.rollout.sync import SyncRoute, alone, make_sender, push
from mcore_mas.rollout.sync.digests import SGLangDigest
from mcore_mas.rollout.sync.disk import changes, patched
from mcore_mas.rollout.sync.push import GroupSender, TensorSender, buckets, flatten
from mcore_mas.rollout.sync.shared import SharedCheck, SharedWeights
from tests.support.tiny import make_model

NAMES = ("a.weight", "b.weight", "c.bias")


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(1000.0).view(50, 20) * scale,
        "b.weight": torch.arange(640.0).view(10, 64).bfloat16(),
        "c.bias": torch.tensor([0.0, -1.5, 2.0]),
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the tensors' names and shapes."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), str(folder / "model.safetensors"))
    return folder


def route(transport: str, model: Path, place: Path) -> SyncRoute:
    return SyncRoute(transport=transport, place=str(place), model=str(model))


def identical(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    """Equal bit patterns: -0.0 is not 0.0, and NaN is itself."""
    return got.keys() == want.keys() and all(
        got[name].dtype == want[name].dtype
        and torch.equal(got[name].contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8))
        for name in want
    )


def test_a_checksum_sees_what_hand_overs_get_wrong() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    right = checksum(weight)
    assert checksum(weight.clone()) == right
    one = weight.clone()
    one.view(torch.int32)[3, 17] ^= 1
    wrong = {
        "a bit": one,
        "two rows": weight[[1, 0, 2, 3, 4, 5]],
        "shards of rows": weight.roll(3, 0),
        "shards of columns": weight.roll(32, 1),
        "another shape": weight.view(12, 32),
        "nothing": torch.zeros_like(weight),
    }
    assert len({right, *map(checksum, wrong.values())}) == 7
    # rows may lie anywhere in memory, as they do in an engine's fused buffers
    wide = torch.zeros(6, 128)
    wide[:, 64:] = weight
    assert checksum(wide[:, 64:]) == right
    assert checksum(weight.t().contiguous().t()) == right
    odd = torch.randn(3, 5).bfloat16()  # rows of 10 bytes
    assert checksum(odd) == checksum(torch.cat([odd, odd], 1)[:, :5])
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))


def test_a_checksum_sees_what_happens_in_any_block() -> None:
    weight = torch.randn(700, 1003, generator=torch.Generator().manual_seed(0))  # 2.8 MB: three blocks and 80 bytes
    right = checksum(weight)
    flat = weight.view(-1)
    said = {right}
    for at in (0, 262_143, 262_144, 524_287, 524_288, 702_079, 702_080, 702_099):  # both ends of each
        spoilt = weight.clone()
        spoilt.view(torch.uint8).view(-1)[4 * at + 3] ^= 0x80  # the sign
        said.add(checksum(spoilt))
    for size in (128, 500, 1003, 1024, 262_144):  # blocks that trade places, small and large, near and far
        swapped = flat.clone()
        swapped[:size], swapped[size : 2 * size] = flat[size : 2 * size], flat[:size]
        said |= {checksum(swapped.view_as(weight)), checksum(flat.roll(size).view_as(weight))}
    said.add(checksum(flat.roll(1).view_as(weight)))
    columns = torch.cat([weight[:, 501:], weight[:, :501]], 1)  # shards in a wrong order
    said.add(checksum(columns))
    assert len(said) == 1 + 8 + 2 * 5 + 2


def copied(rows: RowBlocks, target: Tensor) -> tuple[str, list[int]]:
    """The checksum taken on the way, and how far it was after each part."""
    digest = Checksum(shape_of(rows))
    parts = list(copy(rows, target, digest))
    return digest.text(), parts


def test_a_copy_is_summed_on_the_way() -> None:
    weight = torch.randn(300, 1000)
    for tensor in (weight, weight.bfloat16(), weight[:7], weight[0], weight.t()):
        target = torch.zeros(tensor.shape)
        assert copied(tensor, target)[0] == checksum(tensor.float()) == checksum(target)
        assert torch.equal(target, tensor.float())
    paired = torch.zeros(10, 15, 2, 1000).transpose(1, 2)  # an engine's order of rows
    assert copied(weight, paired)[0] == checksum(weight) == checksum(paired.reshape(300, 1000))


def test_blocks_of_rows_are_copied_as_the_tensor_they_make_up() -> None:
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    memory = torch.cat([torch.full((1, 1000), 9.0), weight[:210], torch.full((5, 1000), 9.0), weight[210:]])
    blocks = [memory[1:211], memory[216:]]  # as two groups of queries lie between keys and values
    assert shape_of(blocks) == weight.shape
    assert torch.equal(whole(blocks), weight)
    assert whole([weight]) is weight
    flat, paired = torch.zeros(300, 1000), torch.zeros(10, 15, 2, 1000).transpose(1, 2)
    # 840,000 and 360,000 bytes, in parts of 524,288
    assert copied(blocks, flat) == (checksum(weight), [524_288, 840_000, 840_000, 1_200_000, 1_200_000])
    assert copied(blocks, paired) == (checksum(weight), [840_000, 1_200_000])
    assert torch.equal(flat, weight)
    assert torch.equal(paired.reshape(300, 1000), weight)


def test_a_checksum_is_xxh3_of_shape_and_bytes() -> None:
    ones = torch.ones(2, 3)
    assert checksum(ones) == xxhash.xxh3_128_hexdigest(b"[2, 3]" + 6 * b"\x00\x00\x80\x3f")


def test_shared_weights_are_checked_while_the_next_ones_are_written(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path)
    weights = dict(read_tensors(tmp_path))
    shape = read_architecture(tmp_path)
    place = memory_path()
    try:
        shared = SharedWeights(place, shape, create=True)
        check = SharedCheck(SharedWeights(place, shape), 1)  # as the engine maps it
        last, size = list(weights)[-1], sum(tensor.nbytes for tensor in weights.values())

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights.items():
                deadline = time.monotonic() + 20
                while name == last and check.read.sum() < size - tensor.nbytes and time.monotonic() < deadline:
                    time.sleep(0.001)
                yield name, tensor
            assert check.read.sum() >= size - tensor.nbytes  # all but the last were read before it was sent

        sender = make_sender(SyncRoute(transport="shared", place=str(place), model=str(tmp_path)))
        handover = sender.send(stream(), 7, {"half": 1})
        assert shared.versions.tolist() == [-1, 7]
        assert check.finish() == handover.checksums == {name: checksum(tensor) for name, tensor in weights.items()}
        for name, tensor in shared.halves[1].tensors():  # a changed bit in any of them has that one's name
            bits = shared.halves[1].placed([(name, tensor)])
            view = next(bits)[2].view(torch.int32)
            at = tuple(size - 1 for size in view.shape)
            view[at] ^= 1
            with pytest.raises(EngineError, match=f"tensor '{name}': the engine's bytes differ"):
                compare(SharedCheck(shared, 1).finish(), handover.checksums, 7)
            view[at] ^= 1
        compare(SharedCheck(shared, 1).finish(), handover.checksums, 7)

        def broken() -> Iterator[tuple[str, Tensor]]:
            yield from list(weights.items())[:3]
            raise RuntimeError("a rank died")

        with pytest.raises(RuntimeError, match="a rank died"):
            sender.send(broken(), 8, {"half": 0})
        assert shared.versions.tolist() == [-1, 7]  # no engine adopts it
    finally:
        place.unlink(missing_ok=True)


def test_a_stream_is_held_to_the_model(model: Path) -> None:
    manifest = tensor_shapes(model)
    assert manifest == {"a.weight": (50, 20), "b.weight": (10, 64), "c.bias": (3,)}
    head = ("lm_head.weight", torch.zeros(1))
    assert [name for name, _ in complete([*tensors().items(), head], manifest)] == list(NAMES)  # a tied head
    for spoilt, message in [
        ({"a.weight": tensors()["a.weight"]}, "tensor '.*' and 1 more is missing"),
        ({**tensors(), "d": torch.zeros(1)}, "tensor 'd' is unknown to this model"),
        ({**tensors(), "c.bias": torch.zeros(4)}, r"tensor 'c.bias' has shape \[4\]; expected \[3\]"),
    ]:
        with pytest.raises(EngineError, match=message):
            list(complete(spoilt.items(), manifest))
    with pytest.raises(EngineError, match="expected a Hugging Face model folder"):
        tensor_shapes(model.parent)


def test_a_difference_is_named() -> None:
    compare({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, 4)
    with pytest.raises(EngineError, match="tensor 'b' and 1 more: the engine's bytes differ from the trainer's at v"):
        compare({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "c": "y"}, 4)


def test_a_folder_holds_one_version_and_only_changes_if_asked(model: Path, tmp_path: Path) -> None:
    sender = make_sender(route("disk", model, tmp_path / "disk"))
    for version in (3, 4):
        handover = sender.send(tensors(version).items(), version, {})
        assert identical(dict(read_tensors(Path(handover.place))), tensors(version))
        assert handover.bytes == 4000 + 1280 + 12
        assert handover.checksums == {name: checksum(tensor.float()) for name, tensor in tensors(version).items()}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["v000004"]

    sender = make_sender(route("changed", model, tmp_path / "changed"))
    assert sender.send(tensors().items(), 1, {"base": 0}).bytes == 5292  # nothing was sent before
    handover = sender.send({**tensors(), "c.bias": torch.tensor([-0.0, -1.5, 2.0])}.items(), 2, {"base": 1})
    assert list(dict(read_tensors(Path(handover.place)))) == ["c.bias"]  # 0.0 became -0.0
    assert sorted(handover.checksums) == sorted(NAMES)  # all are compared
    assert sender.send(tensors().items(), 3, {"base": 1}).bytes == 5292  # the engine holds another version


def test_a_delta_is_lossless(model: Path, tmp_path: Path) -> None:
    sender = make_sender(route("delta", model, tmp_path / "delta"))
    first = sender.send(tensors().items(), 1, {"base": 0})
    assert identical(dict(patched(tensors(9.0).items(), Path(first.place), 0)), tensors())  # all of it, from anything
    new = tensors()
    new["a.weight"][2, 3] = float("nan")
    new["a.weight"][49, 19] = -0.0
    new["c.bias"] += 1  # cheaper whole
    second = sender.send(new.items(), 2, {"base": 1})
    file = load_file(Path(second.place) / "model-00000.safetensors")
    assert {name: tensor.tolist() for name, tensor in file.items() if "#index" in name} == {"a.weight#index": [43, 999]}
    assert sorted(file) == ["a.weight#index", "a.weight#value", "c.bias"]
    assert second.bytes == 2 * (4 + 4) + 12
    held = tensors()
    assert identical(dict(patched(held.items(), Path(second.place), 1)), new)
    assert identical(held, tensors())  # the engine computes from them meanwhile
    with pytest.raises(EngineError, match="changes since version 1, but the engine holds version 0"):
        list(patched(tensors().items(), Path(second.place), 0))
    new["a.weight"][0, 0] = 5.0  # where it lies: the trainer does not keep what it sent
    assert sender.send(new.items(), 3, {"base": 2}).bytes == 4 + 4
    assert sender.send(new.items(), 4, {"base": 2}).bytes == 5292  # the engine does not hold the version sent last
    assert changes("x", torch.tensor([0.0]), torch.tensor([-0.0]))["x"].tolist() == [-0.0]
    assert changes("x", new["a.weight"], new["a.weight"].clone()) == {}  # NaN and all


def test_an_interrupted_update_leaves_the_next_one_whole(model: Path, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors(2.0).items())[:1]
        raise RuntimeError("a rank died")

    for transport in ("changed", "delta"):
        sender = make_sender(route(transport, model, tmp_path / transport))
        sender.send(tensors().items(), 1, {"base": None})
        with pytest.raises(RuntimeError, match="a rank died"):
            sender.send(broken(), 2, {"base": 1})
        assert sender.send(tensors().items(), 2, {"base": 1}).bytes == 5292


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


def test_a_gpu_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu:
        is_cuda, device = True, torch.device("cuda", 0)

    whole = tuple(range(15))
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (tuple, whole))
    monkeypatch.setattr(push, "_name_of", lambda device: f"GPU-{device.index}")
    rebuild, arguments = push._Shared(OnAGpu()).__reduce__()  # type: ignore[arg-type]
    assert rebuild is tuple
    assert arguments == (*whole[:6], "GPU-0", *whole[7:])  # where rebuild_cuda_tensor has the device


def test_sglangs_own_checksums_are_of_stacked_tensors() -> None:
    digest = SGLangDigest(dtype="float32", tp=1, kv_heads=1, gpu=False)
    q, k, v = torch.ones(2, 3), torch.zeros(1, 3), torch.full((1, 3), 2.0)
    for part, tensor in (("q", q), ("k", k), ("v", v)):
        digest.add(f"model.layers.0.self_attn.{part}_proj.weight", tensor)
    digest.add("model.layers.0.mlp.gate_proj.weight", q)  # without up: not compared
    digest.add("model.embed_tokens.weight", torch.ones(70, 1))
    for number in (1, 0):
        for part, value in (("up", 3.0), ("gate", 2.0)):
            digest.add(f"e.experts.{number}.{part}_proj.weight", torch.full((31, 1), value + number))
        digest.add(f"e.experts.{number}.down_proj.weight", torch.full((1, 31), 7.0 + number))

    def padded(*values: float) -> torch.Tensor:
        return torch.cat([torch.cat([torch.full((31,), value), torch.zeros(1)]) for value in values])

    want = {
        "e.experts.w13_weight": padded(2, 3, 3, 4),  # gate and up of the first, then of the second
        "e.experts.w2_weight": padded(7, 8),
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q, k, v]),
        "model.embed_tokens.weight": torch.cat([torch.ones(70), torch.zeros(58)]),  # 128 rows
    }
    assert digest.finish() == {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in want.items()
    }


def test_sglangs_ranks_hold_parts_of_stacks() -> None:
    digest = SGLangDigest(dtype="bfloat16", tp=2, kv_heads=1, gpu=True)
    q, k, v = torch.arange(12.0).view(4, 3), torch.full((2, 3), 20.0), torch.full((2, 3), 30.0)
    for part, tensor in (("q", q), ("k", k), ("v", v)):
        digest.add(f"model.layers.0.self_attn.{part}_proj.weight", tensor)
    digest.add("model.layers.0.self_attn.o_proj.weight", q.t())
    digest.add("model.layers.0.mlp.gate_proj.weight", q)
    digest.add("model.layers.0.mlp.up_proj.weight", q + 100)
    digest.add("model.norm.weight", torch.ones(3))
    digest.add("lm_head.weight", torch.ones(65, 1))
    for layer in (0, 1):  # one is done when the next begins
        for part, tensor in (("gate", q), ("up", q + 50), ("down", q.t())):
            digest.add(f"layers.{layer}.experts.0.{part}_proj.weight", tensor + layer)
    head = torch.cat([torch.ones(65, 1), torch.zeros(63, 1)])  # 128 rows, which two share
    want: dict[str, Tensor] = {}
    for rank, half in enumerate((slice(0, 2), slice(2, 4))):
        parts = {
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q[half], k, v]),  # both have the only head of keys
            "model.layers.0.self_attn.o_proj.weight": q.t()[:, half],
            "model.layers.0.mlp.gate_up_proj.weight": torch.cat([q[half], q[half] + 100]),
            "model.norm.weight": torch.ones(3),
            "lm_head.weight": head[64 * rank : 64 * rank + 64],
            "layers.0.experts.w13_weight": torch.cat([q[half], q[half] + 50])[None],
            "layers.0.experts.w2_weight": q.t()[None, :, half],
            "layers.1.experts.w13_weight": torch.cat([q[half] + 1, q[half] + 51])[None],
            "layers.1.experts.w2_weight": q.t()[None, :, half] + 1,
        }
        want |= {f"{name} of rank {rank}": part for name, part in parts.items()}
    assert digest.finish() == {name: f"{gpu_hash(part.bfloat16()):016x}" for name, part in want.items()}


@pytest.mark.parametrize("how", ["torch", "kernel"])
def test_the_hash_of_a_gpu_is_sglangs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "kernel":
        triton = pytest.importorskip("triton", reason="needs triton (pip install triton==3.7.1)")
        if not triton.knobs.runtime.interpret:
            pytest.skip("needs TRITON_INTERPRET=1, as tests/conftest.py has it")
        from mcore_mas.rollout.models import hash_kernel
        from mcore_mas.rollout.models import tensors as module

        kernel = partial(hash_kernel.sum_of_tiles, seeds=module._SEEDS)
        monkeypatch.setattr(module, "_sum_of_tiles", kernel)
    # as the kernel of SGLang 0.5.23 computes them in Triton's interpreter; tests/sglang does that again
    assert gpu_hash(torch.ones(1)) == 0x7BB542503BA9B944
    many = (torch.arange(40_000) % 251).float()
    assert gpu_hash(many) == 0xA5A582EB081D1E92
    assert gpu_hash(many.view(200, 200).t().contiguous().t()) == 0xA5A582EB081D1E92
    assert gpu_hash(torch.arange(5, dtype=torch.uint8)) == 0x5378E41554869438  # two words, filled up
    assert gpu_hash(torch.empty(0)) == 0
    monkeypatch.setattr("mcore_mas.rollout.models.tensors._TILES", 2)  # blocks of 16,384 words
    assert gpu_hash(many) == 0xA5A582EB081D1E92


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support import reference

    folder = tmp_path_factory.mktemp("decoder")
    reference.make_model("qwen2", folder)
    return folder


def test_shared_weights_are_written_where_they_are_used(decoder_folder: Path) -> None:
    shape = read_architecture(decoder_folder)
    place = memory_path()
    try:
        engine = SharedWeights(place, shape, create=True)
        decoder = CachedDecoder(shape, 16, engine.halves)
        decoder.load(read_tensors(decoder_folder))
        assert decoder.half == 1
        weights = dict(read_tensors(decoder_folder))
        doubled = {name: tensor * 2 for name, tensor in weights.items()}
        sender = make_sender(route("shared", decoder_folder, place))
        handover = sender.send(doubled.items(), 7, {"half": 0})
        assert engine.versions.tolist() == [7, -1]
        assert engine.halves[0].checksums() == handover.checksums
        assert identical(dict(engine.halves[0].tensors()), {n: doubled[n] for n, _ in engine.halves[0].tensors()})
        assert identical(dict(decoder.weights.tensors()), {n: weights[n] for n, _ in decoder.weights.tensors()})
        with pytest.raises(EngineError, match="is missing from the update"):
            sender.send(list(weights.items())[:-1], 8, {"half": 0})
        assert engine.versions.tolist() == [-1, -1]  # half written: nobody may take it
    finally:
        place.unlink()


def test_what_dead_processes_left_in_memory_is_removed() -> None:
    left = memory_path().with_name("999999999-1")  # no such process
    left.mkdir(exist_ok=True)
    (left / "v000001").touch()
    memory_path()
    assert not left.exists()


def test_weights_in_memory_are_in_a_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(memory_path().parent.stat().st_mode) == 0o700
    monkeypatch.setattr(files, "MEMORY", tmp_path)
    mine = memory_path().parent
    assert (mine.parent, stat.S_IMODE(mine.stat().st_mode)) == (tmp_path, 0o700)
    mine.chmod(0o755)
    with pytest.raises(files.FolderError, match="not a folder that is this user's alone; have it removed"):
        memory_path()
    mine.rmdir()
    mine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((files.FolderError, FileExistsError)):
        memory_path()
