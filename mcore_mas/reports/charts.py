"""A suite's page of charts: the curves of its runs side by side, as SVG in a page that loads and runs nothing."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.study import Metrics, curve, curves_of, read_metrics
from rollout.base.files import write_text

# Okabe and Ito's colours, told apart with any colour vision; a line style and a marker repeat the distinction
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MEAN_OVER = 5  # steps of the running mean that is drawn over the raw values
_ACROSS = 4  # panels beside each other
_FIRST = "reward and accuracy"
_KEY = {"reward/mean": "mean reward of a trajectory", "validation/accuracy": "validation accuracy"}
# by the title of their section; the rest of an agent's metrics is in MLflow and the studio
_GROUPED = {
    "validation accuracy by source": ("validation", "accuracy"),
    "reward by agent": ("agent", "reward_mean"),
    "share of well-formed turns by agent": ("agent", "valid_ratio"),
    "gradient norm by agent": ("agent", "grad_norm"),
    "mean square of advantages by agent": ("agent", "advantage_second_moment"),
    "tokens of a turn by agent": ("agent", "response_length"),
    "mean -log p of sampled tokens by agent": ("agent", "sampled_entropy"),
}

Bands = Mapping[
    str, tuple[pd.Series, pd.Series]
]  # of each run, the interval of its validation accuracy
Panels = dict[str, dict[str, pd.Series]]  # by the panel's title, each run's values by updates done


def write_charts(runs: Mapping[str, Path], out: Path) -> None:
    """Write the page: a section for each metric with a panel for each agent or data source, and a line for each run.

    Metrics that are zero throughout are left out, but for reward and accuracy. `runs` has each run's metrics.jsonl.

    Raises:
        MetricsError: a file is missing or no line of it is a step's metrics.
    """
    metrics = {run: read_metrics(path) for run, path in runs.items()}
    found = sections(metrics)
    # Matplotlib escapes what it writes into an SVG
    bands = _bands(metrics)
    figures = {name: Markup(_figure(panels, list(runs), bands)) for name, panels in found.items()}  # noqa: S704
    write_text(out, render_page("charts.html.jinja", figures=figures, runs=len(runs)))


def key_curves(metrics: Mapping[str, Metrics]) -> str:
    """The first section of the page alone, as SVG: reward and validation accuracy of each run."""
    return _figure(sections(metrics)[_FIRST], list(metrics), _bands(metrics))


def _bands(metrics: Mapping[str, Metrics]) -> Bands:
    return {
        run: (curve(rows, "validation/ci_low"), curve(rows, "validation/ci_high"))
        for run, rows in metrics.items()
    }


def sections(metrics: Mapping[str, Metrics]) -> dict[str, Panels]:
    """The panels of each section: reward and accuracy, validation by data source, each metric of agents."""
    found: dict[str, Panels] = {_FIRST: {}}
    for key, title in _KEY.items():
        curves = {run: curve(rows, key) for run, rows in metrics.items()}
        found[_FIRST][title] = {run: values for run, values in curves.items() if len(values)}
    for section, (group, name) in _GROUPED.items():
        panels: Panels = {}
        for run, rows in metrics.items():
            for one, values in curves_of(rows, group, name).items():
                if values.any():
                    panels.setdefault(one, {})[run] = values
        found |= {section: dict(sorted(panels.items()))} if panels else {}
    return found


def _figure(panels: Panels, runs: Sequence[str], bands: Bands) -> str:
    """The panels as SVG; a run has the same line in all of them, and its band around the validation accuracy."""
    style: Any = {
        "svg.hashsalt": "mcore-mas",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.titlesize": 10,
    }
    style |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
    }
    with rc_context(style):  # the salt makes equal numbers equal pictures
        down = math.ceil(len(panels) / _ACROSS)
        across = min(_ACROSS, len(panels))
        size = (max(5.0, 3.2 * across), 2.5 * down + 0.3 + 0.2 * math.ceil(len(runs) / across))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(down, across, squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, curves, runs, bands if title == _KEY["validation/accuracy"] else {})
            axis.set(title=title.replace("$", r"\$"), xlabel="training step")
            axis.locator_params(axis="x", integer=True)
        lines = {
            label: line
            for axis in figure.axes
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        if lines:
            figure.legend(
                lines.values(),
                lines.keys(),
                loc="outside lower center",
                ncols=across,
                frameon=False,
            )
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def _panel(axis: Axes, curves: Mapping[str, pd.Series], runs: Sequence[str], bands: Bands) -> None:
    for run, values in curves.items():
        number = runs.index(run)
        dense = (
            len(values) == 1 + values.index[-1] - values.index[0]
        )  # a value of every step, as no validation has
        colour = _COLOURS[number % len(_COLOURS)]
        if dense:
            axis.plot(values.index, values, color=colour, alpha=0.3, linewidth=1)
        elif values.index[0] == 0:
            axis.axhline(
                values.iloc[0], color=colour, linestyle=":", linewidth=1
            )  # before training
        if run in bands and len(bands[run][0]):
            low, high = bands[run]
            axis.fill_between(low.index, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.plot(
            values.index,
            values.rolling(_MEAN_OVER, min_periods=1).mean() if dense else values,
            color=colour,
            linestyle=_STYLES[number % len(_STYLES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markevery=max(1, len(values) // 8),
            markersize=4,
            linewidth=1.6,
            label=run.replace("$", r"\$"),
        )
    axis.grid(visible=True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    if not curves:
        axis.text(
            0.5,
            0.5,
            "no such metric was logged",
            ha="center",
            va="center",
            transform=axis.transAxes,
        )
