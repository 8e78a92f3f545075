"""Commands that run, check and plan a suite, and the stages of one run."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mcore_mas import resolve_page_paths
from mcore_mas.cli.arguments import (
    ConfigDir,
    ConfigFile,
    Overrides,
    RunFolder,
    SuiteName,
    UsageError,
    output_file,
)
from mcore_mas.runtime.stop_signal import ignore_stop_signals, raise_on_stop_signals

pipeline_commands = typer.Typer()
PIPELINE_PANEL = "Train and evaluate"


@pipeline_commands.command(
    "run",
    rich_help_panel=PIPELINE_PANEL,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run_suite(
    context: typer.Context,
    suite: SuiteName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Run the pipeline on a suite, or on one experiment.

    Your own experiments and teams are read from the folder configs/ next to the suite file, or, if
    you name an experiment, from configs/ in the current folder. Further arguments are Hydra
    overrides of every run, such as trainer.steps=3, and arguments of Snakemake, such as -n for a
    dry run.
    """
    from mcore_mas.cli.suite_command import run_snakemake, snakemake_arguments

    # Typer does not know Snakemake's options and puts them among the overrides; the two are separated below.
    arguments = snakemake_arguments(suite, [*(overrides or []), *context.args], config_dir)
    run_snakemake(arguments)


@pipeline_commands.command("new", rich_help_panel=PIPELINE_PANEL)
def new_team(
    name: Annotated[str, typer.Argument(help="Name of the project and of its Python package.")],
) -> None:
    """Create a project of your own: team, environment, reward, tasks and test.

    It trains in minutes on a laptop.
    """
    from mcore_mas.pipeline.project import new_project

    folder = new_project(name, Path())
    print(f"{folder}/  next: cd {folder}; mcore-mas check {name}.yaml; mcore-mas run {name}.yaml")


@pipeline_commands.command("check", rich_help_panel=PIPELINE_PANEL)
def check_runs(
    suite: SuiteName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Check the models, layouts, lengths, prompts, files and checkpoints of a suite.

    The exit status is 1 if there is a problem. Settings that are valid but do not fit a run's
    checkpoints give only a note; `mcore-mas run` refuses them, also with -n.
    """
    from mcore_mas.pipeline.check import suite_problems
    from mcore_mas.pipeline.recipe_check import recipe_problems
    from mcore_mas.pipeline.suite import load_suite
    from mcore_mas.runtime.project_path import path_problem

    loaded_suite = load_suite(suite, overrides or [], config_dir)
    problems = suite_problems(loaded_suite)
    path_error = path_problem()
    if path_error:
        problems.insert(0, path_error)
    for problem in problems:
        print(f"error: {resolve_page_paths(problem)}")
    if problems:
        raise typer.Exit(1)
    print(f"ok: {', '.join(loaded_suite.runs)}")
    # These are no errors, because a run without checkpoints can be trained with the settings.
    for problem in recipe_problems(loaded_suite):
        print(
            "note: the settings are valid, but not for the checkpoints here, so `mcore-mas run` "
            f"refuses {resolve_page_paths(problem)}"
        )


@pipeline_commands.command("plan", rich_help_panel=PIPELINE_PANEL)
def plan_suite(
    suite: SuiteName,
    overrides: Overrides = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Number and kind of GPUs; by default cluster.gpus of each run, or 8xH100."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help=(
                "YAML file in place of --gpus, with the keys gpus (such as 16xH100), node (GPUs per "
                "machine) and memory (GB per GPU)."
            )
        ),
    ] = None,
    as_configured: Annotated[
        bool,
        typer.Option(
            "--as-configured",
            help=(
                "Choose no placement; check the one that each run would have. This is the layout in "
                "its config, unless the config sets cluster.gpus."
            ),
        ),
    ] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Print the placement and the memory of every run on the GPUs of --gpus, of --cluster or of its config.

    The exit status is 1 if a run does not fit.
    """
    from mcore_mas.pipeline.suite import load_suite
    from mcore_mas.planning.gpus import Cluster, PlanError
    from mcore_mas.planning.page import plan_lines
    from mcore_mas.planning.place import check_placement, place_run

    named_cluster: Cluster | None = None
    if cluster is not None:
        named_cluster = Cluster.read(cluster)
    elif gpus is not None:
        named_cluster = Cluster.parse(gpus)

    all_overrides = list(overrides or [])
    if named_cluster is not None and not as_configured:
        # A suite places its runs on the GPUs of cluster.gpus when it is loaded. On other GPUs, `place_run`
        # would keep parts of that placement as settings of the user.
        all_overrides.append("cluster.gpus=null")

    fits = True
    loaded_suite = load_suite(suite, all_overrides, config_dir)
    for run in loaded_suite.runs:
        config = loaded_suite.run_config(run)
        run_cluster = named_cluster or Cluster.parse(config.cluster.gpus or "8xH100")
        try:
            if as_configured:
                check_placement(config, run_cluster)
            else:
                config = place_run(config, run_cluster)
        except PlanError as error:
            fits = False
            print(f"error: {error}")
            continue
        for line in plan_lines(config, run_cluster):
            print(line)
    raise typer.Exit(0 if fits else 1)


@pipeline_commands.command("plan-index", rich_help_panel=PIPELINE_PANEL)
def plan_index(
    passages: Annotated[
        int, typer.Argument(min=1, help="Number of passages; wiki-18 has 21015324.")
    ],
    dim: Annotated[
        int,
        typer.Option(
            min=8, help="Dimensions of the encoder: 768 for E5-base and BGE-base, 384 for MiniLM."
        ),
    ] = 768,
    rate: Annotated[
        float, typer.Option(min=0.1, help="Passages that all jobs together encode in a second.")
    ] = 50.0,
) -> None:
    """Print the memory, disk and hours that each kind of vector index would take, by formula."""
    from mcore_mas.planning.indexes import index_table

    for line in index_table(passages, dim, rate):
        print(line)


@pipeline_commands.command("train", rich_help_panel=PIPELINE_PANEL)
def train_run(
    config_file: ConfigFile,
    address: Annotated[
        str | None, typer.Option(help="Address of a running Ray, in place of cluster.address.")
    ] = None,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork",
            help="If the recipe, an input or the code has changed since the newest checkpoint, continue "
            "from that checkpoint all the same; the run as it was is kept in train.1 (train.2, ...).",
        ),
    ] = False,
) -> None:
    """Train one run, from its newest checkpoint if it has one."""
    raise_on_stop_signals()
    from mcore_mas.runtime.joblog import logged_cause
    from mcore_mas.training.train import train

    with logged_cause(config_file.parent):
        train(config_file, address, fork=fork)
    ignore_stop_signals()  # the run has finished


