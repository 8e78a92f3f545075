"""Commands about this machine and the runs on it: what it lacks for training, MLflow's pages, lists, comparisons."""

import asyncio
import importlib.metadata
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import psutil
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rollout.base.ownership import FolderError
from rollout.base.processes import start_group, stop_group
from rollout.base.text import nearest, shown_line

machine_commands = typer.Typer()
_PANEL = "This machine"
HOST = "127.0.0.1"  # the pages have no password
# of MLflow's page: trainings, not folded below their experiments as without an order
TRAININGS = urlencode(
    {
        "searchFilter": "tags.stage = 'train'",
        "orderByKey": "metrics.`validation/accuracy`",
        "orderByAsc": "false",
    },
    quote_via=quote,
)


class UsageError(ValueError):
    """A command cannot be done as it was called: says what was expected, or what to do."""


@machine_commands.command("ui", rich_help_panel=_PANEL)
def open_pages(
    store: Annotated[
        str, typer.Option(help="MLflow tracking store.")
    ] = "sqlite:///results/mlflow.db",
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 5000,
) -> None:
    """Serve MLflow's pages on the runs of this machine until interrupted."""
    from rollout.base.http_server import bind

    scheme, _, path = store.partition(":///")
    if scheme == "sqlite" and not Path(path).is_file():
        raise UsageError(
            f"{path}: no such file; no run has been tracked yet (run `make demo`, or name another --store)"
        )
    try:
        bind(HOST, port).close()
    except OSError as error:
        raise UsageError(
            f"port {port} on {HOST}: {error.strerror}; choose another --port"
        ) from error
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    environment = {
        **os.environ,  # MLflow's server and its workers take these settings from nowhere else
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    child = start_group(command, env=environment, death=signal.SIGTERM)
    print(
        f"MLflow: http://{HOST}:{port}{_first_page(Path(path)) if scheme == 'sqlite' else ''}  (Ctrl-C ends it)",
        flush=True,
    )
    try:
        status = child.wait()
    except KeyboardInterrupt:
        return
    finally:
        stop_group(child)
    raise UsageError(f"the MLflow server ended with status {status}; what it said is above")


def _first_page(store: Path) -> str:
    """The page of the experiment in which a run was last begun: its trainings."""
    with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as database:
        try:
            last = database.execute(
                "SELECT experiment_id FROM runs ORDER BY start_time DESC LIMIT 1"
            ).fetchone()
        except sqlite3.Error:  # MLflow says what is wrong with it
            last = None
    return f"/#/experiments/{last[0]}/runs?{TRAININGS}&compareRunsMode=CHART" if last else ""


_NEEDED = (
    "torch",
    "megatron-core",
    "ray",
    "transformers",
    "snakemake",
    "mlflow",
    "faiss-cpu",
    "pyarrow",
    "hydra-core",
)
_OPTIONAL = ("transformer-engine", "sglang", "gymnasium", "mcp", "alfworld")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Ray keeps its objects)


@machine_commands.command("doctor", rich_help_panel=_PANEL)
def examine() -> None:
    """Say what this machine has and lacks; exit status 1 if something needed is missing."""
    failed = 0
    for name, check in _CHECKS.items():
        ok, finding = check()
        failed += not ok
        print(f"{'ok ' if ok else 'NO '} {name:<16} {finding}")
    raise typer.Exit(1 if failed else 0)


def _packages() -> tuple[bool, str]:
    missing = [name for name in _NEEDED if not _version(name)]
    if missing:
        return False, f"missing: {', '.join(missing)}; run `make setup`"
    return True, ", ".join(f"{name} {_version(name)}" for name in _NEEDED)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        return (
            True,
            "none: training runs on the CPU over gloo, for models of a few million parameters",
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return True, f"{len(names)}: {', '.join(sorted(set(names)))}"


def _sandbox() -> tuple[bool, str]:
    """The tier in which model-written programs run here; without one, teams that run none still train."""
    from rollout.sandbox import Sandbox, SandboxUnavailable

    sandbox = Sandbox(slots=1)
    try:
        asyncio.run(sandbox.start())
    except SandboxUnavailable as error:
        return True, f"none: {error}"
    finally:
        sandbox.close()
    return True, f"{sandbox.tier} (model-written programs; docs/sandbox.md)"


def _room(needed: float, free: int) -> tuple[bool, str]:
    """Whether of `free` bytes the `needed` GiB are there."""
    return free >= needed * 2**30, f"{free / 2**30:.1f} GiB free ({needed:g} needed by the demo)"


_CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "python": lambda: (
        sys.version_info >= (3, 11),
        f"{sys.version.split()[0]} (3.11 or newer is needed)",
    ),
    "packages": _packages,
    "optional": lambda: (
        True,
        ", ".join(f"{name} {_version(name) or 'absent'}" for name in _OPTIONAL),
    ),
    "gpus": _gpus,
    "cores": lambda: (True, f"{len(os.sched_getaffinity(0))} usable"),
    "sandbox": _sandbox,
    "memory": lambda: _room(8, psutil.virtual_memory().available),
    "shared memory": lambda: _room(0.5, shutil.disk_usage(_SHARED_MEMORY).free),
    "disk": lambda: _room(5, shutil.disk_usage(Path.cwd()).free),
}


