"""Commands on the runs that are there: a list of them, two side by side, and a conversation with a team."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_mas.rollout.base.files import FolderError
from mcore_mas.rollout.base.text import shown_line

run_commands = typer.Typer()
_PANEL = "Look at runs"
_Folder = Annotated[Path, typer.Argument(help="A run's folder: results/{run}.")]


@run_commands.command("ls", rich_help_panel=_PANEL)
def list_runs(
    results: Annotated[Path, typer.Argument(help="The folder of the runs.")] = Path("results"),
) -> None:
    """List the runs of a folder: steps taken, last reward and validation, scores before training and after it."""
    from mcore_mas.reports.runs import run_states

    states = run_states(results)
    names = list(dict.fromkeys(["base", "trained", *(name for state in states for name in state.scores)]))
    table = Table("run", "steps", "reward", "validation", *names, show_edge=False)
    for state in states:
        numbers = (state.reward, state.accuracy, *(state.scores.get(name) for name in names))
        cells = ("" if number is None else f"{number:.3f}" for number in numbers)
        table.add_row(Text(shown_line(state.run)), f"{state.steps}/{state.of}{' done' if state.done else ''}", *cells)
    Console(highlight=False).print(table)


@run_commands.command("compare", rich_help_panel=_PANEL)
def compare_runs(first: _Folder, second: _Folder) -> None:
    """Print which settings of two runs differ, and their scores on the tasks that both have, paired by task."""
    from mcore_mas.reports.runs import config_differences, score_differences

    console = Console(highlight=False)
    settings = Table("setting", shown_line(first.name), shown_line(second.name), show_edge=False)
    for key, values in config_differences(first, second).items():
        settings.add_row(Text(shown_line(key)), *(Text(shown_line(str(value))) for value in values))
    console.print(settings)
    scores = Table("evaluation", "metric", "first", "second", "difference", "95 % interval", "tasks", show_edge=False)
    for row in score_differences(first, second):
        numbers = (f"{100 * row.first:.1f}", f"{100 * row.second:.1f}", f"{100 * (row.second - row.first):+.1f}")
        interval = f"[{100 * row.low:+.1f}, {100 * row.high:+.1f}]"
        scores.add_row(row.state, row.metric, *numbers, Text(interval), str(row.tasks))
    console.print(scores)


@run_commands.command("track", rich_help_panel=_PANEL)
def track_results(results: Annotated[Path, typer.Argument(help="The folder of the runs.")] = Path("results")) -> None:
    """Send MLflow what it lacks of a folder's finished runs: steps, evaluations, costs, tables and charts."""
    from mcore_mas.training.publish import publish

    if not results.is_dir():
        raise FolderError(f"{results}: no such folder; name the folder of the runs")
    runs = [file.parent.name for file in sorted(results.glob("*/config.yaml"))]
    said: list[str] = []
    page = publish(results, runs, [file.stem for file in sorted(results.glob("tables/*.csv"))], said.append)
    print("\n".join([*said, *([page] if page else [])]))
    if said:
        raise typer.Exit(1)


@run_commands.command("chat", rich_help_panel=_PANEL)
def chat_with_team(
    run: _Folder,
    state: Annotated[str, typer.Option(help="base or trained.")] = "trained",
) -> None:
    """Talk to a run's team in the terminal: each line is a task that it plays; an empty line or Ctrl-D ends."""
    from mcore_mas.config.run import RunConfig
    from mcore_mas.reports.terminal import print_trajectory
    from mcore_mas.training.evaluate import converse

    console = Console(highlight=False)
    for trajectory in converse(RunConfig.load(run / "config.yaml"), state, _lines()):
        print_trajectory(trajectory, console, {})


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("you: ")
        except EOFError:
            return
        if not line.strip():
            return
        yield line
