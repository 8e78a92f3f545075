"""Cross-play: scores of a team by the models that play two of its agents, as a matrix and a heat map."""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rollout.base.files import write_text
from rollout.base.json_files import read_record
from rollout.base.ownership import FolderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Scores of an evaluation, in which one pair of models has played.

    Attributes:
        file: file of the evaluation.
        scores: score of every trajectory that has one.
        value: avg@k, the mean over tasks of their mean scores, as a fraction of 1.
        ci_low, ci_high: ends of its 95 % interval over tasks.
    """

    file: Path
    scores: tuple[float, ...] = ()
    value: float
    ci_low: float
    ci_high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} [{100 * self.ci_low:.1f}, {100 * self.ci_high:.1f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossPlayMatrix:
    """Scores of all pairs of models that have been evaluated together.

    Attributes:
        row_agent: agent that the models in the rows play.
        column_agent: agent that the models in the columns play.
        pairings: scores by the models of the row and of the column.
    """

    row_agent: str
    column_agent: str
    pairings: Mapping[tuple[str, str], Pairing]

    @property
    def rows(self) -> list[str]:
        """Models that have played the row's agent."""
        return sorted({row for row, _ in self.pairings})

    @property
    def columns(self) -> list[str]:
        """Models that have played the column's agent."""
        return sorted({column for _, column in self.pairings})


def read_cross_play(results: Path, row_agent: str, column_agent: str) -> CrossPlayMatrix:
    """Read the scores of every pair of models from the evaluations of all runs in a results folder.

    Evaluations of teams without one of the two agents are left out, and so are those without a score, and
    those of older versions, which did not record the players.

    Raises:
        FolderError: a file is damaged, two evaluations are of the same pair, or none
            has both agents.
    """
    pairings: dict[tuple[str, str], Pairing] = {}
    for file in sorted(results.glob("*/evaluation/*.json")):
        evaluation = read_record(file, "rows")
        # The name of the model that plays each agent.
        players: Mapping[str, str] = evaluation.get("players", {})
        if not {row_agent, column_agent} <= players.keys() or not evaluation["rows"]:
            continue
        pair = players[row_agent], players[column_agent]
        if pair in pairings:
            raise FolderError(
                f"{file}: {row_agent} is {pair[0]} and {column_agent} is {pair[1]} as in "
                f"{pairings[pair].file}; name agents in which the evaluations differ, or remove one"
            )
        pairings[pair] = _pairing(file, evaluation["rows"], evaluation.get("tasks", []))
    if not pairings:
        raise FolderError(
            f"{results}: no evaluation of a team with agents {row_agent} and {column_agent}; make some "
            "with `mcore-mas evaluate RUN --state NAME --seat AGENT=WHO`"
        )
    return CrossPlayMatrix(row_agent=row_agent, column_agent=column_agent, pairings=pairings)


def _pairing(file: Path, rows: list[dict[str, Any]], tasks: list[dict[str, Any]]) -> Pairing:
    """Return the scores of an evaluation.

    Args:
        file: file of the evaluation.
        rows: means of metrics; those over all data sources follow those of single ones.
        tasks: tasks with the scores of their trajectories; None for a score that is not known.
    """
    average = [row for row in rows if row["metric"].startswith("avg@")][-1]
    scores: list[float] = []
    for task in tasks:
        scores += [score for score in task["scores"] if score is not None]
    return Pairing(
        file=file,
        scores=tuple(scores),
        value=average["value"],
        ci_low=average["ci_low"],
        ci_high=average["ci_high"],
    )


def draw_cross_play(cross_play: CrossPlayMatrix, out: Path) -> None:
    """Draw the matrix as a heat map, and write it as SVG to `out`; pairs without scores stay white."""
    rows = cross_play.rows
    columns = cross_play.columns
    values = [[math.nan] * len(columns) for _ in rows]
    for (row, column), pairing in cross_play.pairings.items():
        values[rows.index(row)][columns.index(column)] = pairing.value
    lowest = min(0.0, *(pairing.value for pairing in cross_play.pairings.values()))

    figure = Figure(figsize=(2.5 + 1.1 * len(columns), 1.5 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, vmin=lowest, vmax=1.0, cmap="viridis")
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(cross_play.column_agent)
    axes.set_ylabel(cross_play.row_agent)
    for (row, column), pairing in cross_play.pairings.items():
        axes.text(
            columns.index(column),
            rows.index(row),
            f"{100 * pairing.value:.1f}",
            ha="center",
            va="center",
            color="black" if pairing.value > 0.6 else "white",  # viridis is bright at its upper end
        )
    figure.colorbar(image, ax=axes, label="mean score")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(out, text.getvalue())
