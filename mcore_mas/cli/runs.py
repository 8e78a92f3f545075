"""Commands that use existing runs: serve, studio, export, ls, compare, cross-play, track, chat."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mcore_mas.cli.arguments import (
    ListenHost,
    ListenPort,
    ResultsFolder,
    RunFolder,
    State,
    TokenFile,
    UsageError,
    output_file,
)
from mcore_mas.cli.pipeline import PIPELINE_PANEL
from rollout.base.terminal import end_at_second_interrupt, typed_lines
from rollout.base.text import escape_line

run_commands = typer.Typer()
_RUNS_PANEL = "Look at runs"


@run_commands.command("serve", rich_help_panel=PIPELINE_PANEL)
def serve_run(
    run: RunFolder,
    state: State = "trained",
    host: ListenHost = "127.0.0.1",
    port: ListenPort = 8000,
    token_file: TokenFile = None,
    most_calls: Annotated[
        int, typer.Option(help="Calls answered at a time; further ones get status 429.", min=1)
    ] = 256,
    most_connections: Annotated[
        int,
        typer.Option(help="Open connections; calls on further ones get status 503.", min=1),
    ] = 1024,
    alias: Annotated[
        list[str],
        typer.Option(help="Further name of a model, as NAME=AGENT; can be repeated."),
    ] = [],  # noqa: B006
) -> None:
    """Serve a team through the APIs of OpenAI and Anthropic.

    The whole team is the model with the name of the run, and each agent is a model too.
    """
    from mcore_mas.evaluation.serve import serve

    # SIGTERM raises KeyboardInterrupt too, so that the team's engines are closed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve(
            run,
            state=state,
            host=host,
            port=port,
            token_file=token_file,
            max_calls=most_calls,
            max_connections=most_connections,
            aliases=parse_aliases(alias),
        )
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def parse_aliases(pairs: Sequence[str]) -> dict[str, str]:
    """Return the agent of each alias; raise BadParameter for a pair that is not NAME=AGENT."""
    aliases: dict[str, str] = {}
    for pair in pairs:
        name, separator, agent = pair.rpartition("=")
        if not (name and separator and agent):
            raise typer.BadParameter(f"'{pair}' is not NAME=AGENT", param_hint="--alias")
        aliases[name] = agent
    return aliases


@run_commands.command("studio", rich_help_panel=PIPELINE_PANEL)
def studio(
    results: ResultsFolder = Path("results"),
    host: ListenHost = "127.0.0.1",
    port: ListenPort = 8001,
    token_file: TokenFile = None,
) -> None:
    """Show runs live in a browser: curves by agent and policy, conversations, credit."""
    from mcore_mas.reports.studio_server import run_studio

    run_studio(results, host=host, port=port, token_file=token_file)


@run_commands.command("export", rich_help_panel=PIPELINE_PANEL)
def export_policy(
    run: RunFolder,
    policy: Annotated[str, typer.Argument(help="One of its trained policies.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write; it must be empty or new.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapter of a LoRA policy, for PEFT.")
    ] = False,
) -> None:
    """Export a policy as a Hugging Face folder.

    It is taken from the finished model, or from the newest checkpoint.
    """
    from mcore_mas.evaluation.export import export

    export(run, policy, to, lambda line: print(line, file=sys.stderr), adapter=adapter)
    print(to)


@run_commands.command("ls", rich_help_panel=_RUNS_PANEL)
def list_runs(results: ResultsFolder = Path("results")) -> None:
    """List runs with their steps, last reward and validation, and scores.

    Above the table, there is a line for each run that is private to another user. Below it, there is
    a line for each failed run, with the cause, and a line for each damaged file, with what to do.
    Damaged files give exit status 1.
    """
    from mcore_mas.reports.run_states import private_run_errors, read_run_states

    runs = read_run_states(results)
    for error in private_run_errors(results):
        print(escape_line(error))
    if not runs:
        print(f"no runs in {escape_line(str(results))}")
        return

    evaluations = ["base", "trained"]
    for run in runs:
        evaluations += [name for name in run.scores if name not in evaluations]
    table = Table("run", "steps", "reward", "validation", *evaluations, show_edge=False)
    for run in runs:
        scores = [run.accuracy, *(run.scores.get(name) for name in evaluations)]
        total_steps = "?" if run.total_steps is None else run.total_steps
        status = " done" if run.done else ""
        if run.failure:
            status = " failed"
        table.add_row(
            Text(escape_line(run.run)),
            f"{run.steps}/{total_steps}{status}",
            "" if run.reward is None else f"{run.reward:.3f}",
            *("" if score is None else f"{100 * score:.1f} %" for score in scores),
        )
    Console(highlight=False).print(table)
    for run in runs:
        if run.failure:
            print(escape_line(f"{run.run}: failed: {run.failure}"))
        for problem in run.problems:
            print(escape_line(f"{run.run}: {problem}"))
    if any(run.problems for run in runs):
        raise typer.Exit(1)


@run_commands.command("compare", rich_help_panel=_RUNS_PANEL)
def compare_runs(first: RunFolder, second: RunFolder) -> None:
    """Compare two runs: their scores on common tasks, paired by task, and their settings."""
    from mcore_mas.reports.run_differences import config_differences, score_differences

    console = Console(highlight=False)
    scores = Table(
        "evaluation",
        "metric",
        "first",
        "second",
        "difference",
        "95 % interval",
        "tasks",
        show_edge=False,
    )
    for row in score_differences(first, second):
        scores.add_row(
            row.state,
            row.metric,
            f"{100 * row.first:.1f}",
            f"{100 * row.second:.1f}",
            f"{100 * (row.second - row.first):+.1f}",
            Text(f"[{100 * row.low:+.1f}, {100 * row.high:+.1f}]"),
            str(row.tasks),
        )
    console.print(scores if scores.rows else "no evaluation that both have")

    settings = Table(
        Column("setting", overflow="fold"),
        Column(escape_line(first.name), overflow="fold"),
        Column(escape_line(second.name), overflow="fold"),
        show_edge=False,
    )
    for key, values in config_differences(first, second).items():
        shown = ["not set" if value is None else escape_line(str(value)) for value in values]
        settings.add_row(Text(escape_line(key)), *map(Text, shown))
    console.print(settings if settings.rows else "no setting differs")


@run_commands.command("cross-play", rich_help_panel=_RUNS_PANEL)
def print_cross_play(
    row_agent: Annotated[str, typer.Argument(help="Agent whose models are the rows.")],
    column_agent: Annotated[str, typer.Argument(help="Agent whose models are the columns.")],
    results: Annotated[
        Path, typer.Option("--results", help="Folder of the runs that were evaluated.")
    ] = Path("results"),
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            help="Also draw a heat map, as SVG, to this file.",
            callback=output_file,
        ),
    ] = None,
    ratings: Annotated[
        bool,
        typer.Option(
            "--ratings",
            help="Also print ratings of the models, for a game of the agents first and second.",
        ),
    ] = False,
) -> None:
    """Print the scores of all evaluations as a matrix: models of one agent by models of the other.

    Scores are avg@k in per cent, with 95 % intervals over tasks.
    """
    from mcore_mas.reports.cross_play import draw_cross_play, read_cross_play
    from mcore_mas.reports.ratings import Games, bradley_terry
    from rollout.environments.games.zero_sum import PLAYERS

    if ratings and (row_agent, column_agent) != PLAYERS:
        raise UsageError(
            f"--ratings with agents {row_agent} and {column_agent}: expected the players of a game, "
            f"{' and '.join(PLAYERS)} in this order; name them, or leave out --ratings"
        )
    matrix = read_cross_play(results, row_agent, column_agent)
    title = f"{row_agent} \\ {column_agent}"
    headers = [Column(Text(escape_line(header))) for header in (title, *matrix.columns)]
    table = Table(*headers, show_edge=False)
    for row in matrix.rows:
        pairings = [matrix.pairings.get((row, column)) for column in matrix.columns]
        cells = ["" if pairing is None else str(pairing) for pairing in pairings]
        table.add_row(Text(escape_line(row)), *map(Text, cells))
    Console(highlight=False).print(table)
    if picture is not None:
        draw_cross_play(matrix, picture)
    if ratings:
        # The models in the rows play `first`. The score of a game is 1 if `first` has won, and 0.5 after a draw.
        games_by_pair = {
            pair: Games(score=sum(pairing.scores), count=len(pairing.scores))
            for pair, pairing in matrix.pairings.items()
        }
        fitted = bradley_terry(games_by_pair)
        print()
        ranked = sorted(fitted.players.items(), key=lambda item: -item[1].value)
        for player, rating in ranked:
            print(f"{escape_line(player)}: {rating}")
        print(f"first move: {fitted.first_move}")


@run_commands.command("track", rich_help_panel=_RUNS_PANEL)
def track_results(results: ResultsFolder = Path("results")) -> None:
    """Send MLflow the missing steps, scores, costs and tables of runs, also of unfinished ones.

    For the folder of a single run, neither tables nor means over seeds are sent. The exit status is 1
    if something could not be sent.
    """
    from mcore_mas.reports.run_states import run_folders
    from mcore_mas.runtime.pipeline_messages import mlflow_command
    from mcore_mas.tracking.publish import LOCAL_PAGES, publish

    is_single_run = (results / "config.yaml").is_file()
    if is_single_run:
        folder = results.absolute()
        results = folder.parent
        runs = [folder.name]
        tables: list[str] = []
    else:
        runs = [folder.name for folder in run_folders(results)]
        tables = [file.stem for file in sorted(results.glob("tables/*.csv"))]

    warnings: list[str] = []
    page = publish(results, runs, tables, warnings.append, means=not is_single_run)
    for line in warnings:
        print(line)
    if page and page.startswith(LOCAL_PAGES):
        print(f"{page}  (`{mlflow_command(results)}` starts its server)")
    elif page:
        print(page)
    if warnings:
        raise typer.Exit(1)


@run_commands.command("chat", rich_help_panel=_RUNS_PANEL)
def chat_with_team(run: RunFolder, state: State = "trained") -> None:
    """Chat with the team of a run.

    The team plays each line that you type as a task. An empty line, or Ctrl-D at a terminal, ends
    the chat.
    """
    from mcore_mas.config.run import RunConfig
    from mcore_mas.evaluation.converse import converse
    from mcore_mas.reports.trajectory_terminal import print_trajectory

    # asyncio's own handler would cancel a task only at its next `await`. This one interrupts blocking code of the
    # team too, and a second Ctrl-C ends the process at once.
    end_at_second_interrupt("stopped by Ctrl-C")
    console = Console(highlight=False)
    config = RunConfig.load(run / "config.yaml")
    agent_tools = {name: list(agent.tools) for name, agent in config.agents.items()}
    prompts = typed_lines("you: " if sys.stdin.isatty() else "")
    for trajectory in converse(config, state, prompts):
        print_trajectory(trajectory, console, {}, head=False, agent_tools=agent_tools)
