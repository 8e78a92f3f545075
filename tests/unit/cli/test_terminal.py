"""Commands at a terminal of 80 columns: tab completes names, and long output comes in pages."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from rollout.records.files import write_trajectories
from tests.support.finished import finished
from tests.support.played import trajectory, turn

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pexpect.spawn]:
    """Start bash in a folder with a run, after `mcore-mas --install-completion`."""
    tmp_path = tmp_path_factory.mktemp("home")
    finished(tmp_path / "results", "my_first_run", 1)
    played = [
        trajectory(turn(0, reward=n), turn(1, "verifier", reward=1), sample=n) for n in range(40)
    ]
    write_trajectories(
        tmp_path / "results/my_first_run/train/trajectories/step_000000.parquet", played
    )
    program = tmp_path / "lib" / "mcore-mas"
    command = tmp_path / "bin" / "mcore-mas"
    for file in (program, command):
        file.parent.mkdir()
    program.write_text("from mcore_mas.cli.main import main\nmain()\n")
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    command.chmod(0o755)
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
        "PAGER": "sed s/^/paged:/",
    }
    env |= {"PATH": f"{command.parent}:{os.environ['PATH']}", "INPUTRC": "/dev/null"}
    env.pop("COLUMNS", None)
    bash = ["-c", "mcore-mas --install-completion bash >/dev/null; exec bash --rcfile ~/.bashrc -i"]
    process = pexpect.spawn(
        "bash", bash, cwd=tmp_path, env=env, timeout=40, encoding="utf-8", dimensions=(24, 80)
    )
    run_command(process, "bind 'set enable-bracketed-paste off'")
    yield process
    process.close(force=True)


def run_command(shell: pexpect.spawn, line: str) -> list[str]:
    """Run a command in the shell, and return the lines that it prints."""
    shell.sendline(f"{line}; echo done-$((1+1))")
    shell.expect_exact("$((1+1))")
    shell.expect_exact("done-2")
    return shell.before.replace("\r", "").splitlines()[1:]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("expl", "explain "),
        ("chat my", "chat my_first_run "),
        ("show my", "show my_first_run "),
        ("list est", "list estimators "),
        ("show results/my_first_run/tr", "show results/my_first_run/train/"),
    ],
)
def test_tab_completes(shell: pexpect.spawn, typed: str, completed: str) -> None:
    shell.send(f"mcore-mas {typed}\t")
    shell.expect_exact(f"mcore-mas {completed}")
    shell.sendcontrol("u")


@pytest.mark.slow
def test_long_output_comes_in_pages_that_fit_the_terminal(shell: pexpect.spawn) -> None:
    for command, words in (
        ("show my_first_run", "my_first_run/train/traj"),
        ("explain my_first_run", "agent solver"),
    ):
        lines = run_command(shell, f"mcore-mas {command}")
        assert len(lines) > 24 and all(line.startswith("paged:") for line in lines), lines
        assert any(words in line for line in lines), lines
        tables = [line.removeprefix("paged:") for line in lines if re.search("[│┃━]", line)]
        assert tables and max(map(len, tables)) <= 80
    assert max(map(len, run_command(shell, "mcore-mas ls"))) <= 80
