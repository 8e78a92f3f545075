"""Command line `mcore-mas`, also `python -m mcore_mas`: the app of all commands and its errors."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from mcore_mas import resolve_page_paths
from mcore_mas.cli.arguments import setting_hint
from mcore_mas.cli.data import data_commands
from mcore_mas.cli.doctor import doctor_commands
from mcore_mas.cli.mlflow_pages import mlflow_commands
from mcore_mas.cli.names import name_commands
from mcore_mas.cli.pipeline import pipeline_commands
from mcore_mas.cli.runs import run_commands
from mcore_mas.cli.trajectories import trajectory_commands
from mcore_mas.runtime.error_description import describe_error
from mcore_mas.runtime.stop_signal import Stopped, ignore_stop_signals
from rollout.base.text import escape_logs

_INTERRUPTED = 130  # status of a command that Ctrl-C ended, set by Typer

app = typer.Typer(
    name="mcore-mas",
    help="Reinforcement-learning post-training of teams of LLM agents on Megatron-core.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="An error is one line and a non-zero exit status.",
)
for commands in (
    pipeline_commands,
    run_commands,
    trajectory_commands,
    data_commands,
    name_commands,
    mlflow_commands,
    doctor_commands,
):
    app.add_typer(commands)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"mcore-mas {version('mcore-mas')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    # `main` takes --debug out of the arguments, wherever it stands; it is here only to be in --help.
    debug: Annotated[
        bool, typer.Option("--debug", help="Add the traceback to the line of an error.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of teams of LLM agents on Megatron-core."""
    escape_logs()


def main() -> None:
    """Run a command and exit.

    An error is printed as one line, with exit status 1, or 2 if Typer cannot parse the arguments.
    With --debug it is raised.

    Ctrl-C gives status 130 in a command that does not handle it. A command that continues from saved
    state (train, evaluate or distill) ends with status 143 at Ctrl-C or SIGTERM, and with 130 at a
    second Ctrl-C.
    """
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    sys.path.append(str(Path.cwd()))  # so that the user's teams and rewards can be imported

    try:
        status = app(arguments, prog_name="mcore-mas", standalone_mode=False)
    except Stopped as stop:
        ignore_stop_signals()
        print(stop, file=sys.stderr)
        sys.exit(143)
    except typer.TyperException as error:
        if debug:
            raise
        _print_usage_error(error, arguments)
        sys.exit(2)
    except Exception as error:
        if debug:
            raise
        # Typer replaces an EOFError, such as that of a pipe whose process has ended, by its Abort.
        cause = error.__cause__ if isinstance(error, typer.Abort) else None
        line = resolve_page_paths(describe_error(cause or error))
        print(f"error: {line}  (--debug shows the traceback)", file=sys.stderr)
        sys.exit(1)
    if status == _INTERRUPTED:
        print("stopped by Ctrl-C", file=sys.stderr)
    sys.exit(status or 0)


def _print_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> None:
    """Print the line of an error in the arguments, with the command whose help says more."""
    message = " ".join(error.format_message().split()).rstrip(".?")
    if not message:
        return  # the command was called without arguments, and its help has been printed
    if message.startswith("No such option"):
        message += setting_hint(str(getattr(error, "option_name", "")))
    context = getattr(error, "ctx", None)
    command = "mcore-mas"
    if context is not None:
        command = context.command_path
    elif arguments and arguments[0] in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        # An error of the parser, such as that of an option without its value, has no context.
        command = f"mcore-mas {arguments[0]}"
    print(f"error: {message}; `{command} --help` says what is expected", file=sys.stderr)
