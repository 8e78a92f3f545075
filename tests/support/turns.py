"""Turns by hand: rows of names and numbers as the columns that estimators see."""

from collections.abc import Sequence

import torch

from mcore_mas.equations.turns import Turns

COLUMNS = ("policy", "task", "trajectory", "agent", "state", "turn", "round")


def make_turns(rows: Sequence[dict], **columns: list) -> Turns:
    """Turns from rows with a score each; what a row does not name is 0 (one token, one task, ...)."""
    keys = {}
    for column in COLUMNS:
        values = [row.get(column, 0) for row in rows]
        names = sorted({str(value) for value in values})
        number = {str(v): v if isinstance(v, int) else names.index(str(v)) for v in values}
        keys[column] = torch.tensor([number[str(value)] for value in values])
    nodes = [(str(row.get("trajectory", 0)), row.get("node", "")) for row in rows]
    numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    parents = [(t, node.rpartition(".")[0]) if node else None for t, node in nodes]
    keys["node"] = torch.tensor([numbers[node] for node in nodes])
    keys["parent"] = torch.tensor([numbers.get(parent, -1) if parent else -1 for parent in parents])
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return Turns(
        scores=torch.tensor([float(row["score"]) for row in rows], dtype=torch.float64),
        keys=keys,
        lengths=torch.tensor([row.get("tokens", 1) for row in rows]),
        **given,
    )
