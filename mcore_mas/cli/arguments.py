"""Arguments and options that several commands of `mcore-mas` share."""

from pathlib import Path
from typing import Annotated

import typer

from rollout.base.files import check_output_path
from rollout.base.hints import nearest_hint
from rollout.base.ownership import FolderError, private_folder_error


class UsageError(ValueError):
    """A command cannot do what it was called with; the message says what was expected."""


def setting_hint(option: str) -> str:
    """Return a hint that a setting of a run is written without dashes; "" if the option is no setting."""
    from mcore_mas.config.run import RunConfig
    from rollout.base.error_lines import dotted_keys

    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    keys = dotted_keys(name, RunConfig)
    if not keys:
        return ""
    settings = " or ".join(f"{key}=..." for key in keys)
    return f"; a setting of a run has no dashes: `mcore-mas run SUITE {settings}`"


def setting_names() -> set[str]:
    """Return the names of a run's settings without their sections, such as `steps` for `trainer.steps`."""
    from mcore_mas.config.run import RunConfig
    from rollout.base.error_lines import section_keys

    return section_keys(RunConfig)


def run_names() -> list[str]:
    """Return the names of the runs in results/ of the current folder."""
    return [file.parent.name for file in sorted(Path("results").glob("*/config.yaml"))]


def run_folder(run: Path) -> Path:
    """Return the folder of a run that is named by its folder, its config.yaml, or its name in results/.

    Raises:
        FolderError: there is no such run.
    """
    if (run / "config.yaml").is_file():
        return run
    if run.name == "config.yaml" and run.is_file():
        return run.parent
    if str(run) in run_names():
        return Path("results") / run
    check_readable(run)
    raise FolderError(
        f"{run}: no run here; expected a run's folder, its name in results/, or its config.yaml"
        f"{nearest_hint(run.name, run_names())}"
    )


def check_readable(run: Path) -> None:
    """Raise FolderError if a run, named by its folder or its name in results/, is private to another user."""
    for folder in (run, Path("results") / run):
        error = private_folder_error(folder)
        if error:
            raise FolderError(error)


def run_config_file(run: Path) -> Path:
    """Return the file of a run's resolved config.

    Args:
        run: this file, or the folder of the run, or its name in results/.

    Raises:
        FolderError: there is no such run.
    """
    return run if run.is_file() else run_folder(run) / "config.yaml"


def results_folder(folder: Path) -> Path:
    """Return the folder that an argument means: a folder of runs or of one run, or results/NAME for a run's name.

    `mcore-mas new` gives a project's Python package and its run the same name. This name then means the
    run, because the package's folder has no run.
    """
    is_run_or_has_runs = any(folder.glob("config.yaml")) or any(folder.glob("*/config.yaml"))
    if not is_run_or_has_runs and str(folder) in run_names():
        return Path("results") / folder
    return folder


def output_path(path: Path | None) -> Path | None:
    """Check that a command can write a file or folder at this path.

    This is a callback of Typer, so it returns the path.

    Raises:
        FolderError: it cannot be written.
    """
    if path is not None:
        check_output_path(path)
    return path


def output_file(path: Path | None) -> Path | None:
    """Check that a command can write a file at this path.

    This is a callback of Typer, so it returns the path.

    Raises:
        FolderError: it cannot be written, or is a folder.
    """
    if path is not None:
        check_output_path(path)
        if path.is_dir():
            raise FolderError(f"{path}: is a folder; name a file")
    return path


RunFolder = Annotated[
    Path,
    typer.Argument(
        help="A run: its folder, or its name in results/.",
        callback=run_folder,
        autocompletion=run_names,
    ),
]
ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="run",
        help="A run: its folder, its name in results/, or its config.yaml.",
        callback=run_config_file,
        autocompletion=run_names,
    ),
]
ResultsFolder = Annotated[
    Path,
    typer.Argument(
        help="The folder of the runs, or one run: its folder, or its name in results/.",
        callback=results_folder,
    ),
]

SuiteName = Annotated[str, typer.Argument(help="A suite file, or the name of an experiment.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Hydra overrides of every run, such as trainer.steps=3."),
]
ConfigDir = Annotated[
    Path | None, typer.Option(help="Folder of your own configs, if it is not configs/.")
]
State = Annotated[
    str, typer.Option(help="base: the models before training; trained: those after it.")
]

ListenHost = Annotated[str, typer.Option(help="Address to listen on.")]
ListenPort = Annotated[
    int, typer.Option(help="Port to listen on; 0: any free port.", min=0, max=65535)
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File of a bearer token; required if the host is not loopback."),
]
