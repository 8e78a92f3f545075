"""Advantages of the turns in a file of trajectories, recorded by the training or computed again."""

from collections.abc import Sequence
from pathlib import Path

from mcore_mas.credit.advantage_files import TurnAdvantages, advantage_path, read_advantages
from rollout.records.trajectory import Trajectory


def find_turn_advantages(file: Path, trajectories: Sequence[Trajectory]) -> TurnAdvantages:
    """Return the advantages that the training gave the turns of a file.

    If no advantages are recorded, they are computed by `compute_turn_credit`. This is so if the step
    has not assigned credit yet, or if an older version made the run. The file of an evaluation has no
    rewards, so the result is {}.
    """
    advantage_file = advantage_path(file)
    if advantage_file.is_file():
        return read_advantages(advantage_file)

    # The import of torch takes longer than the rest of a command.
    from mcore_mas.reports.turn_credit import compute_turn_credit

    return compute_turn_credit(file, trajectories)[0]
