"""The log of a collection: entries are read back, and a line that a kill has cut off is skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollout.records.collection_log import CollectionLog
from tests.unit.records.test_records import TRAJECTORIES

TRAJECTORY = TRAJECTORIES[0]


def test_trajectories_and_results_are_read_back(tmp_path: Path) -> None:
    routed = replace(TRAJECTORY, turns=(replace(TRAJECTORY.turns[0], routing=bytes(range(256))),))
    log = CollectionLog(tmp_path / "log.jsonl", "recipe")
    log.add_trajectory("a", routed)
    log.add_call("letter", ["sent", True])
    log.add_call("no text", b"\xff")

    again = CollectionLog(tmp_path / "log.jsonl", "recipe")
    assert again.trajectory("a") == routed
    assert again.trajectory("b") is None
    assert again.call_result("letter") == ["sent", True]
    assert again.call_result("no text") is None
    assert again.newest_version == max(turn.policy_version for turn in routed.turns)


def test_a_log_of_another_recipe_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    CollectionLog(path, "one").add_trajectory("a", TRAJECTORY)
    other = CollectionLog(path, "other")
    assert other.trajectory("a") is None
    other.add_trajectory("b", TRAJECTORY)
    again = CollectionLog(path, "other")
    assert (again.trajectory("a"), again.trajectory("b")) == (None, TRAJECTORY)


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = CollectionLog(path)
    log.add_call("a", 1)
    log.add_call("b", 2)
    path.write_bytes(path.read_bytes()[:-5])
    CollectionLog(path).add_call("c", 3)
    again = CollectionLog(path)
    assert [again.call_result(call) for call in "abc"] == [1, None, 3]


def test_a_removed_log_is_empty_and_can_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = CollectionLog(path)
    log.remove()  # there is no file yet
    log.add_call("a", 1)
    log.remove()
    assert not path.exists()
    assert CollectionLog(path).call_result("a") is None
