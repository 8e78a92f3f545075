"""Time in which the studio opens a file of a million turns, against reading the whole file."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from rollout.records.files import write_trajectories
from rollout.records.trajectory_lists import (
    TrajectoryFilter,
    count_trajectories,
    list_trajectories,
    trajectory_at,
)
from tests.support.played import trajectory, turn

TURNS = 1_000_000
TURNS_PER_TRAJECTORY = 8
TRAJECTORIES = TURNS // TURNS_PER_TRAJECTORY
DISTINCT_TRAJECTORIES = 250  # the file repeats them
TOKENS = 32
ROW_GROUP_SIZE = 256
LISTED = 100  # trajectories on the studio's first page
# The reference reads this fraction of the rows, and its time is multiplied.
REFERENCE_FRACTION = 25
GOAL = 20.0


def write_large_file(folder: Path) -> Path:
    """Write a file of TRAJECTORIES trajectories."""
    long_turn = replace(
        turn(0), text="word " * TOKENS, completion_ids=(7,) * TOKENS, logprobs=(-0.5,) * TOKENS
    )
    turns = [replace(long_turn, index=i) for i in range(TURNS_PER_TRAJECTORY)]
    small = folder / "small.parquet"
    write_trajectories(
        small, [trajectory(*turns, sample=number) for number in range(DISTINCT_TRAJECTORIES)]
    )
    rows = pq.read_table(small)
    large = folder / "large.parquet"
    pq.write_table(
        pa.concat_tables([rows] * (TRAJECTORIES // DISTINCT_TRAJECTORIES)),
        large,
        compression="zstd",
        row_group_size=ROW_GROUP_SIZE,
    )
    return large


def open_as_studio(file: Path) -> float:
    """Count trajectories, list the first page, and read the last trajectory; return the seconds."""
    began = time.perf_counter()
    count = count_trajectories(file)
    first_page = list_trajectories(file, TrajectoryFilter())
    trajectory_at(file, count - 1)
    seconds = time.perf_counter() - began
    assert count == TRAJECTORIES
    assert len(first_page) == LISTED
    return seconds


def read_whole(file: Path) -> float:
    """Return the seconds to read the whole file, extrapolated from a fraction of it."""
    began = time.perf_counter()
    groups = TRAJECTORIES // ROW_GROUP_SIZE // REFERENCE_FRACTION
    pq.ParquetFile(file).read_row_groups(list(range(groups))).to_pylist()
    return (time.perf_counter() - began) * REFERENCE_FRACTION


def main() -> None:
    """Write the file once, and open it both ways."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_large_file(Path(folder))
        studio_s = open_as_studio(file)
        whole_s = read_whole(file)
    print(
        f"first page, count and last trajectory of {TURNS} turns: {studio_s:.3f} s, whole: "
        f"{whole_s:.0f} s"
    )
    print_result("studio_open", whole_s / studio_s, goal=GOAL, reference="whole_file", repeats=1)


if __name__ == "__main__":
    main()
