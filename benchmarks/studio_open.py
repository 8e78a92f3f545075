"""How fast the studio lists a file of a million turns: its first page, against reading the file whole."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from rollout.records.files import write_trajectories
from rollout.records.trajectory_lists import (
    TrajectoryFilter,
    count_trajectories,
    list_trajectories,
    trajectory_at,
)
from tests.support.played import trajectory, turn

TURNS, EACH, TOKENS, GOAL = 1_000_000, 8, 32, 20.0
PART = 25  # the reference reads this part of the rows, and counts as many times longer


def main() -> None:
    """Writes the file once; opens it as the studio does, and whole."""
    long = replace(
        turn(0), text="word " * TOKENS, completion_ids=(7,) * TOKENS, logprobs=(-0.5,) * TOKENS
    )
    played = [
        trajectory(*(replace(long, index=i) for i in range(EACH)), sample=n) for n in range(250)
    ]
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.parquet", Path(folder) / "large.parquet"
        write_trajectories(small, played)
        rows = pq.read_table(small)
        pq.write_table(
            pa.concat_tables([rows] * (TURNS // EACH // 250)),
            large,
            compression="zstd",
            row_group_size=256,
        )
        began = time.perf_counter()
        number = count_trajectories(large)
        listed = list_trajectories(large, TrajectoryFilter())
        trajectory_at(large, number - 1)
        ours = time.perf_counter() - began
        assert (number, len(listed)) == (TURNS // EACH, 100)
        began = time.perf_counter()
        pq.ParquetFile(large).read_row_groups(list(range(number // 256 // PART))).to_pylist()
        whole = (time.perf_counter() - began) * PART
    print(
        f"first page, count and last trajectory of {TURNS} turns: {ours:.3f} s, whole: {whole:.0f} s"
    )
    print(f"name=studio_open ratio={whole / ours:.2f} goal={GOAL:.2f} reference=whole_file n=1")


if __name__ == "__main__":
    main()
