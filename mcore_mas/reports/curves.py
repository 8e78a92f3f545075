"""Training curves from metrics.jsonl: figures over the steps of a suite's runs, and estimators compared over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import pandas as pd

from mcore_mas.equations.statistics import SpikeMonitor, mean_interval
from mcore_mas.reports.tables import markdown_table
from rollout.base.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart with any colour vision; a line style and a marker repeat the distinction
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MEAN_OVER = 5  # steps of the running mean that is drawn over the raw values
SPIKE_FACTOR = 3.0  # times the running median; runs of some dozen steps on a tiny model have no larger ones to count
_STUDY_NOTE = (
    "Means over seeds with 95 % intervals; differences are paired by seed. A spike is an agent's gradient "
    f"norm above {SPIKE_FACTOR:g} times its running median, or not finite."
)

Metrics = Sequence[Mapping[str, float]]  # of a run, one step after the other; what a step did not measure is absent


class MetricsError(ValueError):
    """Runs cannot be drawn or compared: says which, what is wrong and what to do."""


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run's steps, in order.

    Raises:
        MetricsError: the file is missing, or a line of it is not a step's metrics.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise MetricsError(f"{path}: cannot be read ({error.strerror}); train the run again") from error
    except ValueError as error:
        raise MetricsError(f"{path}: not JSON lines ({error}); train the run again") from error
    if not rows or any("step" not in row for row in rows):
        raise MetricsError(f"{path}: expected one JSON object with a 'step' per line; train the run again")
    return rows


def curve(metrics: Metrics, key: str) -> pd.Series:
    """The metric `key` by updates done, of each step that has it; a step counts from 0 and is the update it led to."""
    return pd.Series({int(row["step"]) + 1: float(row[key]) for row in metrics if key in row}, dtype=float)


def agent_curves(metrics: Metrics, name: str) -> dict[str, pd.Series]:
    """`curve` of agent/<agent>/`name` for each agent that has it."""
    agents = {key.split("/")[1] for row in metrics for key in row if key.startswith("agent/") and key.endswith(name)}
    return {agent: curve(metrics, f"agent/{agent}/{name}") for agent in sorted(agents)}


def plot_curves(runs: Mapping[str, Path], folder: Path) -> None:
    """Write reward.svg, accuracy.svg and grad_norm.svg to `folder`.

    Args:
        runs: the metrics.jsonl of each run.

    Raises:
        MetricsError: a file is missing or a line of it is not a step's metrics.
    """
    metrics = {run: read_metrics(path) for run, path in runs.items()}
    folder.mkdir(parents=True, exist_ok=True)
    reward = {run: curve(rows, "reward/mean") for run, rows in metrics.items()}
    _figure(folder / "reward.svg", {"": reward}, "mean reward of a trajectory", smooth=True)
    accuracy = {run: curve(rows, "validation/accuracy") for run, rows in metrics.items()}
    _figure(folder / "accuracy.svg", {"": accuracy}, "validation accuracy", smooth=False)
    norms = {run: agent_curves(rows, "grad_norm") for run, rows in metrics.items()}
    _figure(folder / "grad_norm.svg", norms, "gradient norm of the agent's samples", smooth=True)


def _figure(path: Path, panels: Mapping[str, Mapping[str, pd.Series]], label: str, *, smooth: bool) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    style: Any = {"svg.hashsalt": "mcore-mas", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):  # the salt makes equal numbers equal files
        width = 7.0 if len(panels) == 1 else 5.0 * len(panels)
        figure, axes = pyplot.subplots(1, len(panels), figsize=(width, 4.0), squeeze=False, layout="constrained")
        for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
            _panel(axis, {name: values for name, values in curves.items() if len(values)}, smooth=smooth)
            axis.set(title=title, xlabel="training step", ylabel=label)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _panel(axis: Axes, curves: Mapping[str, pd.Series], *, smooth: bool) -> None:
    for number, (name, values) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        if smooth:
            axis.plot(values.index, values, color=colour, alpha=0.3, linewidth=1)
        axis.plot(
            values.index,
            values.rolling(_MEAN_OVER, min_periods=1).mean() if smooth else values,
            color=colour,
            linestyle=_STYLES[number % len(_STYLES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markevery=max(1, len(values) // 8),
            markersize=5,
            linewidth=2,
            label=name,
        )
    axis.grid(visible=True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    if curves:
        axis.legend(frameon=False)
    else:
        axis.text(0.5, 0.5, "no such metric was logged", ha="center", va="center", transform=axis.transAxes)


def study_stability(runs: Mapping[str, Mapping[str, Any]], outputs: Sequence[Path]) -> None:
    """Compare the estimators of finished `runs` (resolved configs by name), and write .csv or .md by suffix.

    Raises:
        MetricsError: a team was trained with one estimator only, its estimators have other seeds, or a run has not
            finished.
    """
    teams: dict[str, list[dict[str, Any]]] = {}
    for name, config in runs.items():
        arm = {"advantage": config["advantage"]["name"], "seed": config["seed"]}
        teams.setdefault(config["orchestra"]["name"], []).append(arm | _measured(Path(config["results"]) / name))
    findings = pd.DataFrame(finding for team, own in teams.items() for finding in _compared(team, own))
    writers: dict[str, Callable[[pd.DataFrame], str]] = {
        ".csv": lambda table: str(table.to_csv(index=False, lineterminator="\n")),
        ".md": _markdown_study,
    }
    for path in outputs:
        write_text(path, writers[path.suffix](findings))


def stability(metrics: Metrics) -> dict[str, float]:
    """What the steps of a run say of its training, by measure.

    `spikes`: gradient norms of agents above `SPIKE_FACTOR` times their running median, or not finite.
    `largest norm / median`: the largest over all agents. `A² <agent>`: the mean second moment of the agent's
    advantages, which under a common (μ, σ) grows by (σ_k² + (μ_k - μ)²) / σ²   Dr. MAS, arXiv 2602.08847, Lemma 4.2.
    """
    found = {"spikes": 0.0, "largest norm / median": 0.0}
    norms = agent_curves(metrics, "grad_norm")
    for agent, moments in agent_curves(metrics, "advantage_second_moment").items():
        monitor = SpikeMonitor(SPIKE_FACTOR)
        own = norms.get(agent, pd.Series(dtype=float)).tolist()
        found["spikes"] += sum(monitor.observe(norm) for norm in own)
        finite = [norm for norm in own if math.isfinite(norm)]
        if finite:
            found["largest norm / median"] = max(found["largest norm / median"], max(finite) / median(finite))
        found[f"A² {agent}"] = fmean(moments)
    return found


def _measured(folder: Path) -> dict[str, float]:
    metrics = [row for row in read_metrics(folder / "train" / "metrics.jsonl") if row["step"] >= 0]
    base, trained = (_accuracy(folder / "evaluation" / f"{state}.json") for state in ("base", "trained"))
    return {"accuracy before": base, "accuracy": trained} | stability(metrics)


def _accuracy(path: Path) -> float:
    if not path.is_file():
        raise MetricsError(f"{path}: no such file; evaluate the run first")
    tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    return fmean(value for task in tasks for name, value in task["metrics"].items() if name.startswith("avg@"))


def _compared(team: str, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each measure of each estimator, and of its difference to the first, over seeds."""
    measures = dict.fromkeys((key for run in runs for key in run if key not in ("advantage", "seed")), 0.0)
    arms: dict[str, pd.DataFrame] = {
        str(advantage): own.set_index("seed").sort_index()
        for advantage, own in pd.DataFrame([{**measures, **run} for run in runs]).groupby("advantage", sort=False)
    }
    first, *others = arms
    if not others:
        raise MetricsError(f"team '{team}' was trained with '{first}' only; a study compares at least two estimators")
    for other in others:
        if list(arms[other].index) != list(arms[first].index):
            raise MetricsError(
                f"team '{team}': '{first}' has seeds {list(arms[first].index)}, '{other}' {list(arms[other].index)}; "
                "expected the same"
            )
    for measure in measures:
        values = {name: arm[measure] for name, arm in arms.items()}
        values |= {f"{other} - {first}": values[other] - values[first] for other in others}
        for name, own in values.items():
            low, high = mean_interval(own.tolist(), f"{team}/{name}/{measure}")
            found = {"value": fmean(own), "ci_low": low, "ci_high": high, "seeds": len(own)}
            yield {"team": team, "advantage": name, "measure": measure} | found


def _markdown_study(findings: pd.DataFrame) -> str:
    """A table per team: a line per measure, a column per estimator and per difference, intervals in brackets."""
    parts = []
    for team, own in findings.groupby("team", sort=False):
        cells: dict[str, dict[str, str]] = {}
        for row in own.to_dict("records"):
            cell = f"{row['value']:.3g} [{row['ci_low']:.3g}, {row['ci_high']:.3g}]"
            cells.setdefault(row["measure"], {"measure": row["measure"]})[row["advantage"]] = cell
        table = markdown_table(pd.DataFrame(cells.values()))
        parts.append(f"**{team}**, {own['seeds'].iloc[0]} seeds\n\n{table}")
    return "\n\n".join([*parts, _STUDY_NOTE]) + "\n"
