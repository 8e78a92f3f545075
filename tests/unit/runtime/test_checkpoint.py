"""Checkpoints are written beside training and trusted only when they are what was written."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.runtime.checkpoint import CheckpointError, Written
from mcore_mas.runtime.checkpoint_manifest import read_checkpoint_manifest
from rollout.base.digests import Digest, write_chunks
from rollout.base.json_files import sealed, write_json
from rollout.base.ownership import owned
from tests.support.checkpoints import MODELS, begin, edit, names, open_, save, silent

WEIGHTS_OF_1 = "9f7ebbb2ca46745f912339e39e2320486b42231bfe40c1a6197c61805185f23f"  # sha256sum


def test_what_an_owner_wrote_after_another_had_come_is_not_used(tmp_path: Path) -> None:
    for steps in ((1, 2), (3,)):
        with owned(tmp_path):
            save(open_(tmp_path, keep=9), *steps)
    epochs = [
        read_checkpoint_manifest(tmp_path / f"step_00000{step}")["epoch"] for step in (1, 2, 3)
    ]
    assert epochs[0] == epochs[1] < epochs[2]
    with owned(tmp_path):
        save(open_(tmp_path, keep=9), 4)
    late = tmp_path / "step_000004"
    write_json(
        late / "manifest.json", sealed({**read_checkpoint_manifest(late), "epoch": epochs[0]})
    )
    said: list[str] = []
    found = open_(tmp_path).newest(said.append)
    assert found is not None and found.step == 3
    assert said == [
        f"{late}: written in epoch {epochs[0]}, after a process of epoch {epochs[2]} had taken the folder over; "
        "kept as refused_step_000004, step_000003 is used"
    ]


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = open_(tmp_path)
    assert checkpoints.newest(silent) is None
    save(checkpoints, 5, 10, 15)
    found = checkpoints.newest(silent)
    assert found is not None
    assert (found.folder.name, found.step, found.state) == ("step_000015", 15, {"kl": 15})
    assert (found.folder / "policy" / "weights").read_text() == "weights of step 15"
    assert names(tmp_path) == ["step_000010", "step_000015"]


def test_training_goes_on_while_files_are_written_and_the_next_save_waits(tmp_path: Path) -> None:
    async def play() -> None:
        checkpoints = open_(tmp_path)
        first = await begin(checkpoints, 1)  # returned: its files are not there yet
        assert not checkpoints.has(1)
        second = asyncio.create_task(begin(checkpoints, 2))
        await asyncio.sleep(0.01)
        assert not second.done()
        first.set()
        (await second).set()
        assert checkpoints.has(1)
        assert not checkpoints.has(2)
        await checkpoints.finish()
        assert checkpoints.has(2)

    asyncio.run(play())
    assert names(tmp_path) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("at_the_end", [True, False])
def test_what_could_not_be_written_is_said_in_one_line_later(
    tmp_path: Path, at_the_end: bool
) -> None:
    async def play() -> None:
        checkpoints = open_(tmp_path)

        async def write(folder: Path) -> Written:
            async def written() -> dict[str, Digest]:
                raise OSError("rank 1 of policy: Input/output error")

            return written

        await checkpoints.save(3, {}, write)
        await (checkpoints.finish() if at_the_end else begin(checkpoints, 4))

    with pytest.raises(
        CheckpointError, match=r"step_000003.*could not be written \(rank 1 of policy: Input"
    ):
        asyncio.run(play())
    assert open_(tmp_path).newest(silent) is None  # and what there was of it is gone


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    asyncio.run(begin(open_(tmp_path), 7))  # its writing never ends
    assert [name for name in names(tmp_path) if name.startswith(".step_000007.")]
    assert open_(tmp_path).newest(silent) is None
    assert names(tmp_path) == []


def test_the_manifest_says_whose_it_is_and_lists_every_file_with_its_digest(tmp_path: Path) -> None:
    save(open_(tmp_path), 1, metrics=(0.25,))
    text = (tmp_path / "step_000001" / "manifest.json").read_text()
    assert len(json.loads(text)["sha256"]) == 64
    assert read_checkpoint_manifest(tmp_path / "step_000001") == {
        "format": 2,
        "epoch": 0,  # nobody owns the folder
        "run": "r",
        "models": MODELS,
        "step": 1,
        "metric": 0.25,
        "recipe": {},
        "inputs": {},
        "state": {"kl": 1},
        "files": {"policy/weights": {"bytes": 17, "sha256": WEIGHTS_OF_1}},
    }


def test_what_cannot_be_used_is_named_and_kept_aside_and_an_older_one_is_used(
    tmp_path: Path,
) -> None:
    checkpoints = open_(tmp_path, keep=9)
    save(checkpoints, *range(1, 10))
    at = {step: tmp_path / f"step_{step:06d}" for step in range(1, 10)}
    (at[9] / "manifest.json").write_text('{"state": {"st')
    (at[8] / "policy" / "weights").write_text("weights of step 9")  # same size, other bytes
    (at[7] / "policy" / "weights").write_text("weights")
    (at[6] / "policy" / "weights").unlink()
    edit(at[5], run="other")
    edit(at[4], format=1)
    edit(at[3], models={"policy": {**MODELS["policy"], "vocab": 600}})
    edit(at[2], models={"verifier": MODELS["policy"]})
    told: list[str] = []
    found = checkpoints.newest(told.append)
    assert found is not None
    assert found.folder == at[1]
    assert [line.split(": ", 1)[1].split("; ")[0] for line in told] == [
        "no readable manifest.json",
        "policy/weights is not what was written",
        "policy/weights has 7 bytes, 17 were written",
        "policy/weights is missing",
        "of run 'other', not 'r'",
        "written in format 1, this version reads format 2",
        "policy 'policy' has vocab 600, the run's model 512",
        "has no policy 'policy' (it has verifier)",
    ]
    assert told[0].endswith("; kept as refused_step_000009, step_000001 is used")
    assert names(tmp_path) == [*(f"refused_step_{n:06d}" for n in range(2, 10)), "step_000001"]
    save(checkpoints, 9)  # in nobody's way
    assert checkpoints.has(9)


def bad_manifests() -> dict[str, Callable[[dict[str, Any]], str | bytes]]:
    """What a damaged or edited manifest may look like, by what is wrong with it."""

    def without(*names: str) -> Callable[[dict[str, Any]], str]:
        return lambda good: json.dumps(
            {name: value for name, value in good.items() if name not in names}
        )

    def changed(**values: object) -> Callable[[dict[str, Any]], str]:
        return lambda good: json.dumps(good | values)

    def resealed(**values: object) -> Callable[[dict[str, Any]], str]:
        return lambda good: json.dumps(sealed(good | values))

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
        # by somebody who can seal
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
    checkpoints = open_(tmp_path, keep=2, best=1)
    save(checkpoints, 1, 2, metrics=(0.5, 0.75))
    path = tmp_path / "step_000002" / "manifest.json"
    text = bad_manifests()[kind](json.loads(path.read_text()))
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (tmp_path / ".x.partial").touch()
    again = open_(tmp_path, keep=2, best=1)
    told: list[str] = []
    best = again.best(told.append)  # of a manifest that cannot be read no metric is known
    assert (
        best is not None
        and best.step == 1
        and len(told) == (kind in ("sealed: another step", "sealed: no files"))
    )
    told.clear()
    found = again.newest(told.append)
    assert found is not None and found.step == 1
    assert len(told) == 1 and "manifest.json" in told[0] and "step_000001 is used" in told[0]
    assert names(tmp_path) == ["refused_step_000002", "step_000001"]


def test_a_checkpoint_by_another_steps_name_does_not_take_its_place(tmp_path: Path) -> None:
    """A copy of step 1 as step 9 would be the newest for good, and each start would begin at step 1 again."""
    save(open_(tmp_path), 1, 2)
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000009")
    told: list[str] = []
    found = open_(tmp_path).newest(told.append)
    assert found is not None and found.step == 2
    assert (
        "step_000009: manifest.json: of step 1, under another's name; kept as refused_step_000009"
        in told[0]
    )


def test_a_checkpoint_that_is_a_link_or_no_folder_is_removed_when_it_is_due(tmp_path: Path) -> None:
    """Step 1 was moved to another disk; what is there stays."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    save(open_(folder), 1)
    (folder / "step_000001").rename(elsewhere)
    (folder / "step_000001").symlink_to(elsewhere)
    (folder / "step_000000").touch()
    (folder / ".step_000007.1.partial").symlink_to(elsewhere)
    save(open_(folder), 2, 3)
    assert names(folder) == ["step_000002", "step_000003"]
    assert (elsewhere / "manifest.json").is_file()


