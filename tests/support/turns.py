"""Turns by hand: rows of names and numbers as the columns that estimators see."""

from collections.abc import Sequence

import torch

from mcore_mas.equations.turns import Turns

COLUMNS = ("policy", "task", "trajectory", "agent", "state", "turn", "round")


def make_turns(rows: Sequence[dict], **columns: list) -> Turns:
    """Return the columns of turns.

    Args:
        rows: turns by column name, each with a score. A column that a row does not have is 0; a turn has one token.
        columns: further columns, such as `values` with a number for each token.
    """
    keys = {}
    for column in COLUMNS:
        values = [row.get(column, 0) for row in rows]
        names = sorted({str(value) for value in values})
        numbers = [value if isinstance(value, int) else names.index(str(value)) for value in values]
        keys[column] = torch.tensor(numbers)
    nodes = [(str(row.get("trajectory", 0)), row.get("node", "")) for row in rows]
    node_numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    parent_numbers = []
    for trajectory, node in nodes:
        parent = (trajectory, node.rpartition(".")[0])
        parent_numbers.append(node_numbers.get(parent, -1) if node else -1)
    keys["node"] = torch.tensor([node_numbers[node] for node in nodes])
    keys["parent"] = torch.tensor(parent_numbers)
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return Turns(
        rewards=torch.tensor([float(row["score"]) for row in rows], dtype=torch.float64),
        keys=keys,
        lengths=torch.tensor([row.get("tokens", 1) for row in rows]),
        **tensors,
    )
