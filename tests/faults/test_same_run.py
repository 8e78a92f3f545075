"""A run is its recipe: the same seed and layout give the same bits again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAYS = (("=", "ahead:token=sleep:0.1"), ("=", "ahead:token=kill@103"))  # of each of two processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, str]]]:
    """Files of the runs that two processes trained, each in its ways; in the same folder, one after the other."""
    folder, made = tmp_path_factory.mktemp("same"), []
    for ways in WAYS:
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults.same", str(folder), *ways]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made.append([json.loads(line) for line in done.stdout.splitlines()])
    return made


def assert_same(one: dict[str, str], other: dict[str, str]) -> None:
    assert len([name for name in one if name.endswith(".safetensors")]) >= 4
    assert one == other, [name for name in one if one[name] != other.get(name)]


@pytest.mark.slow
def test_the_same_recipe_is_the_same_run(found: list[list[dict[str, str]]]) -> None:
    assert_same(found[0][0], found[1][0])


@pytest.mark.slow
def test_ahead_of_training_neither_time_nor_a_kill_changes_a_bit(
    found: list[list[dict[str, str]]],
) -> None:
    """Each token of one comes later; the other is killed and goes on."""
    assert_same(found[0][1], found[1][1])
    assert found[0][1] != found[0][0]
