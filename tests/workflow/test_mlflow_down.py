"""Train whole runs whose tracking server hangs or is down: they end in time, with all steps."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_mas.tracking.metrics_log import STEP_TIME
from rollout.base.network import free_port
from tests.support.run_folder import make_run, metrics_of

pytestmark = pytest.mark.usefixtures("forked_programs")
TRAIN = """
import sys, time
from pathlib import Path
import pytest
from mcore_mas.training import train
from tests.support.in_process import training_here
for config in map(Path, sys.argv[1:]):
    with pytest.MonkeyPatch.context() as patch, training_here(patch, tracked=True):
        train.train(config)
    (config.parent / "ended").write_text(str(time.time()))
"""


@pytest.mark.slow
def test_a_training_whose_server_hangs_or_is_down_ends_well_with_all_its_steps(
    tmp_path: Path,
) -> None:
    """Train both runs in one process, which also has to end in time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        runs = []
        for name, port in (("hangs", silent.getsockname()[1]), ("down", free_port("127.0.0.1"))):
            (tmp_path / name).mkdir()
            settings = ("policies.solver.tp=1", "data.validation=1", "trainer.steps=2")
            tracking = f"tracking.uri=http://127.0.0.1:{port}"
            runs.append(make_run(tmp_path / name, *settings, tracking))
        command = [
            sys.executable,
            "-c",
            TRAIN,
            *(str(run / "config.yaml") for run in runs),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        gone = time.time()
    assert result.returncode == 0, result.stderr[-3000:]
    for run in runs:
        rows = metrics_of(run)
        assert [row["step"] for row in rows] == [-1, 0, 1]
        ended = float((run / "ended").read_text())
        assert ended - rows[-1][STEP_TIME] < 120  # models are written, and MLflow has 30 s
        assert (run / "train" / "done.json").is_file()
        warning = rf"MLflow does not (take metrics|answer).*{re.escape(str(run))}"
        assert re.search(warning, result.stdout + result.stderr)
    assert gone - ended < 60
