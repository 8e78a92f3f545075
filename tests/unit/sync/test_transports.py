"""Weights arrive bit for bit over every transport; a tensor that does not is named."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.base.ownership import FolderError
from rollout.engines import EngineConfig
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import read_architecture
from rollout.models.named_buffers import NamedBuffers
from rollout.models.tensors import (
    check_stream,
    checksum,
    compare_checksums,
    read_tensors,
    tensor_shapes,
)
from rollout.sync import disk, memory
from rollout.sync.memory import memory_path
from rollout.sync.shared import SharedWeights
from rollout.sync.transport import SyncRoute, make_sender
from tests.support.three_tensors import NAMES, tensors
from tests.support.tiny import make_model


def route(transport: str, model: Path, target: Path) -> SyncRoute:
    return SyncRoute(transport=transport, target=str(target), model=str(model))


def identical(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return True if the bits are equal: -0.0 differs from 0.0, and NaN equals itself."""
    if tensors.keys() != expected.keys():
        return False
    for name, tensor in tensors.items():
        bits = tensor.contiguous().view(torch.uint8)
        expected_bits = expected[name].contiguous().view(torch.uint8)
        if tensor.dtype != expected[name].dtype or not torch.equal(bits, expected_bits):
            return False
    return True


def test_shared_weights_are_compared_bit_by_bit(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path)
    weights = dict(read_tensors(tmp_path))
    file = memory_path()
    try:
        shared = SharedWeights(file, read_architecture(tmp_path), create=True)
        sender = make_sender(route("shared", tmp_path, file))
        update = sender.send(weights.items(), 7, half=1)
        assert shared.versions.tolist() == [-1, 7]
        assert update.checksums == {name: checksum(tensor) for name, tensor in weights.items()}
        half = shared.halves[1]
        assert checksums_of(half) == update.checksums

        for name, tensor in half.tensors():  # a flipped bit of any tensor is found and named
            _, _, view = next(half.with_destinations([(name, tensor)]))
            bits = view.view(torch.int32)
            last = tuple(size - 1 for size in bits.shape)
            bits[last] ^= 1
            with pytest.raises(EngineError, match=f"tensor '{name}': the engine's bytes differ"):
                compare_checksums(checksums_of(half), update.checksums, 7)
            bits[last] ^= 1
        compare_checksums(checksums_of(half), update.checksums, 7)

        def broken() -> Iterator[tuple[str, Tensor]]:
            yield from list(weights.items())[:3]
            raise RuntimeError("a rank died")

        with pytest.raises(RuntimeError, match="a rank died"):
            sender.send(broken(), 8, half=0)
        assert shared.versions.tolist() == [-1, 7]  # no engine adopts it
    finally:
        file.unlink(missing_ok=True)


def checksums_of(half: NamedBuffers) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in half.tensors()}


def test_a_stream_must_have_the_tensors_of_the_model(model: Path) -> None:
    manifest = tensor_shapes(model)
    assert manifest == {"a.weight": (50, 20), "b.weight": (10, 64), "c.bias": (3,)}
    head = ("lm_head.weight", torch.zeros(1))
    # A tied head may be in the stream, and is left out.
    names = [name for name, _ in check_stream([*tensors().items(), head], manifest)]
    assert names == list(NAMES)
    for spoilt, message in [
        ({"a.weight": tensors()["a.weight"]}, "tensor '.*' and 1 more is missing"),
        ({**tensors(), "d": torch.zeros(1)}, "tensor 'd' is unknown to this model"),
        (
            {**tensors(), "c.bias": torch.zeros(4)},
            r"tensor 'c.bias' has shape \[4\]; expected \[3\]",
        ),
    ]:
        with pytest.raises(EngineError, match=message):
            list(check_stream(spoilt.items(), manifest))
    with pytest.raises(EngineError, match="expected a Hugging Face model folder"):
        tensor_shapes(model.parent)


