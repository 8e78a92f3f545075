"""Commands that show what is there: trajectories, credit, leaks between splits, the names that a config may use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mcore_mas.cli.machine import UsageError, run_names
from rollout.base.lookup import entry_points_of
from rollout.base.text import nearest, shown_line, shown_text

if TYPE_CHECKING:  # what a command needs is imported when it runs, so that --help is there at once
    from rollout.records.trajectory import Task
    from rollout.tasks.splits import Leak, Match

inspection_commands = typer.Typer()
_TRAJECTORIES = "Look at trajectories"
_DATA = "Look at data and names"

REGISTRIES = {  # where the names that a config may use stand, and the kind by which packages offer further ones
    "orchestras": ("rollout.orchestras:ORCHESTRAS", "orchestra"),
    "envs": ("rollout.environments:ENVS", "env"),
    "roles": ("rollout.config.sections:ROLES", "agent role"),
    "tasks": ("rollout.tasks:GENERATORS", "task generator"),
    "formats": ("rollout.tasks.files:READABLE", "data format"),
    "allocators": ("rollout.rewards:ALLOCATORS", "reward"),
    "penalties": ("rollout.rewards.penalties:PENALTIES", "penalty"),
    "estimators": ("mcore_mas.equations.advantages:ESTIMATORS", "advantage"),
    "filters": ("mcore_mas.equations.filters:FILTERS", "filter"),
    "losses": ("mcore_mas.equations.losses:LOSSES", ""),
    "corrections": ("mcore_mas.equations.divergence:CORRECTIONS", ""),
    "aggregations": ("mcore_mas.equations.losses:AGGREGATIONS", ""),
    "engines": ("rollout.engines:ENGINES", "engine"),
    "tools": ("rollout.environments:TOOLS", ""),
    "providers": ("rollout.engines.remote:PROVIDERS", ""),
    **dict.fromkeys(
        ("experiments", "teams", "recipes"), ("mcore_mas.config.experiments:names_in", "")
    ),
}

_SHOWN_CHARS = 60  # of a prompt
_SENSES = {
    "id": "the same id",
    "text": "the same text",
    "similar": "similar text",
    "tests": "scored on tests that are shown",
}


def recorded(named: Path) -> Path:
    """A file of trajectories as it was named; of a run, by its folder or its name in results/, the newest step's.

    Raises:
        UsageError: there is neither.
    """
    steps = [
        file
        for run in (named, "results" / named)
        for file in sorted(run.glob("train/trajectories/*.parquet"))
    ]
    is_run = any(run.is_dir() for run in (named, "results" / named)) and not any(
        named.glob("*.parquet")
    )
    if not steps and is_run:
        raise UsageError(
            f"{named}: no trajectories here; a run that was not trained has none (mcore-mas run SUITE)"
        )
    if not steps and not named.exists():
        near = nearest(str(named), run_names())
        raise UsageError(
            f"{named}: no such file or run; expected a parquet file of trajectories, or a run{near}"
        )
    return steps[-1] if steps else named


_Recorded = Annotated[
    Path,
    typer.Argument(
        help="A file of trajectories, under train/trajectories or evaluation of a run; or a run: its newest step's.",
        callback=recorded,
        autocompletion=run_names,
    ),
]


@inspection_commands.command("show", rich_help_panel=_TRAJECTORIES)
def show_trajectory(
    file: _Recorded,
    index: Annotated[
        int | None, typer.Option(help="Which of the file's trajectories, from 0; else a list.")
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option("--id", help="Show this trajectory instead.")
    ] = None,
    branches: Annotated[
        bool, typer.Option("--branches", help="Of a tree, also the branches that did not go on.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that stands by itself to this file instead.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Of a game: draw it into this .svg file instead, or all of the file's into a folder."
        ),
    ] = None,
) -> None:
    """List a file's trajectories, or print one as a conversation: who said what to whom, tools, rewards, advantages."""
    from mcore_mas.reports.pages import draw_games, find_trajectory, trajectory_page
    from mcore_mas.reports.terminal import credit_of, print_trajectories, print_trajectory
    from rollout.base.files import write_text
    from rollout.records.files import read_trajectories

    if picture is not None:
        print(
            "\n".join(
                map(str, draw_games(file, picture, index=index or 0, trajectory_id=trajectory))
            )
        )
        return
    trajectories = read_trajectories(file)
    advantages, _ = credit_of(file, trajectories)
    console = Console(highlight=False)
    if len(trajectories) > 1 and (index, trajectory, html) == (None, None, None):
        with _paged(console):
            print_trajectories(trajectories, console, advantages, file)
        return
    chosen = find_trajectory(file, trajectories, index or 0, trajectory)
    if html is None:
        with _paged(console):
            print_trajectory(chosen, console, advantages, branches=branches)
        return
    write_text(html, trajectory_page(chosen, advantages))
    print(html)


