"""Trainings of the same recipe give the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# One row for each of two processes: the ways in which it trains; see `tests.faults.same`.
WAYS = (("=", "ahead:token=sleep:0.1"), ("=", "ahead:token=kill@103"))


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, str]]]:
    """Return the digests of each training's files: `digests[process][way]`, in the order of `WAYS`.

    All trainings use the same folder, one after the other.
    """
    folder = tmp_path_factory.mktemp("same")
    digests = []
    for ways in WAYS:
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults.same", str(folder), *ways]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        digests.append([json.loads(line) for line in result.stdout.splitlines()])
    return digests


def assert_same(first: dict[str, str], second: dict[str, str]) -> None:
    assert len([name for name in first if name.endswith(".safetensors")]) >= 4
    assert first == second, [name for name in first if first[name] != second.get(name)]


@pytest.mark.slow
def test_the_same_recipe_is_the_same_run(digests: list[list[dict[str, str]]]) -> None:
    assert_same(digests[0][0], digests[1][0])


@pytest.mark.slow
def test_ahead_of_training_neither_time_nor_a_kill_changes_a_bit(
    digests: list[list[dict[str, str]]],
) -> None:
    """One training waits 0.1 s for each token; the other is killed at a token, and started again."""
    assert_same(digests[0][1], digests[1][1])
    assert digests[0][1] != digests[0][0]
