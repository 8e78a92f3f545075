"""The command line: `mcore-mas`, also `python -m mcore_mas`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from mcore_mas.training.joblog import cause

app = typer.Typer(
    name="mcore-mas",
    help="Reinforcement-learning post-training of teams of LLM agents on Megatron-core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="What goes wrong is one line and a non-zero exit; --debug, anywhere, adds the traceback.",
)

REGISTRIES = {  # where the names that a config may use stand, by what they are
    "orchestras": "rollout.orchestras:ORCHESTRAS",
    "envs": "rollout.environments:ENVS",
    "roles": "rollout.teams.team:ROLES",
    "tasks": "rollout.tasks:GENERATORS",
    "formats": "rollout.tasks.files:READABLE",
    "allocators": "rollout.rewards:ALLOCATORS",
    "penalties": "rollout.rewards.penalties:PENALTIES",
    "estimators": "mcore_mas.equations.advantages:ESTIMATORS",
    "filters": "mcore_mas.equations.filters:FILTERS",
    "losses": "mcore_mas.equations.losses:LOSSES",
    "corrections": "mcore_mas.equations.corrections:CORRECTIONS",
    "aggregations": "mcore_mas.equations.aggregation:AGGREGATIONS",
    "engines": "rollout.engines:ENGINES",
}


class UsageError(ValueError):
    """A command was called as it cannot be: says what was expected."""


_Config = Annotated[Path, typer.Option("--config", help="A resolved config: results/{run}/config.yaml.")]


def main() -> None:
    """Run a command; what goes wrong is one line on stderr and exit status 1, unless --debug asks for the traceback."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(arguments)
    except Exception as error:
        if debug:
            raise
        print(f"error: {cause(error)}  (--debug shows the traceback)", file=sys.stderr)
        sys.exit(1)


@app.command()
def train(config: _Config) -> None:
    """Train one run, from its newest checkpoint if it has one."""
    from mcore_mas.training.session import Stopped
    from mcore_mas.training.train import train as run

    try:
        run(config)
    except Stopped as stop:
        print(stop, file=sys.stderr)
        raise typer.Exit(143) from None
    except KeyboardInterrupt:  # typer would only say "Aborted!"
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def evaluate(
    config: _Config,
    state: Annotated[Literal["base", "trained"], typer.Option(help="Which weights.")] = "trained",
    out: Annotated[Path | None, typer.Option(help="JSON file; by default evaluation/{state}.json of the run")] = None,
) -> None:
    """Measure a policy state on the test tasks: avg@k and pass@k per data source."""
    from mcore_mas.config.run import RunConfig
    from mcore_mas.training.evaluate import evaluate as run

    path = out or RunConfig.load(config).folder / "evaluation" / f"{state}.json"
    run(config, state, path)
    print(path)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder: results/{run}.")],
    policy: Annotated[str, typer.Argument(help="One of its trained policies.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write, empty or not there.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter of a LoRA policy, for PEFT.")] = False,
) -> None:
    """Write a policy as a Hugging Face folder, from its finished model or else its newest valid checkpoint."""
    from mcore_mas.training.export import export as run_export

    run_export(run, policy, to, lambda line: print(line, file=sys.stderr), adapter=adapter)
    print(to)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Trajectories: a parquet file under train/trajectories or evaluation.")],
    index: Annotated[int, typer.Option(help="Which of the file's trajectories, from 0.")] = 0,
    trajectory: Annotated[str | None, typer.Option("--id", help="Show this trajectory instead.")] = None,
    branches: Annotated[
        bool, typer.Option("--branches", help="Of a tree, also the branches that did not go on.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that stands by itself to this file instead.")] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Of a game: draw it into this .svg file instead, or all of the file's into a folder."),
    ] = None,
) -> None:
    """Print a trajectory as a conversation: who said what to whom, tools, rewards, advantages."""
    if picture is not None:
        from mcore_mas.reports.trajectory_drawing import draw

        print("\n".join(map(str, draw(file, picture, index=index, trajectory_id=trajectory))))
        return
    from mcore_mas.reports.show import show as run

    run(file, index, trajectory, branches=branches, html=html)
    if html is not None:
        print(html)


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(help="Trajectories: a parquet file under train/trajectories.")],
    advantage: Annotated[str, typer.Option(help="estimator (`mcore-mas list estimators`)")] = "drmas",
    option: Annotated[list[str] | None, typer.Option(help="of the estimator, as key=value; may repeat")] = None,
    task: Annotated[str | None, typer.Option(help="only this task")] = None,
    limit: Annotated[int, typer.Option(min=1, help="at most so many tasks")] = 3,
) -> None:
    """Print who was compared with whom, means, deviations, votes and every turn's advantage."""
    import yaml
    from rich.console import Console

    from mcore_mas.credit.explain import explain as run

    pairs = [item.partition("=") for item in option or []]
    for item, (key, sign, _) in zip(option or [], pairs, strict=True):
        if not (key and sign):
            raise UsageError(f"--option {item}: expected key=value, for example --option lone=raw")
    options = {key: yaml.safe_load(value) for key, _, value in pairs}
    run(file, advantage, options, task, limit, Console(highlight=False))


@app.command()
def leaks(
    files: Annotated[list[Path] | None, typer.Argument(help="Data files that should have no task in common.")] = None,
    config: Annotated[Path | None, typer.Option(help="A resolved config, whose splits are compared instead.")] = None,
    format: Annotated[str, typer.Option(help="of the files (`mcore-mas list formats`)")] = "tasks",
    words: Annotated[int, typer.Option(min=1, help="tokens of the runs by which texts are compared")] = 8,
    threshold: Annotated[float, typer.Option(min=0.01, max=1, help="share of runs in common that is similar")] = 0.5,
    examples: Annotated[int, typer.Option(min=0, help="at most so many of each leak")] = 3,
    report_only: Annotated[bool, typer.Option("--report-only", help="Exit with status 0 whatever leaks.")] = False,
) -> None:
    """Say which tasks of one split are in another, and which programs are scored on tests that they are shown.

    Exit status 1 if one is, by id, text or test; similar texts are for you to judge.
    """
    from rich.console import Console

    from mcore_mas.cli.leaks import report, splits_in, splits_of

    if (config is None) == (not files):
        raise UsageError("name data files to compare, or --config with a resolved config")
    splits = splits_of(config) if config is not None else splits_in(files or [], format)
    console = Console(highlight=False)
    if report(splits, console, words=words, threshold=threshold, examples=examples) and not report_only:
        raise typer.Exit(1)


@app.command("list")
def list_names(
    registry: Annotated[str, typer.Argument(help=", ".join(REGISTRIES))],
) -> None:
    """Print the names a config may use, one a line."""
    if registry not in REGISTRIES:
        raise UsageError(f"no registry '{registry}'; there are: {', '.join(REGISTRIES)}")
    module, _, attribute = REGISTRIES[registry].partition(":")
    print("\n".join(sorted(getattr(import_module(module), attribute))))


@app.command()
def doctor() -> None:
    """Say what this machine has and lacks."""
    from mcore_mas.cli.doctor import examine

    sys.exit(examine())
