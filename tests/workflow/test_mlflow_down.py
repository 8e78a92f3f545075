"""A whole training whose tracking server hangs or is down: it ends well, in time, with all of its steps."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_mas.rollout.base.processes import free_port
from mcore_mas.training.tracking import CLOCK
from tests.support.run_folder import make_run, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_training_whose_server_hangs_or_is_down_ends_well_with_all_its_steps(tmp_path: Path, hangs: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and says nothing
        port = silent.getsockname()[1] if hangs else free_port("127.0.0.1")
        run = make_run(tmp_path, "data.validation=1", "trainer.steps=2", f"tracking.uri=http://127.0.0.1:{port}")
        command = [sys.executable, "-m", "mcore_mas", "train", str(run / "config.yaml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [-1, 0, 1]
    assert time.time() - rows[-1][CLOCK] < 120  # models are written, and MLflow has 30 s
    assert json.loads((run / "train" / "done.json").read_text())["mlflow_run"] is None
    assert "MLflow does not take metrics (" in done.stdout + done.stderr
