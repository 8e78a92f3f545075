"""Weights arrive bit for bit over every transport, and what does not is named."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollout import sync
from rollout.base.errors import EngineError
from rollout.base.ownership import FolderError
from rollout.engines.embedded.decoder import CachedDecoder
from rollout.models.architecture import read_architecture
from rollout.models.tensors import (
    checksum,
    compare,
    complete,
    read_tensors,
    tensor_shapes,
)
from rollout.sync import SyncRoute, make_sender, memory_path
from rollout.sync.disk import changes, patched
from rollout.sync.shared import SharedCheck, SharedWeights
from tests.support.three_tensors import NAMES, tensors
from tests.support.tiny import make_model


def route(transport: str, model: Path, place: Path) -> SyncRoute:
    return SyncRoute(transport=transport, place=str(place), model=str(model))


def identical(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    """Equal bit patterns: -0.0 is not 0.0, and NaN is itself."""
    return got.keys() == want.keys() and all(
        got[name].dtype == want[name].dtype
        and torch.equal(
            got[name].contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8)
        )
        for name in want
    )


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
                while (
                    name == last
                    and check.read.sum() < size - tensor.nbytes
                    and time.monotonic() < deadline
                ):
                    time.sleep(0.001)
                yield name, tensor
            assert (
                check.read.sum() >= size - tensor.nbytes
            )  # all but the last were read before it was sent

        sender = make_sender(SyncRoute(transport="shared", place=str(place), model=str(tmp_path)))
        handover = sender.send(stream(), 7, {"half": 1})
        assert shared.versions.tolist() == [-1, 7]
        assert (
            check.finish()
            == handover.checksums
            == {name: checksum(tensor) for name, tensor in weights.items()}
        )
        for name, tensor in shared.halves[
            1
        ].tensors():  # a changed bit in any of them has that one's name
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
    assert [name for name, _ in complete([*tensors().items(), head], manifest)] == list(
        NAMES
    )  # a tied head
    for spoilt, message in [
        ({"a.weight": tensors()["a.weight"]}, "tensor '.*' and 1 more is missing"),
        ({**tensors(), "d": torch.zeros(1)}, "tensor 'd' is unknown to this model"),
        (
            {**tensors(), "c.bias": torch.zeros(4)},
            r"tensor 'c.bias' has shape \[4\]; expected \[3\]",
        ),
    ]:
        with pytest.raises(EngineError, match=message):
            list(complete(spoilt.items(), manifest))
    with pytest.raises(EngineError, match="expected a Hugging Face model folder"):
        tensor_shapes(model.parent)


def test_a_difference_is_named() -> None:
    compare({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, 4)
    with pytest.raises(
        EngineError,
        match="tensor 'b' and 1 more: the engine's bytes differ from the trainer's at v",
    ):
        compare({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "c": "y"}, 4)


def test_a_folder_holds_one_version_and_only_changes_if_asked(model: Path, tmp_path: Path) -> None:
    sender = make_sender(route("disk", model, tmp_path / "disk"))
    for version in (3, 4):
        handover = sender.send(tensors(version).items(), version, {})
        assert identical(dict(read_tensors(Path(handover.place))), tensors(version))
        assert handover.bytes == 4000 + 1280 + 12
        assert handover.checksums == {
            name: checksum(tensor.float()) for name, tensor in tensors(version).items()
        }
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["v000004"]

    sender = make_sender(route("changed", model, tmp_path / "changed"))
    assert sender.send(tensors().items(), 1, {"base": 0}).bytes == 5292  # nothing was sent before
    handover = sender.send(
        {**tensors(), "c.bias": torch.tensor([-0.0, -1.5, 2.0])}.items(), 2, {"base": 1}
    )
    assert list(dict(read_tensors(Path(handover.place)))) == ["c.bias"]  # 0.0 became -0.0
    assert sorted(handover.checksums) == sorted(NAMES)  # all are compared
    assert (
        sender.send(tensors().items(), 3, {"base": 1}).bytes == 5292
    )  # the engine holds another version


def test_a_delta_is_lossless(model: Path, tmp_path: Path) -> None:
    sender = make_sender(route("delta", model, tmp_path / "delta"))
    first = sender.send(tensors().items(), 1, {"base": 0})
    assert identical(
        dict(patched(tensors(9.0).items(), Path(first.place), 0)), tensors()
    )  # all of it, from anything
    new = tensors()
    new["a.weight"][2, 3] = float("nan")
    new["a.weight"][49, 19] = -0.0
    new["c.bias"] += 1  # cheaper whole
    second = sender.send(new.items(), 2, {"base": 1})
    file = load_file(Path(second.place) / "model-00000.safetensors")
    assert {name: tensor.tolist() for name, tensor in file.items() if "#index" in name} == {
        "a.weight#index": [43, 999]
    }
    assert sorted(file) == ["a.weight#index", "a.weight#value", "c.bias"]
    assert second.bytes == 2 * (4 + 4) + 12
    held = tensors()
    assert identical(dict(patched(held.items(), Path(second.place), 1)), new)
    assert identical(held, tensors())  # the engine computes from them meanwhile
    with pytest.raises(
        EngineError, match="changes since version 1, but the engine holds version 0"
    ):
        list(patched(tensors().items(), Path(second.place), 0))
    new["a.weight"][0, 0] = 5.0  # where it lies: the trainer does not keep what it sent
    assert sender.send(new.items(), 3, {"base": 2}).bytes == 4 + 4
    assert (
        sender.send(new.items(), 4, {"base": 2}).bytes == 5292
    )  # the engine does not hold the version sent last
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
        assert {
            name: checksum(tensor) for name, tensor in engine.halves[0].tensors()
        } == handover.checksums
        assert identical(
            dict(engine.halves[0].tensors()), {n: doubled[n] for n, _ in engine.halves[0].tensors()}
        )
        assert identical(
            dict(decoder.weights.tensors()), {n: weights[n] for n, _ in decoder.weights.tensors()}
        )
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


def test_weights_in_memory_are_in_a_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stat.S_IMODE(memory_path().parent.stat().st_mode) == 0o700
    monkeypatch.setattr(sync, "MEMORY", tmp_path)
    mine = memory_path().parent
    assert (mine.parent, stat.S_IMODE(mine.stat().st_mode)) == (tmp_path, 0o700)
    mine.chmod(0o755)
    with pytest.raises(
        FolderError, match="not a folder that is this user's alone; have it removed"
    ):
        memory_path()
    mine.rmdir()
    mine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((FolderError, FileExistsError)):
        memory_path()