run_commands = typer.Typer()
_RUNS_PANEL = "Look at runs"


def run_names() -> list[str]:
    """The runs in results/, which a name alone means."""
    return [file.parent.name for file in sorted(Path("results").glob("*/config.yaml"))]


def run_folder(named: Path) -> Path:
    """The folder of a run: as it was named, or of that name in results/.

    Raises:
        FolderError: there is none.
    """
    if (named / "config.yaml").is_file():
        return named
    if str(named) in run_names():
        return Path("results") / named
    expected = "expected a run's folder, its name in results/, or its config.yaml"
    raise FolderError(f"{named}: no run here; {expected}{nearest(named.name, run_names())}")


def run_config(named: Path) -> Path:
    """The resolved config that was named by itself, or by its run; raises as `run_folder`."""
    return named if named.is_file() else run_folder(named) / "config.yaml"


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
        help="A run: its folder, its name in results/, or its config.yaml.",
        callback=run_config,
        autocompletion=run_names,
    ),
]


@run_commands.command("ls", rich_help_panel=_RUNS_PANEL)
def list_runs(
    results: Annotated[Path, typer.Argument(help="The folder of the runs, or that of one.")] = Path(
        "results"
    ),
) -> None:
    """List the runs of a folder: steps taken, last reward and validation, scores before training and after it."""
    from mcore_mas.reports.runs import run_states

    states = run_states(results)
    if not states:
        print(f"no runs in {shown_line(str(results))}")
        return
    names = list(
        dict.fromkeys(["base", "trained", *(name for state in states for name in state.scores)])
    )
    table = Table("run", "steps", "reward", "validation", *names, show_edge=False)
    for state in states:
        numbers = (state.reward, state.accuracy, *(state.scores.get(name) for name in names))
        cells = ("" if number is None else f"{number:.3f}" for number in numbers)
        table.add_row(
            Text(shown_line(state.run)),
            f"{state.steps}/{state.of}{' done' if state.done else ''}",
            *cells,
        )
    Console(highlight=False).print(table)


@run_commands.command("compare", rich_help_panel=_RUNS_PANEL)
def compare_runs(first: RunFolder, second: RunFolder) -> None:
    """Print which settings of two runs differ, and their scores on the tasks that both have, paired by task."""
    from mcore_mas.reports.runs import config_differences, score_differences

    console = Console(highlight=False)
    heads = (Column(shown_line(run.name), overflow="fold") for run in (first, second))
    settings = Table(Column("setting", overflow="fold"), *heads, show_edge=False)
    for key, values in config_differences(first, second).items():
        settings.add_row(
            Text(shown_line(key)),
            *(Text("not set" if v is None else shown_line(str(v))) for v in values),
        )
    console.print(settings if settings.rows else "no setting differs")
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
        numbers = (
            f"{100 * row.first:.1f}",
            f"{100 * row.second:.1f}",
            f"{100 * (row.second - row.first):+.1f}",
        )
        interval = f"[{100 * row.low:+.1f}, {100 * row.high:+.1f}]"
        scores.add_row(row.state, row.metric, *numbers, Text(interval), str(row.tasks))
    console.print(scores if scores.rows else "no evaluation that both have")


@run_commands.command("track", rich_help_panel=_RUNS_PANEL)
def track_results(
    results: Annotated[Path, typer.Argument(help="The folder of the runs, or of one run.")] = Path(
        "results"
    ),
) -> None:
    """Send MLflow the steps, scores, costs and tables that it lacks, also of runs that were broken off."""
    from mcore_mas.reports.runs import runs_in
    from mcore_mas.tracking.publish import publish

    if (results / "config.yaml").is_file():
        run_folder = results.absolute()
        results, runs, tables = run_folder.parent, [run_folder.name], []
    else:
        runs = [folder.name for folder in runs_in(results)]
        tables = [file.stem for file in sorted(results.glob("tables/*.csv"))]
    warnings: list[str] = []
    page = publish(results, runs, tables, warnings.append)
    for line in warnings:
        print(line)
    if page:
        print(page)
    if warnings:
        raise typer.Exit(1)


@run_commands.command("chat", rich_help_panel=_RUNS_PANEL)
def chat_with_team(
    run: RunFolder, state: Annotated[str, typer.Option(help="base or trained.")] = "trained"
) -> None:
    """Talk to a run's team: each line is a task that it plays; an empty line, or Ctrl-D at a terminal, ends."""
    from mcore_mas.config.run import RunConfig
    from mcore_mas.evaluation.evaluate import converse
    from mcore_mas.reports.terminal import print_trajectory

    console = Console(highlight=False)
    prompt = "you: " if sys.stdin.isatty() else ""
    asked = iter(lambda: input(prompt).strip(), "")
    with suppress(EOFError):
        for trajectory in converse(RunConfig.load(run / "config.yaml"), state, asked):
            print_trajectory(trajectory, console, {}, head=False)
