"""Commands that check data and results: leaks between splits, and reproduction bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mcore_mas.cli.arguments import UsageError, run_config_file, run_names
from rollout.base.text import escape_line

if TYPE_CHECKING:  # imported when a command runs, so that --help is fast
    from rollout.records.trajectory import Task
    from rollout.tasks.leaks import Leak, Match

data_commands = typer.Typer()
DATA_PANEL = "Look at data and names"

_SHOWN_CHARS = 60  # length of a shown prompt
_LEAK_NAMES = {
    "id": "the same id",
    "text": "the same text",
    "similar": "similar text",
    "tests": "scored on tests that are shown",
}


@data_commands.command("verify", rich_help_panel=DATA_PANEL)
def verify_table(
    bundle: Annotated[Path, typer.Argument(help="results/tables/{table}.bundle.zip.")],
) -> None:
    """Verify a reproduction bundle: its digests, and that its scores give its table."""
    from mcore_mas.pipeline.bundle import verify_bundle

    print(verify_bundle(bundle))


@data_commands.command("leaks", rich_help_panel=DATA_PANEL)
def show_leaks(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A run, whose splits are compared; or data files that should have no task in common."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Compare the splits of this resolved config instead.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="Format of the files (`mcore-mas list formats`).")
    ] = "tasks",
    words: Annotated[
        int, typer.Option(min=1, help="Tokens of the n-grams by which texts are compared.")
    ] = 8,
    threshold: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            help="Texts whose n-grams have at least this Jaccard index are similar.",
        ),
    ] = 0.5,
    examples: Annotated[
        int, typer.Option(min=0, help="Maximum number of examples of each leak.")
    ] = 3,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Exit with status 0 even if there are leaks.")
    ] = False,
) -> None:
    """Find tasks that are in several splits, and programming tasks whose prompt shows their tests.

    The exit status is 1 if tasks of two splits have the same id or text, or if a prompt shows a test
    that scores the reply. Tasks with similar texts are listed for you to judge.
    """
    from mcore_mas.config.run import RunConfig
    from rollout.config.tasks import make_tasks
    from rollout.environments.games import ZERO_SUM_GAMES
    from rollout.tasks.leaks import find_leaks

    if files and len(files) == 1 and config is None and _is_run(files[0]):
        config = run_config_file(files[0])
        files = None
    if config is not None and not files:
        run = RunConfig.load(config)
        splits = make_tasks(run.data, run.seed)
    elif files and config is None:
        splits = _file_splits(files, format)
    else:
        raise UsageError("name a run, data files to compare, or --config with a resolved config")

    leaks = find_leaks(splits, words=words, threshold=threshold)
    _print_leaks(leaks, examples, Console(highlight=False))
    games = {task.env for tasks in splits.values() for task in tasks} & ZERO_SUM_GAMES.keys()
    if games:
        print(f"not compared: {', '.join(sorted(games))}, whose deals are in every split")
    if any(leak.is_certain for leak in leaks) and not report_only:
        raise typer.Exit(1)


def _is_run(path: Path) -> bool:
    """Return True if an argument is a run's folder, its name in results/, or its config.yaml.

    A data file takes precedence over a run in results/ that has the same name. A folder, such as the Python
    package of a project, does not.
    """
    if path.name == "config.yaml" or (path / "config.yaml").is_file():
        return True
    return not path.is_file() and str(path) in run_names()


def _file_splits(files: Sequence[Path], format: str) -> dict[str, list[Task]]:
    """Read each file as a split, named by the file, or by its path if two files have one name."""
    from rollout.tasks.files import read_task_file

    name_counts = Counter(file.name for file in files)
    splits: dict[str, list[Task]] = {}
    for file in files:
        name = file.name if name_counts[file.name] == 1 else str(file)
        if name in splits:
            raise ValueError(
                f"{file} is named twice; name files that should have nothing in common"
            )
        # The argument `split` is needed for rows without one. Its value does not matter here, because
        # each file is compared as a split of its own.
        splits[name] = [
            located.task for located in read_task_file(file, format=format, split="train")
        ]
    return splits


def _print_leaks(leaks: Sequence[Leak], examples: int, console: Console) -> None:
    """Print a table of the leaks, and at most `examples` examples of each."""
    table = Table(
        "splits",
        "leak",
        Column("tasks", justify="right"),
        Column("of", justify="right"),
        Column("%", justify="right"),
    )
    for leak in leaks:
        count = len(leak.matches)
        style = ""
        if leak.is_certain:
            style = "red"
        elif count:
            style = "yellow"
        table.add_row(
            _splits_of(leak),
            _LEAK_NAMES[leak.kind],
            str(count),
            str(leak.tasks),
            f"{100 * count / leak.tasks:.1f}" if leak.tasks else "-",
            style=style,
        )
    console.print(table)

    for leak in leaks:
        if leak.matches and examples:
            _print_examples(leak, examples, console)


def _print_examples(leak: Leak, examples: int, console: Console) -> None:
    console.print(Text(f"\n{_splits_of(leak)}: {_LEAK_NAMES[leak.kind]}", style="bold"))
    for match in leak.matches[:examples]:
        console.print(Text(_example_line(leak, match)), soft_wrap=True)
    hidden = len(leak.matches) - examples
    if hidden > 0:
        console.print(Text(f"and {hidden} more; --examples shows them", style="dim"))


def _splits_of(leak: Leak) -> str:
    return leak.split if leak.kind == "tests" else f"{leak.earlier} → {leak.split}"


def _example_line(leak: Leak, match: Match) -> str:
    prompt = " ".join(match.task.prompt.split())
    if len(prompt) > _SHOWN_CHARS:
        prompt = f"{prompt[:_SHOWN_CHARS]}..."
    if leak.kind == "tests":
        return escape_line(f"{match.task.id}: {prompt}")
    similarity = f", {match.similarity:.2f}" if leak.kind == "similar" else ""
    return escape_line(f"{match.earlier.id} → {match.task.id}{similarity}: {prompt}")