def header(length: int, end: int) -> bytes:
    """A safetensors file of eight bytes, by a header that says how long it is and where its tensor ends."""
    told = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, end]}}).encode()
    return (length or len(told)).to_bytes(8, "little") + told + bytes(8)


@pytest.mark.parametrize(
    "shard", [header(1 << 62, 8), header(99 << 20, 8), header(0, 1 << 40), b"short"]
)
def test_a_shard_with_a_hostile_header_is_not_opened_though_its_digest_is_right(
    tmp_path: Path, shard: bytes
) -> None:
    """Lengths and offsets outside the file, from somebody who can seal manifests."""
    save(open_(tmp_path), 1, 2)
    name, folder = "policy/rank_00000.safetensors", tmp_path / "step_000002"
    for content, step in ((header(0, 8), 2), (shard, 1)):
        edit(folder, files={name: write_chunks(folder / name, [content])})
        told: list[str] = []
        found = open_(tmp_path).newest(told.append)
        assert found is not None and found.step == step
    assert re.search(
        rf"{name}: not a safetensors file \(.+\); kept as refused_step_000002", told[0]
    )


def test_a_run_whose_checkpoints_are_all_refused_does_not_start_over(tmp_path: Path) -> None:
    save(open_(tmp_path), 1, 2)
    before = names(tmp_path)
    for other, why in [
        (open_(tmp_path, run="other"), "of run 'r', not 'other'"),
        (
            open_(tmp_path, models={**MODELS, "critic": {}}),
            "has no policy 'critic' (it has policy)",
        ),
        (open_(tmp_path, models={}), "has policy 'policy', which the run does not have"),
    ]:
        with pytest.raises(CheckpointError) as refusal:
            other.newest(silent)
        assert str(refusal.value) == (
            f"{tmp_path / 'step_000002'}: {why}; no checkpoint can be used (and 1 older): bring a good one back, "
            f"or move {tmp_path} away to start from step 0"
        )
    assert names(tmp_path) == before


def test_the_best_stay_and_of_equals_the_newer(tmp_path: Path) -> None:
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
    told: list[str] = []
    best = checkpoints.best(told.append)
    assert best is not None
    assert best.step == 4
    assert told == [f"{tmp_path / 'step_000007'}: policy/weights is missing; the next best is used"]


def test_without_a_metric_none_is_best(tmp_path: Path) -> None:
    checkpoints = open_(tmp_path)
    save(checkpoints, 1)
    assert checkpoints.best(silent) is None
    assert not checkpoints.is_best(1.0)  # keep_best is 0


def test_what_a_process_did_not_get_to_that_was_killed_behind_its_last_checkpoint_is_removed(
    tmp_path: Path,
) -> None:
    save(open_(tmp_path, keep=9), 1, 2, 3)
    found = open_(tmp_path, keep=1).newest(silent)
    assert found is not None and found.step == 3
    assert names(tmp_path) == ["step_000003"]
