"""Checkpoints: written in the background, verified before use, and removed when they are due."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.runtime.checkpoint import CheckpointError, WaitWritten
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from rollout.base.digests import Digest, write_chunks
from rollout.base.json_files import sealed
from rollout.base.ownership import owned
from tests.support.checkpoints import MODELS, begin, edit, names, open_, save, silent

WEIGHTS_OF_1 = "9f7ebbb2ca46745f912339e39e2320486b42231bfe40c1a6197c61805185f23f"  # sha256sum


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def test_checkpoints_of_a_process_that_lost_the_folder_are_not_used(tmp_path: Path) -> None:
    with owned(tmp_path):
        save(open_(tmp_path, keep=9), 1, 2)
    with owned(tmp_path):
        save(open_(tmp_path, keep=9), 3)
    epochs = [read_checkpoint_manifest(step_folder(tmp_path, step))["epoch"] for step in (1, 2, 3)]
    assert epochs[0] == epochs[1] < epochs[2]

    # Step 4 looks as if the first process had written it after the second one had come.
    with owned(tmp_path):
        save(open_(tmp_path, keep=9), 4)
    late = step_folder(tmp_path, 4)
    edit(late, epoch=epochs[0])
    warnings: list[str] = []
    newest = open_(tmp_path).recover_newest(warnings.append)
    assert newest is not None
    assert newest.step == 3
    assert warnings == [
        f"{late}: written in epoch {epochs[0]}, after a process of epoch {epochs[2]} had taken the "
        "folder over; kept as refused_step_000004, step_000003 is used"
    ]


def test_the_newest_checkpoint_is_found_and_old_ones_are_removed(tmp_path: Path) -> None:
    checkpoints = open_(tmp_path)
    assert checkpoints.recover_newest(silent) is None
    save(checkpoints, 5, 10, 15)
    newest = checkpoints.recover_newest(silent)
    assert newest is not None
    assert (newest.folder.name, newest.step, newest.state) == ("step_000015", 15, {"kl": 15})
    assert (newest.folder / "policy" / "weights").read_text() == "weights of step 15"
    assert names(tmp_path) == ["step_000010", "step_000015"]


def test_training_goes_on_while_files_are_written_and_the_next_save_waits(tmp_path: Path) -> None:
    async def play() -> None:
        checkpoints = open_(tmp_path)
        may_write_first = await begin(checkpoints, 1)
        assert not checkpoints.has(1)
        second = asyncio.create_task(begin(checkpoints, 2))
        await asyncio.sleep(0.01)
        assert not second.done()

        may_write_first.set()
        may_write_second = await second
        assert checkpoints.has(1)
        assert not checkpoints.has(2)
        may_write_second.set()
        await checkpoints.finish()
        assert checkpoints.has(2)

    asyncio.run(play())
    assert names(tmp_path) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_failed_write_is_raised_by_the_next_save_or_at_the_end(
    tmp_path: Path, at_the_end: bool
) -> None:
    async def write(folder: Path) -> WaitWritten:
        async def fail() -> dict[str, Digest]:
            raise OSError("rank 1 of policy: Input/output error")

        return fail

    async def play() -> None:
        checkpoints = open_(tmp_path)
        await checkpoints.save(3, {}, write)
        if at_the_end:
            await checkpoints.finish()
        else:
            await begin(checkpoints, 4)

    message = r"step_000003.*could not be written \(rank 1 of policy: Input"
    with pytest.raises(CheckpointError, match=message):
        asyncio.run(play())
    assert open_(tmp_path).recover_newest(silent) is None


def test_partial_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    asyncio.run(begin(open_(tmp_path), 7))  # its files are never written
    assert [name for name in names(tmp_path) if name.startswith(".step_000007.")]
    assert open_(tmp_path).recover_newest(silent) is None
    assert names(tmp_path) == []


def test_the_manifest_names_the_run_and_lists_every_file_with_its_digest(tmp_path: Path) -> None:
    save(open_(tmp_path), 1, metrics=(0.25,))
    folder = step_folder(tmp_path, 1)
    assert len(json.loads((folder / "manifest.json").read_text())["sha256"]) == 64
    assert read_checkpoint_manifest(folder) == {
        "format": 2,
        "epoch": 0,  # no process owns the folder
        "run": "r",
        "models": MODELS,
        "step": 1,
        "metric": 0.25,
        "recipe": {},
        "inputs": {},
        "state": {"kl": 1},
        "files": {"policy/weights": {"bytes": 17, "sha256": WEIGHTS_OF_1}},
    }


def test_unusable_checkpoints_are_renamed_and_an_older_one_is_used(tmp_path: Path) -> None:
    checkpoints = open_(tmp_path, keep=9)
    save(checkpoints, *range(1, 10))
    folders = {step: step_folder(tmp_path, step) for step in range(1, 10)}
    (folders[9] / "manifest.json").write_text('{"state": {"st')
    (folders[8] / "policy" / "weights").write_text("weights of step 9")  # of the same size
    (folders[7] / "policy" / "weights").write_text("weights")
    (folders[6] / "policy" / "weights").unlink()
    edit(folders[5], run="other")
    edit(folders[4], format=1)
    edit(folders[3], models={"policy": {**MODELS["policy"], "vocab": 600}})
    edit(folders[2], models={"verifier": MODELS["policy"]})

    warnings: list[str] = []
    newest = checkpoints.recover_newest(warnings.append)
    assert newest is not None
    assert newest.folder == folders[1]
    assert [line.split(": ", 1)[1].split("; ")[0] for line in warnings] == [
        "no readable manifest.json",
        "policy/weights is not what was written",
        "policy/weights has 7 bytes, 17 were written",
        "policy/weights is missing",
        "of run 'other', not 'r'",
        "written in format 1, this version reads format 2",
        "policy 'policy' has vocab 600, but the run's model has 512",
        "has no policy 'policy' (it has verifier)",
    ]
    assert warnings[0].endswith("; kept as refused_step_000009, step_000001 is used")
    refused = [f"refused_step_{step:06d}" for step in range(2, 10)]
    assert names(tmp_path) == [*refused, "step_000001"]
    save(checkpoints, 9)  # the renamed folder is not in the way
    assert checkpoints.has(9)


def bad_manifests() -> dict[str, Callable[[dict[str, Any]], str | bytes]]:
    """Return functions that turn a manifest into a damaged or edited file, by name."""

    def without(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda manifest: json.dumps(
            {key: value for key, value in manifest.items() if key != name}
        )

    def changed(**values: object) -> Callable[[dict[str, Any]], str]:
        return lambda manifest: json.dumps(manifest | values)

    def resealed(**values: object) -> Callable[[dict[str, Any]], str]:
        return lambda manifest: json.dumps(sealed(manifest | values))

    return {
        "another step": changed(step=99),
        "another state": changed(state={"kl": {"solver": {"coefficient": 99.0}}}),
        "no files": changed(files={}),
        "a step of letters": changed(step="2"),
        "null files": changed(files=None),
        "a list of files": changed(files=[1]),
        "no models": without("models"),
        "no state": without("state"),
        "no digest": without("sha256"),
        "a list": lambda _: "[1]",
        "null": lambda _: "null",
        "deep": lambda _: "[" * 100_000,
        "bytes": lambda _: b"\xff\xfe\x00",
        "huge": lambda _: b" " * (65 << 20),
        # with a valid digest
        "sealed: next to nothing": lambda _: json.dumps(
            sealed({"format": 2, "run": "r", "step": 2})
        ),
        "sealed: a list of files": resealed(files=[1]),
        "sealed: files without digests": resealed(files={"policy/weights": {"bytes": 17}}),
        "sealed: a model that is none": resealed(models={"policy": 1}),
        "sealed: a step of letters": resealed(step="2"),
        "sealed: another step": resealed(step=99),
        "sealed: no files": resealed(files={}),
        "sealed: a state that is none": resealed(state=[]),
        "sealed: a metric of letters": resealed(metric="0.75"),
    }


@pytest.mark.parametrize("kind", bad_manifests())
def test_with_a_fault_in_a_manifest_the_older_checkpoint_is_used(tmp_path: Path, kind: str) -> None:
    save(open_(tmp_path, keep=2, best=1), 1, 2, metrics=(0.5, 0.75))
    path = step_folder(tmp_path, 2) / "manifest.json"
    damaged = bad_manifests()[kind](json.loads(path.read_text()))
    path.write_bytes(damaged.encode() if isinstance(damaged, str) else damaged)
    (tmp_path / ".x.partial").touch()
    checkpoints = open_(tmp_path, keep=2, best=1)

    warnings: list[str] = []
    best = checkpoints.best(warnings.append)
    assert best is not None
    assert best.step == 1
    # Only these manifests can be read; the others have no metric, and are skipped silently.
    is_readable = kind in ("sealed: another step", "sealed: no files")
    assert len(warnings) == is_readable

    warnings.clear()
    newest = checkpoints.recover_newest(warnings.append)
    assert newest is not None
    assert newest.step == 1
    assert len(warnings) == 1
    assert "manifest.json" in warnings[0]
    assert "step_000001 is used" in warnings[0]
    assert names(tmp_path) == ["refused_step_000002", "step_000001"]


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """Otherwise a copy of step 1 under the name of step 9 would always be the newest checkpoint."""
    save(open_(tmp_path), 1, 2)
    shutil.copytree(step_folder(tmp_path, 1), step_folder(tmp_path, 9))
    warnings: list[str] = []
    newest = open_(tmp_path).recover_newest(warnings.append)
    assert newest is not None
    assert newest.step == 2
    expected = "manifest.json: of step 1, but the folder has the name of another step; kept as refused_step_000009"
    assert f"step_000009: {expected}" in warnings[0]


def test_a_checkpoint_that_is_a_link_or_no_folder_is_removed_when_it_is_due(tmp_path: Path) -> None:
    """A user has moved step 1 to another disk; the files there stay."""
    folder = tmp_path / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    save(open_(folder), 1)
    step_folder(folder, 1).rename(elsewhere)
    step_folder(folder, 1).symlink_to(elsewhere)
    step_folder(folder, 0).touch()
    (folder / ".step_000007.1.partial").symlink_to(elsewhere)
    save(open_(folder), 2, 3)
    assert names(folder) == ["step_000002", "step_000003"]
    assert (elsewhere / "manifest.json").is_file()


def shard_bytes(header_bytes: int | None, tensor_end: int) -> bytes:
    """Return a safetensors file with a tensor of eight bytes.

    Args:
        header_bytes: length of the header that the file declares; None for the true one.
        tensor_end: end of the tensor that the header declares.
    """
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, tensor_end]}}
    ).encode()
    declared_bytes = len(header) if header_bytes is None else header_bytes
    return declared_bytes.to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    "hostile",
    [shard_bytes(1 << 62, 8), shard_bytes(99 << 20, 8), shard_bytes(None, 1 << 40), b"short"],
    ids=["huge header", "long header", "tensor outside", "short"],
)
def test_a_shard_with_a_hostile_header_is_not_opened_though_its_digest_is_right(
    tmp_path: Path, hostile: bytes
) -> None:
    """The header's lengths and offsets are outside the file, and the manifest has a valid digest."""
    save(open_(tmp_path), 1, 2)
    name = "policy/rank_00000.safetensors"
    folder = step_folder(tmp_path, 2)

    edit(folder, files={name: write_chunks(folder / name, [shard_bytes(None, 8)])})
    newest = open_(tmp_path).recover_newest(silent)
    assert newest is not None
    assert newest.step == 2

    edit(folder, files={name: write_chunks(folder / name, [hostile])})
    warnings: list[str] = []
    newest = open_(tmp_path).recover_newest(warnings.append)
    assert newest is not None
    assert newest.step == 1
    pattern = rf"{name}: not a safetensors file \(.+\); kept as refused_step_000002"
    assert re.search(pattern, warnings[0])


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ({"run": "other"}, "of run 'r', not 'other'"),
        ({"models": {**MODELS, "critic": {}}}, "has no policy 'critic' (it has policy)"),
        ({"models": {}}, "has policy 'policy', which the run does not have"),
    ],
)
def test_a_run_whose_checkpoints_are_all_refused_does_not_start_over(
    tmp_path: Path, identity: dict[str, Any], reason: str
) -> None:
    save(open_(tmp_path), 1, 2)
    before = names(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        open_(tmp_path, **identity).recover_newest(silent)
    assert str(refusal.value) == (
        f"{step_folder(tmp_path, 2)}: {reason}; the older one cannot be used either; put "
        f"back a checkpoint that can be used, or move {tmp_path} away to start over"
    )
    assert names(tmp_path) == before


def test_the_best_checkpoints_stay_and_the_newer_of_equals(tmp_path: Path) -> None:
    checkpoints = open_(tmp_path, keep=1, best=2)
    assert checkpoints.is_best(0.0)
    save(checkpoints, 1, 2, 3, 4, 5, 6, metrics=(0.5, 0.75, None, 0.75, 0.25, None))
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000006"]
    assert [checkpoints.is_best(metric) for metric in (0.7, 0.75, 0.8)] == [False, True, True]

    save(checkpoints, 7, metrics=(0.75,))
    assert names(tmp_path) == ["step_000004", "step_000007"]
    best = checkpoints.best(silent)
    assert best is not None
    assert (best.step, best.metric) == (7, 0.75)

    (best.folder / "policy" / "weights").unlink()
    warnings: list[str] = []
    best = checkpoints.best(warnings.append)
    assert best is not None
    assert best.step == 4
    folder = step_folder(tmp_path, 7)
    assert warnings == [f"{folder}: policy/weights is missing; the next best is used"]


def test_no_checkpoint_is_best_without_a_metric(tmp_path: Path) -> None:
    checkpoints = open_(tmp_path)
    save(checkpoints, 1)
    assert checkpoints.best(silent) is None
    assert not checkpoints.is_best(1.0)  # keep_best is 0


def test_checkpoints_that_a_killed_process_did_not_remove_are_removed_later(
    tmp_path: Path,
) -> None:
    save(open_(tmp_path, keep=9), 1, 2, 3)
    newest = open_(tmp_path, keep=1).recover_newest(silent)
    assert newest is not None
    assert newest.step == 3
    assert names(tmp_path) == ["step_000003"]