def _paged(console: Console) -> AbstractContextManager[object]:
    """A pager, where somebody sits at a terminal."""
    return console.pager() if console.is_terminal else nullcontext()


@inspection_commands.command("explain", rich_help_panel=_TRAJECTORIES)
def explain_credit(
    file: _Recorded,
    advantage: Annotated[
        str, typer.Option(help="estimator (`mcore-mas list estimators`)")
    ] = "drmas",
    option: Annotated[
        list[str] | None, typer.Option(help="of the estimator, as key=value; may repeat")
    ] = None,
    task: Annotated[str | None, typer.Option(help="only this task")] = None,
    limit: Annotated[int, typer.Option(min=1, help="at most so many tasks")] = 3,
) -> None:
    """Print who was compared with whom, means, deviations, votes and every turn's advantage."""
    from omegaconf import OmegaConf

    from mcore_mas.reports.terminal import print_credit

    for item in option or []:
        key, sign, _ = item.partition("=")
        if not (key and sign):
            raise UsageError(f"--option {item}: expected key=value, for example --option lone=raw")
    options = OmegaConf.to_container(OmegaConf.from_dotlist(option or []))
    console = Console(highlight=False)
    with _paged(console):
        print_credit(file, advantage, options, task, limit, console)  # type: ignore[arg-type]


@inspection_commands.command("verify", rich_help_panel=_DATA)
def verify_table(
    bundle: Annotated[Path, typer.Argument(help="results/tables/{table}.bundle.zip.")],
) -> None:
    """Check a reproduction bundle: every digest in it, and that its table is what its per-task scores give."""
    from mcore_mas.pipeline.bundle import verify_bundle

    print(verify_bundle(bundle))


@inspection_commands.command("replay", rich_help_panel=_TRAJECTORIES)
def replay_trajectory(
    file: Annotated[
        Path, typer.Argument(help="A quarantined trajectory: a file of train/quarantine of a run.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="The resolved config, if not the run's own.")
    ] = None,
) -> None:
    """Play a quarantined trajectory again from what its policies said; exit status 1 if it fails again."""
    from mcore_mas.evaluation.evaluate import replay
    from mcore_mas.reports.terminal import print_trajectory

    played, trace = replay(file, config or file.resolve().parents[2] / "config.yaml")
    console = Console(highlight=False)
    print_trajectory(played, console, {})
    console.print(Text(shown_text("\n".join(trace))), soft_wrap=True)
    raise typer.Exit(1 if played.error else 0)


@inspection_commands.command("leaks", rich_help_panel=_DATA)
def show_leaks(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Data files that should have no task in common.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A resolved config, whose splits are compared instead.")
    ] = None,
    format: Annotated[str, typer.Option(help="of the files (`mcore-mas list formats`)")] = "tasks",
    words: Annotated[
        int, typer.Option(min=1, help="tokens of the runs by which texts are compared")
    ] = 8,
    threshold: Annotated[
        float, typer.Option(min=0.01, max=1, help="share of runs in common that is similar")
    ] = 0.5,
    examples: Annotated[int, typer.Option(min=0, help="at most so many of each leak")] = 3,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Exit with status 0 whatever leaks.")
    ] = False,
) -> None:
    """Say which tasks of one split are in another, and which programs are scored on tests that they are shown.

    Exit status 1 if one is, by id, text or test; similar texts are for you to judge.
    """
    from mcore_mas.config.run import RunConfig
    from rollout.config.data import make_tasks
    from rollout.tasks.splits import find_leaks

    if (config is None) == (not files):
        raise UsageError("name data files to compare, or --config with a resolved config")
    if config is not None:
        loaded = RunConfig.load(config)
        splits = make_tasks(loaded.data, loaded.seed)
    else:
        splits = _file_splits(files or [], format)
    leaks = find_leaks(splits, words=words, threshold=threshold)
    _print_leaks(leaks, examples, Console(highlight=False))
    if any(leak.exact for leak in leaks) and not report_only:
        raise typer.Exit(1)


