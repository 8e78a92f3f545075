"""Cleanup after a Ray session: its files are removed, and its logs are moved to the run if they are wanted."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_mas.runtime.ray_cleanup import remove_session

# Script of a user that trains in a thread
_TRAINING_SCRIPT = """
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
def test_after_sigterm_to_a_script_the_error_names_both_possible_signals() -> None:
    """A script has no handler of SIGTERM and ends at once. The cleanup process prints the error."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder,
        subprocess.Popen(
            [sys.executable, "-c", _TRAINING_SCRIPT],
            env=os.environ | {"RAY_TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as script,
    ):
        assert script.stdout is not None
        assert script.stdout.readline() == "up\n"
        script.terminate()
        _, stderr = script.communicate(timeout=120)
    assert script.returncode == -signal.SIGTERM
    message = "error: a signal ended the training (SIGTERM, or SIGKILL; was there memory left?)"
    assert stderr.splitlines()[-1] == message


@pytest.mark.parametrize("keep", [True, False])
def test_an_ended_session_is_removed_and_its_logs_are_moved_if_they_are_wanted(
    tmp_path: Path, keep: bool
) -> None:
    session = tmp_path / "ray" / "session_1"
    logs = tmp_path / "run" / "ray"
    for folder in (session / "logs", session / "sockets", logs):
        folder.mkdir(parents=True)
    (session / "logs" / "worker.err").write_text("out of memory")
    (logs / "earlier_log").touch()
    (tmp_path / "ray" / "session_latest").symlink_to(session)
    remove_session(session, logs, keep_logs=keep)
    remaining = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert remaining == (["run", "run/ray", "run/ray/worker.err"] if keep else ["run"])


def test_the_folder_of_another_session_stays(tmp_path: Path) -> None:
    for name in ("session_1", "session_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2")
    remove_session(tmp_path / "session_1", None, keep_logs=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["session_2", "session_latest"]
