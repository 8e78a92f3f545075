"""MLflow's pages on the runs of this machine: `python -m mcore_mas.cli.ui`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

from rollout.base.processes import die_with_parent, stop_group

HOST = "127.0.0.1"  # the pages have no password


class UiError(RuntimeError):
    """The pages cannot be opened: one line that says what, where and what to do."""


def serve(store: str, port: int) -> None:
    """Serve the MLflow `store` on loopback until interrupted, then stop the server and its children.

    Raises:
        UiError: there is no such store, the port is taken, or the server ends by itself.
    """
    scheme, _, path = store.partition(":///")
    if scheme == "sqlite" and not Path(path).is_file():
        raise UiError(f"{path}: no such file; no run has been tracked yet (run `make demo`, or name another --store)")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UiError(f"port {port} on {HOST}: {error.strerror}; choose another (make ui PORT=5001)") from error
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    environment = {
        **os.environ,  # MLflow's server and its workers take these settings from nowhere else
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    signal.signal(signal.SIGTERM, _interrupt)
    child = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent)
    print(f"MLflow: http://{HOST}:{port}  (Ctrl-C ends it)", flush=True)
    try:
        status = child.wait()
    except KeyboardInterrupt:
        return
    finally:
        stop_group(child)
    raise UiError(f"the MLflow server ended with status {status}; what it said is above")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m mcore_mas.cli.ui", description="MLflow's pages on the runs.")
    parser.add_argument("--store", default="sqlite:///results/mlflow.db", help="MLflow tracking store")
    parser.add_argument("--port", type=int, default=5000, help="port on 127.0.0.1")
    options = parser.parse_args(arguments)
    try:
        serve(options.store, options.port)
    except UiError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
