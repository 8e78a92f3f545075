"""Blocks of docs/quickstart.md and the README: a team of objects learns, stops, continues, and is used."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import psutil
import pytest
from typer.testing import CliRunner

from mcore_mas.cli.main import app, main
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Trajectory
from tests.slurm.cluster import wait_until
from tests.support.commands import called

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

# Appended to the page's script: prints the results of its run as JSON
PRINT_RESULTS = """
import json, signal
results = {
    "scores": {state: run.evaluate(k=4, state=state) for state in ("base", "trained")},
    "metrics": run.metrics,
    "handlers": [str(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGURG)],
    "page": run.trajectories[0]._repr_html_()[:40],
}
print(json.dumps(results))
"""


def environment() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in its folder; assert that it succeeds."""
    completed = subprocess.run(
        [sys.executable, script],
        cwd=script.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed


def assert_reward_is_the_pages(trajectory: Trajectory) -> None:
    """Assert that the reward is the share of words with the requested letter, in replies that ended."""
    prompt = trajectory.turns[0].messages[-1].content
    match = re.search(r"words with (\w)\.", prompt)
    assert match is not None
    letter = match[1]
    replies = [turn.text for turn in trajectory.turns if turn.valid]
    words = " ".join(replies).split()
    share = sum(letter in word for word in words) / max(1, len(words))
    assert trajectory.outcome == pytest.approx(share)
    for turn in trajectory.turns:
        assert turn.reward == (trajectory.outcome if turn.valid else 0.0)


@pytest.mark.slow
@pytest.mark.multirank
def test_every_block_of_the_quickstart_runs_and_the_team_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    script = tmp_path / "quickstart.py"
    script.write_text("\n".join([*PYTHON_BLOCK.findall(page), PRINT_RESULTS]))
    completed = run_script(script)
    results = json.loads(completed.stdout.splitlines()[-1])

    # The training was stopped after step 9 and continued.
    assert [row["step"] for row in results["metrics"]] == list(range(-1, 40))
    assert "continuing from results/letters/train/checkpoints/step_000010" in completed.stderr

    # Seven runs ended between 0.82 and 0.98. They differ because the last bits of log-probabilities
    # depend on the other requests of a decoding batch.
    rewards = [row["reward/mean"] for row in results["metrics"][1:]]
    assert sum(rewards[-5:]) / 5 > 0.75
    assert sum(rewards[:5]) / 5 < 0.65
    assert results["scores"]["trained"]["avg@4"] > 0.75
    assert results["scores"]["base"]["avg@4"] < 0.65

    assert results["handlers"] == ["0", "0"]  # SIG_DFL: the process has its own handlers again
    assert results["page"].startswith("<iframe sandbox srcdoc=")
    assert "│ 0 writer (shared v" in completed.stdout  # the trajectory that the page shows
    trajectories = read_trajectories(
        tmp_path / "results/letters/train/trajectories/step_000039.parquet"
    )
    assert len(trajectories) == 8 * 8
    valid_turns = 0
    for trajectory in trajectories:
        assert_reward_is_the_pages(trajectory)
        valid_turns += sum(turn.valid for turn in trajectory.turns)
    assert valid_turns > 0.8 * 2 * len(trajectories)
    assert (tmp_path / "exported" / "config.json").is_file()

    monkeypatch.chdir(tmp_path)
    assert "64 trajectories" in CliRunner().invoke(app, ["show", "letters"]).stdout

    # The command line cannot import the script's objects, because the script would train again.
    monkeypatch.setattr("sys.argv", ["mcore-mas", "chat", "letters"])
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(SystemExit):
        main()
    (error,) = capsys.readouterr().err.splitlines()
    assert (
        "is an object of the script or notebook that made this run; use the run there, such as run.chat()"
        in error
    )


@pytest.mark.slow
@pytest.mark.multirank
def test_ctrl_c_in_a_script_saves_and_the_command_line_plays_its_team(tmp_path: Path) -> None:
    """The script can be imported. As at a terminal, Ctrl-C is sent to all processes of the script."""
    page = (ROOT / "docs/quickstart.md").read_text()
    model, team, world, train, *_ = PYTHON_BLOCK.findall(page)
    # A shell's background jobs ignore SIGINT, and this test may be one of them; the script must not.
    handle_sigint = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    make_run = train.partition("for row in run:")[0]
    main_block = textwrap.indent(f"{handle_sigint}\n{model}{make_run}run.train()", "    ")
    script = tmp_path / "mine.py"
    script.write_text(
        f'import mcore_mas as mm\n{team}{world}\nif __name__ == "__main__":\n{main_block}\n'
    )

    folder = tmp_path / "results" / "letters" / "train"
    metrics_file = folder / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:

        def has_trained_or_failed() -> bool:
            if process.poll():
                return True
            return metrics_file.is_file() and '"step": 2,' in metrics_file.read_text()

        wait_until(has_trained_or_failed, 300)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode != 0
    assert stderr.splitlines()[-1] == "KeyboardInterrupt", stderr[-2000:]
    stopped = r"^results/letters: stopped by Ctrl-C after step \d+; the same command continues"
    assert re.search(stopped, stderr, re.MULTILINE)
    _, alive = psutil.wait_procs(children, timeout=30)
    running = [child.cmdline() for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert running == []
    steps = [json.loads(line)["step"] for line in metrics_file.read_text().splitlines()]
    assert (folder / "checkpoints" / f"step_{steps[-1] + 1:06d}" / "manifest.json").is_file()

    # The config names the script's objects by the script's module.
    config = (tmp_path / "results/letters/config.yaml").read_text()
    assert "mine:Letters" in config
    assert "mine:relay" in config
    assert "reward: mine:worth" in config
    assert ": here:" not in config

    chat, *_ = called(
        [
            "mcore-mas chat --state base letters",
            "mcore-mas evaluate --state base letters",
            "mcore-mas export letters shared --to out",
        ],
        tmp_path,
        environment(),
        typed="Write words with e.\n\n",
    )
    assert "0 writer" in chat
    assert "you: " not in chat  # stdin is no terminal, so there is no prompt
    assert (tmp_path / "results/letters/evaluation/base.json").is_file()
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.multirank
def test_the_readme_example_learns(tmp_path: Path) -> None:
    """The block is run unchanged; it prints the mean reward of each step."""
    (block,) = PYTHON_BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    script = tmp_path / "example.py"
    script.write_text(block)
    rewards = [float(line.split()[1]) for line in run_script(script).stdout.splitlines()]
    assert len(rewards) == 32
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.15
