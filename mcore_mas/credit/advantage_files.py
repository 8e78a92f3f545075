"""Files of the mean advantage of each turn of a training's steps; they are read without torch."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rollout.base.files import atomic_path
from rollout.base.parquet import open_parquet

# Mean advantage of the tokens of each turn, by trajectory, node and turn number.
TurnAdvantages = Mapping[tuple[str, str, int], float]

_SCHEMA = pa.schema(
    [
        ("trajectory", pa.string()),
        ("node", pa.string()),
        ("turn", pa.int64()),
        ("advantage", pa.float64()),
    ]
)


def advantage_path(trajectory_file: Path) -> Path:
    """Return the file of the advantages of a step: in the folder advantages/ beside trajectories/."""
    return trajectory_file.parent.with_name("advantages") / trajectory_file.name


def write_advantages(path: Path, advantages: TurnAdvantages) -> None:
    """Write the advantages of a step as parquet; a failure leaves no partial file."""
    rows = [
        {"trajectory": trajectory, "node": node, "turn": turn, "advantage": advantage}
        for (trajectory, node, turn), advantage in advantages.items()
    ]
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), temporary)


def read_advantages(path: Path) -> TurnAdvantages:
    """Read the advantages that `write_advantages` wrote."""
    with open_parquet(path) as file:
        rows = file.read().to_pylist()
    return {(row["trajectory"], row["node"], row["turn"]): row["advantage"] for row in rows}
