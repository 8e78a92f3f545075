"""MLflow's real pages in real Chromium, on the runs of two seeds: they open on trainings and compare agents."""

from __future__ import annotations

import html
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

from mcore_mas.tracking.publish import LOCAL_PAGES, publish
from rollout.base.processes import free_port
from tests.support.browser import browse, needs_chromium
from tests.support.finished import finished

pytestmark = [pytest.mark.slow, needs_chromium]
RUNS = {"duo": 1, "duo_s2": 2}  # with their seeds
WIDTH, SEEN, HEIGHT = 1700, 1255, 900  # pixels: on the right MLflow offers an assistant


@pytest.fixture(scope="module")
def pages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """What `mcore-mas ui` says to open, and the address of the comparison."""
    if not request.config.getoption("--mlflow"):
        pytest.skip("takes a minute and a half; `make test-mlflow` runs it")
    results = tmp_path_factory.mktemp("mlflow") / "results"
    for run, seed in RUNS.items():
        finished(results, run, seed)
    said: list[str] = []
    link = publish(results, RUNS, [], said.append)
    assert said == []
    assert link
    port = free_port("127.0.0.1")
    command = [
        sys.executable,
        "-m",
        "mcore_mas",
        "ui",
        "--store",
        f"sqlite:///{results}/mlflow.db",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert server.stdout
        opens = server.stdout.readline().split()[1]
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
        yield opens, link.replace(LOCAL_PAGES, f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(60)


def seen(url: str, folder: Path, name: str, request: pytest.FixtureRequest) -> str:
    """The text of a page, whose picture goes to the folder that `--mlflow` names."""
    picture = folder / f"{name}.png"
    options = ["--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]
    document = browse(url, folder / "profile", *options, seconds=45)
    image = (
        Image.open(picture)
        .crop((0, 0, SEEN, HEIGHT))
        .convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    )
    image.save(Path(request.config.getoption("--mlflow")) / f"mlflow_{name}.png", optimize=True)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", document)))


def test_it_opens_on_the_charts_of_trainings_key_metrics_first(
    pages: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = seen(pages[0], tmp_path, "charts", request)
    assert "duo train" in text and "duo_s2 train" in text and "2 matching runs" in text
    assert "duo evaluate" not in text
    assert text.index("0_key (2)") < text.index("agent/solver (1)")


def test_a_table_lists_trainings(
    pages: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = seen(pages[0].partition("&compareRunsMode")[0], tmp_path, "runs", request)
    assert "duo train" in text and "duo_s2 train" in text and "Sort: validation/accuracy" in text


def test_two_runs_are_compared_agent_by_agent(
    pages: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = seen(pages[1], tmp_path, "compare", request)
    assert "Comparing 2 Runs from 1 Experiment" in text
    assert "duo train" in text and "duo_s2 train" in text
    # of the last step, by hand: 0.2 + 0.02 * 19 + 0.1 and, with the other seed, 0.2; 20 minutes on two devices
    names = "0_key/reward 0_key/validation_accuracy agent/solver/reward_mean agent/verifier/reward_mean cost/gpu_hours"
    values = "0.68 0.78 0.825 0.875 0.67 0.77 0.48 0.58 0.667 0.667"
    metrics = text[text.index("Metrics Show diff only") :]
    assert metrics.index(names) < metrics.index(values)
    assert "seed 1 2" in metrics
