"""The command `ui`: MLflow's pages of the runs on this machine."""

import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from mcore_mas.cli.arguments import UsageError
from rollout.base.processes import start_group, stop_group

mlflow_commands = typer.Typer()
MACHINE_PANEL = "This machine"
_HOST = "127.0.0.1"  # MLflow's pages have no password

# Query of MLflow's page of an experiment: its trainings, the best validation accuracy first. Without
# an order, MLflow collapses the runs of a suite below their parent.
_TRAININGS_QUERY = urlencode(
    {
        "searchFilter": "tags.stage = 'train'",
        "orderByKey": "metrics.`validation/accuracy`",
        "orderByAsc": "false",
    },
    quote_via=quote,
)


@mlflow_commands.command("ui", rich_help_panel=MACHINE_PANEL)
def open_mlflow(
    store: Annotated[
        str, typer.Option(help="MLflow tracking store.")
    ] = "sqlite:///results/mlflow.db",
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 5000,
) -> None:
    """Serve MLflow's pages of the runs on this machine until it is interrupted."""
    from rollout.base.http_server import open_listener

    scheme, _, path = store.partition(":///")
    if scheme == "sqlite" and not Path(path).is_file():
        raise UsageError(
            f"{path}: no such file; no run has been tracked yet (run `make demo`, or name another "
            "--store)"
        )
    try:
        open_listener(_HOST, port).close()
    except OSError as error:
        raise UsageError(
            f"port {port} on {_HOST}: {error.strerror}; choose another --port"
        ) from error

    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
    command += ["--host", _HOST, "--port", str(port), "--workers", "1"]
    environment = {
        **os.environ,
        # Settings that reach the workers of MLflow's server as environment variables only.
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    # SIGTERM raises KeyboardInterrupt too, so that the server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = start_group(command, env=environment, death=signal.SIGTERM)
    page = _newest_experiment(Path(path)) if scheme == "sqlite" else ""
    print(f"MLflow: http://{_HOST}:{port}{page}  (Ctrl-C ends it)", flush=True)
    try:
        status = server.wait()
    except KeyboardInterrupt:
        return
    finally:
        stop_group(server)
    raise UsageError(f"the MLflow server ended with status {status}; its messages are above")


def _newest_experiment(store: Path) -> str:
    """Return the path of the page of the experiment with the newest run, or "" if there is none."""
    with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as database:
        try:
            row = database.execute(
                "SELECT experiment_id FROM runs ORDER BY start_time DESC LIMIT 1"
            ).fetchone()
        except sqlite3.Error:  # MLflow's server reports what is wrong with the store
            return ""
    if row is None:
        return ""
    return f"/#/experiments/{row[0]}/runs?{_TRAININGS_QUERY}&compareRunsMode=CHART"
