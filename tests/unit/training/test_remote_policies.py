"""Policies that are frozen models behind an API, and settings of policies that are impossible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mcore_mas import code_commit
from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.evaluation.evaluate import evaluate
from mcore_mas.training.train import train
from rollout.records.files import read_trajectories
from tests.support.chat_server import ChatServer, chat_server, says
from tests.support.in_process import training_here
from tests.support.run_folder import make_run, metrics_of

APPROVAL = "<verify>approve</verify>"


def use_remote_verifier(run: Path, url: str, **trainer: int) -> Path:
    """Let a remote model be the verifier of a run; return its config file.

    Args:
        run: folder of the run.
        url: of the model's server.
        trainer: settings of the section `trainer`.
    """
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["policies"]["verifier"] = {"remote": {"model": "big", "url": url}}
    config["agents"]["verifier"]["loss_weight"] = 0.0
    config["policies"]["solver"]["tp"] = 1
    config["trainer"] |= trainer
    path.write_text(yaml.safe_dump(config))
    return path


def count_requests(server: ChatServer) -> int:
    """Return the number of requests, all of which must be for the model."""
    assert {body["model"] for body in server.bodies} == {"big"}
    return len(server.bodies)


def test_a_remote_policy_plays_in_an_evaluation(tmp_path: Path) -> None:
    with chat_server(says(APPROVAL)) as server:
        run = make_run(tmp_path, "data.test=2", "evaluation.samples=2")
        scores = run / "evaluation" / "base.json"
        scores.parent.mkdir()
        evaluate(use_remote_verifier(run, server.url), "base", scores)
        assert count_requests(server) >= 1
    assert json.loads(scores.read_text())["commit"] == code_commit()

    trajectories = read_trajectories(scores.with_suffix(""))
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    remote_turns = [turn for turn in turns if turn.policy == "verifier"]
    assert {turn.text for turn in remote_turns} == {APPROVAL}
    # the tokens of a remote model are not known
    assert {turn.completion_ids for turn in remote_turns} == {()}
    assert all(turn.completion_ids for turn in turns if turn.policy == "solver")


@pytest.mark.multirank
def test_a_remote_policy_plays_in_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chat_server(says(APPROVAL)) as server, training_here(monkeypatch):
        run = make_run(tmp_path, "data.validation=1")
        config = use_remote_verifier(run, server.url, steps=2, checkpoint_every=2, validate_every=2)
        train(config)
        assert count_requests(server) >= 2
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [-1, 0, 1]
    assert sum(row.get("policy/verifier/calls", 0) for row in rows) >= 1
    record = json.loads((run / "train" / "done.json").read_text())
    assert list(record["policies"]) == ["solver"]
    assert record["commit"] == code_commit()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"policies.verifier": {"remote": {"model": "big"}}},
            "agent 'verifier' plays policy 'verifier', a remote",
        ),
        (
            {"policies.verifier": {"remote": {"model": "big"}, "model": "x", "lr": 1e-3}},
            "a policy has either a model .* or a remote",
        ),
        ({"policies.verifier": {"lr": 1e-3}}, "a policy has either a model .* or a remote"),
        (
            {"policies.verifier.lr": 0},
            "policies.verifier.lr is 0, and agent 'verifier' trains this policy; set it above 0",
        ),
        (
            {"policies.verifier": {"model": "x"}},
            "policies.verifier.lr is missing; agent 'verifier' trains this policy",
        ),
        ({"engine.name": "sglong"}, "unknown engine 'sglong'"),
        ({"engine.name": "sglang"}, "sglang needs python, the interpreter of its own environment"),
        (
            {"engine.transport": "pigeon"},
            "embedded has no transport 'pigeon'; known: shared, disk",
        ),
        ({"engine.device": "abacus"}, "engine.device"),
        (
            {"engine.name": "sglang", "engine.python": "p", "engine.device": "cuda"},
            "device is a setting of the embedded",
        ),
        (
            {"policies.verifier": {"remote": {"model": "big", "request": {"stream": True}}}},
            "request.stream is set; replies are read whole",
        ),
        ({"engine.urls": ["http://127.0.0.1:1"]}, "set name: sglang"),
    ],
)
def test_impossible_policies_and_engines_are_refused_in_one_line(
    change: dict[str, object], message: str
) -> None:
    values = resolve(["experiment=demo_math"])
    for path, value in change.items():
        *parents, key = path.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        section[key] = value
    with pytest.raises(ConfigError, match=message) as raised:
        RunConfig.from_values(values, "here")
    assert "\n" not in str(raised.value)
