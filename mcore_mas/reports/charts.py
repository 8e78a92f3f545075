"""Page of charts of a suite: the curves of its runs, as SVG in an HTML page without scripts."""

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mcore_mas.reports.curves import curve, curves_of
from mcore_mas.reports.page_templates import render_page
from mcore_mas.reports.step_metrics import Metrics, MetricsError, read_metrics
from rollout.base.files import write_text

# Colours of Okabe and Ito, which people with any colour vision can distinguish. Line styles and
# markers repeat the distinction.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINE_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_RUNNING_MEAN_STEPS = 5  # number of steps over which the thick line is a running mean
_MAX_COLUMNS = 4  # panels in a row

_FIRST_SECTION = "reward and accuracy"
# Titles of the panels of the first section, by metric.
_FIRST_PANELS = {
    "reward/mean": "mean reward of a turn",
    "outcome/mean": "mean outcome of a trajectory",
    "validation/accuracy": "validation accuracy",
}
_GAME_SECTION = "strategy in the game"
# Titles of the panels of a team that plays a zero-sum game, by metric.
_GAME_PANELS = {
    "validation/exploitability": "exploitability, in points per game",
    "validation/value": "expected payoff of the first player",
    "validation/legal_probability": "probability of a legal reply",
}
# Group and name of a metric with one panel for each agent or data source, by section. Other metrics
# of agents are in MLflow and in the studio.
_GROUPED_SECTIONS = {
    "validation accuracy by source": ("validation", "accuracy"),
    "reward by agent": ("agent", "reward_mean"),
    "share of well-formed turns by agent": ("agent", "valid_ratio"),
    "gradient norm by agent": ("agent", "grad_norm"),
    "share of the policy's gradient by agent": ("agent", "gradient_share"),
    "mean square of advantages by agent": ("agent", "advantage_second_moment"),
    "tokens of a turn by agent": ("agent", "response_length"),
    "mean -log p of sampled tokens by agent": ("agent", "sampled_entropy"),
}

_STYLE: Any = {
    "svg.hashsalt": "mcore-mas",  # equal numbers give equal pictures
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
}

# By run, the lower and the upper end of the interval of its validation accuracy.
Bands = Mapping[str, tuple[pd.Series, pd.Series]]
# By title of a panel and by run, the values by the number of the step, as `curve` returns them.
Panels = dict[str, dict[str, pd.Series]]


def write_charts(runs: Mapping[str, Path], out: Path) -> None:
    """Write the page of charts, in which every panel has a line for each run.

    The first section has a panel for the reward, the outcome and the validation accuracy. A second
    one, with panels of a zero-sum game, is left out if no run has played one. Every other section is
    about one metric, and has a panel for each agent or data source; curves that are zero in all
    steps are left out.

    A run whose metrics cannot be read is left out, and the page says why.

    Args:
        runs: the metrics.jsonl of each run.
        out: the HTML page.

    Raises:
        MetricsError: no run has metrics that can be read.
    """
    metrics: dict[str, Metrics] = {}
    problems: list[str] = []
    for run, path in runs.items():
        try:
            metrics[run] = read_metrics(path)
        except MetricsError as error:
            problems.append(str(error))
    if problems and not metrics:
        raise MetricsError(problems[0])

    bands = _accuracy_bands(metrics)
    figures = {
        # Matplotlib escapes the text that it writes into an SVG.
        section: Markup(_figure(panels, list(metrics), bands))  # noqa: S704
        for section, panels in sections(metrics).items()
    }
    page = render_page("charts.html.jinja", figures=figures, runs=len(metrics), problems=problems)
    write_text(out, page)


def key_curves(metrics: Mapping[str, Metrics]) -> str:
    """Return the first section of the page as SVG: reward, outcome and validation accuracy of each run."""
    panels = sections(metrics)[_FIRST_SECTION]
    return _figure(panels, list(metrics), _accuracy_bands(metrics))


def picture_of_key_curves(runs: Mapping[str, Path]) -> str:
    """Return reward, outcome and validation accuracy of each run as the content of an SVG file.

    Runs whose metrics cannot be read are left out.

    Args:
        runs: the metrics.jsonl of each run.

    Returns:
        "" if no run has metrics.
    """
    metrics: dict[str, Metrics] = {}
    for run, path in runs.items():
        with suppress(MetricsError):
            metrics[run] = read_metrics(path)
    if not metrics:
        return ""
    # The root element declares the namespace of SVG, so the text is a complete file without an XML
    # declaration.
    return key_curves(metrics).strip()