def scores_file(path: Path | None) -> Path | None:
    """Check that an evaluation can write its scores to this file.

    This is a callback of Typer, so it returns the path.

    Raises:
        UsageError: its name has no suffix.
        FolderError: it cannot be written, or is a folder.
    """
    if path is not None and not path.suffix:
        raise UsageError(
            f"--out {path}: expected a file name with a suffix, such as scores.json, because the "
            "trajectories are written to the folder of this name without the suffix"
        )
    return output_file(path)


@pipeline_commands.command("evaluate", rich_help_panel=PIPELINE_PANEL)
def evaluate_run(
    config_file: ConfigFile,
    state: Annotated[
        str, typer.Option(help="base or trained; with --seat, a name for the evaluation.")
    ] = "trained",
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file; by default evaluation/{state}.json in the run's folder.",
            callback=scores_file,
        ),
    ] = None,
    seat: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "AGENT=WHO, where WHO is base, trained, RUN, RUN/AGENT, {model: FOLDER} or "
                "{remote: ...}."
            )
        ),
    ] = None,
) -> None:
    """Evaluate a team on its test tasks: avg@k, pass@k and maj@k by data source.

    If the team plays a zero-sum game, metrics of its strategy are printed too.
    """
    raise_on_stop_signals()
    from mcore_mas.config.run import RunConfig
    from mcore_mas.evaluation.evaluate import evaluate
    from mcore_mas.evaluation.measure import describe_scores
    from mcore_mas.evaluation.seats import parse_seats
    from mcore_mas.tracking.publish import publish_evaluation

    config = RunConfig.load(config_file)
    seats = parse_seats(state, seat or [], config.agents)
    out = out or config.folder / "evaluation" / f"{state}.json"
    scores = evaluate(config_file, state, out, seats)
    for line in describe_scores(scores["rows"]):
        print(line)
    for name, value in scores["strategy"].items():
        print(f"{name}: {value:.4f}")
    print(out)
    publish_evaluation(config_file, lambda line: print(line, file=sys.stderr))


@pipeline_commands.command("distill", rich_help_panel=PIPELINE_PANEL)
def distill_team(
    run: RunFolder,
    to: Annotated[
        Path | None,
        typer.Option(help="Folder of the new run; by default {run}_distilled beside the run."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Agent who gives the answer; by default, the one whose replies are right most often."
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help=(
                "Role whose parser reads the model's answers; by default the agent's own or lone_solver, "
                "whichever finds more replies right."
            )
        ),
    ] = None,
    turns: Annotated[
        Literal["final", "all"],
        typer.Option(help="final: learn the team's answers; all: learn its other turns too."),
    ] = "final",
    start: Annotated[
        Literal["trained", "base"],
        typer.Option(
            help=(
                "Start from the trained or the base model of the agent's policy. With base, the config of "
                "the new run makes the trained model the teacher of its student."
            )
        ),
    ] = "trained",
    newest: Annotated[
        int | None, typer.Option(min=1, help="Read the trajectories of the last N steps only.")
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-5,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the replies.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Replies per update.")] = 64,
) -> None:
    """Distil a trained team into one model that answers in one call, and compare the two."""
    raise_on_stop_signals()
    from mcore_mas.pipeline.distill import DistillSettings, describe, distill

    settings = DistillSettings(
        agent=agent,
        role=role,
        turns=turns,
        start=start,
        newest=newest,
        lr=lr,
        epochs=epochs,
        batch=batch,
    )
    folder = to or run.with_name(f"{run.name}_distilled")
    team, student = distill(run, folder, settings)
    for line in describe(team, student):
        print(line)
    print(folder)
