"""MLflow's pages in Chromium, on the runs of two seeds."""

from __future__ import annotations

import html
import itertools
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from mcore_mas.tracking.mlflow_store import open_store
from mcore_mas.tracking.mlflow_training import start_training_record
from mcore_mas.tracking.publish import LOCAL_PAGES, publish
from mcore_mas.tracking.traces import TracedTrajectory, TraceSender
from rollout.base.network import free_port
from tests.support.browser import browse, needs_chromium
from tests.support.finished import finished
from tests.support.played import TASK, trajectory, turn
from tests.support.tracked_run import config_path_of, write_run

pytestmark = [pytest.mark.slow, needs_chromium]
SEEDS = {"duo": 1, "duo_s2": 2}
# Size of the window in pixels. On its right MLflow offers an assistant, which pictures leave out.
WIDTH = 1700
HEIGHT = 900
PICTURE_WIDTH = 1255


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("mlflow")
    return folder / "results"


@pytest.fixture(scope="module")
def pages(request: pytest.FixtureRequest, results: Path) -> Iterator[tuple[str, str]]:
    """Yield the address that `mcore-mas ui` prints, and the address of the comparison of two runs."""
    if not request.config.getoption("--mlflow"):
        pytest.skip("takes a minute and a half; `make test-mlflow` runs it")
    for run, seed in SEEDS.items():
        finished(results, run, seed)
    comparison = publish(results, SEEDS, [], pytest.fail)
    assert comparison

    port = free_port("127.0.0.1")
    command = [
        sys.executable,
        "-m",
        "mcore_mas",
        "ui",
        f"--store=sqlite:///{results}/mlflow.db",
        f"--port={port}",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout
        first_page = server.stdout.readline().split()[1]
        wait_for_server(server, f"http://127.0.0.1:{port}/health")
        yield first_page, comparison.replace(LOCAL_PAGES, f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def traces_page(results: Path, pages: tuple[str, str]) -> str:
    """Send a trajectory of two agents as a trace; return the address of its experiment's traces."""
    config = write_run(results, f"sqlite:///{results}/mlflow.db")
    record = start_training_record(config, config_path_of(config), 0)
    played = trajectory(
        turn(0, "solver", text="\\boxed{3}", reward=0.75, started_s=time.time(), took_s=1.0),
        turn(1, "verifier", text="APPROVE", reward=0.25, started_s=time.time(), took_s=1.0),
        answer="3",
    )
    advantages = {("0/t/0", "", 0): 1.5, ("0/t/0", "", 1): -0.5}
    warnings: list[str] = []
    sender = TraceSender(config, record, warnings.append)
    sender.send([TracedTrajectory(trajectory=played, task=TASK, advantages=advantages)])
    sender.close()
    sender.join(120)
    assert not warnings
    server = pages[0].partition("/#")[0]
    return f"{server}/#/experiments/{open_store(config).experiment_id}/traces?startTimeLabel=ALL"


def wait_for_server(server: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)


def page_text(url: str, folder: Path, name: str, request: pytest.FixtureRequest) -> str:
    """Return the text of a page, and put its picture into the folder that `--mlflow` names."""
    screenshot = folder / f"{name}.png"
    options = ["--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={screenshot}"]
    document = browse(url, folder / "profile", *options, seconds=45)
    picture = Image.open(screenshot).crop((0, 0, PICTURE_WIDTH, HEIGHT))
    picture = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    pictures = Path(request.config.getoption("--mlflow"))
    picture.save(pictures / f"mlflow_{name}.png", optimize=True)
    return text_of(document)


def text_of(document: str) -> str:
    """Return the text of an HTML document."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", document))
    return re.sub(r"\s+", " ", text)


def test_the_first_page_has_the_charts_of_trainings_with_key_metrics_first(
    pages: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = page_text(pages[0], tmp_path, "charts", request)
    assert "duo train" in text and "duo_s2 train" in text and "2 matching runs" in text
    assert "duo evaluate" not in text
    assert text.index("achieved (2)") < text.index("agent/solver (1)")


def test_a_table_lists_trainings(
    pages: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = pages[0].partition("&compareRunsMode")[0]
    text = page_text(url, tmp_path, "runs", request)
    assert "duo train" in text and "duo_s2 train" in text and "Sort: validation/accuracy" in text


def test_two_runs_are_compared_agent_by_agent(
    pages: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = page_text(pages[1], tmp_path, "compare", request)
    assert "Comparing 2 Runs from 1 Experiment" in text
    assert "duo train" in text and "duo_s2 train" in text
    assert "seed 1 2" in text
    # Values of the last step, worked out by hand: the rewards are 0.2 + 0.02 * 19 + 0.1 * seed;
    # 20 minutes on two devices are 0.667 hours.
    expected = {
        "achieved/reward": ("0.68", "0.78"),
        "achieved/accuracy": ("0.825", "0.875"),
        "agent/solver/reward_mean": ("0.67", "0.77"),
        "agent/verifier/reward_mean": ("0.48", "0.58"),
        "cost/gpu_hours": ("0.667", "0.667"),
    }
    compared = compared_metrics(text)
    assert {name: compared[name] for name in expected} == expected


def compared_metrics(text: str) -> dict[str, tuple[str, str]]:
    """Return each metric's values in two runs: the page lists all names in any order, then two values for each."""
    words = text.partition("Metrics Show diff only ")[2].split()
    names = list(itertools.takewhile(lambda word: "/" in word, words))
    values = words[len(names) : 3 * len(names)]
    return dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))


def test_a_trajectory_is_listed_with_the_rewards_and_advantages_of_its_agents(
    traces_page: str, tmp_path: Path
) -> None:
    window = f"--window-size={WIDTH},{HEIGHT}"
    text = text_of(browse(traces_page, tmp_path / "profile", window, seconds=45))
    assert "0/t/0" in text  # the session
    for name in ("outcome", "reward/solver", "advantage/verifier"):
        assert name in text
