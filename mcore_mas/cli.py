"""The command line: `mcore-mas`, also `python -m mcore_mas`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mcore_mas.joblog import cause

app = typer.Typer(
    name="mcore-mas",
    help="Reinforcement-learning post-training of teams of LLM agents on Megatron-core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
    from mcore_mas.train import train as run

    try:
        run(config)
    except KeyboardInterrupt:  # typer would only say "Aborted!"
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def evaluate(
    config: _Config,
    state: Annotated[str, typer.Option(help="base or trained")] = "trained",
    out: Annotated[Path | None, typer.Option(help="JSON file [default: evaluation/{state}.json of the run]")] = None,
) -> None:
    """Measure a policy state on the test tasks: avg@k and pass@k per data source."""
    from mcore_mas.config import RunConfig
    from mcore_mas.evaluate import evaluate as run

    path = out or RunConfig.load(config).folder / "evaluation" / f"{state}.json"
    run(config, state, path)
    print(path)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Trajectories: a parquet file under train/trajectories or evaluation.")],
    index: Annotated[int, typer.Option(help="Which of the file's trajectories, from 0.")] = 0,
    trajectory: Annotated[str | None, typer.Option("--id", help="Show this trajectory instead.")] = None,
) -> None:
    """Print a trajectory as a conversation: who said what, tools, rewards."""
    from mcore_mas.show import show as run

    run(file, index, trajectory)


@app.command("list")
def list_names(
    registry: Annotated[str, typer.Argument(help="orchestras, envs, estimators, allocators, engines, tasks or roles")],
) -> None:
    """Print the names a config may use, one a line."""
    print("\n".join(sorted(_registries(registry))))


@app.command()
def doctor() -> None:
    """Say what this machine has and lacks."""
    from mcore_mas.doctor import examine

    sys.exit(examine())


def _registries(name: str) -> dict[str, Any]:
    from mcore_mas.core.advantages import ESTIMATORS
    from mcore_mas.core.losses import LOSSES
    from rollout.agent import ROLES
    from rollout.engines import ENGINES
    from rollout.envs import ENVS
    from rollout.orchestras import ORCHESTRAS
    from rollout.registry import lookup
    from rollout.rewards import ALLOCATORS
    from rollout.tasks import GENERATORS

    known: dict[str, dict[str, Any]] = {
        "orchestras": dict(ORCHESTRAS),
        "envs": dict(ENVS),
        "estimators": dict(ESTIMATORS),
        "losses": dict(LOSSES),
        "allocators": dict(ALLOCATORS),
        "engines": dict(ENGINES),
        "tasks": dict(GENERATORS),
        "roles": dict(ROLES),
    }
    return lookup("registry", name, known)