def sections(metrics: Mapping[str, Metrics]) -> dict[str, Panels]:
    """Return the panels of each section of the page.

    Sections without a curve are left out, except for the first one. A metric that no run has still
    gets its panel, without curves, in the first section and in the section of games.
    """
    panels_by_section = {_FIRST_SECTION: _panels_of(metrics, _FIRST_PANELS)}
    game_panels = _panels_of(metrics, _GAME_PANELS)
    if any(game_panels.values()):
        panels_by_section[_GAME_SECTION] = game_panels
    for section, (group, name) in _GROUPED_SECTIONS.items():
        panels = _panels_by_member(metrics, group, name)
        if panels:
            panels_by_section[section] = panels
    return panels_by_section


def _panels_of(metrics: Mapping[str, Metrics], titles: Mapping[str, str]) -> Panels:
    """Return a panel for each metric in `titles`, with the curves of the runs that have the metric."""
    panels: Panels = {}
    for key, title in titles.items():
        curves = {run: curve(rows, key) for run, rows in metrics.items()}
        panels[title] = {run: values for run, values in curves.items() if len(values)}
    return panels


def _panels_by_member(metrics: Mapping[str, Metrics], group: str, name: str) -> Panels:
    """Return a panel of a metric for each agent or data source, without curves that are always zero."""
    panels: Panels = {}
    for run, rows in metrics.items():
        for member, values in curves_of(rows, group, name).items():
            if values.any():
                panels.setdefault(member, {})[run] = values
    return dict(sorted(panels.items()))


def _accuracy_bands(metrics: Mapping[str, Metrics]) -> Bands:
    return {
        run: (curve(rows, "validation/ci_low"), curve(rows, "validation/ci_high"))
        for run, rows in metrics.items()
    }


def _figure(panels: Panels, runs: Sequence[str], bands: Bands) -> str:
    """Return the panels and a common legend as SVG.

    A run has the same colour, line style and marker in all panels. Bands are drawn around the
    validation accuracy.
    """
    with rc_context(_STYLE):
        rows = math.ceil(len(panels) / _MAX_COLUMNS)
        columns = min(_MAX_COLUMNS, len(panels))
        # In inches. Each line of the legend names as many runs as there are columns.
        width = max(5.0, 3.2 * columns)
        height = 2.5 * rows + 0.3 + 0.2 * math.ceil(len(runs) / columns)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for unused in axes.flat[len(panels) :]:
            unused.remove()

        for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
            has_bands = title == _FIRST_PANELS["validation/accuracy"]
            _draw_panel(axis, curves, runs, bands if has_bands else {})
            axis.set(title=_literal(title), xlabel="training step")
            axis.locator_params(axis="x", integer=True)

        _draw_legend(figure, columns)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})

    # The SVG is put into a page, so its XML declaration and document type are dropped.
    return text.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def _draw_legend(figure: Figure, columns: int) -> None:
    lines = {}
    for axis in figure.axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            lines[label] = line
    if lines:
        figure.legend(
            lines.values(), lines.keys(), loc="outside lower center", ncols=columns, frameon=False
        )


def _draw_panel(
    axis: Axes, curves: Mapping[str, pd.Series], runs: Sequence[str], bands: Bands
) -> None:
    for run, values in curves.items():
        _draw_curve(axis, values, bands.get(run), label=_literal(run), run_index=runs.index(run))

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


def _draw_curve(
    axis: Axes,
    values: pd.Series,
    band: tuple[pd.Series, pd.Series] | None,
    *,
    label: str,
    run_index: int,
) -> None:
    """Draw the curve of a run.

    A metric with a value in every step is a thin line, with its running mean as the thick line. A
    metric without a value in some steps, such as a validation's, is a thick line through its values.
    If such a metric was measured before training, a dotted line at that value crosses the panel.
    """
    colour = _COLOURS[run_index % len(_COLOURS)]
    thick_line = values
    steps = 1 + values.index[-1] - values.index[0]
    if len(values) == steps:
        axis.plot(values.index, values, color=colour, alpha=0.3, linewidth=1)
        thick_line = values.rolling(_RUNNING_MEAN_STEPS, min_periods=1).mean()
    elif values.index[0] == 0:
        before_training = values.iloc[0]
        axis.axhline(before_training, color=colour, linestyle=":", linewidth=1)

    if band is not None and len(band[0]):
        low, high = band
        axis.fill_between(low.index, low, high, color=colour, alpha=0.12, linewidth=0)
    axis.plot(
        values.index,
        thick_line,
        color=colour,
        linestyle=_LINE_STYLES[run_index % len(_LINE_STYLES)],
        marker=_MARKERS[run_index % len(_MARKERS)],
        markevery=max(1, len(values) // 8),
        markersize=4,
        linewidth=1.6,
        label=label,
    )


def _literal(text: str) -> str:
    """Escape the dollar signs of a text, between which Matplotlib would set a formula."""
    return text.replace("$", r"\$")