def _file_splits(files: Sequence[Path], format: str) -> dict[str, list[Task]]:
    """One split per file: named by the file, or by its path where two files have one name."""
    from rollout.tasks.files import read_task_file

    names = Counter(file.name for file in files)
    splits: dict[str, list[Task]] = {}
    for file in files:
        name = file.name if names[file.name] == 1 else str(file)
        if name in splits:
            raise ValueError(
                f"{file} is named twice; name files that should have nothing in common"
            )
        splits[name] = [task for _, task in read_task_file(file, format=format, split="train")]
    return splits


def _print_leaks(leaks: Sequence[Leak], examples: int, console: Console) -> None:
    """What leaks, as a table, and at most so many examples of each."""
    table = Table(
        "splits", "leak", *(Column(heading, justify="right") for heading in ("tasks", "of", "%"))
    )
    for leak in leaks:
        found = len(leak.matches)
        share = f"{100 * found / leak.tasks:.1f}" if leak.tasks else "-"
        style = "red" if leak.exact else "yellow" if found else ""
        table.add_row(
            _where(leak), _SENSES[leak.kind], str(found), str(leak.tasks), share, style=style
        )
    console.print(table)
    for leak in leaks:
        if leak.matches and examples:
            console.print(Text(f"\n{_where(leak)}: {_SENSES[leak.kind]}", style="bold"))
            for match in leak.matches[:examples]:
                console.print(Text(_line(leak, match)), soft_wrap=True)
            if len(leak.matches) > examples:
                console.print(
                    Text(
                        f"and {len(leak.matches) - examples} more; --examples shows them",
                        style="dim",
                    )
                )


def _where(leak: Leak) -> str:
    return leak.split if leak.kind == "tests" else f"{leak.earlier} → {leak.split}"


def _line(leak: Leak, match: Match) -> str:
    prompt = " ".join(match.task.prompt.split())
    shown = prompt if len(prompt) <= _SHOWN_CHARS else f"{prompt[:_SHOWN_CHARS]}..."
    if leak.kind == "tests":
        return shown_line(f"{match.task.id}: {shown}")
    alike = f", {match.similarity:.2f}" if leak.kind == "similar" else ""
    return shown_line(f"{match.earlier.id} → {match.task.id}{alike}: {shown}")


@inspection_commands.command("list", rich_help_panel=_DATA)
def list_names(
    registry: Annotated[
        str, typer.Argument(help=", ".join(REGISTRIES), autocompletion=lambda: list(REGISTRIES))
    ],
) -> None:
    """Print the names a config may use, one a line; what an installed package offers, with the package.

    The key of a config is understood too: advantage, reward.name, data.generator.
    """
    word = registry.removesuffix(".name").rpartition(".")[2]
    words = {other: name for name, (_, kind) in REGISTRIES.items() for other in _words(name, kind)}
    if word not in words:
        raise UsageError(
            f"no registry '{registry}'; there are: {', '.join(REGISTRIES)}{nearest(word, REGISTRIES)}"
        )
    place, kind = REGISTRIES[words[word]]
    module, _, attribute = place.partition(":")
    own = getattr(import_module(module), attribute)
    own = own(words[word].removesuffix("s")) if callable(own) else own
    theirs = (
        [
            f"{entry.name}  (of {entry.dist.name if entry.dist else '?'})"
            for entry in entry_points_of(kind)
        ]
        if kind
        else []
    )
    print("\n".join(sorted([*own, *theirs])))


def _words(name: str, kind: str) -> set[str]:
    """What a registry is called here, in configs and in errors, one or many of it."""
    one = {name, name.removesuffix("s"), name.removesuffix("es"), *kind.split()[-1:]}
    return one | {f"{word}s" for word in one}
