"""Names of a config are looked up among registered names, installed packages and import paths."""

import math
from pathlib import Path

import pytest

from rollout.base.lookup import LOCAL_OBJECTS, UnknownName, entry_points_of, lookup, lookup_import


def test_a_registered_name_wins_and_an_unknown_one_has_its_nearest() -> None:
    registered = {"search": sum, "single": max}
    assert lookup("env", "search", registered) is sum
    with pytest.raises(
        UnknownName, match=r"^unknown env 'serach'; nearest: search; known: search, single \(or"
    ):
        lookup("env", "serach", registered)


def test_import_paths_may_be_forbidden() -> None:
    assert lookup("loss", "math:fsum", {}) is math.fsum
    with pytest.raises(UnknownName, match=r"^unknown loss 'math:fsum'; known: mean$"):
        lookup("loss", "math:fsum", {"mean": sum}, importable=False)


def test_a_table_of_import_paths_is_imported_when_a_name_is_used() -> None:
    paths = {"exact": "math:fsum"}
    assert lookup_import("engine", "exact", paths) is math.fsum
    assert lookup_import("engine", "math:prod", paths) is math.prod


def test_an_object_of_a_script_is_found_in_its_own_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOCAL_OBJECTS, "here:run.reward", sum)
    assert lookup("reward", "here:run.reward", {}) is sum
    with pytest.raises(UnknownName, match="is an object of the script or notebook"):
        lookup("reward", "here:another.reward", {})


def test_a_name_may_be_offered_by_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "theirs-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[mcore_mas.task_generator]\nsums = math:fsum\nlost = math:nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry_points_of.cache_clear()
    try:
        assert lookup("task generator", "sums", {"own": sum}) is math.fsum
        assert lookup("task generator", "own", {"own": sum}) is sum
        with pytest.raises(UnknownName, match="unknown env 'sums'"):
            lookup("env", "sums", {})
        with pytest.raises(UnknownName, match="task generator 'math:nothing' cannot be imported"):
            lookup("task generator", "lost", {})
    finally:
        entry_points_of.cache_clear()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (
            "my_taem.world:Env",
            "No module named 'my_taem'; .* my_taem, or add that folder to PYTHONPATH",
        ),
        ("my_team.world.Env:step", "'my_team.world' is not a package"),
        ("my_team.world:Evn", "module 'my_team.world' has no attribute 'Evn'; nearest: Env"),
        ("my_team.wrold:Env", "No module named 'my_team.wrold'; nearest: world"),
        ("my_team.broken:Env", "No module named 'my_team.wrld'; nearest: world"),
        ("my_team.raises:Env", "RuntimeError: boom twice"),
        ("circular:Env", r"\(most likely due to a circular import\) \(.*circular\.py\)"),
    ],
)
def test_an_import_path_that_cannot_be_imported_says_why(
    path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_team").mkdir()  # without __init__.py, as docs/own_team.md has its folder
    (tmp_path / "my_team" / "world.py").write_text("class Env: ...\n")
    (tmp_path / "my_team" / "broken.py").write_text("from my_team.wrld import Env\n")
    (tmp_path / "my_team" / "raises.py").write_text("raise RuntimeError('boom\\ntwice')\n")
    (tmp_path / "circular.py").write_text("from circular_helper import clip\nclass Env: ...\n")
    (tmp_path / "circular_helper.py").write_text("from circular import Env\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownName, match=f"^env '{path}' cannot be imported: .*{reason}$"):
        lookup("env", path, {})


def test_an_import_path_of_version_0_1_says_where_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old_team.py").write_text("from mcore_mas.rollout.teams import roles\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("mcore_mas.rollout.orchestras.search:search_team", "old_team:relay"):
        with pytest.raises(UnknownName, match=r"since version 0\.2\.0 its package is rollout"):
            lookup("orchestra", path, {})