def test_a_difference_is_named() -> None:
    compare_checksums({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, 4)
    with pytest.raises(
        EngineError,
        match="tensor 'b' and 1 more: the engine's bytes differ from the trainer's at v",
    ):
        compare_checksums({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "c": "y"}, 4)


def test_a_folder_holds_the_newest_version(model: Path, tmp_path: Path) -> None:
    sender = make_sender(replace(route("disk", model, tmp_path / "disk"), checksums=True))
    for version in (3, 4):
        update = sender.send(tensors(version).items(), version)
        assert identical(dict(read_tensors(Path(update.location))), tensors(version))
        assert update.bytes == 4000 + 1280 + 12
        assert update.checksums == {
            name: checksum(tensor.float()) for name, tensor in tensors(version).items()
        }
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["v000004"]
    silent = make_sender(route("disk", model, tmp_path / "disk"))
    assert silent.send(tensors().items(), 5).checksums == {}


def test_a_large_version_is_split_into_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_FILE_BYTES", 5000)
    update = make_sender(route("disk", model, tmp_path / "disk")).send(tensors().items(), 1)
    files = sorted(path.name for path in Path(update.location).iterdir())
    assert files == ["model-00000.safetensors", "model-00001.safetensors"]
    assert identical(dict(read_tensors(Path(update.location))), tensors())


def test_an_interrupted_update_leaves_the_version_before(model: Path, tmp_path: Path) -> None:
    sender = make_sender(route("disk", model, tmp_path / "disk"))
    first = sender.send(tensors().items(), 1)
    with pytest.raises(EngineError, match=r"the weight update: tensor .* is missing"):
        sender.send(list(tensors(2.0).items())[:1], 2)
    assert identical(dict(read_tensors(Path(first.location))), tensors())
    second = sender.send(tensors(2.0).items(), 2)
    assert identical(dict(read_tensors(Path(second.location))), tensors(2.0))


@pytest.mark.parametrize("removed", ["delta", "changed"])
def test_a_removed_transport_says_what_replaces_it(removed: str) -> None:
    with pytest.raises(ValidationError, match=f"transport '{removed}' was removed; use .*disk"):
        EngineConfig.model_validate({"transport": removed})


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support import reference

    folder = tmp_path_factory.mktemp("decoder")
    reference.make_model("qwen2", folder)
    return folder


def test_shared_weights_are_written_where_they_are_used(decoder_folder: Path) -> None:
    shape = read_architecture(decoder_folder)
    memory_file = memory_path()
    try:
        engine = SharedWeights(memory_file, shape, create=True)
        decoder = CachedDecoder(shape, 16, engine.halves)
        decoder.load(read_tensors(decoder_folder))
        assert decoder.half == 1
        weights = dict(read_tensors(decoder_folder))
        doubled = {name: tensor * 2 for name, tensor in weights.items()}
        sender = make_sender(route("shared", decoder_folder, memory_file))
        update = sender.send(doubled.items(), 7, half=0)
        assert engine.versions.tolist() == [7, -1]
        assert checksums_of(engine.halves[0]) == update.checksums
        written = dict(engine.halves[0].tensors())
        assert identical(written, {name: doubled[name] for name in written})
        active = dict(decoder.weights.tensors())
        assert identical(active, {name: weights[name] for name in active})
        with pytest.raises(EngineError, match=r"the weight update: tensor .* is missing"):
            sender.send(list(weights.items())[:-1], 8, half=0)
        assert engine.versions.tolist() == [-1, -1]  # half written: nobody may take it
    finally:
        memory_file.unlink()


def test_memory_files_of_dead_processes_are_removed() -> None:
    left = memory_path().with_name("999999999-1")  # no such process
    left.mkdir(exist_ok=True)
    (left / "v000001").touch()
    memory_path()
    assert not left.exists()


def test_weights_in_memory_are_in_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stat.S_IMODE(memory_path().parent.stat().st_mode) == 0o700
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    mine = memory_path().parent
    assert (mine.parent, stat.S_IMODE(mine.stat().st_mode)) == (tmp_path, 0o700)
    mine.chmod(0o755)
    with pytest.raises(FolderError, match=f"must be a folder of user {os.getuid()} with mode 0700"):
        memory_path()
    mine.rmdir()
    mine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((FolderError, FileExistsError)):
        memory_path()
