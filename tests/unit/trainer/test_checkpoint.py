"""Checkpoints are trusted only when they are what was written."""

import asyncio
import json
from pathlib import Path

from mcore_mas.checkpoint import Checkpoints


def save(checkpoints: Checkpoints, step: int) -> None:
    async def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_text(f"weights of step {step}")

    asyncio.run(checkpoints.save(step, {"step": step}, write))


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest(lambda _: None) is None
    for step in (5, 10, 15):
        save(checkpoints, step)
    folder, state = checkpoints.newest(lambda _: None)
    assert (folder.name, state) == ("step_000015", {"step": 15})
    assert (folder / "policy" / "weights").read_text() == "weights of step 15"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_000015"]


def test_damaged_checkpoints_are_named_and_an_older_one_is_used(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=4)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    (tmp_path / "step_000004" / "manifest.json").write_text('{"state": {"st')
    (tmp_path / "step_000003" / "policy" / "weights").write_text("weights of step 9")  # same size, other bytes
    (tmp_path / "step_000002" / "policy" / "weights").unlink()
    told: list[str] = []
    found = checkpoints.newest(told.append)
    assert found is not None
    assert found[0].name == "step_000001"
    assert [line.split(": ")[1].split(";")[0] for line in told] == [
        "no readable manifest.json",
        "policy/weights is not what was written",
        "policy/weights is missing",
    ]


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    partial = tmp_path / ".step_000007.partial"
    partial.mkdir()
    (partial / "half").write_text("")
    assert Checkpoints(tmp_path, keep=1).newest(lambda _: None) is None
    assert not partial.exists()


def test_the_manifest_lists_every_file_with_its_digest(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, keep=1), 1)
    files = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())["files"]
    assert files == {
        "policy/weights": {
            "bytes": 17,
            "sha256": "9f7ebbb2ca46745f912339e39e2320486b42231bfe40c1a6197c61805185f23f",
        }
    }
