"""Commands that work on one run: train it, evaluate it, export its policies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

run_commands = typer.Typer()
_PANEL = "Train and evaluate"
_Config = Annotated[Path, typer.Option("--config", help="A resolved config: results/{run}/config.yaml.")]


@run_commands.command(
    "run",
    rich_help_panel=_PANEL,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run_suite(
    context: typer.Context,
    suite: Annotated[
        Path, typer.Argument(help="A suite file; experiments and teams of your own lie in configs/ beside it.")
    ],
    config_dir: Annotated[Path | None, typer.Option(help="Folder of your own configs, if it is another.")] = None,
) -> None:
    """Run the pipeline on a suite; further arguments are Snakemake's, for example -n to see what would run."""
    from mcore_mas.pipeline.suite import SNAKEFILE

    if not suite.is_file():
        raise FileNotFoundError(f"{suite}: no such file; expected a suite (docs/configuration.md)")
    own = [f"--config=config_dir={config_dir.resolve()}"] if config_dir else []
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), f"--configfile={suite}"]
    os.execv(sys.executable, [*command, *own, *context.args])  # noqa: S606


@run_commands.command("train", rich_help_panel=_PANEL)
def train_run(config: _Config) -> None:
    """Train one run, from its newest checkpoint if it has one."""
    from mcore_mas.training.stopping import Stopped
    from mcore_mas.training.train import train

    try:
        train(config)
    except Stopped as stop:
        print(stop, file=sys.stderr)
        raise typer.Exit(143) from None
    except KeyboardInterrupt:  # typer would only say "Aborted!"
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


@run_commands.command("evaluate", rich_help_panel=_PANEL)
def evaluate_run(
    config: _Config,
    state: Annotated[Literal["base", "trained"], typer.Option(help="Which weights.")] = "trained",
    out: Annotated[Path | None, typer.Option(help="JSON file; by default evaluation/{state}.json of the run")] = None,
) -> None:
    """Measure a policy state on the test tasks: avg@k and pass@k per data source."""
    from mcore_mas.config.run import RunConfig
    from mcore_mas.training.evaluate import evaluate

    path = out or RunConfig.load(config).folder / "evaluation" / f"{state}.json"
    evaluate(config, state, path)
    print(path)


@run_commands.command("export", rich_help_panel=_PANEL)
def export_policy(
    run: Annotated[Path, typer.Argument(help="A run's folder: results/{run}.")],
    policy: Annotated[str, typer.Argument(help="One of its trained policies.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write, empty or not there.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter of a LoRA policy, for PEFT.")] = False,
) -> None:
    """Write a policy as a Hugging Face folder, from its finished model or else its newest valid checkpoint."""
    from mcore_mas.training.export import export

    export(run, policy, to, lambda line: print(line, file=sys.stderr), adapter=adapter)
    print(to)
