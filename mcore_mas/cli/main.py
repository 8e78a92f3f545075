"""Command line: `mcore-mas`, also `python -m mcore_mas`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mcore_mas.cli.inspection import inspection_commands
from mcore_mas.cli.machine import machine_commands
from mcore_mas.cli.runs import run_commands
from mcore_mas.training.joblog import cause

app = typer.Typer(
    name="mcore-mas",
    help="Reinforcement-learning post-training of teams of LLM agents on Megatron-core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="What goes wrong is one line and a non-zero exit; --debug, anywhere, adds the traceback.",
)
for group in (run_commands, inspection_commands, machine_commands):
    app.add_typer(group)
document_commands = typer.Typer(no_args_is_help=True)
app.add_typer(
    document_commands, name="write", help="Write documents of this repository.", rich_help_panel="Development"
)


def main() -> None:
    """Run a command; what goes wrong is one line on stderr and exit status 1, unless --debug asks for the traceback."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    sys.path.append(str(Path.cwd()))  # a team of one's own is found where one stands
    try:
        app(arguments)
    except Exception as error:
        if debug:
            raise
        print(f"error: {cause(error)}  (--debug shows the traceback)", file=sys.stderr)
        sys.exit(1)


@document_commands.command("results")
def write_results(
    tables: Annotated[list[Path], typer.Argument(help="Tables of scores: results/tables/{suite}.csv.")],
    readme: Annotated[Path, typer.Option(help="The page with the block of results.")] = Path("README.md"),
) -> None:
    """Put the results of tables of scores into the README."""
    from mcore_mas.reports.tables import update_readme

    update_readme(readme, tables)
    print(readme)


@document_commands.command("catalogue")
def write_catalogue() -> None:
    """Write docs/catalogue.md, the teams that ship."""
    from mcore_mas.reports.catalogue import CATALOGUE, render_catalogue
    from rollout.base.files import write_text

    write_text(CATALOGUE, render_catalogue())
    print(CATALOGUE)


@document_commands.command("options")
def write_options() -> None:
    """Write docs/options.md, what every option takes, and configs/schema/, which tells editors the same."""
    from mcore_mas.config.schema import SCHEMAS, write_schemas
    from mcore_mas.reports.catalogue import OPTIONS, render_options
    from rollout.base.files import write_text

    write_schemas()
    write_text(OPTIONS, render_options())
    print(SCHEMAS, OPTIONS, sep="\n")
