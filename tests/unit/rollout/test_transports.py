"""Weights arrive bit for bit over every transport, and what does not is named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.engines.architecture import Architecture
from rollout.engines.decoder import Decoder, read_folder
from rollout.engines.protocol import EngineError
from rollout.transports import make_sender
from rollout.transports.bucket import buckets, flatten
from rollout.transports.checksum import checksum
from rollout.transports.delta import changes, patched
from rollout.transports.digest import SGLang
from rollout.transports.handover import Route
from rollout.transports.manifest import compare, complete, read_manifest
from rollout.transports.memory import MEMORY, fresh_place
from rollout.transports.shared import SharedWeights

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


def route(transport: str, model: Path, place: Path) -> Route:
    return Route(transport=transport, place=str(place), model=str(model))


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


def test_a_stream_is_held_to_the_model(model: Path) -> None:
    manifest = read_manifest(model)
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
        read_manifest(model.parent)


def test_a_difference_is_named() -> None:
    compare({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, 4)
    with pytest.raises(EngineError, match="tensor 'b' and 1 more: the engine's bytes differ from the trainer's at v"):
        compare({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "c": "y"}, 4)


def test_a_folder_holds_one_version_and_only_changes_if_asked(model: Path, tmp_path: Path) -> None:
    sender = make_sender(route("disk", model, tmp_path / "disk"))
    for version in (3, 4):
        handover = sender.send(tensors(version).items(), version, {})
        assert identical(dict(read_folder(Path(handover.place))), tensors(version))
        assert handover.bytes == 4000 + 1280 + 12
        assert handover.checksums == {name: checksum(tensor) for name, tensor in tensors(version).items()}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["v000004"]

    sender = make_sender(route("changed", model, tmp_path / "changed"))
    assert sender.send(tensors().items(), 1, {"base": 0}).bytes == 5292  # nothing was sent before
    handover = sender.send({**tensors(), "c.bias": torch.tensor([-0.0, -1.5, 2.0])}.items(), 2, {"base": 1})
    assert list(dict(read_folder(Path(handover.place)))) == ["c.bias"]  # 0.0 became -0.0
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
    file = load_file(second.place)
    assert {name: tensor.tolist() for name, tensor in file.items() if "#index" in name} == {"a.weight#index": [43, 999]}
    assert sorted(file) == ["a.weight#index", "a.weight#value", "c.bias"]
    assert second.bytes == 2 * (4 + 4) + 12
    assert identical(dict(patched(tensors().items(), Path(second.place), 1)), new)
    with pytest.raises(EngineError, match="changes since version 1, but the engine holds version 0"):
        list(patched(tensors().items(), Path(second.place), 0))
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


def test_sglangs_own_checksums_are_of_stacked_tensors() -> None:
    digest = SGLang(torch.float32)
    q, k, v = torch.ones(2, 3), torch.zeros(1, 3), torch.full((1, 3), 2.0)
    for part, tensor in (("q", q), ("k", k), ("v", v)):
        digest.add(f"model.layers.0.self_attn.{part}_proj.weight", tensor)
    digest.add("model.layers.0.mlp.gate_proj.weight", q)  # without up: not compared
    digest.add("model.embed_tokens.weight", torch.ones(70, 1))
    want = {
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q, k, v]),
        "model.embed_tokens.weight": torch.cat([torch.ones(70), torch.zeros(58)]),  # 128 rows
    }
    assert digest.finish() == {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in want.items()
    }


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support import reference

    folder = tmp_path_factory.mktemp("decoder")
    reference.make_model("qwen2", folder)
    return folder


def test_shared_weights_are_written_where_they_are_used(decoder_folder: Path) -> None:
    shape = Architecture.read(decoder_folder)
    place = fresh_place()
    try:
        engine = SharedWeights(place, shape, create=True)
        decoder = Decoder(shape, 16, engine.halves)
        decoder.load(read_folder(decoder_folder))
        assert decoder.half == 1
        weights = dict(read_folder(decoder_folder))
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
    left = MEMORY / "mcore_mas-weights-999999999-1"  # no such process
    left.mkdir(exist_ok=True)
    (left / "v000001").touch()
    fresh_place()
    assert not left.exists()
