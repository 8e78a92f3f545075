"""Cleanup behind a Ray: nothing stays of its session but logs that are wanted."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_mas.runtime.ray_cleanup import remove_session

_IN_A_SCRIPT = """
import threading, time
from mcore_mas.runtime.local_ray import running_ray

def train():
    with running_ray(1, 100):
        print("up", flush=True)
        time.sleep(600)

training = threading.Thread(target=train)
training.start()
training.join()
"""


@pytest.mark.slow
def test_sigterm_to_a_script_that_trains_is_not_called_a_sigkill() -> None:
    """A script hears no SIGTERM: it ends at once, and what cleans up behind it says so."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder}
        command, pipe = [sys.executable, "-c", _IN_A_SCRIPT], subprocess.PIPE
        with subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True
        ) as script:
            assert script.stdout is not None and script.stdout.readline() == "up\n"
            script.terminate()
            said = script.communicate(timeout=120)[1].splitlines()
    assert script.returncode == -signal.SIGTERM
    assert (
        said[-1]
        == "error: a signal ended the training (SIGTERM, or SIGKILL; was there memory left?)"
    )


@pytest.mark.parametrize("keep", [True, False])
def test_a_ray_that_has_ended_leaves_nothing_but_its_logs_where_they_are_wanted(
    tmp_path: Path, keep: bool
) -> None:
    session, logs = tmp_path / "ray" / "session_1", tmp_path / "run" / "ray"
    for folder in (session / "logs", session / "sockets", logs):
        folder.mkdir(parents=True)
    (session / "logs" / "worker.err").write_text("out of memory")
    (logs / "of_before").touch()
    (tmp_path / "ray" / "session_latest").symlink_to(session)
    remove_session(session, logs, keep_logs=keep)
    left = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert left == ["run", *(["run/ray", "run/ray/worker.err"] if keep else [])]


def test_another_rays_folder_stays(tmp_path: Path) -> None:
    for name in ("session_1", "session_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2")
    remove_session(tmp_path / "session_1", None, keep_logs=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["session_2", "session_latest"]
