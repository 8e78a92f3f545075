"""Pictures of a suite's training: reward, validation accuracy and each agent's gradient norm over the steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart with any colour vision; a line style and a marker repeat the distinction
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MEAN_OVER = 5  # steps of the running mean that is drawn over the raw values

Series = list[tuple[int, float]]  # (updates done, value)


class PlotError(ValueError):
    """A run's metrics cannot be drawn: says which file, what is wrong and what to do."""


def plot_curves(runs: Mapping[str, Path], folder: Path) -> None:
    """Write reward.svg, accuracy.svg and grad_norm.svg to `folder`.

    Args:
        runs: the metrics.jsonl of each run.

    Raises:
        PlotError: a file is missing or a line of it is not a step's metrics.
    """
    metrics = {run: _read(path) for run, path in runs.items()}
    folder.mkdir(parents=True, exist_ok=True)
    reward = {run: series(rows, "reward/mean") for run, rows in metrics.items()}
    _figure(folder / "reward.svg", {"": reward}, "mean reward of a trajectory", smooth=True)
    accuracy = {run: series(rows, "validation/accuracy") for run, rows in metrics.items()}
    _figure(folder / "accuracy.svg", {"": accuracy}, "validation accuracy", smooth=False)
    norms = {run: by_agent(rows, "grad_norm") for run, rows in metrics.items()}
    _figure(folder / "grad_norm.svg", norms, "gradient norm of the agent's samples", smooth=True)


def series(rows: Sequence[Mapping[str, float]], key: str) -> Series:
    """(updates done, value) of each step that has `key`; a row's step counts from 0 and is the update it led to."""
    return [(int(row["step"]) + 1, float(row[key])) for row in rows if key in row]


def by_agent(rows: Sequence[Mapping[str, float]], metric: str) -> dict[str, Series]:
    """`series` of agent/<name>/`metric` for each agent that has it, by name."""
    keys = sorted({key for row in rows for key in row if key.startswith("agent/") and key.endswith(f"/{metric}")})
    return {key.split("/")[1]: series(rows, key) for key in keys}


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to `width` - 1 before it."""
    return [sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - width) : end])]


def _read(path: Path) -> list[dict[str, float]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise PlotError(f"{path}: cannot be read ({error.strerror}); train the run again") from error
    except ValueError as error:
        raise PlotError(f"{path}: not JSON lines ({error}); train the run again") from error
    if not rows or any("step" not in row for row in rows):
        raise PlotError(f"{path}: expected one JSON object with a 'step' per line; train the run again")
    return rows


def _figure(path: Path, panels: Mapping[str, Mapping[str, Series]], label: str, *, smooth: bool) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    style: Any = {"svg.hashsalt": "mcore-mas", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):  # the salt makes equal numbers equal files
        width = 7.0 if len(panels) == 1 else 5.0 * len(panels)
        figure, axes = pyplot.subplots(1, len(panels), figsize=(width, 4.0), squeeze=False, layout="constrained")
        for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
            _panel(axis, lines, smooth=smooth)
            axis.set(title=title, xlabel="training step", ylabel=label)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _panel(axis: Axes, lines: Mapping[str, Series], *, smooth: bool) -> None:
    drawn = {name: points for name, points in lines.items() if points}
    for number, (name, points) in enumerate(drawn.items()):
        steps, values = [step for step, _ in points], [value for _, value in points]
        colour = _COLOURS[number % len(_COLOURS)]
        if smooth:
            axis.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            values = running_mean(values, _MEAN_OVER)
        axis.plot(
            steps,
            values,
            color=colour,
            linestyle=_STYLES[number % len(_STYLES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markevery=max(1, len(points) // 8),
            markersize=5,
            linewidth=2,
            label=name,
        )
    axis.grid(visible=True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    if drawn:
        axis.legend(frameon=False)
    else:
        axis.text(0.5, 0.5, "no such metric was logged", ha="center", va="center", transform=axis.transAxes)
