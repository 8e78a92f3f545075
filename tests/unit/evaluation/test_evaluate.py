"""Evaluations that are interrupted and go on, that fail, and the versions that they record."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.converse import converse
from mcore_mas.evaluation.evaluate import EvaluationError, evaluate
from mcore_mas.evaluation.measure import describe_scores
from rollout.base.digests import tree_sha256
from rollout.base.json_files import write_json
from rollout.base.ownership import FolderError
from rollout.models.chat_template import Renderer
from rollout.records.files import read_tasks, read_trajectories
from rollout.records.trajectory import Trajectory
from tests.support.run_folder import make_run
from tests.support.slotted_sglang import slotted_server

pytestmark = pytest.mark.usefixtures("forked_programs")


def requests_to(url: str) -> int:
    """Return the number of requests that a server has answered."""
    with urlopen(f"{url}/count") as response:
        return int(response.read())


def use_server(run: Path, url: str) -> Path:
    """Let the engines of a run be the server at `url`; return the run's config file."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["engine"] |= {
        "name": "sglang",
        "urls": [url],
        "slots": 8,
        "compare_servers": False,
        "transport": None,
        "start_s": 0.5,
    }
    path.write_text(yaml.safe_dump(config))
    return path


def read_scores_file(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / "evaluation" / name).read_text())


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_to_the_same_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path, "data.test=60", "evaluation.samples=8")
    trajectories = run / "evaluation" / "base"
    scores = run / "evaluation" / "base.json"
    answer = read_tasks(run / "tasks" / "test.parquet")[0].answers[0]
    reply = Renderer(run / "base").encode_reply(f"\\boxed{{{answer}}}")
    with slotted_server(8, 0.02, reply) as url:
        config = use_server(run, url)
        command = [sys.executable, "-m", "mcore_mas", "evaluate", str(config), "--state", "base"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while not list(trajectories.glob("part_000001*")) and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        assert not scores.exists()
        finished = {trajectory.id for trajectory in read_trajectories(trajectories)}
        assert 256 <= len(finished) < 480

        before = requests_to(url)
        evaluate(config, "base", scores)
        after_resumed = requests_to(url)
        evaluate(config, "base", run / "evaluation" / "again.json")
        resumed_requests = after_resumed - before
        all_requests = requests_to(url) - after_resumed
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        missing_share = (480 - len(finished)) / 480
        assert resumed_requests == pytest.approx(all_requests * missing_share, rel=0.15)

    resumed = read_scores_file(run, "base.json")
    assert resumed == read_scores_file(run, "again.json")
    assert printed.splitlines() == [*describe_scores(resumed["rows"]), str(scores)]
    assert resumed["replies"] == 480
    assert resumed["failed"] == {}
    assert len(resumed["tasks"]) == 60
    assert 0 < resumed["rows"][-3]["value"] < 1
    ids = [trajectory.id for trajectory in read_trajectories(trajectories)]
    assert len(ids) == len(set(ids)) == 480


def versions_by_agent(trajectory: Trajectory) -> dict[str, set[int]]:
    versions: dict[str, set[int]] = {"solver": set(), "verifier": set()}
    for turn in trajectory.turns:
        versions[turn.agent].add(turn.policy_version)
    return versions


@pytest.mark.parametrize(
    ("state", "versions"),
    [
        ("trained", {"solver": {30}, "verifier": {0}}),
        ("base", {"solver": {0}, "verifier": {0}}),
    ],
)
def test_turns_of_trained_models_have_the_step_of_their_weights(
    tmp_path: Path, state: str, versions: dict[str, set[int]]
) -> None:
    """Models that this run did not write have version 0."""
    run = make_run(tmp_path, "data.test=1", "evaluation.samples=1")
    config = RunConfig.load(run / "config.yaml")
    model = shutil.copytree(run / "base", run / "train" / "models" / "solver")
    policies = {"solver": str(model), "verifier": str(run / "base")}
    record = {
        "policies": policies,
        "policies_of_step": 30,
        "sha256": {"solver": tree_sha256(model)},
    }
    write_json(run / "train" / "done.json", record)

    evaluate(config, state, run / "evaluation" / f"{state}.json")
    [evaluated] = read_trajectories(run / "evaluation" / state)
    assert versions_by_agent(evaluated) == versions
    [chat] = converse(config, state, ["What is 3+4?"])
    assert versions_by_agent(chat) == versions


def test_a_chat_with_coders_completes_without_tests(tmp_path: Path) -> None:
    """The random model writes no program, so the reviewer is asked after the first reply."""
    model = (
        make_run(tmp_path) / "base"
    )  # of another demo, because that of the coders takes longer to make
    settings = [
        "experiment=demo_coder",
        f"results={tmp_path}",
        f"policies.shared.model={model}",
        "agents.coder.max_tokens=8",
        "agents.reviewer.max_tokens=8",
    ]
    config = RunConfig.from_values(resolve(settings), "demo_coder")
    [chat] = converse(config, "base", ["Print 3+4."])
    assert chat.error == ""
    assert {turn.agent for turn in chat.turns} == {"coder", "reviewer"}


def test_a_missing_model_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    seats = {"solver": {"model": "/nowhere"}, "verifier": "base"}
    with pytest.raises(FolderError, match="/nowhere: no such model folder; name one"):
        evaluate(run / "config.yaml", "swapped", run / "swapped.json", seats)


@pytest.mark.slow
def test_too_many_failures_give_no_score_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, "data.test=2", "evaluation.samples=2")
    with slotted_server(8, 0.0) as url:
        config = use_server(run, url)
    # the server has ended
    scores = run / "evaluation" / "base.json"
    message = r"4 of 4 trajectories are lost \(4 EngineError\).*max_failed is 0.05"
    with pytest.raises(EvaluationError, match=message):
        evaluate(config, "base", scores)
    assert not scores.exists()

    reply = Renderer(run / "base").encode_reply("\\boxed{1}")
    with slotted_server(8, 0.0, reply) as url:
        evaluate(use_server(run, url), "base", scores)
    assert read_scores_file(run, "base.json")["failed"] == {}
