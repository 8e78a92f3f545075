"""Commands that show recorded trajectories and their credit: show, explain, replay."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from mcore_mas.cli.arguments import (
    UsageError,
    check_readable,
    output_file,
    output_path,
    run_names,
)
from rollout.base.hints import nearest_hint
from rollout.base.text import escape_text

trajectory_commands = typer.Typer()
_TRAJECTORIES_PANEL = "Look at trajectories"


def trajectory_file(name: Path) -> Path:
    """Return the file of a run's newest step; return the path of other trajectories unchanged.

    Args:
        name: file or folder of trajectories, a run's folder, or a run's name in results/.

    Raises:
        UsageError: there is no such file or run, or the run has no trajectories.
        FolderError: the run is private to another user.
    """
    run_folders = [name, "results" / name]
    steps: list[Path] = []
    for folder in run_folders:
        steps += sorted(folder.glob("train/trajectories/*.parquet"))
    if steps:
        return steps[-1]

    check_readable(name)
    # The folder of an evaluation, or train/trajectories of a run, is named itself.
    holds_trajectories = any(name.glob("*.parquet"))
    if any(folder.is_dir() for folder in run_folders) and not holds_trajectories:
        raise UsageError(
            f"{name}: no trajectories here; a run that was not trained has none "
            "(mcore-mas run SUITE)"
        )
    if not name.exists():
        raise UsageError(
            f"{name}: no such file or run; expected a parquet file of trajectories, or a run"
            f"{nearest_hint(str(name), run_names())}"
        )
    return name


_TrajectoryFile = Annotated[
    Path,
    typer.Argument(
        help=(
            "A file of trajectories, in train/trajectories or evaluation of a run; or a run, for "
            "its newest step."
        ),
        callback=trajectory_file,
        autocompletion=run_names,
    ),
]


@trajectory_commands.command("show", rich_help_panel=_TRAJECTORIES_PANEL)
def show_trajectory(
    file: _TrajectoryFile,
    index: Annotated[
        int | None, typer.Option(help="Show the trajectory with this number in the list, from 1.")
    ] = None,
    trajectory_id: Annotated[
        str | None, typer.Option("--id", help="Show the trajectory with this id.")
    ] = None,
    branches: Annotated[
        bool,
        typer.Option(
            "--branches", help="Show also the dropped branches of a tree, and alternatives."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page about one trajectory, by default the first, to this file instead.",
            callback=output_file,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Draw the game of the trajectory into this .svg file instead, or those of all "
                "trajectories into a folder."
            ),
            callback=output_path,
        ),
    ] = None,
) -> None:
    """List the trajectories of a file, or print one: messages, tools, rewards and advantages."""
    from mcore_mas.reports.trajectory_files import find_agent_tools, select_trajectory
    from mcore_mas.reports.trajectory_terminal import print_trajectories, print_trajectory
    from mcore_mas.reports.turn_advantages import find_turn_advantages
    from rollout.base.files import write_text
    from rollout.records.files import read_trajectories

    position = 0 if index is None else index - 1
    if picture is not None:
        from mcore_mas.reports.game_pictures import write_game_pictures

        for drawing in write_game_pictures(
            file, picture, index=position, trajectory_id=trajectory_id
        ):
            print(drawing)
        return

    trajectories = read_trajectories(file)
    advantages = find_turn_advantages(file, trajectories)
    console = Console(highlight=False)
    shows_one = index is not None or trajectory_id is not None or html is not None
    if len(trajectories) > 1 and not shows_one:
        with _paged(console):
            print_trajectories(trajectories, console, advantages, file)
        return

    chosen = select_trajectory(file, trajectories, position, trajectory_id)
    if html is not None:
        from mcore_mas.reports.task_texts import find_task_texts
        from mcore_mas.reports.trajectory_page import trajectory_page

        task = find_task_texts(file, [chosen.task_id]).get(chosen.task_id)
        write_text(html, trajectory_page(chosen, advantages, task=task))
        print(html)
        return
    with _paged(console):
        print_trajectory(
            chosen, console, advantages, branches=branches, agent_tools=find_agent_tools(file)
        )


def _paged(console: Console) -> AbstractContextManager[object]:
    """Return a pager if the output is a terminal, else a context that does nothing."""
    return console.pager() if console.is_terminal else nullcontext()


@trajectory_commands.command("explain", rich_help_panel=_TRAJECTORIES_PANEL)
def explain_credit(
    file: _TrajectoryFile,
    advantage: Annotated[
        str | None,
        typer.Option(
            help=(
                "Advantage estimator (`mcore-mas list estimators`); by default those of the run's "
                "config."
            )
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Option of the estimator as KEY=VALUE; may be repeated."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Print the task with this id only.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of tasks to print.")] = 3,
) -> None:
    """Print the advantage of every turn, and the turns with which it was compared.

    Without --advantage, the estimators are those that the run was trained with.
    """
    from mcore_mas.reports.credit_terminal import print_credit

    for item in option or []:
        key, equals, _ = item.partition("=")
        if not key or not equals:
            raise UsageError(f"--option {item}: expected key=value, for example --option lone=raw")
    options: dict[str, Any] = {}
    if option:
        from omegaconf import OmegaConf

        options = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(option)))
    console = Console(highlight=False)
    with _paged(console):
        print_credit(file, advantage, options, task, limit, console)


@trajectory_commands.command("replay", rich_help_panel=_TRAJECTORIES_PANEL)
def replay_trajectory(
    file: Annotated[
        Path,
        typer.Argument(
            help=(
                "File of a quarantined trajectory: in train/quarantine of a run, or in the folder "
                "NAME-quarantine of an evaluation."
            )
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            help="Resolved config; by default that of the run in whose folder the file is."
        ),
    ] = None,
) -> None:
    """Replay a quarantined trajectory, which failed by a defect in code, from its recorded replies.

    The exit status is 1 if it fails again.
    """
    from mcore_mas.evaluation.replay import config_of_quarantined, replay
    from mcore_mas.reports.trajectory_terminal import print_trajectory

    trajectory, traceback = replay(file, config or config_of_quarantined(file))
    console = Console(highlight=False)
    print_trajectory(trajectory, console, {})
    console.print(Text(escape_text("\n".join(traceback))), soft_wrap=True)
    raise typer.Exit(1 if trajectory.error else 0)
